"""quota: moesaic's own policy: few replicas, on ranks that already hold many of the expert's
tokens. Each replica takes a fixed number of tokens, its quota.

A greedy search adds replicas one by one. Each step takes the rank with the most tokens and its
largest expert. It gives a replica to the rank where that shortens the layer most: the busiest rank
computes less, and the receiver keeps its own tokens. Four strategies differ in the tokens that a
receiver takes:

- up to the mean: least work, where replicas are cheap
- half of the difference: fewest replicas
- more than the mean, if the receiver can pass its own experts' tokens on to a third rank
- local tokens: they relieve the rank that sends or receives most

With local tokens, a rank computes all its own tokens of one expert; the pair with the largest net
saving is chosen. The cost model rates the replicas after each addition, and the best of all
strategies wins. If balancing cannot pay, there are no replicas.
"""

from __future__ import annotations

from moesaic.facts.balance import BalanceDecision, BalanceProblem, IntArray, no_replicas
from moesaic.policy.balance.cost_model import layer_times

_MIN_SPEEDUP = 1.01
"""Smallest speedup for which replicas are made."""

_MAX_SEARCH_FRACTION, _SEARCH_S_PER_ROW_AND_COLUMN = 0.01, 4e-9
"""Fraction of a layer's time that the search for local tokens may take; search seconds per replica,
divided by (ranks + experts)."""
_MAX_COUNT_TABLE_SIZE = 1 << 16
"""Largest ranks * experts for which the local-token strategy is tried."""


def quota(counts: IntArray, problem: BalanceProblem) -> BalanceDecision:
    """Return the decision with the lowest predicted layer time over all strategies; no replicas if
    it saves less than 1%."""
    unbalanced_s = layer_times(counts, problem, no_replicas()).total_s
    if unbalanced_s <= layer_lower_bound_s(counts, problem) * _MIN_SPEEDUP:
        return no_replicas()
    return _search(counts, problem, unbalanced_s / _MIN_SPEEDUP)


def assign_to_replicas(
    counts: IntArray, problem: BalanceProblem, replicas: IntArray
) -> BalanceDecision:
    """Return the best assignment of tokens to replicas that were already sent. Their transfer is
    not charged."""
    if not len(replicas):
        return no_replicas()
    sent_already = problem._replace(
        expert_bytes=0.0,
        gradient_bytes=0.0,
        latency_s=0.0,
        max_replicas=None,
        max_replicas_sent=None,
        min_replica_tokens=1,
    )
    unbalanced_s = layer_times(counts, sent_already, no_replicas()).total_s
    found = _search(counts, sent_already, unbalanced_s, allowed=replicas)
    return BalanceDecision(replicas, found.rerouted)


def _search(
    counts: IntArray, problem: BalanceProblem, limit_s: float, allowed: IntArray | None = None
) -> BalanceDecision:
    """Return the best decision of all strategies, or no replicas if none takes less than `limit_s`.

    `allowed` are the replicas (expert, rank) that the search may use; None: any.
    """
    # It needs numba, whose import is slow.
    from moesaic.policy.balance import quota_search

    start = quota_search.SearchState.from_counts(counts, problem)
    if allowed is not None:
        start.is_taken_ED[:] = True
        start.is_taken_ED[allowed[:, 0], allowed[:, 1]] = False
    costs = quota_search.SearchCosts.from_problem(counts, problem)
    best = None
    for strategy in quota_search.STRATEGIES:
        max_replicas = counts.size
        if strategy == quota_search.LOCAL_TOKENS:
            max_replicas = max_local_replicas(counts, limit_s)
        if not max_replicas:
            continue
        replicas, num_best, layer_s = quota_search.search_replicas(
            start.clone(), costs, strategy, limit_s, max_replicas
        )
        if num_best:
            limit_s, best = layer_s, replicas[:num_best]
    return no_replicas() if best is None else quota_search.balance_from_replicas(best, start)


def max_local_replicas(counts: IntArray, layer_s: float) -> int:
    """Return how many replicas for local tokens may be searched in a layer of `layer_s` seconds.

    There may be one for each expert and rank, and all ranks wait for the search.
    """
    if counts.size > _MAX_COUNT_TABLE_SIZE:
        return 0
    return int(_MAX_SEARCH_FRACTION * layer_s / (_SEARCH_S_PER_ROW_AND_COLUMN * sum(counts.shape)))


def layer_lower_bound_s(counts: IntArray, problem: BalanceProblem) -> float:
    """Return the seconds of evenly spread tokens without any traffic."""
    tokens_per_rank = int(counts.sum()) / problem.num_ranks
    return problem.num_passes * (
        tokens_per_rank / problem.expert_tokens_per_s + problem.weight_read_s
    )
