"""Gradient reductions: which ranks reduce which gradients, and in which buckets.

Gradients fill buckets in the order in which backward finishes them, as in `dist.buckets`. A bucket
is reduced with its last gradient, while backward goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from moesaic.facts.workload.collectives import (
    BucketLayout,
    CollectiveCall,
    group_of,
    split_into_buckets,
    stage_ranks,
)
from moesaic.facts.workload.ops import Op
from moesaic.facts.workload.parameter_placement import model_block, workload_block
from moesaic.facts.workload.parameters import Parameter, unpadded_local_size
from moesaic.facts.workload.rank_params import RankParams
from moesaic.facts.workload.sizes import STORED_BYTES

OVERLAPPED_REDUCTIONS = ("dense", "tp shards", "experts")
"""Names of the reductions that may overlap backward."""

ALL_REDUCTIONS = (
    *OVERLAPPED_REDUCTIONS,
    "tied embedding",
    "gradients",
    "replicas",
    "reduce-scatter tied embedding",
)
"""Names of all gradient reductions, with those of FSDP and of a tied, column-sharded weight."""


@dataclass(frozen=True)
class Gradient:
    """One gradient to reduce: of a dense parameter, or of all experts of a layer."""

    block: str
    """Block whose backward produces the gradient."""
    num_bytes: int
    has_weight_decay: bool = True
    """True if weight decay applies; in a bucket, gradients without it come last."""
    parameter: Parameter | None = None
    """Dense parameter of the gradient, if known."""


@dataclass(frozen=True)
class GradientReduction:
    """Gradients that the same ranks reduce."""

    name: str
    """Name of the collectives."""
    ranks: tuple[int, ...]
    gradients: Sequence[Gradient]
    """Gradients in the order in which backward finishes them."""
    overlaps_backward: bool = True
    """True if buckets are reduced during backward."""
    stays_in_bucket: bool = True
    """True if gradients stay in their bucket, instead of being copied back."""

    @cached_property
    def buckets(self) -> list[BucketLayout]:
        """Buckets of the gradients; none for a single rank."""
        sizes = [one.num_bytes for one in self.gradients]
        behind = {at for at, one in enumerate(self.gradients) if not one.has_weight_decay}
        return list(split_into_buckets(sizes, at_end=behind)) if len(self.ranks) > 1 else []


def gradient_reductions(params: RankParams) -> list[GradientReduction]:
    """Return the gradient reductions that a rank takes part in."""
    plan, rank, model = params.plan, params.rank, params.job.model
    element_bytes, overlaps = STORED_BYTES[params.job.train.precision], plan.pp == 1
    dense = _backward_order(params.trainable_dense, params)

    def gradients(parameters: Iterable[Parameter]) -> list[Gradient]:
        replica = plan.dp_rank(rank)
        return [
            Gradient(
                workload_block(p, model),
                unpadded_local_size(p, plan.dp_shard, replica) * element_bytes,
                len(p.shape) > 1,
                p,
            )
            for p in parameters
        ]

    replicated = gradients(p for p in dense if not (params.is_tp_sharded(p) or p.is_column_shard))
    if plan.dp_shard == 1:
        tp_sharded = gradients(p for p in dense if params.is_tp_sharded(p))
        dp_ranks = group_of(plan.dp_groups(), rank)
        reductions = [
            GradientReduction("dense", stage_ranks(plan, rank), replicated, overlaps),
            GradientReduction("tp shards", dp_ranks, tp_sharded, overlaps),
        ]
    else:  # FSDP reduces over the ranks with the same TP shard, and keeps its own tensors.
        tp_ranks = group_of(plan.tp_groups(), rank)
        reductions = [
            GradientReduction(
                "dense", tp_ranks, replicated, overlaps_backward=False, stays_in_bucket=False
            )
        ]
    arenas: dict[str, int] = {}
    for p in _backward_order([p for p in params.experts if p.name in params.trainable], params):
        block = workload_block(p, model)
        arenas[block] = arenas.get(block, 0) + p.size * element_bytes
    replica_ranks = group_of(plan.expert_dp_groups(), rank)
    reductions.append(
        GradientReduction(
            "experts", replica_ranks, [Gradient(*one) for one in arenas.items()], overlaps
        )
    )
    if model.tied and plan.pp > 1 and plan.pp_rank(rank) in (0, plan.pp - 1):
        end_ranks = (
            rank % plan.ranks_per_stage,
            rank % plan.ranks_per_stage + plan.ranks - plan.ranks_per_stage,
        )
        tied = gradients(p for p in dense if p.name.startswith("embed."))
        reductions.append(
            GradientReduction("tied embedding", end_ranks, tied, overlaps_backward=False)
        )
    return reductions


def flat_param_leaders(
    params: RankParams, reductions: Sequence[GradientReduction]
) -> frozenset[str]:
    """Return the names of the first dense parameter in each tensor of the optimizer.

    Parameters of one block that are neighbours in a bucket, with the same weight decay, form one
    flat tensor. Any other parameter is a tensor by itself.
    """
    firsts, flattened = dict[object, str](), set[str]()
    for one in (
        one for one in reductions if one.stays_in_bucket and one.name in ("dense", "tp shards")
    ):
        for index, bucket in enumerate(one.buckets):
            bucket_params = [one.gradients[at].parameter for at in bucket.members]
            for p in (p for p in bucket_params if p is not None):
                key = one.name, index, model_block(p), len(p.shape) > 1
                firsts.setdefault(key, p.name)
                flattened.add(p.name)
    separate = (p.name for p in params.trainable_dense if p.name not in flattened)
    return frozenset((*firsts.values(), *separate))


def _backward_order(parameters: Sequence[Parameter], params: RankParams) -> list[Parameter]:
    """Return parameters in backward order, the reverse of the model's modules."""

    def position(p: Parameter) -> tuple[float, bool]:
        if p.layer is not None:
            return p.layer, not workload_block(p, params.job.model).endswith(".attention")
        # The head's norm follows its weight.
        return (
            (-1, False)
            if model_block(p) == "embed"
            else (params.job.model.layers, p.kind == "norm")
        )

    return sorted(parameters, key=position)[::-1]


@dataclass(frozen=True)
class ReductionWork:
    """Collectives and copies of gradient reductions."""

    collectives: dict[str, list[CollectiveCall]]
    """Collectives by the block whose backward completes the bucket; "" for those after backward."""
    ops: tuple[Op, ...]
    """Copies into buckets, and back."""


def reduction_work(reductions: Sequence[GradientReduction]) -> ReductionWork:
    """Return the work of all reductions.

    Reductions of experts come last in a block, as some ranks may have none.
    """
    by_block: dict[str, list[CollectiveCall]] = {}
    moved, kernels = {True: 0, False: 0}, {True: 0, False: 0}
    for one in reductions:
        for bucket in one.buckets:
            block = one.gradients[bucket.members[-1]].block if one.overlaps_backward else ""
            call = CollectiveCall(one.name, "all_reduce", one.ranks, bucket.num_bytes)
            by_block.setdefault(block, []).append(call)
            if len(bucket.members) > 1:
                moved[one.overlaps_backward] += (2 if one.stays_in_bucket else 4) * bucket.num_bytes
                kernels[one.overlaps_backward] += len(bucket.members) if one.stays_in_bucket else 2
    ops = (
        Op("fill buckets", (), moved[True], kernels[True]),
        Op("reduce", (), moved[False], kernels[False]),
    )
    return ReductionWork(by_block, ops)
