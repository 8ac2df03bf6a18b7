"""Top-k broadcast: the experts with the most tokens get a replica on every rank."""

from __future__ import annotations

from moesaic.facts.balance import BalanceDecision, BalanceProblem, IntArray
from moesaic.policy.balance.faster_moe import replicate_everywhere, sort_by_load


def top_k_broadcast(
    counts: IntArray, problem: BalanceProblem, num_experts: int = 1
) -> BalanceDecision:
    """Replicate the `num_experts` experts with the most tokens on every rank, at any cost."""
    return replicate_everywhere(
        counts, problem, [int(e) for e in sort_by_load(counts)[:num_experts]]
    )
