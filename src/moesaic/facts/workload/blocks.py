"""What is to be done: every block of a model with its work, for one micro-batch and the update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from numpy.typing import ArrayLike

from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.workload import latent, messages, ops
from moesaic.facts.workload.loads import Counts, expert_counts, slots_of, traffic
from moesaic.facts.workload.messages import Message
from moesaic.facts.workload.ops import Op, Part
from moesaic.facts.workload.parameters import Parameter, local_size, parameters
from moesaic.facts.workload.sizes import STORED_BYTES, Sizes

STEP = "step"
"""Name of the block of what belongs to none."""


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
    """embed, layers.0.attention, layers.0.ffn or layers.0.moe, ..., head; step: all of it."""
    forward: Work
    """Once a micro-batch."""
    backward: Work
    """Once a micro-batch; with `train.recompute` it begins with what is computed again."""
    update: Work
    """Once a step."""


def workload(
    job: Job, plan: Plan, rank: int = 0, loads: Sequence[ArrayLike] | None = None
) -> list[Block]:
    """What `rank` does in one micro-batch and in the update, block by block.

    Args:
        job: the job, under the plan (`facts.plan.ruled`): whether layers are computed again is read
            from it alone.
        plan: which rank holds what.
        rank: whose work.
        loads: by expert layer, the load of each expert, or assignments by rank and expert over one
            global micro-batch; absent: even routing.
    """
    sizes = Sizes.of(job, plan, rank)
    sparse = job.model.expert_layers
    even = expert_counts(job, plan, None) if sparse and loads is None else None
    blocks = [_block("embed", [ops.embedding(sizes)])]
    for layer in range(job.model.layers):
        name, again = f"layers.{layer}", job.train.recompute
        blocks.append(_block(f"{name}.attention", _attention(sizes), again=again))
        if layer in sparse:
            load = None if loads is None else loads[sparse.index(layer)]
            counts = expert_counts(job, plan, load) if even is None else even
            blocks.append(_moe(f"{name}.moe", job, plan, rank, sizes, counts))
        else:
            blocks.append(_block(f"{name}.ffn", _dense(sizes, layer), again=again))
    blocks.append(
        _block("head", [ops.norm(sizes, job.model.hidden, within=False), ops.loss(sizes)])
    )
    held: dict[str, list[Parameter]] = {}
    for parameter in parameters(job.model):
        held.setdefault(_block_of(parameter, job), []).append(parameter)
    update = {name: _update(job, plan, rank, held[name]) for name in held}
    blocks = [replace(block, update=Work(update[block.name])) for block in blocks]
    if plan.shard > 1:
        blocks = _sharded(blocks, held, job, plan, rank)
    return [*blocks, Block(STEP, Work(), Work(), _step(job, plan, rank))]


def _block_of(parameter: Parameter, job: Job) -> str:
    if parameter.layer is None:
        return parameter.name.partition(".")[0]
    inner = parameter.name.split(".")[2]
    if inner == "ffn_norm":
        inner = _inner(job, parameter.layer)
    return f"layers.{parameter.layer}.{inner.removesuffix('_norm')}"


def _inner(job: Job, layer: int) -> str:
    return "moe" if layer in job.model.expert_layers else "ffn"


def _attention(s: Sizes) -> list[Part]:
    model, hidden = s.model, s.model.hidden
    if model.latent is not None:
        return latent.attention(s, model.latent)
    return [
        ops.norm(s, hidden, uses=3),
        ops.linear("q", s, s.queries, hidden, wide_input=True),
        ops.linear("k", s, s.keys, hidden, wide_input=True),
        ops.linear("v", s, s.keys, hidden, wide_input=True),
        *(ops.head_norms(s) if model.normed is not None else ()),
        *((ops.clamp(s),) if model.clip_qkv is not None else ()),
        ops.rotary(s, s.queries),
        ops.rotary(s, s.keys),
        ops.attend(s),
        ops.linear("o", s, hidden, s.queries, wide_input=False),
        ops.residual(s),
    ]


def _dense(s: Sizes, layer: int) -> list[Part]:
    return [
        ops.norm(s, s.model.hidden, uses=2),
        *_gated(s, s.model.inner(layer)),
        ops.residual(s),
    ]


def _gated(s: Sizes, ffn: int, of: str = "") -> list[Part]:
    hidden = s.model.hidden
    return [
        ops.linear(f"{of}gate", s, ffn, hidden, wide_input=True),
        ops.linear(f"{of}up", s, ffn, hidden, wide_input=True),
        ops.gate(s, ffn, f"{of}gate"),
        ops.linear(f"{of}down", s, hidden, ffn, wide_input=False),
    ]


def _moe(name: str, job: Job, plan: Plan, rank: int, s: Sizes, counts: Counts) -> Block:
    group = messages.group_of(plan.expert_groups(), rank)
    slots = slots_of(counts, plan, rank, group)
    leaving, arriving, travels = int(counts[rank].sum()), sum(slots), plan.ep > 1
    shared = s.model.shared * s.model.ffn
    parts = [
        ops.norm(s, s.model.hidden, uses=4 if shared else 2),
        ops.router(s),
        ops.dispatch(s, leaving, arriving, travels=travels),
        *(_gated(s, shared, "shared ") if shared else ()),
        ops.experts(s, slots),
        ops.combine(s, leaving, arriving, travels=travels),
        *((ops.beside(s),) if shared else ()),
        ops.residual(s),
    ]
    row_bytes = s.model.hidden * s.narrow
    out, back = ([n * row_bytes for n in rows] for rows in traffic(counts, plan, rank, group))
    forward = (
        *messages.counts(job, plan),
        *messages.exchange("tokens", plan, rank, out, back),
        *messages.exchange("results", plan, rank, back, out),
    )
    backward = (
        *messages.exchange("results", plan, rank, out, back),
        *messages.exchange("tokens", plan, rank, back, out),
    )
    return _block(name, parts, forward, backward, again=job.train.recompute)


def _block(
    name: str,
    parts: Sequence[Part],
    forward: tuple[Message, ...] = (),
    backward: tuple[Message, ...] = (),
    *,
    again: bool = False,
) -> Block:
    """A block without its update; computed `again` in backward but for what nobody needs there."""
    first = tuple(op for op, _ in parts)
    last = tuple(op for _, op in reversed(parts))
    repeated: tuple[Op, ...] = ()
    if again:
        repeated = tuple(replace(op, products=()) if op.name == "down" else op for op in first)
        if not name.endswith("attention"):
            repeated = tuple(op for op in repeated if op.name not in ("residual", "shared"))
        backward = (*forward, *backward)
    return Block(name, Work(first, forward), Work((*repeated, *last), backward), Work())


def _update(job: Job, plan: Plan, rank: int, held: Sequence[Parameter]) -> tuple[Op, ...]:
    """The gradient's norm, clipping and AdamW on what `rank` holds of a block."""
    width = STORED_BYTES[job.train.precision]
    dense = [local_size(p, plan.shard) for p in held if p.is_dense]
    homes = plan.homes(rank)
    experts = sum(p.size for p in held if p.expert is not None and p.expert in homes)
    elements, tensors = sum(dense) + experts, len(dense) + (experts > 0)
    owned = sum(dense) * (rank < plan.shard) + experts * (rank < plan.ep)
    added, clips = job.train.micro_batches - 1, job.train.clip > 0
    update = ops.update(elements * width, tensors, normed_bytes=owned * width, clips=clips)
    if job.optimizer.moments != "full":
        matrices = [local_size(p, plan.shard) for p in held if p.is_dense and len(p.shape) > 1]
        matrices += [p.size for p in held if p.expert is not None and p.expert in homes]
        vectors = [local_size(p, plan.shard) for p in held if p.is_dense and len(p.shape) == 1]
        narrow = ops.narrow_adamw(matrices, job.optimizer.moments)
        update = (*update[:-1], ops.adamw(sum(vectors) * width, len(vectors)), narrow)
    return (Op("accumulate", (), 3 * added * elements * width, added * tensors), *update)


def _sharded(
    blocks: Sequence[Block], held: dict[str, list[Parameter]], job: Job, plan: Plan, rank: int
) -> list[Block]:
    """With what FSDP adds: one group a layer, and one of embedding and head."""
    width = STORED_BYTES[job.train.precision]
    groups = [("embed", "embed", "head")]
    for layer in range(job.model.layers):
        groups.append((f"layers.{layer}.attention", f"layers.{layer}.{_inner(job, layer)}", ""))
    named = {block.name: block for block in blocks}
    for first, last, other in groups:
        names = {first, last, other} - {""}
        dense = [p for name in sorted(names) for p in held[name] if p.is_dense]
        gathered, scattered, summed = messages.sharded(dense, plan, rank, width)
        num_bytes = gathered.num_bytes
        unshard = Work(
            (Op("unshard", (), 2 * num_bytes + 2 * num_bytes // plan.shard, 2),), (gathered,)
        )
        reshard = Work((Op("reshard", (), 2 * num_bytes, 1),), (scattered,))
        named[first] = _add(named[first], forward=unshard)
        if first != last:  # Embedding and head stay whole between forward and backward.
            named[last] = _add(named[last], backward=unshard)
        named[first] = _add(named[first], after=reshard, update=Work((), summed))
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


def _step(job: Job, plan: Plan, rank: int) -> Work:
    """Sums of gradients over ranks, in buckets that span blocks, and of single numbers."""
    width, model = STORED_BYTES[job.train.precision], job.model
    found = list(parameters(model))
    dense = [p for p in found if p.is_dense and p.name != "head.norm.weight"]
    dense += [p for p in found if p.name == "head.norm.weight"]  # It comes behind head.weight.
    arena = 3 * model.ffn * model.hidden * len(plan.homes(rank)) * width
    groups = [("dense", tuple(range(plan.ranks)), [p.size * width for p in dense])] * (
        plan.shard == 1
    )
    if model.experts:
        copies = messages.group_of(plan.replica_groups(), rank)
        groups.append(("experts", copies, [arena] * len(model.expert_layers)))
    work = summed(groups)
    return Work(work.ops, (*work.messages, *messages.scalars(plan)))


def summed(groups: Sequence[tuple[str, tuple[int, ...], Sequence[int]]]) -> Work:
    """Sums of gradients: what for, over which ranks, bytes of each tensor; in buckets."""
    sent: list[Message] = []
    moved = calls = 0
    for name, ranks, sizes in groups:
        for bucket in messages.buckets(sizes) if len(ranks) > 1 else ():
            sent.append(Message(name, "all_reduce", ranks, sum(bucket)))
            if len(bucket) > 1:
                moved, calls = moved + 4 * sum(bucket), calls + 1 + len(bucket)
    return Work((Op("reduce", (), moved, calls),), tuple(sent))
