"""Workload of one rank: each block's operations, collectives and saved bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from numpy.typing import ArrayLike

from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.workload import ops
from moesaic.facts.workload.attention import attention
from moesaic.facts.workload.collectives import CollectiveCall, collective, scalar_reductions
from moesaic.facts.workload.experts import mixture_of_experts
from moesaic.facts.workload.gradient_reduction import GradientReduction, gradient_reductions
from moesaic.facts.workload.loads import RoutedTokens, routed_by_layer
from moesaic.facts.workload.operation import Op, Operation
from moesaic.facts.workload.parameters import local_size
from moesaic.facts.workload.rank_params import RankParams
from moesaic.facts.workload.sizes import GPU_MOMENT_CHUNK, MOMENT_CHUNK, Sizes
from moesaic.facts.workload.spec import BlockSpec

STEP = "step"
"""Name of the block for work outside all blocks."""


@dataclass(frozen=True)
class BlockWork:
    """Ops in order, and the collectives between them."""

    ops: tuple[Op, ...] = ()
    collectives: tuple[CollectiveCall, ...] = ()

    def __add__(self, other: BlockWork) -> BlockWork:
        """Return this work followed by `other`."""
        return BlockWork(self.ops + other.ops, self.collectives + other.collectives)

    @property
    def flops(self) -> int:
        """FLOPs of all matmuls, in full."""
        return sum(op.flops for op in self.ops)

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written by elementwise kernels."""
        return sum(op.moved_bytes for op in self.ops)


@dataclass(frozen=True)
class Block:
    """One block of the model on one rank, with its work."""

    spec: BlockSpec
    forward: BlockWork = BlockWork()
    """Work once per micro-batch."""
    backward: BlockWork = BlockWork()
    """Work once per micro-batch; with recomputation it starts with the recomputed forward."""
    update: BlockWork = BlockWork()
    """Work once per step."""
    saved_bytes: int = 0
    """Bytes that autograd saves in one forward without recomputation, without parameters."""
    captured_bytes: int = 0
    """Bytes of gradients that the first half of a split backward keeps for the second."""

    @property
    def name(self) -> str:
        """Name of the block; `step` for work outside all blocks."""
        return self.spec.name


def workload(
    job: Job,
    plan: Plan,
    rank: int = 0,
    loads: Sequence[ArrayLike] | None = None,
    *,
    on_cpu: bool = True,
) -> list[Block]:
    """Return the work of `rank` in one micro-batch and in the update, block by block.

    In a pipeline, these are the blocks of the rank's own stages. Transfers between stages and the
    order of micro-batches are not included.

    Args:
        job: the job with the plan's settings (`facts.plan.job_under_plan`).
        plan: placement of the model on ranks.
        rank: the rank.
        loads: one load per expert layer of the whole model, as `loads.expert_counts` takes it; None
            for even routing.
        on_cpu: whether the rank computes on a CPU; a GPU has other kernels for norms and casts.
    """
    builder = BlockBuilder(RankParams(job, plan, rank), Sizes(job, plan, rank, on_cpu), loads)
    reductions = gradient_reductions(builder.params)
    last = BlockWork((), scalar_reductions(job, plan, rank))
    return with_gradient_reductions(builder.blocks(), reductions, last)


@dataclass(frozen=True)
class BlockBuilder:
    """Builder of one rank's blocks, except for gradient reductions.

    Backward goes down to the embedding, even if fine-tuning freezes the first layers.
    """

    params: RankParams
    sizes: Sizes
    loads: Sequence[ArrayLike] | None

    @cached_property
    def routed(self) -> dict[int, RoutedTokens]:
        """Routed tokens by expert layer on the rank."""
        job, plan, rank = self.params.job, self.params.plan, self.params.rank
        own = {spec.layer for spec in self.params.blocks if spec.kind == "moe"}
        layers = [layer for layer in job.model.expert_layers if layer in own]
        found = routed_by_layer(job, plan, rank, self.loads, layers)
        return dict(zip(layers, found, strict=True))

    def blocks(self) -> list[Block]:
        """Return the rank's blocks in model order; equal layers are built once."""
        groups: dict[str, list[BlockSpec]] = {}
        for spec in self.params.blocks:
            groups.setdefault("" if spec.layer is None else spec.model_block, []).append(spec)
        built, blocks = dict[object, list[Block]](), dict[str, Block]()
        for specs in groups.values():
            key = self._work_key(specs)
            if key not in built:
                built[key] = self._with_fsdp([self.build(spec) for spec in specs])
            for block, spec in zip(built[key], specs, strict=True):
                blocks[spec.name] = replace(block, spec=spec)
        return [blocks[spec.name] for spec in self.params.blocks]

    def _work_key(self, specs: Sequence[BlockSpec]) -> object:
        """Return a key that is equal for all layers with the same work."""
        last = specs[-1]
        has_own_load = self.loads is not None or bool(self.params.plan.expert_placement_by_layer)
        own_load = last.layer if last.kind == "moe" and has_own_load else None
        return last.kind, last.inner_width, own_load

    def _with_fsdp(self, blocks: Sequence[Block]) -> list[Block]:
        """Return blocks of one FSDP group with its work: a layer, or embedding and head.

        It all-gathers parameters, reduce-scatters gradients, and all-reduces gradient shards over
        replicas once a step.
        A layer is gathered again for backward, embedding and head stay gathered. In a pipeline,
        stages stay gathered from the first micro-batch to the last. Then they reduce-scatter the
        accumulated gradients, as part of the update.
        """
        params, plan, element_bytes = self.params, self.params.plan, self.sizes.stored_bytes
        dense = [p for block in blocks for p in block.spec.dense if not p.is_column_shard]
        if plan.dp_shard == 1 or not dense:  # FSDP skips a column-sharded embedding by itself.
            return list(blocks)
        ranks = plan.dp_shard_groups().of(params.rank)
        replicas = plan.dp_replicate_groups().of(params.rank)
        shard_bytes, gradient_bytes = (
            sum(local_size(p, plan.dp_shard) for p in group) * element_bytes
            for group in (dense, [p for p in dense if params.is_trained(p)])
        )
        gathered, scattered = shard_bytes * len(ranks), gradient_bytes * len(ranks)
        gather = CollectiveCall("parameters", "all_gather", ranks, gathered, precedes_compute=True)
        unshard = BlockWork((Op("unshard", (), 2 * (gathered + shard_bytes), 2),), (gather,))
        reshard = reduction = BlockWork()
        if gradient_bytes:
            scatter = collective("gradients", "reduce_scatter", ranks, scattered)
            reshard = BlockWork((Op("reshard", (), 2 * scattered, 1),), scatter)
            reduce = collective("replicas", "all_reduce", replicas, gradient_bytes)
            reduction = BlockWork((), reduce)
        first, *rest = blocks
        if plan.pp > 1:
            return [replace(first, update=first.update + unshard + reshard + reduction), *rest]
        if first.spec.layer is not None:
            rest[-1] = replace(rest[-1], backward=unshard + rest[-1].backward)
        first = replace(
            first, forward=unshard + first.forward, backward=first.backward + reshard,
            update=first.update + reduction,
        )  # fmt: skip
        return [first, *rest]

    def _operations(self, spec: BlockSpec) -> list[Operation]:
        """Return the operations of a block in order."""
        params, s = self.params, self.sizes
        if spec.kind == "embed":
            return ops.embedding(s, tied=s.model.tied and params.plan.pp == 1)
        if spec.kind == "head":
            return ops.head(s)
        if spec.kind == "attention":
            return attention(s)
        if spec.kind == "ffn":
            return _dense_ffn(s, spec.inner_width // s.tp)
        assert spec.layer is not None
        return mixture_of_experts(s, spec.inner_width // s.tp, self.routed[spec.layer])

    def build(self, spec: BlockSpec) -> Block:
        """Return a block without FSDP.

        With recomputation, backward of a layer starts with the forward that it needs.
        """
        operations = self._operations(spec)
        forward = BlockWork(
            tuple(one.forward for one in operations if one.forward is not None),
            tuple(call for one in operations for call in one.forward_calls),
        )
        backward = BlockWork(
            tuple(one.backward for one in reversed(operations) if one.backward is not None),
            tuple(call for one in reversed(operations) for call in one.backward_calls),
        )
        if self.params.plan.recomputes(self.params.job) and spec.layer is not None:
            repeated = [one for one in operations if one.recompute != "nothing"]
            recomputed = BlockWork(
                tuple(op for one in repeated if (op := one.recomputed) is not None),
                tuple(call for one in repeated for call in one.forward_calls),
            )
            backward = recomputed + backward
        saved = sum(one.saved_bytes for one in operations)
        captured = sum(one.captured_bytes for one in operations)
        update = BlockWork(update_ops(self.params, self.sizes, spec))
        return Block(spec, forward, backward, update, saved, captured)


def _dense_ffn(s: Sizes, ffn: int) -> list[Operation]:
    """Return a layer's dense FFN of width `ffn`, with its norm and residual."""
    *inner, down, scatter = ops.gated_ffn(s, ffn, "ffn")
    return [
        ops.norm(s, s.model.hidden, num_gradients=3 if s.tp == 1 else 2, saves_result=s.tp == 1),
        *inner,
        replace(down, recompute="input"),
        replace(scatter, recompute="nothing"),
        replace(ops.residual(s), recompute="nothing"),
    ]


def update_ops(params: RankParams, sizes: Sizes, spec: BlockSpec) -> tuple[Op, ...]:
    """Return gradient norm, clipping and AdamW for the trainable parameters of a block."""
    job, plan, element_bytes = params.job, params.plan, sizes.stored_bytes
    trained = [p for p in spec.parameters if params.is_trained(p)]
    elements = [p.size if p.expert is not None else local_size(p, plan.dp_shard) for p in trained]
    total = sum(elements)
    normed = sum(
        size for p, size in zip(trained, elements, strict=True) if params.counts_in_grad_norm(p)
    )
    # Experts are updated one by one. Gradients in buckets make flat tensors, of matrices and of
    # vectors, which a layer's attention and network share.
    num_tensors = sum(p.is_dense for p in trained)
    if plan.dp_shard == 1 and plan.ranks_per_stage > 1:
        num_tensors = 0 if spec.kind in ("ffn", "moe") else min(num_tensors, 2)
    num_tensors += len({p.expert for p in trained if p.expert is not None})
    num_additions = job.train.micro_batches - 1
    # A pipeline accumulates unsharded gradients.
    accumulated = sum(p.size for p in trained) if plan.pp > 1 else total
    moved = 3 * num_additions * accumulated * element_bytes
    norm, clip, *updates = ops.optimizer_update(total * element_bytes, num_tensors)
    norm = replace(norm, moved_bytes=ops.TRAFFIC_FACTOR["norm"] * normed * element_bytes)
    if job.optimizer.moments != "full":
        matrices = [size for p, size in zip(trained, elements, strict=True) if len(p.shape) > 1]
        vector_bytes = (total - sum(matrices)) * element_bytes
        chunk = MOMENT_CHUNK if sizes.on_cpu else GPU_MOMENT_CHUNK
        chunks = sum(-(-size // chunk) for size in matrices)
        low_bit_moved, kernels = ops.LOW_BIT_TRAFFIC[job.optimizer.moments]
        updates = [
            ops.optimizer_update(vector_bytes, min(num_tensors, 2))[-1],
            Op("low-bit adamw", (), low_bit_moved * sum(matrices), kernels * chunks),
        ]
    if job.train.clip:
        updates = [clip, *updates]
    return Op("accumulate", (), moved, num_additions * num_tensors), norm, *updates


def with_gradient_reductions(
    blocks: Sequence[Block], reductions: Sequence[GradientReduction], last: BlockWork
) -> list[Block]:
    """Return `blocks` with gradient reductions, and a last block for work once a step.

    An overlapped reduction belongs to the block whose backward completes its bucket. The last block
    has all others, and then `last`. Reductions of experts come last in a block, as some ranks may
    have none.
    """
    calls, copies = dict[str, list[CollectiveCall]](), list[Op]()
    for one in reductions:
        for bucket in one.buckets:
            block = one.gradients[bucket.members[-1]].block if one.overlaps_backward else ""
            call = CollectiveCall(one.name, "all_reduce", one.ranks, bucket.num_bytes)
            calls.setdefault(block, []).append(call)
        filled = [bucket for bucket in one.buckets if len(bucket.members) > 1]
        moved = sum(2 * bucket.num_bytes for bucket in filled)
        num_kernels = sum(len(bucket.members) for bucket in filled)
        name = "fill buckets" if one.overlaps_backward else "reduce"
        copies.append(Op(name, (), moved, num_kernels))
    reduced = [
        replace(block, update=block.update + BlockWork((), tuple(calls.get(block.name, ()))))
        for block in blocks
    ]
    final = BlockWork(tuple(copies), tuple(calls.get("", ()))) + last
    return [*reduced, Block(BlockSpec(STEP, "other"), update=final)]
