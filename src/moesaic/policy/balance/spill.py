"""LLEP: what is more than its share of a rank's rows is spilt over to the ranks with the least."""

from __future__ import annotations

import numpy as np

from moesaic.facts.balance import Balance, Ints, Setting, unchanged
from moesaic.policy.balance.sources import Sources


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
