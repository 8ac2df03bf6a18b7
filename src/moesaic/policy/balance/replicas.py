"""DeepSeek's EPLB: a fixed number of replicas, by loads that were; and rows that are spread evenly
over them, whatever the loads are."""

from __future__ import annotations

import numpy as np

from moesaic.facts.balance import Balance, Ints, Setting, unchanged


def eplb(counts: Ints, setting: Setting, each: int = 1) -> Balance:
    """So many copies on each rank, and rows of `counts` spread over homes and copies.

    The expert with the most rows a replica gets one more, again and again; then the largest go
    first to the rank that has the least. Homes stay where they are.
    """
    room = min(each, len(setting.homes) - int(np.bincount(setting.homes).min(initial=0)))
    totals = counts.sum(axis=0)
    replicas = _replicated(totals, setting.ranks, room * setting.ranks)
    load = totals / replicas
    ranks_load = np.zeros(setting.ranks)
    np.add.at(ranks_load, setting.homes, load)
    free = np.full(setting.ranks, room)
    has = np.zeros((len(totals), setting.ranks), bool)
    has[np.arange(len(totals)), setting.homes] = True
    pairs = list[tuple[int, int]]()
    for expert in np.argsort(-load, kind="stable").tolist():
        for _ in range(int(replicas[expert]) - 1):
            fits = (free > 0) & ~has[expert]
            if not fits.any():
                break
            rank = int(np.where(fits, ranks_load, np.inf).argmin())
            has[expert, rank] = True
            free[rank] -= 1
            ranks_load[rank] += load[expert]
            pairs.append((expert, rank))
    if not pairs:
        return unchanged()
    return evenly(counts, setting, np.array(sorted(pairs), np.int64))


def _replicated(totals: Ints, ranks: int, more: int) -> Ints:
    """Replicas of each expert, one at least and one on each rank at most, and so many more."""
    replicas = np.ones(len(totals), np.int64)
    for _ in range(more):
        load = np.where(replicas < ranks, totals / replicas, -1.0)
        expert = int(load.argmax())
        if load[expert] <= 0:
            break
        replicas[expert] += 1
    return replicas


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
