"""Cost model of an expert layer for a given balance decision, in seconds.

It rates every policy and extends Pro-Prophet's performance model:

- Tokens travel four times: to experts and back, in forward and in backward.
- Backward takes twice the computing of forward.
- Replica traffic overlaps with experts and with the dense layers between them.
- With recomputation, everything of forward happens twice.

Beyond Pro-Prophet, it counts sent as well as received bytes, latencies, the senders of replicas,
and the CPU time of overlapped replica traffic.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from moesaic.facts.balance import BalanceDecision, BalanceProblem, IntArray, no_replicas


class RankTokens(NamedTuple):
    """Routed tokens by rank, [ranks] each."""

    computed: IntArray
    sent: IntArray
    """Tokens sent to other ranks; results return the same way."""
    received: IntArray
    """Tokens received from other ranks."""


class LayerTimes(NamedTuple):
    """Seconds of a layer, forward and backward."""

    exchange_s: float
    """One of the four exchanges."""
    experts_s: float
    """Experts, forward only."""
    replica_send_s: float
    """Sending parameters to replicas, overlapped or not."""
    gradient_return_s: float
    """Returning gradients of replicas, overlapped or not."""
    cpu_s: float
    """CPU time that overlapped replica traffic takes from computing."""
    exposed_s: float
    """Replica traffic that does not overlap."""
    total_s: float


def count_rank_tokens(counts: IntArray, owners: IntArray, balance: BalanceDecision) -> RankTokens:
    """Return the tokens that each rank computes, sends and receives, from routed tokens [D, E]."""
    ranks, (experts, sources, targets, num_tokens) = len(counts), balance.rerouted.T
    computed = np.zeros(ranks, np.int64)
    np.add.at(computed, owners, counts.sum(axis=0))
    received = computed.copy()
    np.subtract.at(received, owners, counts[owners, np.arange(len(owners))])
    sent = counts.sum(axis=1)
    np.subtract.at(sent, owners, counts[owners, np.arange(len(owners))])
    owner_ranks = owners[experts]
    np.subtract.at(computed, owner_ranks, num_tokens)
    np.add.at(computed, targets, num_tokens)
    was_remote, is_remote = sources != owner_ranks, sources != targets
    np.subtract.at(received, owner_ranks[was_remote], num_tokens[was_remote])
    np.subtract.at(sent, sources[was_remote], num_tokens[was_remote])
    np.add.at(received, targets[is_remote], num_tokens[is_remote])
    np.add.at(sent, sources[is_remote], num_tokens[is_remote])
    return RankTokens(computed, sent, received)


def load_imbalance(computed: IntArray) -> float:
    """Return the maximum over the mean of computed tokens by rank; 1 if there are none."""
    total = int(computed.sum())
    return float(computed.max() * len(computed) / total) if total else 1.0


def count_replica_transfers(
    balance: BalanceDecision, problem: BalanceProblem
) -> tuple[IntArray, IntArray]:
    """Return the replicas that each rank sends, and those that it receives."""
    sent, received = (np.zeros(problem.num_ranks, np.int64) for _ in range(2))
    experts, ranks = balance.replicas.T
    np.add.at(sent, problem.owners[experts], 1)
    np.add.at(received, ranks, 1)
    return sent, received


def layer_times(counts: IntArray, problem: BalanceProblem, balance: BalanceDecision) -> LayerTimes:
    """Return the layer's times under `balance`."""
    return layer_times_from_tokens(
        count_rank_tokens(counts, problem.owners, balance),
        *count_replica_transfers(balance, problem),
        problem,
    )


def drop_if_slower(
    counts: IntArray, problem: BalanceProblem, balance: BalanceDecision
) -> BalanceDecision:
    """Return `balance`, or no replicas if the model rates these faster."""
    if not len(balance.replicas):
        return balance
    return min((balance, no_replicas()), key=lambda one: layer_times(counts, problem, one).total_s)


def layer_times_from_tokens(
    rank_tokens: RankTokens,
    replicas_sent: IntArray,
    replicas_received: IntArray,
    problem: BalanceProblem,
) -> LayerTimes:
    """Return the layer's times, given tokens and replicas by rank."""
    # A replica's weights are read as well, by the rank that has it.
    weights_s = problem.weight_read_s * (1 + replicas_received / problem.experts_per_rank)
    experts_s = float((rank_tokens.computed / problem.expert_tokens_per_s + weights_s).max())
    most_replicas = _max_link_load(replicas_sent, replicas_received, problem)
    if problem.overlaps:
        most_replicas = max(most_replicas, -(-int(replicas_sent.sum()) // problem.num_ranks))
    return layer_times_of_busiest(
        _max_link_load(rank_tokens.sent, rank_tokens.received, problem),
        experts_s,
        most_replicas,
        int((replicas_sent + replicas_received).max()),
        problem,
    )


def layer_times_of_busiest(
    max_tokens: float, experts_s: float, max_replicas: float, max_handled: int, costs: Any
) -> LayerTimes:
    """Return the layer's times, given what its busiest ranks do.

    quota's search compiles this function; `costs` is a `BalanceProblem` or its `SearchCosts`.

    Args:
        max_tokens: tokens over the busiest link.
        experts_s: forward seconds of the slowest rank's experts.
        max_replicas: replicas over the busiest link.
        max_handled: most replicas that one rank sends and receives.
        costs: costs of the layer.
    """
    exchange_s = max_tokens * costs.token_bytes / costs.bytes_per_s
    exchange_s += costs.latency_s * (max_tokens > 0)
    # All transfers between two ranks form one message.
    message_s = costs.latency_s * (max_replicas > 0)
    send_s = max_replicas * costs.expert_bytes / costs.bytes_per_s + message_s
    return_s = max_replicas * costs.gradient_bytes / costs.bytes_per_s + message_s
    overlapped_s = (experts_s + costs.dense_compute_s) * costs.overlaps
    handled_s = max_handled * costs.cpu_s_per_byte * costs.overlaps
    send_cpu_s, return_cpu_s = handled_s * costs.expert_bytes, handled_s * costs.gradient_bytes
    cpu_s = costs.num_forwards * send_cpu_s + return_cpu_s
    exposed_s = costs.num_forwards * max(0.0, send_s - overlapped_s - send_cpu_s)
    exposed_s += max(0.0, return_s - 2 * overlapped_s - return_cpu_s)
    total_s = costs.num_exchanges * exchange_s + costs.num_passes * experts_s + cpu_s + exposed_s
    return LayerTimes(exchange_s, experts_s, send_s, return_s, cpu_s, exposed_s, total_s)


def _max_link_load(sent: IntArray, received: IntArray, problem: BalanceProblem) -> float:
    """Return the largest load of a rank's link.

    Links are full duplex. Ranks that move bytes by themselves alternate, so half of the sum counts.
    """
    if problem.overlaps:
        return max(int(sent.max()), int(received.max()))
    return int((sent + received).max()) / 2


def break_even_tokens(problem: BalanceProblem) -> float:
    """Return the tokens whose computing costs as much as one replica without overlap.

    A replica that takes fewer off the busiest rank pays only if it saves traffic.
    """
    fraction = 1.0 if problem.overlaps else 0.5

    def replica_s(size: float) -> float:
        transfer_s = fraction * size / problem.bytes_per_s + problem.latency_s
        return max(transfer_s, size * problem.cpu_s_per_byte * problem.overlaps)

    total_s = problem.num_forwards * replica_s(problem.expert_bytes) + replica_s(
        problem.gradient_bytes
    )
    return total_s * problem.expert_tokens_per_s / problem.num_passes


def use_local_replicas(counts: IntArray, replicas: IntArray) -> BalanceDecision:
    """Return the decision in which each rank with a replica computes all its own tokens of that
    expert."""
    experts, ranks = replicas.T
    num_tokens = counts[ranks, experts]
    rerouted = np.stack((experts, ranks, ranks, num_tokens), axis=1)
    return BalanceDecision(replicas, rerouted[num_tokens > 0])
