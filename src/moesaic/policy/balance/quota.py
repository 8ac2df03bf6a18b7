"""Ours: as few copies as bring the busiest rank down, each where its rows are, with exact numbers
of rows; and nothing where that would not pay.

The rank with the most rows gives what it has above the mean, of its largest expert, to the rank
that saves the most by it: rows that need not be computed by the busiest rank, and rows of its own
that need not travel. How much a rank takes is tried in three ways. Up to the mean is the least work
where copies cost little; half of the difference is the fewest copies; and up to the mean beside
what it can give on of its own experts has each home send few copies, and many homes at a time.
After each gift the whole is modelled, and the best of all states on all ways is taken.
"""

from __future__ import annotations

from moesaic.facts.balance import Balance, Ints, Setting, unchanged
from moesaic.policy.balance.model import times

_WORTH = 1.01
"""As much slower a layer must be without copies for them to be made."""


def quota(counts: Ints, setting: Setting) -> Balance:
    """The best state on the ways from everything at home to equal loads."""
    if nothing_to_gain(counts, setting):
        return unchanged()
    least_s = times(counts, setting, unchanged()).whole / _WORTH
    from moesaic.policy.balance import gifts  # Compiled at first, then read from a cache.

    start, terms, best = gifts.State.of(counts, setting), gifts.Terms.of(counts, setting), None
    for way in gifts.WAYS:
        found, number, step_s = gifts.search(start.again(), terms, way, least_s)
        if number:
            least_s, best = step_s, found[:number]
    return unchanged() if best is None else gifts.balance_of(best, start)


def nothing_to_gain(counts: Ints, setting: Setting) -> bool:
    """Whether rows that are spread evenly and need not travel would save too little: no balance can
    do better than that."""
    even_s = 3 * (int(counts.sum()) / setting.ranks) / setting.rows_per_s
    return times(counts, setting, unchanged()).whole <= even_s * _WORTH
