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

from typing import TYPE_CHECKING

import numpy as np

from moesaic.facts.balance import BalanceDecision, BalanceProblem, IntArray, no_replicas
from moesaic.policy.balance.cost_model import (
    count_rank_tokens,
    count_replica_transfers,
    layer_times_from_tokens,
)

if TYPE_CHECKING:
    from moesaic.policy.balance.quota_search import SearchCosts, SearchState

_MIN_SPEEDUP = 1.01
"""Smallest speedup for which replicas are made."""

_MAX_SEARCH_FRACTION, _SEARCH_S_PER_ENTRY = 0.01, 4e-9
"""Fraction of a layer's time that the search for local tokens may take; search seconds per replica,
divided by (ranks + experts)."""
_MAX_SEARCH_ENTRIES = 1 << 16
"""Largest ranks * experts for which the local-token strategy is tried."""


def quota(counts: IntArray, setting: BalanceProblem) -> BalanceDecision:
    """Return the decision with the lowest predicted layer time over all strategies; no replicas if
    it saves less than 1%."""
    on_owners = count_rank_tokens(counts, setting.owners, no_replicas())
    unbalanced_s = layer_times_from_tokens(
        on_owners, *count_replica_transfers(no_replicas(), setting), setting
    ).total_s
    if unbalanced_s <= balanced_layer_s(counts, setting) * _MIN_SPEEDUP:
        return no_replicas()
    from moesaic.policy.balance import quota_search

    start = quota_search.SearchState.from_counts(counts, setting, on_owners)
    best = _best_replicas(
        counts,
        start,
        quota_search.SearchCosts.from_setting(counts, setting),
        unbalanced_s / _MIN_SPEEDUP,
    )
    return no_replicas() if best is None else quota_search.balance_from_replicas(best, start)


def assign_to_replicas(
    counts: IntArray, setting: BalanceProblem, replicas: IntArray
) -> BalanceDecision:
    """Return the best assignment of tokens to replicas that were already sent. Their transfer is
    not charged."""
    if not len(replicas):
        return no_replicas()
    from moesaic.policy.balance import quota_search

    ordered = replicas[np.lexsort((replicas[:, 1], replicas[:, 0]))]
    free_setting = setting._replace(
        expert_bytes=0.0,
        gradient_bytes=0.0,
        latency_s=0.0,
        max_replicas=None,
        max_replicas_sent=None,
        min_replica_tokens=1,
    )
    on_owners = count_rank_tokens(counts, free_setting.owners, no_replicas())
    start = quota_search.SearchState.from_counts(counts, free_setting, on_owners)
    start.has_replica_ED[:] = True
    start.has_replica_ED[ordered[:, 0], ordered[:, 1]] = False
    unbalanced_s = layer_times_from_tokens(
        on_owners, *count_replica_transfers(no_replicas(), free_setting), free_setting
    ).total_s
    best = _best_replicas(
        counts, start, quota_search.SearchCosts.from_setting(counts, free_setting), unbalanced_s
    )
    rerouted = (
        no_replicas().rerouted
        if best is None
        else quota_search.balance_from_replicas(best, start).rerouted
    )
    return BalanceDecision(ordered, rerouted)


def _best_replicas(
    counts: IntArray, start: SearchState, costs: SearchCosts, limit_s: float
) -> IntArray | None:
    """Return the best replicas of all strategies, or None if none takes less than `limit_s`."""
    # Numba compiles it at first use and caches the result.
    from moesaic.policy.balance import quota_search

    best = None
    for strategy in quota_search.STRATEGIES:
        most = (
            max_local_replicas(counts, limit_s)
            if strategy == quota_search.LOCAL_TOKENS
            else counts.size
        )
        if not most:
            continue
        found, number, step_s = quota_search.search_replicas(
            start.clone(), costs, strategy, limit_s, most
        )
        if number:
            limit_s, best = step_s, found[:number]
    return best


def max_local_replicas(counts: IntArray, layer_s: float) -> int:
    """Return how many replicas for local tokens may be searched in a layer of `layer_s` seconds.

    There may be one for each expert and rank, and all ranks wait for the search.
    """
    if counts.size > _MAX_SEARCH_ENTRIES:
        return 0
    return int(_MAX_SEARCH_FRACTION * layer_s / (_SEARCH_S_PER_ENTRY * sum(counts.shape)))


def balanced_layer_s(counts: IntArray, setting: BalanceProblem) -> float:
    """Return the seconds of evenly spread tokens without any traffic."""
    each = int(counts.sum()) / setting.num_ranks
    return setting.num_passes * (each / setting.expert_tokens_per_s + setting.weight_read_s)
