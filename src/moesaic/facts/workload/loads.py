"""Expert loads: tokens that each expert receives from each rank, from a recorded load or even
routing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moesaic.base.errors import ConfigError
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan

CountArray = NDArray[np.int64]

SLOT_INDEX_BYTES = 4
_ALIGNMENT_BYTES = 16
"""Alignment of a deduplicated token, in bytes."""


def expert_counts(job: Job, plan: Plan, load: ArrayLike | None) -> CountArray:
    """Return assignments of one layer over a global micro-batch, without drops, [ranks, experts].

    In a pipeline, the ranks are those that have the layer. An expert TP group counts as one rank,
    as it gathers its tokens.

    Args:
        job: the job.
        plan: placement of samples and sequence shards.
        load: relative load [experts], spread alike over all ranks, or assignments [ranks, experts].
            Deduplicated tokens per destination rank and host may follow the assignments. None for
            even routing.
    """
    array = np.ones(plan.experts, np.int64) if load is None else np.asarray(load)
    num_ranks = plan.ranks_per_stage // plan.etp
    if array.shape in (
        (num_ranks, plan.experts),
        (num_ranks, plan.experts + sum(destination_counts(plan))),
    ):
        return array[:, : plan.experts].astype(np.int64)
    if array.shape != (plan.experts,):
        raise ConfigError(
            f"a load of shape {array.shape} does not fit {plan.experts} experts on {num_ranks} "
            f"ranks: give it by expert [{plan.experts}], or [{num_ranks}, {plan.experts}]"
        )
    if not (array.sum() > 0 and array.min() >= 0):
        raise ConfigError(
            "a load has no assignments or a negative count: give counts of at least 0, some above 0"
        )
    cumulative = _apportion(_token_ends(job, plan) * job.model.top_k, array.astype(np.float64))
    counts: CountArray = np.diff(cumulative, axis=0, prepend=0)
    return counts


def destination_counts(plan: Plan) -> list[int]:
    """Return the number of destinations: ranks of an EP group, then hosts if dispatch has two
    levels."""
    return [plan.ep, plan.dispatch_hosts] if plan.num_exchanges > 1 else [plan.ep]


def _dedup_tokens(
    plan: Plan,
    layer: int,
    load: ArrayLike | None,
    positions: Sequence[int],
    expected: list[CountArray],
) -> list[CountArray]:
    """Return deduplicated tokens [ranks, destinations] recorded in `load`, else `expected`.

    Local tokens count only for a rank itself and for its host. If the recorded run treated them
    unlike the plan, the expected numbers replace those entries.
    """
    array = np.zeros(0) if load is None else np.asarray(load)
    if array.ndim != 2 or array.shape[1] != plan.experts + sum(destination_counts(plan)):
        return expected
    recorded = array[positions].astype(np.int64)
    by_level: list[CountArray] = np.split(
        recorded[:, plan.experts :], destination_counts(plan)[:-1], axis=1
    )
    ranks, own_destinations = np.arange(len(positions)), np.array(positions) % plan.ep
    recorded_overlap = not by_level[0][ranks, own_destinations].any()
    local = _tokens_by_destination(plan, layer, recorded[:, : plan.experts], plan.ep)[
        ranks, own_destinations
    ]
    if local.any() and recorded_overlap != plan.overlap_local:
        for tokens, estimate in zip(by_level, expected, strict=True):
            destinations = own_destinations * tokens.shape[1] // plan.ep
            tokens[ranks, destinations] = estimate[ranks, destinations]
    return by_level


def _tokens_by_destination(
    plan: Plan, layer: int, counts: CountArray, num_destinations: int
) -> CountArray:
    """Return assignments [ranks, destinations] for destinations that split the experts evenly."""
    tokens: CountArray = (
        counts[:, plan.slot_experts(layer)].reshape(len(counts), num_destinations, -1).sum(axis=2)
    )
    return tokens


def _expected_dedup_tokens(
    job: Job,
    plan: Plan,
    layer: int,
    counts: CountArray,
    all_counts: CountArray,
    num_destinations: int,
) -> CountArray:
    """Return the expected number of deduplicated tokens for `counts`, [ranks, destinations].

    Choices follow `all_counts` independently, except that no token chooses an expert twice.
    """
    top_k, experts_per_destination = job.model.top_k, plan.experts // num_destinations
    assigned = _tokens_by_destination(plan, layer, counts, num_destinations)
    total = all_counts.sum(axis=1, keepdims=True)
    fraction, probability_none = assigned / np.maximum(total, 1), np.ones(assigned.shape)
    for choice in range(top_k):  # Each choice is among the experts not chosen yet.
        probability_none *= 1 - np.minimum(fraction * plan.experts / (plan.experts - choice), 1.0)
    tokens = total // top_k
    expected = np.rint(tokens * (1 - probability_none)).astype(np.int64)
    lower, upper = -(-assigned // min(top_k, experts_per_destination)), np.minimum(assigned, tokens)
    clipped: CountArray = np.clip(expected, lower, np.maximum(upper, lower))
    return clipped


def _expected_destinations(
    job: Job, plan: Plan, layer: int, counts: CountArray, all_counts: CountArray
) -> list[CountArray]:
    """Return the expected deduplicated tokens per rank, and per host.

    A host gets at least as many as each of its ranks, and at most their sum.
    """
    by_rank, *by_host = (
        _expected_dedup_tokens(job, plan, layer, counts, all_counts, num)
        for num in destination_counts(plan)
    )
    ranks_of_host = by_rank.reshape(len(counts), plan.dispatch_hosts, -1)
    return [
        by_rank,
        *(
            np.clip(hosts, ranks_of_host.max(axis=2), ranks_of_host.sum(axis=2))
            for hosts in by_host
        ),
    ]


def dedup_token_bytes(hidden: int, top_k: int, element_bytes: int) -> tuple[int, int]:
    """Return bytes of a deduplicated token with weights and slots, and the offset of its slots."""
    slots_at = _round_up((hidden + top_k) * element_bytes, SLOT_INDEX_BYTES)
    return _round_up(slots_at + top_k * SLOT_INDEX_BYTES, _ALIGNMENT_BYTES), slots_at


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _token_ends(job: Job, plan: Plan) -> CountArray:
    """Return the end of each rank's tokens in the global micro-batch, [ranks]."""
    batch, sequence = job.train.batch // job.train.micro_batches, job.data.sequence
    bounds = np.array(plan.sample_bounds(batch), np.int64)
    ranks = np.arange(plan.etp - 1, plan.ranks_per_stage, plan.etp)
    replica, shard = np.divmod(ranks, plan.tp)
    samples = np.diff(bounds)[replica]
    ends: CountArray = sequence * bounds[replica] + (shard + 1) * samples * sequence // plan.tp
    return ends


def _apportion(totals: NDArray[np.int64], weights: NDArray[np.float64]) -> CountArray:
    """Split each of `totals` into whole numbers by `weights`; a larger total lowers no number.

    This is the Sainte-Lague method: the next unit goes to the smallest number relative to its
    weight. Ties go to the first, so equal weights take turns.
    """
    is_positive = weights > 0
    numbers: CountArray = np.floor(totals[:, None] / weights.sum() * weights + 0.5).astype(np.int64)
    excess = numbers.sum(axis=1) - totals
    with np.errstate(divide="ignore"):
        while excess.any():
            too_low, too_high = np.flatnonzero(excess < 0), np.flatnonzero(excess > 0)
            next_cost = np.where(is_positive, (2 * numbers[too_low] + 1) / weights, np.inf)
            numbers[too_low, next_cost.argmin(axis=1)] += 1
            last_cost = np.where(is_positive, (2 * numbers[too_high] - 1) / weights, -np.inf)
            numbers[too_high, last_cost.shape[1] - 1 - last_cost[:, ::-1].argmax(axis=1)] -= 1
            excess = numbers.sum(axis=1) - totals
    return numbers


def received_tokens(counts: CountArray, plan: Plan, group: Sequence[int]) -> CountArray:
    """Return tokens for each expert from all ranks of `group`, [experts]."""
    received: CountArray = counts[_stage_positions(plan, group)].sum(axis=0)
    return received


def slot_tokens(received: CountArray, plan: Plan, layer: int, rank: int) -> list[int]:
    """Return tokens of each slot of `rank`, of those that its group received for each expert."""
    tokens: list[int] = received[list(plan.experts_of(rank, layer))].tolist()
    return tokens


def sent_tokens(counts: CountArray, plan: Plan, rank: int) -> int:
    """Return assignments of the tokens that `rank` dispatches."""
    return int(counts[_stage_positions(plan, [rank])].sum())


def _remote_tokens(counts: CountArray, plan: Plan, layer: int, group: Sequence[int]) -> CountArray:
    """Return `counts` without tokens for experts of their own rank."""
    remote = counts.copy()
    for rank, position in zip(group, _stage_positions(plan, group), strict=True):
        remote[position, list(plan.experts_of(rank, layer))] = 0
    return remote


def _stage_positions(plan: Plan, group: Sequence[int]) -> list[int]:
    """Return indices of ranks within their pipeline rank; an expert TP group has one index."""
    return [rank % plan.ranks_per_stage // plan.etp for rank in group]


def split_evenly(total: int, parts: int) -> list[int]:
    """Split `total` into `parts` numbers, the larger ones first."""
    return [total // parts + (index < total % parts) for index in range(parts)]


class Exchange(NamedTuple):
    """Tokens of one expert layer that one rank exchanges: one per expert, or deduplicated."""

    group: tuple[int, ...]
    """Ranks of the exchange."""
    send_tokens: list[int]
    """Tokens sent to each rank of the group."""
    receive_tokens: list[int]
    """Tokens received from each rank of the group."""
    num_tokens: int
    """Tokens before the exchange: the rank's own, or those of the exchange before."""

    def chunk(self, index: int, chunks: int) -> Exchange:
        """Return chunk `at` of `chunks`, of evenly split tokens."""
        send, receive = (
            [split_evenly(number, chunks)[index] for number in counts]
            for counts in (self.send_tokens, self.receive_tokens)
        )
        return Exchange(self.group, send, receive, split_evenly(self.num_tokens, chunks)[index])

    @property
    def num_sent(self) -> int:
        """Tokens sent to all ranks."""
        return sum(self.send_tokens)

    @property
    def num_received(self) -> int:
        """Tokens received from all ranks."""
        return sum(self.receive_tokens)


class RoutedTokens(NamedTuple):
    """Routed tokens of one rank in one expert layer."""

    num_sent: int
    """Assignments that the rank dispatches, without separate local ones."""
    slot_tokens: list[int]
    """Tokens received at each slot, without separate local ones."""
    exchanges: tuple[Exchange, ...]
    """Exchanges of the dispatch; none if tokens stay on the rank."""
    is_dedup: bool
    """True if each token is sent once per destination rank."""
    num_chunks: int = 1
    """Chunks that are dispatched one after another."""
    local_slot_tokens: tuple[int, ...] = ()
    """Local tokens at each slot, if computed separately (`layout.overlap_local`)."""

    @property
    def is_all_to_all(self) -> bool:
        """True if each token is sent once per chosen expert."""
        return bool(self.exchanges) and not self.is_dedup

    @property
    def num_local_chunks(self) -> int:
        """Chunks of local tokens, computed before, between and after the dispatched chunks."""
        return (self.num_chunks + 1) * bool(self.local_slot_tokens)

    @property
    def num_tokens(self) -> int:
        """Routed tokens computed on the rank."""
        return sum(self.slot_tokens) + sum(self.local_slot_tokens)

    def split_chunks(self) -> list[RoutedTokens]:
        """Return each dispatched chunk, of evenly split tokens."""
        if self.num_chunks == 1:
            return [self._replace(local_slot_tokens=())]
        result = []
        for index, slots in enumerate(_split_slots(self.slot_tokens, self.num_chunks)):
            exchanges = tuple(exchange.chunk(index, self.num_chunks) for exchange in self.exchanges)
            num_sent = split_evenly(self.num_sent, self.num_chunks)[index]
            result.append(RoutedTokens(num_sent, slots, exchanges, self.is_dedup))
        return result

    def local_chunks(self) -> list[RoutedTokens]:
        """Return each chunk of local tokens, in slot order."""
        chunks, start = [], 0
        ends = np.cumsum(self.local_slot_tokens)
        for size in (
            split_evenly(sum(self.local_slot_tokens), self.num_local_chunks)
            if self.local_slot_tokens
            else []
        ):
            bounds = np.clip(ends, start, start + size)
            slots = np.diff(bounds, prepend=start).tolist()
            chunks.append(RoutedTokens(size, slots, (), is_dedup=False))
            start += size
        return chunks

    def compute_order(self) -> list[RoutedTokens]:
        """Return all chunks in the order in which they are computed."""
        local_chunks, order = self.local_chunks(), list[RoutedTokens]()
        for index, chunk in enumerate(self.split_chunks()):
            order += [*local_chunks[index : index + 1], chunk]
        return [*order, *local_chunks[self.num_chunks :]]


def _split_slots(slots: Sequence[int], parts: int) -> list[list[int]]:
    return [
        list(part) for part in zip(*(split_evenly(tokens, parts) for tokens in slots), strict=True)
    ]


def routed_by_layer(
    job: Job, plan: Plan, rank: int, loads: Sequence[ArrayLike] | None
) -> list[RoutedTokens]:
    """Return the routed tokens of `rank` in each expert layer.

    `loads` has one load per layer, as `expert_counts` takes it; None for even routing.
    """
    group = next(group for group in plan.ep_groups() if rank in group)

    def route(load: ArrayLike | None, layer: int) -> RoutedTokens:
        counts, local = expert_counts(job, plan, load), tuple[int, ...]()
        exchanges = _exchanges(job, plan, layer, rank, load, counts)
        if plan.overlap_local:
            own = received_tokens(counts, plan, [rank])
            local = tuple(slot_tokens(own, plan, layer, rank))
            counts = _remote_tokens(counts, plan, layer, group)
        slots = slot_tokens(received_tokens(counts, plan, group), plan, layer, rank)
        is_dedup = plan.dispatch == "dedup" and plan.ep > 1
        num_sent = sent_tokens(counts, plan, rank)
        return RoutedTokens(num_sent, slots, exchanges, is_dedup, plan.chunks, local)

    layers = job.model.expert_layers
    if loads is None:
        if not plan.expert_placement_by_layer:
            return [route(None, layers[0])] * len(layers)
        return [route(None, layer) for layer in layers]
    return [route(load, layer) for load, layer in zip(loads, layers, strict=True)]


def _exchanges(
    job: Job, plan: Plan, layer: int, rank: int, load: ArrayLike | None, counts: CountArray
) -> tuple[Exchange, ...]:
    """Return the exchanges of `rank`; none without expert parallelism."""
    if plan.ep == 1:
        return ()
    group, *hops = [
        next(ranks for ranks in groups if rank in ranks)
        for groups in (plan.ep_groups(), *plan.exchange_groups())
    ]
    positions, index = _stage_positions(plan, group), group.index(rank)
    all_counts, num_destinations = counts[positions], destination_counts(plan)
    if plan.overlap_local:
        counts = _remote_tokens(counts, plan, layer, group)
    group_counts = counts[positions]
    if plan.dispatch == "all_to_all":
        by_destination, tokens = (
            [_tokens_by_destination(plan, layer, group_counts, num) for num in num_destinations],
            sent_tokens(counts, plan, rank),
        )
    else:
        expected = _expected_destinations(job, plan, layer, group_counts, all_counts)
        by_destination = _dedup_tokens(plan, layer, load, positions, expected)
        tokens = int(np.diff(_token_ends(job, plan), prepend=0)[positions[index]])
    if len(hops) == 1:
        send, receive = by_destination[0][index], by_destination[0][:, index]
        return (Exchange(tuple(group), send.tolist(), receive.tolist(), tokens),)
    inter_host, intra_host = hops
    host, local_rank = divmod(index, len(intra_host))
    to_ranks = by_destination[0].reshape(
        plan.dispatch_hosts, -1, plan.dispatch_hosts, len(intra_host)
    )
    to_hosts = by_destination[1].reshape(plan.dispatch_hosts, -1, plan.dispatch_hosts)
    send_hosts, receive = to_hosts[host, local_rank], to_hosts[:, local_rank, host]
    send_ranks, receive_ranks = (
        to_ranks[:, local_rank, host].sum(axis=0),
        to_ranks[:, :, host, local_rank].sum(axis=0),
    )
    return (
        Exchange(tuple(inter_host), send_hosts.tolist(), receive.tolist(), tokens),
        Exchange(
            tuple(intra_host), send_ranks.tolist(), receive_ranks.tolist(), int(receive.sum())
        ),
    )
