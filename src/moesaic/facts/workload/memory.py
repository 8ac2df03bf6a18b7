"""What a rank holds while it trains, by kind of content, and at the moments when it holds most.

What autograd keeps of each layer is exact for torch's kernels on a CPU, and for whatever a GPU
computes with the same ones; it depends on routing only through the rows that arrive. The moments
are those of our own layers, of FSDP in torch 2.13, and of kernels on a CPU.

In fine-tuning, parameters, gradients and moments are those of what is there and of what learns;
activations and what backward makes on its way are counted as if all of the model learnt, and
without what adapters keep, which is little.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from numpy.typing import ArrayLike

from moesaic.facts.job import Job
from moesaic.facts.job.model import Latent
from moesaic.facts.plan import Plan
from moesaic.facts.workload.finetune import adapters, learnt
from moesaic.facts.workload.latent import attended, unturned
from moesaic.facts.workload.loads import Routed, routed
from moesaic.facts.workload.messages import buckets, group_of
from moesaic.facts.workload.parameters import (
    Parameter,
    local_size,
    moment_bytes,
    parameters,
    rank_size,
)
from moesaic.facts.workload.sizes import (
    BIAS_BYTES,
    HEAD_ROWS,
    INDEX_BYTES,
    SHARE_BYTES,
    STORED_BYTES,
    Sizes,
)


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds while it trains, by what they are for."""

    parameters_bytes: int
    gradients_bytes: int
    """All of them, and with several micro-batches the one that is being added."""
    moments_bytes: int
    staging_bytes: int
    """The copy that checkpoints are written from; 0 where it lies in a memory of the host's own."""
    gathered_bytes: int
    """Most of what FSDP has put together of other ranks' shards, or is about to share out."""
    activations_bytes: int
    """What autograd keeps of embedding and layers."""
    head_bytes: int
    """What the head keeps, the gradient of its weight among it, and its logits."""
    working_bytes: int
    """What backward of a layer's larger half makes on its way, less what it has let go."""
    forward_bytes: int
    """Most of what is there in a forward pass and does not last: gradients of micro-batches
    before, activations, what FSDP has gathered, and the head."""
    backward_bytes: int
    """Most of what is there in a backward pass or right after it and does not last: gradients so
    far, activations that are left, what FSDP has gathered, and what kernels need on the way."""

    def by_kind(self) -> dict[str, int]:
        """What is held for its own sake: what `total_bytes` adds up."""
        return {
            kind: getattr(self, kind)
            for kind in self.__dataclass_fields__
            if kind not in ("forward_bytes", "backward_bytes")
        }

    @property
    def total_bytes(self) -> int:
        """All of it, as if it were there at one time."""
        return sum(self.by_kind().values())

    @property
    def peak_bytes(self) -> int:
        """What is there at one time: at the end of a forward pass, or in a backward pass."""
        lasting = self.parameters_bytes + self.moments_bytes + self.staging_bytes
        return lasting + max(self.forward_bytes, self.backward_bytes)


def memory(
    job: Job,
    plan: Plan,
    rank: int | None = None,
    loads: Sequence[ArrayLike] | None = None,
    *,
    on_cpu: bool = True,
) -> Memory:
    """What `rank` of `plan` holds.

    Args:
        job: the job.
        plan: which rank holds what.
        rank: absent: the last, which has the most rows.
        loads: by expert layer, as `workload` takes them; absent: even routing.
        on_cpu: whether rank and host share one memory, which then holds the staging copy too.
    """
    rank = plan.ranks - 1 if rank is None else rank
    everything = [*parameters(job.model), *adapters(job.model, job.finetune)]
    learning = {p.name for p in learnt(job)}
    dense = [p for p in everything if p.is_dense]
    biases = [p for p in everything if p.kind == "bias"]
    experts = [p for p in everything if p.expert is not None and p.expert in plan.homes(rank)]
    num_held = sum(local_size(p, plan.shard) for p in dense) + sum(p.size for p in experts)
    with_moments = [[p for p in some if p.name in learning] for some in (dense, experts)]
    num_experts = sum(p.size for p in with_moments[1])
    rows = [(p, rank_size(p, plan.shard, rank)) for p in with_moments[0]]
    rows += [(p, p.size) for p in with_moments[1]]
    moments = sum(sum(moment_bytes(p, size, job)) for p, size in rows)
    arena = num_experts // max(len(job.model.expert_layers), 1)
    step = _Step(job, plan, rank, (dense, with_moments[0]), arena, loads, on_cpu)
    layers, wide = range(job.model.layers), step.s.wide
    asynchronous = job.checkpoint.asynchronous and on_cpu
    staging = _staged((dense, experts, biases), learning, job, plan, rank)
    return Memory(
        parameters_bytes=num_held * wide + sum(p.size for p in biases) * BIAS_BYTES,
        gradients_bytes=(step.held + step.several * step.arena) * wide,
        moments_bytes=moments,
        staging_bytes=staging if asynchronous else 0,
        gathered_bytes=max(step.gathered(index) for index in layers),
        activations_bytes=step.passing + max(step.left(index) for index in layers),
        head_bytes=step.kept["head"] + _logits(step.s),
        working_bytes=max(step.working(index) for index in layers),
        forward_bytes=step.forward(),
        backward_bytes=max(step.end(), *(step.backward(index) for index in layers)),
    )


class _Step:
    """What is there at moments of a rank's step, beside what lasts."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        rank: int,
        dense: tuple[Sequence[Parameter], Sequence[Parameter]],
        arena: int,
        loads: Sequence[ArrayLike] | None,
        on_cpu: bool,
    ) -> None:
        self.s, self.job, self.plan, self.rank = Sizes.of(job, plan, rank), job, plan, rank
        self.on_cpu, self.several = on_cpu, job.train.micro_batches > 1
        self.kept, self.layers = activations(job, plan, rank, loads), job.model.layers
        self.sparse = job.model.expert_layers
        self.routed = routed(job, plan, rank, loads) if self.sparse else []
        self.passing = self.kept["context"] + self.kept["embed"]
        everything, learning = dense
        self.arena = arena
        """Elements that learn of the experts of a layer that has some."""
        self.shards = [local_size(p, plan.shard) for p in learning]
        self.held = sum(self.shards) + arena * len(self.sparse)
        """Gradients, once all are there."""
        self.whole = [0] * self.layers
        self.own = [arena * (index in self.sparse) for index in range(self.layers)]
        """Dense elements of each layer, and what lies on this rank of all that learns in it."""
        self.root = self.root_grads = self.root_share = 0
        for p in everything:
            if p.layer is None:
                self.root += p.size
            else:
                self.whole[p.layer] += p.size
        for p in learning:
            if p.layer is None:
                self.root_grads += p.size
                self.root_share += local_size(p, plan.shard)
            else:
                self.own[p.layer] += local_size(p, plan.shard)
        self.head = job.model.vocab * job.model.hidden * (self.root_grads > 0)
        """Elements of the gradient of the head's weight, and of the embedding's."""

    def left(self, index: int) -> int:
        """What autograd keeps of the layers up to `index` when backward comes to that one."""
        if self.job.train.recompute:
            return index * self.s.stream * self.s.wide + self.kept[f"layers.{index}"]
        return sum(self.kept[f"layers.{before}"] for before in range(index + 1))

    def gathered(self, index: int) -> int:
        """What FSDP has while backward is in layer `index`.

        Embedding, head and the layer; a message that has brought the next one; and the message
        that shares out the gradients of the one before.
        """
        groups = self.whole[max(index - 1, 0) : index + 2]
        return (self.plan.shard > 1) * (self.root + sum(groups)) * self.s.wide

    def forward(self) -> int:
        """When the head has logits; FSDP still has the message that brought the last layer."""
        kept = self.left(self.layers - 1)
        if self.job.train.recompute:
            kept = self.layers * self.s.stream * self.s.wide
        gathered = (self.plan.shard > 1) * (self.root + self.whole[-1])
        lasting = (self.several * self.held + gathered) * self.s.wide
        return self._contexts() + lasting + kept + self.kept["head"] + _logits(self.s)

    def backward(self, index: int) -> int:
        """In the larger half of layer `index`, whose own gradients have just begun to come."""
        gradients = self.held if self.several else sum(self.own[index + 1 :])
        if not self.several or self.plan.shard > 1 or self.job.model.tied:
            gradients += self.head  # It is not with the others yet.
        there = self._contexts() + self.left(index) + self.gathered(index)
        # Before anything is computed gloo has a copy of the message that brings the next layer;
        # what is to be computed again is not there then.
        early = self.plan.shard > 1 and index > 0 and not self.job.train.recompute
        copied = self.whole[index - 1] if early else 0
        most = max(self.working(index), (self.s.stream + copied) * self.s.wide)
        return there + gradients * self.s.wide + most

    def end(self) -> int:
        """When the last gradients come, or all are there and copies are summed."""
        s, more = self.s, 0
        if self.plan.shard > 1:
            # The message that shares out those of embedding and head, gloo's copy of it, the last
            # tensor that went into it, and the share, which has not been added to others yet.
            last = 0 if self.job.model.tied else self.head
            more = 2 * self.root_grads + last + self.several * self.root_share
        elif self.several or self.job.model.tied:  # The embedding's, to be added to others.
            more = self.head * (1 + (self.several and self.job.model.tied))
        copies = group_of(self.plan.replica_groups(), self.rank)
        sums = [[self.arena] * len(self.sparse)] * (len(copies) > 1)
        sums += [self.shards] * (self.plan.ranks > 1 and self.plan.shard == 1)
        flat = [
            sum(bucket)
            for sizes in sums
            for bucket in buckets([size * s.wide for size in sizes])
            if len(bucket) > 1
        ]
        return self._contexts() + self.held * s.wide + max(more * s.wide, *flat, 0)

    def _contexts(self) -> int:
        """That of every micro-batch is there until the step is over, but for its mask."""
        angles = self.kept["context"] - self.s.mask
        return self.passing + (self.job.train.micro_batches - 1) * angles

    def working(self, index: int) -> int:
        """What backward of the larger half of layer `index` makes, less what it has let go."""
        s, model = self.s, self.s.model
        stream = s.stream * s.wide
        if index in self.sparse:
            rows = self._rows(self.routed[self.sparse.index(index)])
            return stream + self.arena * s.wide + rows * s.narrow
        ffn = model.inner(index)
        # Three gradients around a product are there, and its result is not; the gradient of the
        # weight that followed stays, or has been added to that of earlier micro-batches.
        stays = not self.several or self.plan.shard > 1
        down = stays * ffn * model.hidden * s.wide
        return stream + down + 2 * s.tokens * ffn * s.narrow

    def _rows(self, routed: Routed) -> int:
        """The same of an expert layer's rows, in elements: gradients of results, which are gone
        themselves, and those of rows: share by share, and then all shares joined."""
        model, rows = self.s.model, sum(routed.slots)
        shares = _shares(self.s, routed.slots, self.on_cpu)
        most, done = 2 * rows * model.hidden if len(shares) > 1 else 0, 0
        for num_slots, num_rows in shares:
            inner, before = num_rows * model.ffn, done * model.hidden
            done += num_rows
            weights = self.s.casts * num_slots * 2 * model.ffn * model.hidden
            most = max(most, before + 5 * inner, done * model.hidden + 4 * inner + weights)
        return (rows - routed.leaving) * model.hidden + most


def _shares(s: Sizes, slots: Sequence[int], on_cpu: bool) -> list[tuple[int, int]]:
    """Slots and rows of each share that an expert layer takes at a time: on a GPU all at once."""
    limit = SHARE_BYTES // (2 * s.model.ffn * s.narrow) if on_cpu else sum(slots)
    shares = [(0, 0)]
    for rows in slots:
        num_slots, num_rows = shares[-1]
        if num_rows and num_rows + rows > limit:
            shares.append((1, rows))
        else:
            shares[-1] = (num_slots + 1, num_rows + rows)
    return shares


def activations(
    job: Job, plan: Plan, rank: int, loads: Sequence[ArrayLike] | None = None
) -> dict[str, int]:
    """Bytes that autograd keeps of one micro-batch: context, embed, layers.0, ..., head.

    Parameters are not in it, nor what checkpointing saves (`train.recompute`): that leaves each
    layer its input, and in backward one layer at a time all of it.
    """
    s = Sizes.of(job, plan, rank)
    sparse = job.model.expert_layers
    inner = [_dense_bytes(s, index) for index in range(job.model.layers - len(sparse))]
    if sparse:
        inner += [_moe_bytes(s, plan, one) for one in routed(job, plan, rank, loads)]
    angles = s.tokens * job.model.turned * s.wide
    head = _norm_bytes(s) + s.stream * s.narrow + job.model.vocab * job.model.hidden * s.wide
    return {
        "context": angles + s.mask,
        "embed": s.tokens * INDEX_BYTES,
        **{f"layers.{index}": _attention_bytes(s) + one for index, one in enumerate(inner)},
        "head": head,
    }


def _norm_bytes(s: Sizes) -> int:
    """Its input, the input normed, and a factor a row."""
    return (2 * s.stream + s.tokens) * s.wide


def _inputs_bytes(s: Sizes, num: int, weights: int) -> int:
    """What `num` products read of one wide tensor, and casts of `weights` elements of weights."""
    if s.casts:
        return (num * s.stream + weights) * s.narrow
    return s.stream * s.wide


def _attention_bytes(s: Sizes) -> int:
    q, k, model = s.tokens * s.queries, s.tokens * s.keys, s.model
    if model.latent is not None:
        return _latent_bytes(s, model.latent)
    kept = _norm_bytes(s) + _inputs_bytes(s, 3, 2 * (s.queries + s.keys) * model.hidden)
    if model.normed is not None:
        rows = model.heads + model.kv_heads if model.normed == "heads" else 2
        kept += (2 * (q + k) + rows * s.tokens) * s.wide
    if model.clip_qkv is not None:
        kept += (q + k) * s.wide + k * s.narrow
    # Turned queries, keys and values as often as they are repeated; the result, twice.
    kept += 5 * q * s.narrow + s.tokens * model.heads * s.wide
    return kept + s.mask * s.narrow


def _latent_bytes(s: Sizes, latent: Latent) -> int:
    model, t, width = s.model, s.tokens, attended(s, latent)
    values, down = model.heads * latent.value, latent.width + latent.rotary
    up = unturned(s) + values
    weights = down * model.hidden + latent.width * up + values * model.hidden
    # A norm keeps its input, that normed, a factor a row; the next product its result. A norm of
    # part of a result that is not cast keeps all of that.
    norms = (2 * latent.width + 1) * s.wide + latent.width * s.narrow
    norms += (not s.casts) * latent.rotary * s.wide
    if latent.queries is None:
        weights += s.queries * model.hidden
    else:
        weights += latent.queries * (model.hidden + s.queries)
        norms += (2 * latent.queries + 1) * s.wide + latent.queries * s.narrow
    kept = _norm_bytes(s) + _inputs_bytes(s, 2, weights) + t * norms
    # Queries, keys and result; values, and what is cut of the result, or all that came up.
    cut = latent.value < width
    heads = 3 * model.heads * width + (model.heads * width + values if cut else up)
    return kept + (t * heads + s.mask) * s.narrow + t * model.heads * s.wide


def _dense_bytes(s: Sizes, layer: int) -> int:
    ffn = s.model.inner(layer)
    return _norm_bytes(s) + _inputs_bytes(s, 2, 3 * ffn * s.model.hidden) + _gated_bytes(s, ffn)


def _gated_bytes(s: Sizes, ffn: int) -> int:
    """Both products, silu of the first, and what goes into the last."""
    return 4 * s.tokens * ffn * s.narrow


def _moe_bytes(s: Sizes, plan: Plan, routed: Routed) -> int:
    model, t, (leaving, slots) = s.model, s.tokens, routed
    arriving = sum(slots)
    scores, chosen = t * model.experts, t * model.top_k
    routing = (2 * scores + t + model.experts) * s.wide
    if model.score == "sigmoid":  # What makes odds of them.
        routing += t * s.wide
    if model.renormalise:
        routing += (chosen + t) * s.wide
    indices = (2 * chosen + leaving + len(slots)) * INDEX_BYTES + 2 * chosen
    if plan.ep > 1:
        indices += 2 * arriving * INDEX_BYTES
    rows = arriving * (model.hidden + 2 * model.ffn) + leaving * model.hidden
    kept = _norm_bytes(s) + s.stream * s.wide + routing + indices + (rows + chosen) * s.narrow
    if model.shared:  # Besides the stream, which the router has kept already.
        ffn = model.shared * model.ffn
        casts = s.casts * (2 * s.stream + 3 * ffn * model.hidden) * s.narrow
        kept += casts + _gated_bytes(s, ffn)
    return kept


def _logits(s: Sizes) -> int:
    """What the head reads, and logits and their logarithms of some rows.

    In narrow types a copy of the weight is there too; and later, beside the gradient of logits, its
    narrow copy and an addend of the weight's gradient.
    """
    read = s.stream * (s.wide + s.casts * s.narrow)
    weight = s.casts * s.model.vocab * s.model.hidden * s.narrow
    logits = min(s.tokens, HEAD_ROWS) * s.model.vocab
    return read + weight + max(2 * logits * s.wide, logits * (s.wide + s.narrow) + weight)


def _staged(
    held: tuple[Sequence[Parameter], ...],
    learning: Collection[str],
    job: Job,
    plan: Plan,
    rank: int,
) -> int:
    """Bytes that `rank` writes of a checkpoint: the owners of a piece share pieces out.

    Args:
        held: dense parameters, experts and biases.
        learning: names of those that have moments.
        job: the job.
        plan: which rank holds what.
        rank: whose.
    """
    dense, experts, biases = held
    wide = STORED_BYTES[job.train.precision]

    def tensors(p: Parameter, size: int) -> tuple[int, ...]:
        return (size * wide, *(moment_bytes(p, size, job) if p.name in learning else ()))

    pieces = (
        (plan.shard, [n for p in dense for n in tensors(p, rank_size(p, plan.shard, rank))]),
        (plan.ep, [n for p in experts for n in tensors(p, p.size)]),
        (1, [p.size * BIAS_BYTES for p in biases]),
    )
    shared: dict[tuple[int, ...], list[int]] = {}
    for by, sizes in pieces:
        shared.setdefault(tuple(range(rank % by, plan.ranks, by)), []).extend(sizes)
    staged = 0
    for owners, sizes in shared.items():
        loads = [0] * len(owners)
        for size in sorted(sizes, reverse=True):
            loads[loads.index(min(loads))] += size
        staged += loads[owners.index(rank)]
    return staged
