"""DeepSeek's EPLB: a fixed number of replicas, by loads that were; and rows that are spread evenly
over them, whatever the loads are."""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace

import numpy as np

from moesaic.facts.balance import Balance, Ints, Setting, unchanged


def eplb(counts: Ints, setting: Setting, each: int = 1) -> Balance:
    """So many copies on each rank, and rows of `counts` spread over homes and copies."""
    copies = placed(counts, setting, each)
    return evenly(counts, setting, copies) if len(copies) else unchanged()


def placed(counts: Ints, setting: Setting, each: int) -> Ints:
    """So many copies (expert, rank) on each rank.

    The expert with the most rows a replica gets one more, again and again; then the largest go
    first to the rank that has the least. Homes stay where they are, and send no more than they may.
    """
    room = min(each, len(setting.homes) - int(np.bincount(setting.homes).min(initial=0)))
    totals = counts.sum(axis=0)
    replicas = _replicated(totals, setting.ranks, room * setting.ranks)
    load = totals / replicas
    ranks_load = np.zeros(setting.ranks)
    np.add.at(ranks_load, setting.homes, load)
    free = np.full(setting.ranks, room)
    sends = np.full(setting.ranks, replicas.sum() if setting.sends is None else setting.sends)
    pairs = list[tuple[int, int]]()
    order = np.argsort(-load, kind="stable")
    for expert in order[replicas[order] > 1].tolist():
        home = setting.homes[expert]
        fits = free > 0
        fits[home] = False
        for _ in range(min(int(replicas[expert]) - 1, int(sends[home]))):
            if not fits.any():
                break
            rank = int(np.where(fits, ranks_load, np.inf).argmin())
            fits[rank] = False
            free[rank] -= 1
            sends[home] -= 1
            ranks_load[rank] += load[expert]
            pairs.append((expert, rank))
    return np.array(sorted(pairs), np.int64).reshape(-1, 2)


def _replicated(totals: Ints, ranks: int, more: int) -> Ints:
    """Replicas of each expert, one at least and one on each rank at most, and so many more."""
    replicas = [1] * len(totals)
    fullest = [(-float(total), expert) for expert, total in enumerate(totals.tolist()) if total]
    heapify(fullest)
    for _ in range(more if ranks > 1 else 0):
        if not fullest:
            break
        expert = fullest[0][1]
        replicas[expert] += 1
        if replicas[expert] < ranks:
            heapreplace(fullest, (-totals[expert] / replicas[expert], expert))
        else:
            heappop(fullest)
    return np.array(replicas, np.int64)


def evenly(counts: Ints, setting: Setting, copies: Ints) -> Balance:
    """Each rank's rows for an expert in equal parts over its home and copies; what is left over of
    one rank begins elsewhere than that of another."""
    diverted = list[tuple[int, int, int, int]]()
    for expert in np.unique(copies[:, 0]).tolist():
        at = [int(setting.homes[expert]), *copies[copies[:, 0] == expert, 1].tolist()]
        for source in np.flatnonzero(counts[:, expert]).tolist():
            each, rest = divmod(int(counts[source, expert]), len(at))
            for turn, rank in enumerate(at[1:], 1):
                number = each + ((turn - source) % len(at) < rest)
                diverted += [(expert, source, rank, number)] * (number > 0)
    ordered = copies[np.lexsort((copies[:, 1], copies[:, 0]))]
    return Balance(ordered, np.array(sorted(diverted), np.int64).reshape(-1, 4))
