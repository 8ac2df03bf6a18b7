"""Workload of one rank: each block's operations and collectives, per micro-batch and per step."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from numpy.typing import ArrayLike

from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.workload import collectives, ops
from moesaic.facts.workload.block_work import (
    STEP,
    Block,
    BlockWork,
    build_block,
    concat_work,
    extend_block,
)
from moesaic.facts.workload.collectives import TensorParallelCollectives
from moesaic.facts.workload.fsdp_work import add_fsdp
from moesaic.facts.workload.gradient_reduction import (
    GradientReduction,
    flat_param_leaders,
    gradient_reductions,
    reduction_work,
)
from moesaic.facts.workload.layer_work import attention_block, dense_block, moe_block
from moesaic.facts.workload.loads import RoutedTokens, routed_by_layer
from moesaic.facts.workload.ops import Op, OpPair
from moesaic.facts.workload.parameter_placement import (
    blocks_of_rank,
    counts_in_grad_norm,
    workload_block,
)
from moesaic.facts.workload.parameters import Parameter, local_size
from moesaic.facts.workload.rank_params import RankParams
from moesaic.facts.workload.sizes import STORED_BYTES, Sizes


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
        job: the job with the plan's settings (`facts.plan.job_under_plan`); recomputation is read
            from it, not from `plan`.
        plan: placement of the model on ranks.
        rank: the rank.
        loads: one load per expert layer of the whole model, as `loads.expert_counts` takes it; None
            for even routing.
        on_cpu: whether the rank computes on a CPU; a GPU has other kernels for some elementwise
            work.
    """
    sizes, model = Sizes.of_rank(job, plan, rank, on_cpu=on_cpu), job.model
    builder = _BlockBuilder(job, plan, rank, sizes, loads)
    kinds = {name: builder.kind(name) for name in blocks_of_rank(model, plan, rank)}
    first_names = {kind: name for name, kind in reversed(kinds.items())}
    distinct = [name for name, kind in kinds.items() if first_names[kind] == name]
    blocks = [block for name in distinct for block in builder.blocks(name)]
    blocks = [builder.without_unneeded_backward(block) for block in blocks]
    params = RankParams.of_rank(job, plan, rank)
    by_block: dict[str, list[Parameter]] = {}
    for parameter in (*params.dense, *params.experts):
        by_block.setdefault(workload_block(parameter, model), []).append(parameter)
    reductions = gradient_reductions(params)
    leaders = flat_param_leaders(params, reductions)

    def updated(block: Block) -> Block:
        trained = [p for p in by_block[block.name] if p.name in params.trainable]
        work = BlockWork(_update_ops(params, trained, leaders, sizes.moment_chunk))
        return replace(block, update=work)

    if plan.dp_shard > 1:
        blocks = add_fsdp([updated(block) for block in blocks], by_block, params)
    all_blocks = [
        replace(block, name=block.name.replace(first_names[kind], name, 1))
        for name, kind in kinds.items()
        for block in blocks
        if f"{block.name}.".startswith(f"{first_names[kind]}.")
    ]
    if plan.dp_shard == 1:  # Equal blocks may still have different bucket boundaries.
        all_blocks = [updated(block) for block in all_blocks]
    final = BlockWork((), tuple(collectives.scalar_reductions(model, plan, rank)))
    return with_gradient_reductions(all_blocks, reductions, final)


@dataclass(frozen=True)
class _BlockBuilder:
    """Builder of one rank's blocks."""

    job: Job
    plan: Plan
    rank: int
    sizes: Sizes
    loads: Sequence[ArrayLike] | None

    @cached_property
    def _first_trainable(self) -> str:
        return self.sizes.trainable.first_trainable_block(self.job.model)

    @cached_property
    def _routed_by_layer(self) -> list[RoutedTokens]:
        return routed_by_layer(self.job, self.plan, self.rank, self.loads)

    def kind(self, name: str) -> object:
        """Return a key that is equal for all blocks of the model with the same work."""
        model = self.job.model
        if not name.startswith("layers."):
            return name
        layer, first = int(name.removeprefix("layers.")), _block_position(self._first_trainable)[0]
        is_moe = layer in model.expert_layers
        width = 0 if is_moe else model.ffn_width(layer)
        has_own_load = self.loads is not None or bool(self.plan.expert_placement_by_layer)
        own_load = layer if is_moe and has_own_load else None
        # Layers differ only by their place: far before, just before (FSDP prefetches it), at, or
        # after the first trainable layer.
        from_first = max(-2.0, min(layer - first, 1.0))
        return is_moe, width, own_load, from_first

    def blocks(self, name: str) -> Iterator[Block]:
        """Yield the parts of the model's block `name`: two for a decoder layer, else one."""
        model, recompute = self.job.model, self.job.train.recompute
        sizes_and_rank = self.sizes, self.plan, self.rank
        if name == "embed":
            lookup = ops.embedding(self.sizes, tied=model.tied and self.plan.pp == 1)
            calls = self._tp_collectives(name).reduce_scatter_sequence(self.sizes.stored_bytes)
            yield build_block(
                name, [lookup], calls.followed_by(collectives.embedding_lookup(*sizes_and_rank))
            )
        elif name == "head":
            calls = (
                self._tp_collectives(name)
                .head()
                .followed_by(collectives.gather_tied_embedding(*sizes_and_rank))
            )
            yield build_block(name, _head(self.sizes), calls)
        else:
            layer = int(name.removeprefix("layers."))
            attention, ffn, moe = f"{name}.attention", f"{name}.ffn", f"{name}.moe"
            yield attention_block(attention, self._tp_collectives(attention), recompute=recompute)
            if layer in model.expert_layers:
                routed = self._routed_by_layer[model.expert_layers.index(layer)]
                yield moe_block(
                    moe, self.job, self.plan, self.rank, self._tp_collectives(moe), routed
                )
            else:
                yield dense_block(
                    ffn, self._tp_collectives(ffn), self.sizes.ffn_width(layer), recompute=recompute
                )

    def without_unneeded_backward(self, block: Block) -> Block:
        """Return `block` without its backward if nothing up to it is trainable.

        With recomputation, the first trainable layer still recomputes its earlier block.
        """
        position, first = _block_position(block.name), _block_position(self._first_trainable)
        if position >= first:
            return block
        if position[0] < first[0] or not self.job.train.recompute:
            return replace(block, backward=BlockWork())
        return replace(block, backward=block.forward)

    def _tp_collectives(self, name: str) -> TensorParallelCollectives:
        return (
            self._first_collectives
            if name == self._first_trainable != "embed"
            else self._inner_collectives
        )

    @cached_property
    def _inner_collectives(self) -> TensorParallelCollectives:
        return TensorParallelCollectives.of_rank(
            replace(self.sizes, input_has_no_grad=False), self.plan, self.rank
        )

    @cached_property
    def _first_collectives(self) -> TensorParallelCollectives:
        return TensorParallelCollectives.of_rank(
            replace(self.sizes, input_has_no_grad=True), self.plan, self.rank
        )


def _block_position(block: str) -> tuple[float, bool]:
    """Return the position of a block in the model: its layer, and whether it is the second half."""
    if not block.startswith("layers."):
        return (-1.0 if block == "embed" else math.inf), False
    _, layer, kind = block.split(".")
    return int(layer), kind != "attention"


def _head(s: Sizes) -> list[OpPair]:
    gathers = *ops.gather_sequence(s, s.model.hidden), *ops.gather_tied_embedding(s)
    return [ops.norm(s, s.model.hidden, in_residual=False), *gathers, ops.loss(s)]


def _update_ops(
    params: RankParams, trained: Sequence[Parameter], leaders: Container[str], chunk: int
) -> tuple[Op, ...]:
    """Return gradient norm, clipping and AdamW for the `trained` parameters.

    `leaders` are the first parameters of flat tensors. Low-bit moments update `chunk` elements at a
    time.
    """
    job, plan, rank = params.job, params.plan, params.rank
    element_bytes, num_shards = STORED_BYTES[job.train.precision], plan.dp_shard
    dense = [p for p in trained if p.is_dense]
    experts = [p for p in trained if p.expert is not None]
    sizes = [local_size(p, num_shards) for p in dense]
    expert_elements = sum(p.size for p in experts)
    elements, tensors = sum(sizes) + expert_elements, len(dense) + (expert_elements > 0)
    num_experts = len({p.expert for p in experts})  # The optimizer updates them one by one.
    num_flat_tensors = sum(p.name in leaders for p in dense) + num_experts
    normed_elements = sum(
        n for p, n in zip(dense, sizes, strict=True) if counts_in_grad_norm(p, plan, rank)
    )
    normed_elements += sum(p.size for p in experts if counts_in_grad_norm(p, plan, rank))
    num_additions, clips = job.train.micro_batches - 1, job.train.clip > 0
    # A pipeline accumulates unsharded gradients.
    accumulated_elements = sum(p.size for p in dense) + expert_elements if plan.pp > 1 else elements
    update = ops.optimizer_update(
        elements * element_bytes,
        len(dense) + num_experts,
        normed_bytes=normed_elements * element_bytes,
        num_flat_tensors=num_flat_tensors,
        clips_gradient=clips,
    )
    if job.optimizer.moments != "full":
        matrices = [local_size(p, num_shards) for p in dense if len(p.shape) > 1]
        matrices += [p.size for p in experts]
        vectors = [p for p in dense if len(p.shape) == 1]
        vector_bytes = sum(local_size(p, num_shards) for p in vectors) * element_bytes
        num_flat_tensors = sum(p.name in leaders for p in vectors)
        low_bit = ops.low_bit_adamw(matrices, job.optimizer.moments, chunk)
        update = (*update[:-1], ops.adamw(vector_bytes, num_flat_tensors), low_bit)
    return (
        Op(
            "accumulate",
            (),
            3 * num_additions * accumulated_elements * element_bytes,
            num_additions * tensors,
        ),
        *update,
    )


def with_gradient_reductions(
    blocks: Sequence[Block], reductions: Sequence[GradientReduction], last: BlockWork
) -> list[Block]:
    """Return `blocks` with gradient reductions, and a last block for work once a step.

    An overlapped reduction belongs to the block whose backward completes its bucket. The last block
    has all others, and then `last`.
    """
    work = reduction_work(reductions)
    reduced = [
        extend_block(block, update=BlockWork((), tuple(work.collectives[block.name])))
        if block.name in work.collectives
        else block
        for block in blocks
    ]
    final = BlockWork(work.ops, tuple(work.collectives.get("", ())))
    return [*reduced, Block(STEP, BlockWork(), BlockWork(), concat_work(final, last))]
