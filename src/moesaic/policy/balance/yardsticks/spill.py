"""LLEP: what is more than its share of a rank's rows is spilt over to the ranks with the least."""

from __future__ import annotations

import numpy as np

from moesaic.facts.balance import Balance, Ints, Setting, unchanged


def llep(
    counts: Ints,
    setting: Setting,
    *,
    share: float = 1.0,
    threshold: float = 1.3,
    least_rows: int | None = None,
) -> Balance:
    """Expert by expert, the one with the most rows first.

    Args:
        counts: rows [ranks, experts].
        setting: what they cost.
        share: of the mean that a rank takes before it spills.
        threshold: of the busiest rank over the mean, below which nothing is done.
        least_rows: that are spilt at a time, unless they are the last; None: as the setting says.
    """
    totals, ranks = counts.sum(axis=0), setting.ranks
    at_home = np.zeros(ranks, np.int64)
    np.add.at(at_home, setting.homes, totals)
    if at_home.max() * ranks <= threshold * at_home.sum():
        return unchanged()
    least = setting.least_rows if least_rows is None else least_rows
    share_rows = int(np.ceil(share * at_home.sum() / ranks))
    computed, sources = np.zeros(ranks, np.int64), Sources(counts, setting)
    room, sends = (
        np.full(ranks, len(totals) * ranks if limit is None else limit)
        for limit in (setting.room, setting.sends)
    )
    for expert in np.argsort(-totals, kind="stable").tolist():
        home, left = int(setting.homes[expert]), int(totals[expert])
        stays = min(left, max(share_rows - int(computed[home]), 0))
        computed[home] += stays
        left -= stays
        free = room > 0
        free[home] = False
        while left and free.any() and sends[home] > 0:
            rank = int(np.where(free, computed, np.iinfo(np.int64).max).argmin())
            number = min(left, share_rows - int(computed[rank]))
            if number < min(least, left) or number <= 0:
                break
            sources.take(expert, rank, number)
            computed[rank] += number
            room[rank] -= 1
            sends[home] -= 1
            free[rank] = False
            left -= number
        computed[home] += left
    return sources.balance()


class Sources:
    """Rows of every rank for every expert that are still to be computed at home.

    A copy takes rows of its own rank first, then those of ranks that would have sent them to the
    owner, and the owner's last.
    """

    def __init__(self, counts: Ints, setting: Setting) -> None:
        self._counts, self._homes = counts, setting.homes
        self._left: dict[int, Ints] = {}
        self._taken: dict[tuple[int, int], Ints] = {}

    def left(self, expert: int) -> Ints:
        """By rank, rows of `expert` that are still to be computed at home."""
        return self._left.get(expert, self._counts[:, expert])

    def take(self, expert: int, rank: int, number: int) -> Ints:
        """By source, so many rows of `expert` that its copy on `rank` takes from now on."""
        left = self._left.setdefault(expert, self._counts[:, expert].copy())
        found = np.zeros_like(left)
        found[rank] = min(number, int(left[rank]))
        home = int(self._homes[expert])
        others = left.copy()
        others[[rank, home]] = 0
        wanted = number - int(found[rank])
        before = np.cumsum(others) - others
        found += np.clip(wanted - before, 0, others)
        found[home] += number - int(found.sum())
        left -= found
        self._taken[expert, rank] = found
        return found

    def balance(self, moves: int | None = None) -> Balance:
        """All that has been taken, or the first so many of it."""
        taken = list(self._taken.items())[:moves]
        if not taken:
            return unchanged()
        copies, diverted = [key for key, _ in taken], list[tuple[int, int, int, int]]()
        for (expert, rank), found in taken:
            diverted += [(expert, int(at), rank, int(found[at])) for at in np.flatnonzero(found)]
        return Balance(np.array(sorted(copies), np.int64), np.array(sorted(diverted), np.int64))
