"""Reference policies for `moesaic replay` and benchmarks; training does not offer them."""

from __future__ import annotations

from functools import partial

import numpy as np

from moesaic.facts.balance import (
    BalanceDecision,
    BalanceProblem,
    BoolArray,
    IntArray,
    no_replicas,
)
from moesaic.facts.job.balance import YardstickConfig
from moesaic.policy.balance.balancer import LayerBalancer, Method
from moesaic.policy.balance.cost_model import layer_times
from moesaic.policy.balance.eplb import eplb, place_replicas
from moesaic.policy.balance.faster_moe import faster_moe, replicate_everywhere, sort_by_load
from moesaic.policy.balance.pro_prophet import pro_prophet
from moesaic.policy.balance.quota import quota

_LLEP_THRESHOLD = 1.3
"""Imbalance (busiest rank over the mean) up to which LLEP does nothing."""


def make_balancer(config: YardstickConfig, problem: BalanceProblem) -> LayerBalancer:
    """Return the balancer that `config` names: a training policy or a yardstick."""
    each = 1 if config.max_replicas is None else config.max_replicas
    yardsticks = {
        "best": Method(best, compiles=True), "llep": Method(llep),
        "lp": Method(partial(lp, replicas_per_rank=each), split_optimally, compiles=True),
        "top-k-broadcast": Method(top_k_broadcast),
    }  # fmt: skip
    return LayerBalancer(config, problem, method=yardsticks.get(config.policy))


def best(counts: IntArray, problem: BalanceProblem) -> BalanceDecision:
    """Return the decision of all policies with the fastest predicted layer that respects the
    replica limits; quota's always counts."""
    ours = quota(counts, problem)
    others = [policy(counts, problem) for policy in (llep, pro_prophet, faster_moe)]
    if problem.max_replicas != 0:
        others += [eplb(counts, problem), lp(counts, problem)]
    others.append(split_optimally(counts, problem, ours.replicas))
    fitting = [ours, *(balance for balance in others if _fits_limits(balance, problem))]
    return min(fitting, key=lambda balance: layer_times(counts, problem, balance).total_s)


def _fits_limits(balance: BalanceDecision, problem: BalanceProblem) -> bool:
    """Return whether the replicas that ranks send and receive respect the limits."""
    of = (problem.owners[balance.replicas[:, 0]], balance.replicas[:, 1])
    return all(
        limit is None or int(np.bincount(ranks).max(initial=0)) <= limit
        for limit, ranks in zip((problem.max_replicas_sent, problem.max_replicas), of, strict=True)
    )


def top_k_broadcast(counts: IntArray, problem: BalanceProblem) -> BalanceDecision:
    """Replicate the expert with the most tokens on every rank, at any cost."""
    return replicate_everywhere(counts, problem, [int(sort_by_load(counts)[0])])


def llep(counts: IntArray, problem: BalanceProblem) -> BalanceDecision:
    """LLEP: tokens above a rank's share spill over to the least loaded ranks, expert by expert, the
    one with the most tokens first."""
    totals, ranks = counts.sum(axis=0), problem.num_ranks
    owner_load = np.zeros(ranks, np.int64)
    np.add.at(owner_load, problem.owners, totals)
    if owner_load.max() * ranks <= _LLEP_THRESHOLD * owner_load.sum():
        return no_replicas()
    capacity = -(-int(owner_load.sum()) // ranks)
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
            if number < min(problem.min_replica_tokens, left) or number <= 0:
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


def lp(counts: IntArray, problem: BalanceProblem, replicas_per_rank: int = 1) -> BalanceDecision:
    """Return `replicas_per_rank` replicas on each rank, placed by EPLB, with the best split of
    tokens.

    FineEP and LPLB approximate the split by linear programs; here it is exact, in whole tokens.
    """
    return split_optimally(counts, problem, place_replicas(counts, problem, replicas_per_rank))


def split_optimally(
    counts: IntArray, problem: BalanceProblem, replicas: IntArray
) -> BalanceDecision:
    """Return the split of tokens over owners and given replicas with the smallest maximum load.

    At first, ranks with a replica compute their own tokens, and owners compute the rest. Then
    tokens move from overloaded ranks to others, no further than the smallest maximum load requires.
    """
    if not len(replicas):
        return no_replicas()
    from moesaic.policy.balance import quota_search  # Importing numba is slow.

    experts, ranks = replicas.T
    all_experts = np.arange(len(problem.owners))
    has_slot_ED = np.zeros((len(problem.owners), problem.num_ranks), bool)
    has_slot_ED[experts, ranks] = True
    local_ED = np.where(has_slot_ED, counts.T, 0)
    local_ED[all_experts, problem.owners] = counts.sum(axis=0) - local_ED.sum(axis=1)
    has_slot_ED[all_experts, problem.owners] = True
    mean = -(-int(counts.sum()) // problem.num_ranks)
    tokens_ED, needed = _shift_tokens(local_ED, has_slot_ED, mean)
    if needed > mean:  # Repeat with the final target, so that no token moves without need.
        tokens_ED, _ = _shift_tokens(local_ED, has_slot_ED, needed)
    tokens = tokens_ED[experts, ranks]
    local = np.minimum(tokens, counts[ranks, experts])
    # All replicas take local tokens before any takes those of other ranks.
    taken = np.concatenate(
        [np.column_stack((replicas, number)) for number in (local, tokens - local)]
    )
    start = quota_search.SearchState.from_counts(counts, problem)
    return BalanceDecision(replicas, quota_search.split_by_source(taken[taken[:, 2] > 0], start))


def _shift_tokens(tokens_ED: IntArray, has_slot_ED: BoolArray, target: int) -> tuple[IntArray, int]:
    """Return tokens by expert and rank, and the smallest possible maximum load that is at least
    `target`.

    Tokens move along paths of ranks: each rank takes tokens of one expert and hands on as many of
    another, up to a rank below the target. If no path exists, the ranks that were reached must keep
    all their tokens. Their mean, rounded up, is a lower bound and becomes the new target. So the
    target never exceeds the optimum, and reaches it in the end.
    """
    tokens_ED = tokens_ED.copy()
    loads = tokens_ED.sum(axis=0)
    for rank in range(len(loads)):
        while loads[rank] > target:
            path, reached = _find_path(tokens_ED, has_slot_ED, loads < target, rank)
            if not path:
                target = -(-int(loads[reached].sum()) // len(reached))
                continue
            end = path[0][2]
            number = min(loads[rank] - target, target - loads[end])
            number = min(number, *(tokens_ED[expert, source] for expert, source, _ in path))
            loads[rank] -= number
            loads[end] += number
            for expert, source, to in path:
                tokens_ED[expert, source] -= number
                tokens_ED[expert, to] += number
    return tokens_ED, target


def _find_path(
    tokens_ED: IntArray, has_slot_ED: BoolArray, has_room: BoolArray, first: int
) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Return the moves (expert, from, to) from `first` to the nearest rank with room, last one
    first, and all ranks that a breadth-first search reached; no moves if there is no such rank."""
    arrivals: dict[int, tuple[int, int]] = {first: (-1, -1)}
    queue = [first]
    for rank in queue:
        for expert in np.flatnonzero(tokens_ED[:, rank]).tolist():
            for to in np.flatnonzero(has_slot_ED[expert]).tolist():
                if to in arrivals:
                    continue
                arrivals[to] = expert, rank
                queue.append(to)
                if has_room[to]:
                    path = list[tuple[int, int, int]]()
                    while to != first:
                        expert, source = arrivals[to]
                        path.append((expert, source, to))
                        to = source
                    return path, queue
    return [], queue
