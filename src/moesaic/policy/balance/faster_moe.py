"""FasterMoE's shadow experts: replicas of the hottest experts on every rank."""

from __future__ import annotations

import numpy as np

from moesaic.facts.balance import BalanceDecision, BalanceProblem, IntArray, no_replicas
from moesaic.policy.balance.cost_model import use_local_replicas


def faster_moe(counts: IntArray, setting: BalanceProblem) -> BalanceDecision:
    """Replicate experts, hottest first, while FasterMoE's performance model rates the layer faster.

    The model assumes that a rank receives as many tokens as it computes, and that nothing overlaps.
    """
    computed = np.zeros(setting.num_ranks, np.int64)
    np.add.at(computed, setting.owners, counts.sum(axis=0))
    token_s = setting.num_passes / setting.expert_tokens_per_s
    token_s += setting.num_exchanges * setting.token_bytes / setting.bytes_per_s
    num_bytes = setting.num_forwards * setting.expert_bytes + setting.gradient_bytes
    replica_s = num_bytes / setting.bytes_per_s
    best_s, chosen = int(computed.max()) * token_s, list[int]()
    for expert in sort_by_load(counts):
        owner = setting.owners[expert]
        computed += counts[:, expert]
        computed[owner] -= int(counts[:, expert].sum())
        step_s = int(computed.max()) * token_s + (len(chosen) + 1) * replica_s
        if step_s >= best_s:
            break
        best_s = step_s
        chosen.append(int(expert))
    return replicate_everywhere(counts, setting, chosen)


def replicate_everywhere(
    counts: IntArray, setting: BalanceProblem, experts: list[int]
) -> BalanceDecision:
    """Return replicas of `experts` on all ranks; each computes its own tokens with them."""
    pairs = [
        (expert, rank)
        for expert in experts
        for rank in range(setting.num_ranks)
        if rank != setting.owners[expert]
    ]
    return use_local_replicas(counts, np.array(pairs, np.int64)) if pairs else no_replicas()


def sort_by_load(counts: IntArray) -> IntArray:
    """Return experts by their routed tokens, most first."""
    return np.argsort(-counts.sum(axis=0), kind="stable")
