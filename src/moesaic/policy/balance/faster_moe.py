"""FasterMoE's shadow experts: replicas of the hottest experts on every rank."""

from __future__ import annotations

import numpy as np

from moesaic.facts.balance import BalanceDecision, BalanceProblem, IntArray, no_replicas
from moesaic.policy.balance.cost_model import use_local_replicas


def faster_moe(counts: IntArray, problem: BalanceProblem) -> BalanceDecision:
    """Replicate experts, hottest first, while FasterMoE's performance model rates the layer faster.

    The model assumes that a rank receives as many tokens as it computes, and that nothing overlaps.
    """
    computed = np.zeros(problem.num_ranks, np.int64)
    np.add.at(computed, problem.owners, counts.sum(axis=0))
    token_s = problem.num_passes / problem.expert_tokens_per_s
    token_s += problem.num_exchanges * problem.token_bytes / problem.bytes_per_s
    num_bytes = problem.num_forwards * problem.expert_bytes + problem.gradient_bytes
    replica_s = num_bytes / problem.bytes_per_s
    best_s, chosen = int(computed.max()) * token_s, list[int]()
    for expert in sort_by_load(counts):
        owner = problem.owners[expert]
        computed += counts[:, expert]
        computed[owner] -= int(counts[:, expert].sum())
        layer_s = int(computed.max()) * token_s + (len(chosen) + 1) * replica_s
        if layer_s >= best_s:
            break
        best_s = layer_s
        chosen.append(int(expert))
    return replicate_everywhere(counts, problem, chosen)


def replicate_everywhere(
    counts: IntArray, problem: BalanceProblem, experts: list[int]
) -> BalanceDecision:
    """Return replicas of `experts` on all ranks; each computes its own tokens with them."""
    pairs = [
        (expert, rank)
        for expert in experts
        for rank in range(problem.num_ranks)
        if rank != problem.owners[expert]
    ]
    return use_local_replicas(counts, np.array(sorted(pairs))) if pairs else no_replicas()


def sort_by_load(counts: IntArray) -> IntArray:
    """Return experts by their routed tokens, most first."""
    return np.argsort(-counts.sum(axis=0), kind="stable")
