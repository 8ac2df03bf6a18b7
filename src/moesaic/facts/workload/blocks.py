"""What is to be done: every block of a model with its work, for one micro-batch and the update."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from numpy.typing import ArrayLike

from moesaic.facts.job import Job
from moesaic.facts.job.finetune import Target
from moesaic.facts.plan import Plan
from moesaic.facts.workload import latent, messages, ops, sparse
from moesaic.facts.workload.holdings import block_of, blocks_on, is_first
from moesaic.facts.workload.loads import Routed, Trip, routed, visit_bytes
from moesaic.facts.workload.messages import RESULTS, TOKENS, Message, Slices, Talk
from moesaic.facts.workload.ops import Op, Part
from moesaic.facts.workload.parameters import Parameter, local_size
from moesaic.facts.workload.share import Share
from moesaic.facts.workload.sizes import STORED_BYTES, Sizes
from moesaic.facts.workload.sums import Sums, leading, said, sums_of

STEP = "step"
"""Name of the block of what belongs to none."""
_LAST = ("residual", "shared", "joined")
"""What nobody needs again that is computed again, of a layer's second half."""


@dataclass(frozen=True)
class Work:
    """Operations, in order, and the messages among them."""

    ops: tuple[Op, ...] = ()
    messages: tuple[Message, ...] = ()

    @property
    def flops(self) -> int:
        """Of all products, in full."""
        return sum(op.flops for op in self.ops)

    @property
    def moved_bytes(self) -> int:
        """Of all passes between products."""
        return sum(op.moved_bytes for op in self.ops)

    @property
    def calls(self) -> int:
        """Kernels started."""
        return sum(op.calls for op in self.ops)


@dataclass(frozen=True)
class Block:
    """A part of the model on one rank."""

    name: str
    """embed, layers.0.attention, layers.0.ffn or layers.0.moe, ..., head; step: all of it. It
    begins with the name of the model's own block, which says what stage of a pipeline it is in."""
    forward: Work
    """Once a micro-batch."""
    backward: Work
    """Once a micro-batch; with `train.recompute` it begins with what is computed again."""
    update: Work
    """Once a step."""


def workload(
    job: Job,
    plan: Plan,
    rank: int = 0,
    loads: Sequence[ArrayLike] | None = None,
    *,
    on_cpu: bool = True,
) -> list[Block]:
    """What `rank` does in one micro-batch and in the update, block by block.

    In a pipeline it has the blocks of its own stages. What they send to each other is not here, nor
    which micro-batch is whose turn.

    Args:
        job: the job, under the plan (`facts.plan.ruled`): whether layers are computed again is read
            from it alone.
        plan: which rank holds what.
        rank: whose work.
        loads: by expert layer of the whole model, the load of each expert, or assignments by rank
            of a part and expert over one global micro-batch; absent: even routing.
        on_cpu: whether the rank computes on a CPU: a GPU has other kernels for some passes.
    """
    sizes, model = Sizes.of(job, plan, rank, on_cpu=on_cpu), job.model
    making = _Making(job, plan, rank, sizes, loads)
    kinds = {name: making.kind(name) for name in blocks_on(model, plan, rank)}
    firsts = {kind: name for name, kind in reversed(kinds.items())}
    chosen = [name for name, kind in kinds.items() if firsts[kind] == name]
    blocks = [block for name in chosen for block in making.blocks(name)]
    blocks = [making.as_far_as_needed(block) for block in blocks]
    share = Share.of(job, plan, rank)
    by_block: dict[str, list[Parameter]] = {}
    for parameter in (*share.dense, *share.experts):
        by_block.setdefault(block_of(parameter, model), []).append(parameter)
    groups = sums_of(share)
    leaders = leading(share, groups)

    def updated(block: Block) -> Block:
        learnt = [p for p in by_block[block.name] if p.name in share.learning]
        work = Work(_update(share, learnt, leaders, sizes.moment_chunk))
        return replace(block, update=work)

    if plan.shard > 1:
        blocks = _sharded([updated(block) for block in blocks], by_block, share)
    whole = [
        replace(block, name=block.name.replace(firsts[kind], name, 1))
        for name, kind in kinds.items()
        for block in blocks
        if f"{block.name}.".startswith(f"{firsts[kind]}.")
    ]
    if plan.shard == 1:  # What is alike but for where its gradients end a bucket, too.
        whole = [updated(block) for block in whole]
    last = Work((), tuple(messages.scalars(model, plan, rank)))
    return with_sums(whole, groups, last)


@dataclass(frozen=True)
class _Making:
    """Blocks of a rank, in the making."""

    job: Job
    plan: Plan
    rank: int
    sizes: Sizes
    loads: Sequence[ArrayLike] | None

    @cached_property
    def _first(self) -> str:
        return self.sizes.learning.first_block(self.job.model)

    @cached_property
    def _routed(self) -> list[Routed]:
        return routed(self.job, self.plan, self.rank, self.loads)

    def kind(self, name: str) -> object:
        """What the model's block `name` has in common with all that have the same work."""
        model = self.job.model
        if not name.startswith("layers."):
            return name
        layer, first = int(name.removeprefix("layers.")), _place(self._first)[0]
        sparse_one = layer in model.expert_layers
        width = 0 if sparse_one else model.inner(layer)
        told = self.loads is not None or bool(self.plan.homes_of_layers)
        routed_alone = layer if sparse_one and told else None
        from_first = max(-2.0, min(layer - first, 1.0))  # What is right before it is of its own.
        return sparse_one, width, routed_alone, from_first

    def blocks(self, name: str) -> Iterator[Block]:
        """What the model's block `name` is in two, or one."""
        model, again = self.job.model, self.job.train.recompute
        here = self.sizes, self.plan, self.rank
        if name == "embed":
            lookup = ops.embedding(self.sizes, tied=model.tied and self.plan.pp == 1)
            talk = self._slices(name).sum_runs(self.sizes.wide)
            yield _block(name, [lookup], talk.then(messages.look_up(*here)))
        elif name == "head":
            talk = self._slices(name).head().then(messages.join_columns(*here))
            yield _block(name, _head(self.sizes), talk)
        else:
            layer = int(name.removeprefix("layers."))
            attention, ffn, moe = f"{name}.attention", f"{name}.ffn", f"{name}.moe"
            yield _attention(attention, self._slices(attention), again=again)
            if layer in model.expert_layers:
                rows = self._routed[model.expert_layers.index(layer)]
                yield _moe(moe, self.job, self.plan, self.rank, self._slices(moe), rows)
            else:
                yield _dense(ffn, self._slices(ffn), self.sizes.inner(layer), again=again)

    def as_far_as_needed(self, block: Block) -> Block:
        """Without backward, if nothing learns up to here; but for what is computed again of the
        layer in which the first thing does."""
        place, first = _place(block.name), _place(self._first)
        if place >= first:
            return block
        if place[0] < first[0] or not self.job.train.recompute:
            return replace(block, backward=Work())
        return replace(block, backward=block.forward)

    def _slices(self, name: str) -> Slices:
        return self._first_slices if name == self._first != "embed" else self._own_slices

    @cached_property
    def _own_slices(self) -> Slices:
        return Slices.of(replace(self.sizes, begins=False), self.plan, self.rank)

    @cached_property
    def _first_slices(self) -> Slices:
        return Slices.of(replace(self.sizes, begins=True), self.plan, self.rank)


def _place(block: str) -> tuple[float, bool]:
    """Where a block stands in the model: its layer, and whether it is that one's second."""
    if not block.startswith("layers."):
        return (-1.0 if block == "embed" else math.inf), False
    _, layer, kind = block.split(".")
    return int(layer), kind != "attention"


def _head(s: Sizes) -> list[Part]:
    joined = *ops.join_runs(s, s.model.hidden), *ops.join_columns(s)
    return [ops.norm(s, s.model.hidden, within=False), *joined, ops.loss(s)]


def _attention(name: str, slices: Slices, *, again: bool) -> Block:
    s = slices.s
    model, hidden, wide_input = s.model, s.model.hidden, s.slices == 1
    said = slices.head_norms(), slices.sum_runs(s.narrow)
    if model.latent is not None:
        into = replace(slices, s=replace(s, begins=False))  # What is joined has been adapted.
        joined = into.join_runs(latent.travelling(s, model.latent))
        return _block(name, latent.attention(s, model.latent), joined.then(*said), again=again)
    parts = [
        ops.norm(s, hidden, uses=3 if wide_input else 1),
        *ops.join_runs(s, hidden, uses=3, split=True),
        ops.linear("q", s, s.queries, hidden, wide_input=wide_input, first=True),
        ops.linear("k", s, s.keys, hidden, wide_input=wide_input, first=True),
        ops.linear("v", s, s.keys, hidden, wide_input=wide_input, first=True),
        *(ops.head_norms(s) if model.normed is not None else ()),
        *((ops.clamp(s),) if model.clip_qkv is not None else ()),
        ops.rotary(s, s.queries),
        ops.rotary(s, s.keys),
        ops.attend(s),
        ops.linear("o", s, hidden, s.queries, wide_input=False),
        ops.residual(s),
    ]
    return _block(name, parts, slices.join_runs(hidden).then(*said), again=again)


def _dense(name: str, slices: Slices, ffn: int, *, again: bool) -> Block:
    s = slices.s
    parts = [
        ops.norm(s, s.model.hidden, uses=2 if s.slices == 1 else 1),
        *_gated(s, ffn, "ffn"),
        ops.residual(s),
    ]
    return _block(name, parts, _beside(slices), again=again, sums=s.slices > 1)


def _gated(s: Sizes, ffn: int, target: Target) -> list[Part]:
    hidden, of = s.model.hidden, "shared " * (target == "shared")
    linear = partial(ops.linear, s=s, target=target)
    into = partial(linear, columns=ffn, inner=hidden, wide_input=s.slices == 1, first=True)
    parts = [
        *ops.join_runs(s, hidden, uses=2),
        into(f"{of}gate"),
        into(f"{of}up"),
        ops.gate(s, ffn, f"{of}gate"),
        linear(f"{of}down", columns=hidden, inner=ffn, wide_input=False),
    ]
    if s.begins and not s.learning.beside(target):  # Nothing in it learns, nor what comes into it.
        return [(forward, Op(forward.name)) for forward, _ in parts]
    return parts


def _beside(slices: Slices) -> Talk:
    """What slices say around a gated network."""
    s = slices.s
    return slices.join_runs(s.model.hidden).then(slices.sum_runs(s.narrow))


def _moe(name: str, job: Job, plan: Plan, rank: int, slices: Slices, rows: Routed) -> Block:
    s = slices.s
    shared, learns = s.shared > 0, s.learning.experts or s.learning.beside("experts") > 0
    uses = 2 + shared * (2 if s.slices == 1 else 1)
    parts = [
        ops.norm(s, s.model.hidden, uses=uses),
        sparse.router(s),
        sparse.dispatch(s, rows),
        *(_gated(s, s.shared, "shared") if shared else ()),
        *(sparse.experts(s, one.slots, travels=one.by_rows) for one in rows.turns()),
        sparse.combine(s, rows),
        sparse.joined(s, rows),
        *((sparse.beside(s),) if shared else ()),
        ops.residual(s),
    ]
    tokens, results = _travelling(s, rows)
    # The gradients of weights come back with visits, for routers, whatever else learns.
    weighed = rows.visits and s.learning.routers
    ends = s.begins and not weighed
    talk = slices.join_choices().then(
        messages.counts(job, plan, rank),
        slices.join_sent(),
        *(talk.ahead(ends) for talk in tokens[:1]),
        _beside(slices) if shared else Talk(),
        *(talk.ahead(ends) for talk in tokens[1:]),
        results.ahead(ends and not learns),
        slices.sum_results(),
    )
    # Where gradients begin in the shared experts alone, what comes after them is not needed again.
    idle = (sparse.EXPERTS, "combine") if s.begins and not (learns or s.learning.routers) else ()
    return _block(name, parts, talk, again=job.train.recompute, sums=s.expert_slices > 1, idle=idle)


def _travelling(s: Sizes, rows: Routed) -> tuple[list[Talk], Talk]:
    """Tokens to experts, trip by trip, and results back.

    A visit has a token's weights and slots beside it, and brings back the gradients of weights.
    """
    row, choices = s.model.hidden * s.narrow, s.model.top_k
    there = visit_bytes(s.model.hidden, choices, s.narrow)[0] if rows.visits else row
    again = row + rows.visits * choices * s.narrow

    def exchange(name: str, trip: Trip, each: int, *, returns: bool = False) -> Talk:
        to, back = [n * each for n in trip.to], [n * each for n in trip.back]
        return messages.exchange(name, trip.group, *((back, to) if returns else (to, back)))

    tokens, results = list[Talk](), list[Talk]()
    for one in rows.apart():
        tokens += [
            Talk(exchange(TOKENS, trip, there).forward, exchange(TOKENS, trip, again).backward)
            for trip in one.trips
        ]
        results += [exchange(RESULTS, trip, row, returns=True) for trip in reversed(one.trips)]
    return tokens, Talk().then(*results)


def _block(
    name: str,
    parts: Sequence[Part],
    talk: Talk,
    *,
    again: bool = False,
    sums: bool = False,
    idle: Container[str] = (),
) -> Block:
    """A block without its update; computed `again` in backward but for what nobody needs there.

    That is the last message too where it `sums` what nobody computes with; operations that are
    `idle`, and what would bring their results.
    """
    first = tuple(op for op, _ in parts)
    last = tuple(op for _, op in reversed(parts))
    repeated: tuple[Op, ...] = ()
    said: tuple[Message, ...] = ()
    if again:
        # Of the last product of a layer; beside an adapter, of the adapter's last one.
        repeated = tuple(
            replace(op, products=op.products[:-1])
            if op.name == ("shared down" if idle else "down")
            else op
            for op in first
            if op.name not in idle
        )
        said = talk.forward
        if not name.endswith("attention"):
            repeated = tuple(op for op in repeated if op.name not in _LAST)
        if sums:
            said = said[:-1]
        said = tuple(one for one in said if not (one.name == RESULTS and "combine" in idle))
    backward = Work((*repeated, *last), (*said, *talk.backward))
    return Block(name, Work(first, talk.forward), backward, Work())


def _update(
    share: Share, holding: Sequence[Parameter], leaders: Container[str], chunk: int
) -> tuple[Op, ...]:
    """The gradient's norm, clipping and AdamW on what a rank holds of a block, `leaders` and what
    lies beside them in one piece, of narrow moments `chunk` elements at a time."""
    job, plan, rank = share.job, share.plan, share.rank
    width, sharers = STORED_BYTES[job.train.precision], plan.shard
    dense = [p for p in holding if p.is_dense]
    experts = [p for p in holding if p.expert is not None]
    sizes = [local_size(p, sharers) for p in dense]
    arena = sum(p.size for p in experts)
    elements, tensors = sum(sizes) + arena, len(dense) + (arena > 0)
    pieces = sum(p.name in leaders for p in dense) + (arena > 0)
    owned = sum(n for p, n in zip(dense, sizes, strict=True) if is_first(p, plan, rank))
    owned += sum(p.size for p in experts if is_first(p, plan, rank))
    added, clips = job.train.micro_batches - 1, job.train.clip > 0
    # In a pipeline FSDP shares out what micro-batches have added up to.
    grown = sum(p.size for p in dense) + arena if plan.pp > 1 else elements
    update = ops.update(
        elements * width, tensors, normed_bytes=owned * width, pieces=pieces, clips=clips
    )
    if job.optimizer.moments != "full":
        matrices = [local_size(p, sharers) for p in dense if len(p.shape) > 1]
        matrices += [p.size for p in experts]
        vectors = [p for p in dense if len(p.shape) == 1]
        of_vectors = sum(local_size(p, sharers) for p in vectors) * width
        pieces = sum(p.name in leaders for p in vectors)
        narrow = ops.narrow_adamw(matrices, job.optimizer.moments, chunk)
        update = (*update[:-1], ops.adamw(of_vectors, pieces), narrow)
    return (Op("accumulate", (), 3 * added * grown * width, added * tensors), *update)


def _sharded(
    blocks: Sequence[Block], by_block: dict[str, list[Parameter]], share: Share
) -> list[Block]:
    """With what FSDP adds: one group a layer, and one of embedding and head.

    Gradients are shared out of what learns, and parameters come together again for a layer that has
    a backward, and for the one before it. Embedding and head stay whole between forward and
    backward.

    A pipeline's stages stay whole from the first micro-batch to the last, and then share out the
    gradients of all: that is a part of the update.
    """
    plan, width = share.plan, STORED_BYTES[share.job.train.precision]
    ranks = messages.group_of(plan.shard_groups(), share.rank)
    copies = messages.group_of(plan.shard_replica_groups(), share.rank)
    named = {block.name: block for block in blocks}
    reached = {name.rpartition(".")[0] for name, block in named.items() if block.backward.ops}
    groups: dict[str, list[str]] = {}
    for name in named:
        at = name.rpartition(".")[0]  # Of embedding and head: nowhere.
        groups.setdefault(at, []).append(name)
    for at, names in groups.items():
        dense = [p for name in names for p in by_block[name] if p.is_dense and not p.columns]
        if not dense:  # The embedding by itself, whose columns are shared out already.
            continue
        learning = [p for p in dense if p.name in share.learning]
        gathered = messages.gathered(dense, ranks, width)
        first, last = names[0], names[-1]
        moved = 2 * gathered.num_bytes + 2 * gathered.num_bytes // plan.shard
        unshard, reshard, copied = Work((Op("unshard", (), moved, 2),), (gathered,)), Work(), Work()
        if learning:
            scattered, summed = messages.scattered(learning, ranks, copies, width)
            reshard = Work((Op("reshard", (), 2 * scattered.num_bytes, 1),), (scattered,))
            copied = Work((), summed)
        if plan.pp > 1:
            named[first] = _add(named[first], update=_join(unshard, reshard, copied))
            continue
        named[first] = _add(named[first], forward=unshard)
        if at and named[last].backward.ops:
            named[last] = _add(named[last], backward=unshard)
        elif at and f"layers.{int(at.partition('.')[2]) + 1}" in reached:  # It is asked for ahead.
            named[last] = _add(named[last], backward=Work((), (gathered,)))
        named[first] = _add(named[first], after=reshard, update=copied)
    return list(named.values())


def _add(
    block: Block,
    forward: Work | None = None,
    backward: Work | None = None,
    after: Work | None = None,
    update: Work | None = None,
) -> Block:
    """`block` with more before its forward, before and after its backward, and in its update."""
    return Block(
        block.name,
        _join(forward, block.forward),
        _join(backward, block.backward, after),
        _join(block.update, update),
    )


def _join(*works: Work | None) -> Work:
    present = [work for work in works if work is not None]
    return Work(
        tuple(op for work in present for op in work.ops),
        tuple(message for work in present for message in work.messages),
    )


def with_sums(blocks: Sequence[Block], groups: Sequence[Sums], last: Work) -> list[Block]:
    """`blocks` with sums of gradients, each where backward has the last of them, and what is done
    once a step: of sums those that do not go on under backward, and what comes `last`."""
    found = said(groups)
    summed = [
        _add(block, update=Work((), tuple(found.messages[block.name])))
        if block.name in found.messages
        else block
        for block in blocks
    ]
    end = Work(found.ops, tuple(found.messages.get("", ())))
    return [*summed, Block(STEP, Work(), Work(), _join(end, last))]
