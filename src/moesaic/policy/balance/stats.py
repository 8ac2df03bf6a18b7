"""Statistics of one layer's balance decisions: token counts with and without replicas, replica
traffic, and times by the cost model.

Values add up over micro-batches. Tokens, replicas and bytes cover all ranks of an EP group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from moesaic.facts.balance import IntArray, no_replicas
from moesaic.policy.balance.balancer import LayerDecision
from moesaic.policy.balance.cost_model import (
    count_rank_tokens,
    count_replica_transfers,
    layer_times,
    layer_times_from_tokens,
)


@dataclass
class BalanceStats:
    """Balance statistics of one layer; a row of a run's `balance/` has these columns.

    Predicted times are those of the cost model, forward and backward."""

    tokens_before: IntArray
    """Tokens per rank if owner ranks computed everything, [ranks]."""
    imbalance_before: float = 1.0
    """Tokens of the busiest rank over the mean if owner ranks computed everything. The busiest rank
    may differ between micro-batches."""
    imbalance_after: float = 1.0
    """Tokens of the busiest rank over the mean, as computed."""
    replicas: int = 0
    """Expert replicas created."""
    replica_bytes: int = 0
    """Bytes of parameters sent to replicas and of gradients sent back."""
    planning_s: float = 0.0
    """Seconds that the policy took."""
    predicted_experts_s: float = 0.0
    """Predicted seconds of this rank's experts, with the CPU time spent on replica traffic."""
    predicted_exposed_s: float = 0.0
    """Predicted seconds of replica transfers that no computation overlaps."""
    predicted_s: float = 0.0
    """Predicted seconds of the layer."""
    predicted_unbalanced_s: float = 0.0
    """Predicted seconds of the layer if owner ranks computed everything."""
    replica_wait_s: float = math.nan
    """Seconds this rank spent handling and awaiting replicas in forward; NaN without a clock."""
    gradient_wait_s: float = math.nan
    """Seconds this rank spent handling and awaiting replica gradients in backward; NaN without a
    clock."""
    forward_s: float = math.nan
    """Seconds this rank's experts computed in forward; NaN without a clock."""
    backward_s: float = math.nan
    """Seconds this rank's experts computed in backward; NaN without a clock."""


def balance_stats(decisions: Iterable[LayerDecision], num_ranks: int, rank: int) -> BalanceStats:
    """Return the statistics of `decisions` for rank `rank` of an EP group of `num_ranks`.

    A decision that is ahead of its tokens counts by its planning time only.
    """
    stats = BalanceStats(np.zeros(num_ranks, np.int64))
    max_tokens_before = max_tokens_after = 0
    for facts, balance, seconds in decisions:
        stats.planning_s += seconds
        if facts.is_ahead:
            continue
        problem, counts = facts.problem, facts.counts
        before = count_rank_tokens(counts, problem.owners, no_replicas())
        after = count_rank_tokens(counts, problem.owners, balance)
        stats.tokens_before += before.computed
        max_tokens_before += int(before.computed.max())
        max_tokens_after += int(after.computed.max())
        sent, received = count_replica_transfers(balance, problem)
        times = layer_times_from_tokens(after, sent, received, problem)
        stats.predicted_s += times.total_s
        stats.predicted_exposed_s += times.exposed_s
        stats.predicted_unbalanced_s += layer_times(counts, problem, no_replicas()).total_s
        num_bytes = problem.num_forwards * problem.expert_bytes + problem.gradient_bytes
        stats.replicas += len(balance.replicas)
        stats.replica_bytes += round(len(balance.replicas) * num_bytes)
        weight_read_s = problem.weight_read_s * (1 + received[rank] / problem.experts_per_rank)
        forward_s = after.computed[rank] / problem.expert_tokens_per_s + weight_read_s
        cpu_s = int(sent[rank] + received[rank]) * num_bytes * problem.cpu_s_per_byte
        stats.predicted_experts_s += float(problem.num_passes * forward_s)
        stats.predicted_experts_s += cpu_s * problem.overlaps
    num_tokens = int(stats.tokens_before.sum())
    if num_tokens:
        stats.imbalance_before = max_tokens_before * num_ranks / num_tokens
        stats.imbalance_after = max_tokens_after * num_ranks / num_tokens
    return stats
