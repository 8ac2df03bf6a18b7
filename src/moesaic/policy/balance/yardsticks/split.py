"""LP: replicas as EPLB places them, and the token split with the smallest maximum load.

FineEP and LPLB approximate the split by linear programs; here it is exact, in whole tokens. A slot
takes its own rank's tokens first, then those of others.
"""

from __future__ import annotations

import numpy as np

from moesaic.facts.balance import BalanceDecision, BalanceProblem, IntArray, no_replicas
from moesaic.policy.balance.eplb import place_replicas


def lp(counts: IntArray, problem: BalanceProblem, replicas_per_rank: int = 1) -> BalanceDecision:
    """Return `replicas_per_rank` replicas on each rank, with the best split of tokens."""
    return split_optimally(counts, problem, place_replicas(counts, problem, replicas_per_rank))


def split_optimally(
    counts: IntArray, problem: BalanceProblem, replicas: IntArray
) -> BalanceDecision:
    """Return the best split of tokens over owners and given replicas.

    At first, ranks with a replica compute their own tokens, and owners compute the rest. Then
    tokens move from overloaded ranks to others, no further than the smallest maximum load requires.
    """
    if not len(replicas):
        return no_replicas()
    from moesaic.policy.balance import quota_search  # Importing numba is slow.
    from moesaic.policy.balance.yardsticks import flow_split

    ordered = replicas[np.lexsort((replicas[:, 1], replicas[:, 0]))]
    slots = flow_split.ReplicaSlots.from_replicas(ordered, problem)
    replicated = counts[:, slots.experts]
    counts_XD = np.ascontiguousarray(replicated.T, np.int32)
    fixed_load = np.zeros(problem.num_ranks, np.int64)
    np.add.at(fixed_load, problem.owners, counts.sum(axis=0))
    np.subtract.at(fixed_load, problem.owners[slots.experts], replicated.sum(axis=0))
    slot_tokens = flow_split.minimize_max_load(counts_XD, fixed_load, slots)
    tokens = np.delete(slot_tokens, slots.expert_offsets[:-1])  # Without the owners' slots.
    local = np.minimum(tokens, counts[ordered[:, 1], ordered[:, 0]])
    # All replicas take local tokens before any takes those of other ranks.
    taken = np.concatenate(
        [np.column_stack((ordered, number)) for number in (local, tokens - local)]
    )
    start = quota_search.SearchState.from_counts(counts, problem)
    return BalanceDecision(ordered, quota_search.split_by_source(taken[taken[:, 2] > 0], start))
