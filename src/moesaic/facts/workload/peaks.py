"""What is there at the fullest moments of a rank's step, beside what lasts.

The moments are those of our own layers, of FSDP in torch 2.13, and of kernels and of gloo on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from numpy.typing import ArrayLike

from moesaic.facts.workload.kept import activations, joined_bytes, logits_bytes
from moesaic.facts.workload.loads import Routed, routed
from moesaic.facts.workload.parameters import Parameter, local_size
from moesaic.facts.workload.share import Share
from moesaic.facts.workload.sizes import INDEX_BYTES, SHARE_BYTES, Sizes
from moesaic.facts.workload.sums import Sums, sums_of


@dataclass(frozen=True)
class Flat:
    """A bucket of several gradients."""

    num_bytes: int
    sizes: Sequence[int]
    """Of its gradients, in bytes."""
    coming: Sequence[tuple[float, bool]]
    """The layer in which backward finishes each (infinite: the head; -1: the embedding), and
    whether its larger half, a dense one, begins with it."""


def _flats(sums: Sums) -> Iterator[Flat]:
    seen: set[str] = set()
    coming = []
    for one in sums.gradients:
        layer = {"embed": -1.0, "head": math.inf}.get(one.block)
        layer = float(one.block.split(".")[1]) if layer is None else layer
        coming.append((layer, one.block.endswith(".ffn") and one.block not in seen))
        seen.add(one.block)
    for bucket in sums.buckets:
        run = slice(bucket.members.start, bucket.members.stop)
        if len(bucket.members) > 1:
            sizes = [one.num_bytes for one in sums.gradients[run]]
            yield Flat(bucket.num_bytes, sizes, coming[run])


class Step:
    """Moments of the step of a rank that has all of the model's blocks."""

    def __init__(self, share: Share, loads: Sequence[ArrayLike] | None, on_cpu: bool) -> None:
        job, plan, rank = share.job, share.plan, share.rank
        self.s, self.job, self.plan, self.rank = Sizes.of(job, plan, rank), job, plan, rank
        self.share, self.on_cpu, self.several = share, on_cpu, job.train.micro_batches > 1
        self.kept = activations(job, plan, rank, loads)
        self.layers = [i for i in range(job.model.layers) if f"layers.{i}" in self.kept]
        self.recompute = job.train.recompute if plan.recompute is None else plan.recompute
        sparse = job.model.expert_layers
        rows = routed(job, plan, rank, loads) if sparse else []
        self.routed = {i: one for i, one in zip(sparse, rows, strict=True) if i in self.layers}
        """Rows of each of the rank's expert layers."""
        learning = sum(p.size for p in share.experts if p.name in share.learning)
        self.arena = learning // max(len(self.routed), 1)
        """Elements that learn of the experts of a layer that has some."""
        self.shards = [local_size(p, plan.shard) for p in share.learning_dense]
        dense = sum(self._gradient_size(p) for p in share.learning_dense)
        self.held = dense + self.arena * len(self.routed)
        """Gradients, once all are there."""
        self.whole = dict.fromkeys(self.layers, 0)
        self.own = {index: self.arena * (index in self.routed) for index in self.layers}
        """Dense elements of each layer, and what lies on this rank of all that learns in it."""
        self.root = self.root_grads = self.root_share = self.scattered = 0
        for p in share.dense:
            if p.layer is None:
                self.root += p.size * (not p.columns)
            else:
                self.whole[p.layer] += p.size
        for p in share.learning_dense:
            if p.layer is None:
                self.root_grads += p.size
                self.scattered += p.size * (not p.columns)
                self.root_share += local_size(p, plan.shard) * (not p.columns)
            else:
                self.own[p.layer] += self._gradient_size(p)
        self.sums = sums_of(share)
        self.flats = [flat for one in self.sums if one.early for flat in _flats(one)]
        """Buckets of several gradients, which are there from the first one on."""
        self.gaps = sum(flat.num_bytes - sum(flat.sizes) for flat in self.flats)
        self.words = self.s.vocab * job.model.hidden * (self.root_grads > 0)
        """Of the gradient of the head's weight, until it is with the others."""
        if self.s.joins_table:
            self.words = self.table

    @property
    def table(self) -> int:
        """Elements of the gradient of the embedding."""
        return self.s.table * (self.root_grads > 0)

    def gradients(self) -> int:
        """Bytes of all of them, and with several micro-batches of what is being added."""
        return (self.held + self.several * self.arena) * self.s.wide + self.gaps

    def most_gathered(self) -> int:
        """The most that FSDP has."""
        return max((self.gathered(index) for index in self.layers), default=0)

    def most_kept(self) -> int:
        """The most that autograd keeps of embedding and layers."""
        return self.kept["context"] + self.kept["embed"] + max(map(self.left, self.layers))

    def head(self) -> int:
        """What the head keeps, its logits, and a table that has come together for it."""
        return self.kept["head"] + logits_bytes(self.s) + self.joined_table()

    def joined_table(self) -> int:
        """What has come together of a tied weight in columns."""
        s = self.s
        return s.joins_table * s.vocab * s.model.hidden * s.wide

    def parted(self) -> int:
        """What is there beside the gradient of that while it goes apart: this rank's share, and a
        message with gloo's copy of it."""
        if not self.s.joins_table:
            return 0
        return self.table * self.s.wide + 2 * self.s.table_batches[0]

    def asking(self) -> int:
        """The most elements that lookups in columns have on their way, but for the table's: what
        was looked up, what of it is this rank's, and the same in order."""
        s = self.s
        return (s.columns > 1) * s.joined + max(s.looked_up, (s.columns > 1) * s.joined)

    def most_working(self) -> int:
        """The most that backward of a layer's larger half makes on its way."""
        return max((self.working(index, self.stays()) for index in self.layers), default=0)

    def forward(self) -> int:
        """The most that is there in a forward pass: when the head has logits, or the embedding
        what slices are to add up; FSDP has the message that brought the last layer."""
        s = self.s
        kept = self.left(self.layers[-1])
        if self.recompute:
            kept = len(self.layers) * s.stream * s.wide
        sharded, lasting = self.plan.shard > 1, self.several * self.held
        last = kept + self.head() + sharded * self.whole[self.layers[-1]] * s.wide
        first = ((s.slices > 1) * (3 * s.joined + s.stream) + self.asking()) * s.wide
        gaps = self.several * self.gaps
        return self._contexts() + (lasting + sharded * self.root) * s.wide + gaps + max(last, first)

    def backward(self) -> int:
        """The most that is there in a backward pass, or right after it."""
        moments = [self._begin(), self._end(), *(self._backward(index) for index in self.layers)]
        if self.s.joins_table:
            moments.append(self._parting())
        return max(moments)

    def _parting(self) -> int:
        """When the head's gradient of a tied weight goes apart, before any other is there."""
        kept = self.left(self.layers[-1])
        if self.recompute:
            kept = len(self.layers) * self.s.stream * self.s.wide
        sharded = (self.plan.shard > 1) * (self.root + self.whole[self.layers[-1]])
        lasting = (self.several * self.held + sharded) * self.s.wide + self.several * self.gaps
        return self._contexts() + lasting + kept + self.kept["head"] + self.parted()

    def left(self, index: int) -> int:
        """What autograd keeps of the layers up to `index` when backward comes to that one."""
        before = [i for i in self.layers if i < index]
        if self.recompute:
            return len(before) * self.s.stream * self.s.wide + self.kept[f"layers.{index}"]
        return sum(self.kept[f"layers.{i}"] for i in (*before, index))

    def gathered(self, index: int) -> int:
        """What FSDP has while backward is in layer `index`.

        Embedding, head and the layer; a message that has brought the next one; and the message
        that shares out the gradients of the one before.
        """
        groups = sum(self.whole.get(near, 0) for near in (index - 1, index, index + 1))
        return (self.plan.shard > 1) * (self.root + groups) * self.s.wide

    def stays(self) -> bool:
        """Whether the gradient of a weight stays after its product, and is not added at once to
        that of earlier micro-batches."""
        return not self.several or self.plan.shard > 1

    def working(self, index: int, stays: bool) -> int:
        """What backward of the larger half of layer `index` makes, less what it has let go."""
        s, model = self.s, self.s.model
        stream = s.stream * s.wide
        if index not in self.routed:
            return stream + self._gated(s.inner(index), stays)
        routed = self.routed[index]
        most = self.arena * s.wide + self._travelled(routed)
        if routed.local:
            most = max(most - self._let_go(routed), self.arena * s.wide + self._stayed(routed))
        if model.shared:  # Their gradients come when those of experts are done.
            gone = 2 * s.ffn * routed.num_rows
            gone += bool(routed.trips) * model.hidden * routed.leaving
            arena = stays * self.arena * s.wide
            most = max(most, arena + self._gated(s.shared, stays) - gone * s.narrow)
        return stream + most

    def _travelled(self, routed: Routed) -> int:
        """Bytes beside the arena's gradient where experts are in a chunk of what has travelled."""
        s, model, one = self.s, self.s.model, routed.apart()[0]
        mine = sum(one.slots)
        if routed.by_rows:
            handed, named = (mine - one.leaving) * model.hidden, 0
        else:  # What comes back is of all slices' tokens; which row is whose, and its weight.
            arrived = one.trips[-1].arriving if one.visits else s.sent
            handed = (s.expert_slices > 1 or one.visits) * arrived * model.hidden + 2 * mine
            named = 2 * mine * INDEX_BYTES
        if routed.chunks > 1:  # Gradients of the next chunk come.
            trip = one.trips[0]
            handed += (trip.arriving + one.visits * trip.leaving) * model.hidden
        return (handed + self.rows(one)) * s.narrow + named

    def _stayed(self, routed: Routed) -> int:
        """The same in the last piece of what is local, with which they begin, while gradients of
        the last chunk's results come."""
        s, one, last = self.s, routed.apart()[-1], routed.local_pieces()[-1]
        handed = one.trips[-1].arriving + one.visits * one.trips[0].leaving
        rows = handed * s.model.hidden + 2 * last.leaving + self.rows(last)
        return rows * s.narrow + 2 * last.leaving * INDEX_BYTES

    def _let_go(self, routed: Routed) -> int:
        """What that piece has let go when they come to what has travelled, but for gradients of its
        tokens."""
        rows = routed.local_pieces()[-1].leaving
        return (2 * self.s.ffn * rows - self.s.sent * self.s.model.hidden) * self.s.narrow

    def _gradient_size(self, parameter: Parameter) -> int:
        """Elements of what lies on this rank of the gradient of a dense parameter."""
        return local_size(parameter, self.plan.shard)

    def _backward(self, index: int) -> int:
        """In the larger half of layer `index`, whose own gradients have just begun to come."""
        after = (size for other, size in self.own.items() if other > index)
        gradients = self.held if self.several else sum(after)
        if not self.several or self.plan.shard > 1 or self.job.model.tied:
            gradients += self.words  # It is not with the others yet.
        there = self._contexts() + self.left(index) + self.gathered(index)
        # Before anything is computed gloo has a copy of the message that brings the next layer;
        # what is to be computed again is not there then.
        early = self.plan.shard > 1 and index > 0 and not self.recompute
        copied = self.whole[index - 1] if early else 0
        most = max(self.working(index, self.stays()), (self.s.stream + copied) * self.s.wide)
        return there + gradients * self.s.wide + self._places(index) + most

    def _places(self, index: float) -> int:
        """Bytes of buckets that wait for gradients when backward is in the larger half of layer
        `index`; of several micro-batches, what lies between gradients."""
        if self.several:
            return self.gaps
        waiting = 0
        for flat in self.flats:
            come = [at > index or (at == index and first) for at, first in flat.coming]
            arrived = sum(size for size, there in zip(flat.sizes, come, strict=True) if there)
            waiting += any(come) * (flat.num_bytes - arrived)
        return waiting

    def _begin(self) -> int:
        """When the gradient of the head's weight goes to its place in a bucket."""
        root = self.words * self.s.wide
        in_flat = any((math.inf, False) in flat.coming for flat in self.flats)
        if self.several or self.job.model.tied or not in_flat:
            return 0
        there = self._contexts() + self.left(self.layers[-1]) + self.s.stream * self.s.narrow
        return there + 2 * root + self._places(self.layers[-1] + 0.5)

    def _end(self) -> int:
        """When the last gradients come, or all are there and copies are summed."""
        s, more = self.s, 0
        tied, sharded = self.job.model.tied, self.plan.shard > 1
        joined = (s.slices > 1) * s.joined
        if s.columns > 1:
            there = self._contexts() + self.held * s.wide + self.gaps
            return there + max(self._end_of_columns(), self.flat())
        # Its place in a bucket has been there before the embedding's gradient.
        places = (at for flat in self.flats for at, _ in flat.coming)
        placed = not self.several and -1 in places
        if sharded:
            # The message that shares out those of embedding and head, gloo's copy of it, the last
            # tensor that went into it, and the share, which has not been added to others yet.
            last = 0 if tied else self.words
            more = 2 * self.root_grads + last + self.several * self.root_share
            more = max(more, self.root_grads + joined)
        else:
            if self.several or tied:  # The embedding's, to be added to others.
                more = self.words * (1 + (self.several and tied))
            more += joined + placed * self.words
        if joined:  # Before it, that of all tokens of the slices, and gloo's copy.
            waiting = (tied or sharded) - (not self.several and not sharded) + placed
            more = max(more, 2 * joined + s.stream + waiting * self.words)
        held = self.held * s.wide + self.gaps
        return self._contexts() + held + max(more * s.wide, self.flat())

    def _end_of_columns(self) -> int:
        """What is there then beside all gradients, where ranks share out the embedding's columns.

        Its own is found in what has been looked up, which came before it; FSDP has the gradient of
        the head's weight still, and then the message that shares it out, and gloo's copy.
        """
        tied, several = self.job.model.tied, self.several
        found = self.table * (tied + several) + self.s.looked_up
        asking = self.table * (tied - (not several)) + self.asking()
        if self.plan.shard == 1:
            return max(found, asking) * self.s.wide
        waiting = self.scattered - self.root_share * (not several)
        sharing = 2 * self.scattered + several * self.root_share
        return max(waiting + max(found, asking), sharing) * self.s.wide

    def flat(self) -> int:
        """The largest of the buckets that gradients are copied into when backward is over."""
        late = (bucket for one in self.sums if not one.early for bucket in one.buckets)
        return max((b.num_bytes for b in late if len(b.members) > 1), default=0)

    def _contexts(self) -> int:
        """That of every micro-batch is there until the step is over, but for its mask."""
        angles = self.kept["context"] - self.s.mask
        passing = self.kept["context"] + self.kept["embed"]
        return passing + (self.job.train.micro_batches - 1) * angles

    def _gated(self, inner: int, stays: bool) -> int:
        """The same of a gated network `inner` wide, in bytes, beside the gradient of the stream.

        Three gradients around a product are there, and its result is not; the gradient of the
        weight that followed stays, or has been added to that of earlier micro-batches. Of slices,
        the gradient of all tokens comes first, with gloo's copy of it.
        """
        s = self.s
        rows, weight = s.tokens * inner * s.narrow, inner * s.model.hidden
        most = stays * weight * s.wide + 2 * rows
        if s.slices == 1:
            return most
        joined = joined_bytes(s)
        cast = s.casts * s.stream * s.narrow
        return max(most, joined + cast + max(joined, rows + weight * s.narrow))

    def rows(self, routed: Routed, *, stay: bool = False) -> int:
        """Elements that an expert layer's rows take beside the gradients of their results, share by
        share; gradients between the products may `stay`."""
        model, rows = self.s.model, sum(routed.slots)
        shares, between = self._shares(routed.slots), 2 * self.s.ffn * stay
        whole, most, done = rows * model.hidden, 0, 0
        early = routed.by_rows or len(shares) > 1
        for num_slots, num_rows in shares:
            inner, copied = num_rows * self.s.ffn, num_rows * model.hidden
            before = done * between + early * whole
            done += num_rows
            after = whole + done * between + (not stay) * 2 * inner + routed.by_rows * copied
            # Beside them there may be a slot's matrix, narrowed, or its gradient, to be widened; on
            # a GPU matrices of all slots.
            one = self.s.casts * 2 * self.s.ffn * model.hidden
            weights = one if self.on_cpu else num_slots * one
            most = max(most, before + copied + max(5 * inner, 4 * inner + one), after + weights)
        if not routed.by_rows:  # Sums by token, at last.
            sums = routed.trips[-1].arriving if routed.visits else self.s.sent
            most = max(most, whole + done * between + sums * model.hidden)
        return most

    def _shares(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """Slots and rows of each share that an expert layer takes at a time: on a GPU all."""
        limit = SHARE_BYTES // (2 * self.s.ffn * self.s.narrow) if self.on_cpu else sum(slots)
        shares = [(0, 0)]
        for rows in slots:
            num_slots, num_rows = shares[-1]
            if num_rows and num_rows + rows > limit:
                shares.append((1, rows))
            else:
                shares[-1] = (num_slots + 1, num_rows + rows)
        return shares
