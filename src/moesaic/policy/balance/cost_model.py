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

from typing import NamedTuple

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
    balance: BalanceDecision, setting: BalanceProblem
) -> tuple[IntArray, IntArray]:
    """Return the replicas that each rank sends, and those that it receives."""
    sent, received = (np.zeros(setting.num_ranks, np.int64) for _ in range(2))
    experts, ranks = balance.replicas.T
    np.add.at(sent, setting.owners[experts], 1)
    np.add.at(received, ranks, 1)
    return sent, received


def layer_times(counts: IntArray, setting: BalanceProblem, balance: BalanceDecision) -> LayerTimes:
    """Return the layer's times under `balance`."""
    return layer_times_from_tokens(
        count_rank_tokens(counts, setting.owners, balance),
        *count_replica_transfers(balance, setting),
        setting,
    )


def drop_if_slower(
    counts: IntArray, setting: BalanceProblem, balance: BalanceDecision
) -> BalanceDecision:
    """Return `balance`, or no replicas if the model rates these faster."""
    if not len(balance.replicas):
        return balance
    return min((balance, no_replicas()), key=lambda one: layer_times(counts, setting, one).total_s)


def layer_times_from_tokens(
    rank_tokens: RankTokens,
    replicas_sent: IntArray,
    replicas_received: IntArray,
    setting: BalanceProblem,
) -> LayerTimes:
    """Return the layer's times, given tokens and replicas by rank."""
    busiest = _max_link_load(rank_tokens.sent, rank_tokens.received, setting)
    exchange = busiest * setting.token_bytes / setting.bytes_per_s
    exchange += setting.latency_s * (busiest > 0)
    # A replica's weights are read as well, by the rank that has it.
    weights_s = setting.weight_read_s * (1 + replicas_received / setting.experts_per_rank)
    experts = float((rank_tokens.computed / setting.expert_tokens_per_s + weights_s).max())
    most_replicas = _max_link_load(replicas_sent, replicas_received, setting)
    if setting.overlaps:
        all_in_turn = -(-int(replicas_sent.sum()) // setting.num_ranks)
        most_replicas = max(
            int(replicas_received.max()) if setting.uses_relays else most_replicas, all_in_turn
        )
    send_s, return_s = (  # All transfers between two ranks form one message.
        most_replicas * size / setting.bytes_per_s + setting.latency_s * (most_replicas > 0)
        for size in (setting.expert_bytes, setting.gradient_bytes)
    )
    overlapped_s = (experts + setting.dense_compute_s) * setting.overlaps
    each_s = (
        int(_replicas_handled(replicas_sent, replicas_received, setting).max())
        * setting.cpu_s_per_byte
        * setting.overlaps
    )
    send_cpu_s, return_cpu_s = each_s * setting.expert_bytes, each_s * setting.gradient_bytes
    cpu_total_s = setting.num_forwards * send_cpu_s + return_cpu_s
    exposed = setting.num_forwards * max(0.0, send_s - overlapped_s - send_cpu_s)
    exposed += max(0.0, return_s - 2 * overlapped_s - return_cpu_s)
    total_s = (
        setting.num_exchanges * exchange + setting.num_passes * experts + cpu_total_s + exposed
    )
    return LayerTimes(exchange, experts, send_s, return_s, cpu_total_s, exposed, total_s)


def replica_cpu_s(
    rank: int, replicas_sent: IntArray, replicas_received: IntArray, setting: BalanceProblem
) -> float:
    """Return the CPU seconds that replica traffic takes from one rank's computing."""
    num_bytes = setting.num_forwards * setting.expert_bytes + setting.gradient_bytes
    num_replicas = int(_replicas_handled(replicas_sent, replicas_received, setting)[rank])
    return num_replicas * num_bytes * setting.cpu_s_per_byte * setting.overlaps


def _replicas_handled(sent: IntArray, received: IntArray, setting: BalanceProblem) -> IntArray:
    """Return the replicas that pass each rank; a relayed replica is received and sent on."""
    return 2 * received if setting.uses_relays else sent + received


def _max_link_load(sent: IntArray, received: IntArray, setting: BalanceProblem) -> float:
    """Return the largest load of a rank's link.

    Links are full duplex. Ranks that move bytes by themselves alternate, so half of the sum counts.
    """
    if setting.overlaps:
        return max(int(sent.max()), int(received.max()))
    return int((sent + received).max()) / 2


def break_even_tokens(setting: BalanceProblem) -> float:
    """Return the tokens whose computing costs as much as one replica without overlap.

    A replica that takes fewer off the busiest rank pays only if it saves traffic.
    """
    fraction = 1.0 if setting.overlaps else 0.5

    def replica_s(size: float) -> float:
        transfer_s = fraction * size / setting.bytes_per_s + setting.latency_s
        return max(transfer_s, size * setting.cpu_s_per_byte * setting.overlaps)

    total_s = setting.num_forwards * replica_s(setting.expert_bytes) + replica_s(
        setting.gradient_bytes
    )
    return total_s * setting.expert_tokens_per_s / setting.num_passes


def use_local_replicas(counts: IntArray, replicas: IntArray) -> BalanceDecision:
    """Return the decision in which each rank with a replica computes all its own tokens of that
    expert."""
    ordered = replicas[np.lexsort((replicas[:, 1], replicas[:, 0]))]
    experts, ranks = ordered.T
    num_tokens = counts[ranks, experts]
    rerouted = np.stack((experts, ranks, ranks, num_tokens), axis=1)
    return BalanceDecision(ordered, rerouted[num_tokens > 0])
