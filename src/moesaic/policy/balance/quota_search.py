"""Compiled greedy search of quota: it decides on a thousand ranks in milliseconds.

Tests compare its numbers and ties with a plain implementation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from moesaic.base.compiled import cached_njit
from moesaic.facts.balance import BalanceDecision, BalanceProblem, IntArray, no_replicas
from moesaic.policy.balance.cost_model import (
    count_rank_tokens,
    count_replica_transfers,
    layer_times_of_busiest,
)

_LAYER_TIMES_OF_BUSIEST = cached_njit(layer_times_of_busiest)

STRATEGIES = range(4)
"""Tokens that a replica takes from the busiest rank; the last one moves all of a rank's own tokens
of an expert, to or from the rank with the most traffic."""
_UP_TO_MEAN, _HALF_OF_GAP, _MEAN_PLUS_MOVABLE, LOCAL_TOKENS = STRATEGIES


class SearchState(NamedTuple):
    """State of the search: tokens and replicas by rank; D ranks, E experts."""

    counts_ED: Any
    remaining_ED: Any
    """Tokens left for the owner by expert and source, valid for split experts, [E, D]."""
    is_taken_ED: Any
    """Replicas that exist already or may not be made, [E, D]."""
    is_split_E: Any
    """Experts with replicas, [E]."""
    owners_E: IntArray
    owner_tokens_E: IntArray
    computed: IntArray
    sent: IntArray
    received: IntArray
    replicas_sent: IntArray
    """Replicas that each rank sends, [D]."""
    replicas_received: IntArray
    """Replicas that each rank receives, [D]."""
    movable_tokens: IntArray
    """Tokens of each rank's own experts that it can still hand over, [D]."""
    free_slots: IntArray
    accepted: IntArray
    """Scratch: tokens that each rank would take, [D]."""
    saved_s: Any
    """Scratch: seconds that this would save, [D]."""
    experts_by_owner: IntArray
    """Experts, ordered by owner rank, [E]."""
    owner_offsets: IntArray
    """First position of each rank in `experts_by_owner`, and the end, [D + 1]."""

    @classmethod
    def from_counts(cls, counts: IntArray, problem: BalanceProblem) -> SearchState:
        """Start with all tokens on owner ranks."""
        start = count_rank_tokens(counts, problem.owners, no_replicas())
        # A narrow type, for the array is large.
        counts_ED = np.ascontiguousarray(counts.T, np.int32)
        experts = len(problem.owners)
        room = experts if problem.max_replicas is None else problem.max_replicas
        return cls(
            counts_ED, np.empty_like(counts_ED), np.zeros(counts_ED.shape, np.bool_),
            np.zeros(experts, np.bool_), np.ascontiguousarray(problem.owners, np.int64),
            counts.sum(axis=0), *start, *count_replica_transfers(no_replicas(), problem),
            start.computed.copy(),
            np.full(problem.num_ranks, room, np.int64), np.empty(problem.num_ranks, np.int64),
            np.empty(problem.num_ranks), np.argsort(problem.owners, kind="stable"),
            np.searchsorted(np.sort(problem.owners), np.arange(problem.num_ranks + 1)),
        )  # fmt: skip

    def clone(self) -> SearchState:
        """Return a copy of an initial state."""
        fresh = [one.copy() for one in self[4:]]
        return SearchState(
            self.counts_ED, np.empty_like(self.remaining_ED), self.is_taken_ED.copy(),
            np.zeros_like(self.is_split_E), *fresh,
        )  # fmt: skip


class SearchCosts(NamedTuple):
    """Costs of tokens and replicas, as plain numbers for numba."""

    mean: int
    """Mean load of a rank, rounded up."""
    min_replica_tokens: int
    max_replicas_sent: int
    """Replicas that a rank may send."""
    expert_tokens_per_s: float
    token_bytes: float
    bytes_per_s: float
    expert_bytes: float
    gradient_bytes: float
    latency_s: float
    dense_compute_s: float
    weight_read_s: float
    experts_per_rank: float
    overlaps: bool
    cpu_s_per_byte: float
    num_forwards: int
    num_passes: int
    num_exchanges: int

    @classmethod
    def from_problem(cls, counts: IntArray, problem: BalanceProblem) -> SearchCosts:
        """Take the costs of `problem`, and the mean load of `counts`."""
        return cls(
            -(-int(counts.sum()) // problem.num_ranks), max(problem.min_replica_tokens, 1),
            counts.size if problem.max_replicas_sent is None else problem.max_replicas_sent,
            float(problem.expert_tokens_per_s), float(problem.token_bytes),
            float(problem.bytes_per_s), float(problem.expert_bytes), float(problem.gradient_bytes),
            float(problem.latency_s), float(problem.dense_compute_s), float(problem.weight_read_s),
            problem.experts_per_rank, problem.overlaps, float(problem.cpu_s_per_byte),
            problem.num_forwards, problem.num_passes, problem.num_exchanges,
        )  # fmt: skip


@cached_njit
def search_replicas(
    state: SearchState, costs: SearchCosts, strategy: int, limit_s: float, max_replicas: int
) -> Any:
    """Return all replicas (expert, rank, tokens), the number of them that is best, and its seconds.

    The number is 0 if none is faster than `limit_s`. The search adds up to `max_replicas`.
    """
    replicas, best = [(0, 0, 0)][:0], 0
    top = _largest(state.computed)
    while len(replicas) < max_replicas:
        if strategy == LOCAL_TOKENS:
            expert, rank, number = _next_local_replica(state, costs, top)
        else:
            expert, rank, number = _next_replica(state, costs, strategy, top)
        if expert < 0:
            break
        _add_replica(state, expert, rank, number)
        replicas.append((expert, rank, number))
        top = _largest(state.computed)
        layer_s, later_s = _layer_s(state, costs, len(replicas))
        if layer_s < limit_s:
            limit_s, best = layer_s, len(replicas)
        if later_s >= limit_s:
            break
    found = np.zeros((len(replicas), 3), np.int64)
    for at, replica in enumerate(replicas):
        found[at, 0], found[at, 1], found[at, 2] = replica
    return found, best, limit_s


def balance_from_replicas(replicas: IntArray, state: SearchState) -> BalanceDecision:
    """Return the decision for `replicas` (expert, rank, tokens), applied to an initial state."""
    rerouted = split_by_source(replicas, state.clone())
    pairs = replicas[:, :2]
    return BalanceDecision(pairs[np.lexsort(pairs.T[::-1])], rerouted)


@cached_njit
def split_by_source(replicas: IntArray, state: SearchState) -> Any:
    """Return rows (expert, source, rank, tokens) of each replica.

    A replica takes its own rank's tokens first, then those of other ranks, and the owner's last.
    """
    ranks = len(state.computed)
    # Memory that is not written costs nothing.
    found, size = np.empty((256 * len(replicas) + ranks, 4), np.int64), 0
    for at in range(len(replicas)):
        expert, rank, rest = replicas[at]
        owner, left = state.owners_E[expert], _remaining_tokens(state, expert)
        if size + ranks > len(found):
            larger = np.empty((2 * len(found) + ranks, 4), np.int64)
            larger[:size] = found[:size]
            found = larger
        for turn in range(ranks + 2):
            source = rank if turn == 0 else owner if turn > ranks else turn - 1
            taken = min(rest, left[source])
            if taken > 0 and (turn in (0, ranks + 1) or source not in (rank, owner)):
                left[source] -= taken
                rest -= taken
                found[size, 0], found[size, 1] = expert, source
                found[size, 2], found[size, 3] = rank, taken
                size += 1
            if rest == 0:
                break
    return found[:size]


@cached_njit
def _remaining_tokens(state: SearchState, expert: int) -> Any:
    """Return an expert's tokens that are left for the owner, by source."""
    left = state.remaining_ED[expert]
    if not state.is_split_E[expert]:
        state.is_split_E[expert] = True
        left[:] = state.counts_ED[expert]
    return left


@cached_njit
def _next_replica(
    state: SearchState, costs: SearchCosts, strategy: int, max_tokens: int
) -> tuple[int, int, int]:
    """Return the best next replica of the busiest rank as (expert, rank, tokens), or (-1, -1, 0).

    The busiest rank computes `max_tokens`.
    """
    busiest, excess = _index_of(max_tokens, state.computed), max_tokens - costs.mean
    if state.replicas_sent[busiest] >= costs.max_replicas_sent:
        return -1, -1, 0
    own = state.experts_by_owner[state.owner_offsets[busiest] : state.owner_offsets[busiest + 1]]
    tried = np.zeros(len(own), np.bool_)
    while excess >= costs.min_replica_tokens:
        largest = -1
        for one in range(len(own)):
            if tried[one]:
                continue
            if largest < 0 or state.owner_tokens_E[own[one]] > state.owner_tokens_E[own[largest]]:
                largest = one
        if largest < 0:
            break
        tried[largest] = True
        expert = own[largest]
        offered = min(excess, state.owner_tokens_E[expert])
        rank, number = _best_receiver(state, costs, strategy, expert, offered, max_tokens)
        if rank >= 0:
            return expert, rank, number
    return -1, -1, 0


@cached_njit
def _best_receiver(
    state: SearchState,
    costs: SearchCosts,
    strategy: int,
    expert: int,
    num_tokens: int,
    max_tokens: int,
) -> tuple[int, int]:
    """Return the rank that saves most by taking some of `num_tokens`, and how many; (-1, 0) if
    none."""
    counts_D, has_D, saves = state.counts_ED[expert], state.is_taken_ED[expert], state.saved_s
    each_row = costs.num_passes / costs.expert_tokens_per_s
    each_local = costs.num_exchanges * costs.token_bytes / costs.bytes_per_s
    computed, own, room, mean = state.computed, state.movable_tokens, state.free_slots, costs.mean
    takes, most = state.accepted, 0.0
    for rank in range(len(takes)):  # Loops without branches are vectorized.
        takes[rank] = mean - computed[rank]
    if strategy == _HALF_OF_GAP:
        for rank in range(len(takes)):
            takes[rank] = max(takes[rank], (max_tokens - computed[rank]) >> 1)
    elif strategy == _MEAN_PLUS_MOVABLE:
        for rank in range(len(takes)):
            more = takes[rank] + min(own[rank], mean)
            takes[rank] = (
                more if computed[rank] + min(more, num_tokens) < max_tokens else takes[rank]
            )
    for rank in range(len(takes)):
        one = min(takes[rank], num_tokens)
        fits = (one >= costs.min_replica_tokens) & (room[rank] > 0) & (not has_D[rank])
        takes[rank] = one
        saved = one * each_row + min(counts_D[rank], one) * each_local
        saves[rank] = saved if fits else 0.0
    for saved in saves:
        most = max(most, saved)
    if most <= 0:
        return -1, 0
    found = _index_of(most, saves)
    return found, takes[found]


@cached_njit
def _next_local_replica(
    state: SearchState, costs: SearchCosts, max_tokens: int
) -> tuple[int, int, int]:
    """Return the replica for local tokens that saves most, or (-1, -1, 0).

    It relieves the rank with the most traffic, sent or received.
    """
    each_row = costs.num_passes / costs.expert_tokens_per_s
    each_local = costs.num_exchanges * costs.token_bytes / costs.bytes_per_s
    source, owner = state.sent.argmax(), state.received.argmax()
    leaves = state.sent[source] >= state.received[owner]
    found, target, number, most = -1, -1, 0, 0.0
    for expert in range(len(state.owners_E)):
        at = state.owners_E[expert]
        if at == source if leaves else at != owner:
            continue
        if state.replicas_sent[at] >= costs.max_replicas_sent:
            continue
        left = state.remaining_ED[expert] if state.is_split_E[expert] else state.counts_ED[expert]
        has_D = state.is_taken_ED[expert]
        for rank in range(source, source + 1) if leaves else range(len(left)):
            one = left[rank]
            if (
                rank == at
                or has_D[rank]
                or one < costs.min_replica_tokens
                or state.free_slots[rank] <= 0
            ):
                continue
            more = max(state.computed[rank] + one - max_tokens, 0)
            saved = one * each_local - more * each_row
            if saved > most:
                found, target, number, most = expert, rank, one, saved
    return found, target, number


@cached_njit
def _largest(numbers: IntArray) -> int:
    most = 0
    for one in numbers:
        most = max(most, one)
    return most


@cached_njit
def _index_of(value: Any, values: Any) -> int:
    """Return the first index of `value`, which must be present."""
    place = 0
    while values[place] != value:
        place += 1
    return place


@cached_njit
def _add_replica(state: SearchState, expert: int, rank: int, num_tokens: int) -> None:
    """Apply a replica to the state.

    Tokens are taken in the order of `split_by_source`; here only local and remote ones differ.
    """
    owner, left = state.owners_E[expert], _remaining_tokens(state, expert)
    rest = num_tokens
    taken = min(rest, left[rank])
    left[rank] -= taken
    rest -= taken
    state.sent[rank] -= taken
    state.received[owner] -= taken
    for source in range(len(left)):
        if rest == 0:
            break
        if source in (rank, owner):
            continue
        taken = min(rest, left[source])
        left[source] -= taken
        rest -= taken
        state.received[owner] -= taken
        state.received[rank] += taken
    left[owner] -= rest
    state.sent[owner] += rest
    state.received[rank] += rest
    state.computed[owner] -= num_tokens
    state.computed[rank] += num_tokens
    state.owner_tokens_E[expert] -= num_tokens
    state.movable_tokens[owner] -= num_tokens
    state.replicas_sent[owner] += 1
    state.replicas_received[rank] += 1
    state.free_slots[rank] -= 1
    state.is_taken_ED[expert, rank] = True


@cached_njit
def _layer_s(state: SearchState, costs: SearchCosts, num_replicas: int) -> tuple[float, float]:
    """Return the layer's seconds, and a lower bound after further replicas.

    Each further replica adds traffic and leaves less computing to overlap with.
    """
    experts_s = 0.0
    for rank in range(len(state.computed)):
        weights_s = costs.weight_read_s * (
            1 + state.replicas_received[rank] / costs.experts_per_rank
        )
        experts_s = max(experts_s, state.computed[rank] / costs.expert_tokens_per_s + weights_s)
    most = _max_link_load(state.replicas_sent, state.replicas_received, costs)
    if costs.overlaps:
        most = max(most, float(-(-num_replicas // len(state.replicas_sent))))
    times = _LAYER_TIMES_OF_BUSIEST(
        _max_link_load(state.sent, state.received, costs),
        experts_s,
        most,
        _max_sent_and_received(state.replicas_sent, state.replicas_received),
        costs,
    )
    least_s = costs.mean / costs.expert_tokens_per_s + costs.weight_read_s
    return times.total_s, costs.num_passes * least_s + times.cpu_s + times.exposed_s


@cached_njit
def _max_link_load(sent: IntArray, received: IntArray, costs: SearchCosts) -> float:
    """Return the largest load of a link, as in the cost model."""
    if costs.overlaps:
        return float(max(_largest(sent), _largest(received)))
    return float(_max_sent_and_received(sent, received)) / 2


@cached_njit
def _max_sent_and_received(sent: IntArray, received: IntArray) -> int:
    """Return the largest sum of sent and received by rank."""
    both = 0
    for rank in range(len(sent)):
        both = max(both, sent[rank] + received[rank])
    return both
