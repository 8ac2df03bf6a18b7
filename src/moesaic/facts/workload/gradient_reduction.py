"""Gradient reductions: which ranks reduce which gradients, and in which buckets.

Gradients fill buckets in the order in which backward finishes them, as in `dist.buckets`. A bucket
is reduced with its last gradient, while backward goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from moesaic.facts.workload.collectives import BucketLayout, split_into_buckets
from moesaic.facts.workload.parameters import Parameter
from moesaic.facts.workload.rank_params import RankParams
from moesaic.facts.workload.sizes import STORED_BYTES

OVERLAPPED_REDUCTIONS = ("dense gradients", "tp shard gradients", "expert gradients")
"""Names of the reductions that may overlap backward."""


@dataclass(frozen=True)
class Gradient:
    """One gradient to reduce: of a dense parameter, or of all experts of a layer."""

    block: str
    """Block whose backward produces the gradient."""
    num_bytes: int
    has_weight_decay: bool = True
    """True if weight decay applies; in a bucket, gradients without it come last."""


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
    dense, experts = list[tuple[Parameter, Gradient]](), list[Gradient]()
    for spec in reversed(params.blocks):
        trained = [p for p in spec.parameters if params.is_trained(p)]
        # Backward of the head finishes the norm first.
        trained.sort(key=lambda p: spec.kind == "head" and p.kind == "norm")
        for p in reversed([p for p in trained if p.is_dense]):
            num_bytes = params.unpadded_local_size(p) * element_bytes
            dense.append((p, Gradient(spec.name, num_bytes, len(p.shape) > 1)))
        arena = sum(p.size for p in trained if p.expert is not None)
        if arena:
            experts.append(Gradient(spec.name, arena * element_bytes))
    tp_sharded = [gradient for p, gradient in dense if params.is_tp_sharded(p)]
    replicated = [
        gradient for p, gradient in dense if not (params.is_tp_sharded(p) or p.is_column_shard)
    ]
    if plan.dp_shard == 1:
        stage, dp_ranks = plan.stage_groups().of(rank), plan.dp_groups().of(rank)
        reductions = [
            GradientReduction("dense gradients", stage, replicated, overlaps),
            GradientReduction("tp shard gradients", dp_ranks, tp_sharded, overlaps),
        ]
    else:  # FSDP reduces over the ranks with the same TP shard, and keeps its own tensors.
        tp_ranks = plan.tp_groups().of(rank)
        reductions = [
            GradientReduction("dense gradients", tp_ranks, replicated, overlaps_backward=False)
        ]
    replicas = plan.expert_dp_groups().of(rank)
    reductions.append(GradientReduction("expert gradients", replicas, experts, overlaps))
    if model.tied and plan.pp > 1 and plan.pp_rank(rank) in (0, plan.pp - 1):
        chain = plan.pp_groups().of(rank)
        tied = [gradient for p, gradient in dense if p.name == "embed.weight"]
        reductions.append(
            GradientReduction(
                "tied embedding", (chain[0], chain[-1]), tied, overlaps_backward=False
            )
        )
    return reductions
