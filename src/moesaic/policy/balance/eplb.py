"""DeepSeek's EPLB: a fixed number of replicas, placed by previous loads, and an even split of
tokens."""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace

import numpy as np

from moesaic.facts.balance import BalanceDecision, BalanceProblem, IntArray, no_replicas


def eplb(counts: IntArray, problem: BalanceProblem, replicas_per_rank: int = 1) -> BalanceDecision:
    """Return `replicas_per_rank` replicas on each rank and an even split of tokens over them."""
    replicas = place_replicas(counts, problem, replicas_per_rank)
    return assign_evenly(counts, problem, replicas) if len(replicas) else no_replicas()


def place_replicas(counts: IntArray, problem: BalanceProblem, replicas_per_rank: int) -> IntArray:
    """Return `replicas_per_rank` replicas (expert, rank) on each rank, sorted.

    The expert with the most tokens per replica gets another one, repeatedly. Then replicas are
    placed, largest load first, on the rank with the least load. Owners stay fixed, and
    `max_replicas_sent` limits the replicas that they send.
    """
    room = min(
        replicas_per_rank, len(problem.owners) - int(np.bincount(problem.owners).min(initial=0))
    )
    totals = counts.sum(axis=0)
    replicas = _count_replicas(totals, problem.num_ranks, room * problem.num_ranks)
    load = totals / replicas
    ranks_load = np.zeros(problem.num_ranks)
    np.add.at(ranks_load, problem.owners, load)
    slots_left = np.full(problem.num_ranks, room)
    sends_left = np.full(
        problem.num_ranks,
        replicas.sum() if problem.max_replicas_sent is None else problem.max_replicas_sent,
    )
    pairs = list[tuple[int, int]]()
    order = np.argsort(-load, kind="stable")
    for expert in order[replicas[order] > 1].tolist():
        owner = problem.owners[expert]
        eligible = slots_left > 0
        eligible[owner] = False
        for _ in range(min(int(replicas[expert]) - 1, int(sends_left[owner]))):
            if not eligible.any():
                break
            rank = int(np.where(eligible, ranks_load, np.inf).argmin())
            eligible[rank] = False
            slots_left[rank] -= 1
            sends_left[owner] -= 1
            ranks_load[rank] += load[expert]
            pairs.append((expert, rank))
    return np.array(sorted(pairs), np.int64).reshape(-1, 2)


def _count_replicas(totals: IntArray, num_ranks: int, num_extra: int) -> IntArray:
    """Return the replicas per expert, 1 to `num_ranks`, with `num_extra` above one each."""
    replicas = [1] * len(totals)
    fullest = [(-float(total), expert) for expert, total in enumerate(totals.tolist()) if total]
    heapify(fullest)
    for _ in range(num_extra if num_ranks > 1 else 0):
        if not fullest:
            break
        expert = fullest[0][1]
        replicas[expert] += 1
        if replicas[expert] < num_ranks:
            heapreplace(fullest, (-totals[expert] / replicas[expert], expert))
        else:
            heappop(fullest)
    return np.array(replicas, np.int64)


def assign_evenly(counts: IntArray, problem: BalanceProblem, replicas: IntArray) -> BalanceDecision:
    """Return an even split of each rank's tokens of an expert over its owner and replicas.

    The position of the remainder depends on the source rank, so remainders spread out.
    """
    rerouted = list[tuple[int, int, int, int]]()
    for expert in np.unique(replicas[:, 0]).tolist():
        targets = [int(problem.owners[expert]), *replicas[replicas[:, 0] == expert, 1].tolist()]
        for source in np.flatnonzero(counts[:, expert]).tolist():
            each, rest = divmod(int(counts[source, expert]), len(targets))
            for turn, rank in enumerate(targets[1:], 1):
                number = each + ((turn - source) % len(targets) < rest)
                rerouted += [(expert, source, rank, number)] * (number > 0)
    return BalanceDecision(replicas, np.array(sorted(rerouted), np.int64).reshape(-1, 4))
