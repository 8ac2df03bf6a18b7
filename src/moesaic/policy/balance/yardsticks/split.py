"""LP: copies as EPLB places them, and the split of rows over homes and copies with which the
busiest rank has the least. FineEP and LPLB seek it by linear programmes; here it is exact, in rows.

As many rows as are wanted of a place are its own rank's first, then those of others.
"""

from __future__ import annotations

import numpy as np

from moesaic.facts.balance import Balance, Ints, Setting, unchanged
from moesaic.policy.balance.replicas import placed


def lp(counts: Ints, setting: Setting, each: int = 1) -> Balance:
    """So many copies on each rank, and the best split of `counts` over homes and copies."""
    return levelled(counts, setting, placed(counts, setting, each))


def levelled(counts: Ints, setting: Setting, copies: Ints) -> Balance:
    """The same over copies that are there.

    Ranks that have a copy compute their own rows at first, and what is left of others is computed
    at home. Then rows are shifted from ranks that have too much to those that have room, as far as
    that takes the busiest down and no further.
    """
    if not len(copies):
        return unchanged()
    from moesaic.policy.balance.yardsticks import flow_split  # Numba takes long to import.

    ordered = copies[np.lexsort((copies[:, 1], copies[:, 0]))]
    places = flow_split.Places.of_copies(ordered, setting)
    ours = counts[:, places.experts]
    counts_XD = np.ascontiguousarray(ours.T, np.int32)
    elsewhere = np.zeros(setting.ranks, np.int64)
    np.add.at(elsewhere, setting.homes, counts.sum(axis=0))
    np.subtract.at(elsewhere, setting.homes[places.experts], ours.sum(axis=0))
    wanted = flow_split.least(counts_XD, elsewhere, places)
    return Balance(ordered, flow_split.taken(counts_XD, wanted, places))
