"""LLEP: tokens above a rank's share spill over to the least loaded ranks."""

from __future__ import annotations

import numpy as np

from moesaic.facts.balance import BalanceDecision, BalanceProblem, IntArray, no_replicas


def llep(
    counts: IntArray,
    problem: BalanceProblem,
    *,
    capacity_factor: float = 1.0,
    threshold: float = 1.3,
    min_replica_tokens: int | None = None,
) -> BalanceDecision:
    """Return the spilled tokens, expert by expert, the one with the most tokens first.

    Args:
        counts: routed tokens [ranks, experts].
        problem: costs of the layer.
        capacity_factor: a rank's share before it spills, as a multiple of the mean.
        threshold: imbalance (busiest rank over the mean) up to which nothing is done.
        min_replica_tokens: smallest spill, unless it is an expert's last; None for the problem's
            value.
    """
    totals, ranks = counts.sum(axis=0), problem.num_ranks
    owner_load = np.zeros(ranks, np.int64)
    np.add.at(owner_load, problem.owners, totals)
    if owner_load.max() * ranks <= threshold * owner_load.sum():
        return no_replicas()
    min_tokens = problem.min_replica_tokens if min_replica_tokens is None else min_replica_tokens
    capacity = int(np.ceil(capacity_factor * owner_load.sum() / ranks))
    computed, taken = np.zeros(ranks, np.int64), list[tuple[int, int, int]]()
    slots_left, sends_left = (
        np.full(ranks, len(totals) * ranks if limit is None else limit)
        for limit in (problem.max_replicas, problem.max_replicas_sent)
    )
    for expert in np.argsort(-totals, kind="stable").tolist():
        owner, left = int(problem.owners[expert]), int(totals[expert])
        kept = min(left, max(capacity - int(computed[owner]), 0))
        computed[owner] += kept
        left -= kept
        free = slots_left > 0
        free[owner] = False
        while left and free.any() and sends_left[owner] > 0:
            rank = int(np.where(free, computed, np.iinfo(np.int64).max).argmin())
            number = min(left, capacity - int(computed[rank]))
            if number < min(min_tokens, left) or number <= 0:
                break
            taken.append((expert, rank, number))
            computed[rank] += number
            slots_left[rank] -= 1
            sends_left[owner] -= 1
            free[rank] = False
            left -= number
        computed[owner] += left
    if not taken:
        return no_replicas()
    from moesaic.policy.balance import quota_search  # Importing numba is slow.

    start = quota_search.SearchState.from_counts(counts, problem)
    return quota_search.balance_from_replicas(np.array(taken), start)
