"""Ours: as few copies as bring the busiest rank down, each where its rows are, with exact numbers
of rows; and nothing where that would not pay.

The rank with the most rows gives what it has above the mean, of its largest expert, to the rank
that saves the most by it: rows that need not be computed by the busiest rank, and rows of its own
that need not travel. How much a rank takes is tried in three ways. Up to the mean is the least work
where copies cost little; half of the difference is the fewest copies; and up to the mean beside
what it can give on of its own experts has each home send few copies, and many homes at a time.
In a fourth way the rank that sends or receives the most is relieved of what travels: all rows that
some rank has of an expert are computed there, whichever saves the most and delays the least.
After each gift the whole is modelled, and the best of all states on all ways is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesaic.facts.balance import Balance, Ints, Setting, unchanged
from moesaic.policy.balance.model import moved, rows, times_of

if TYPE_CHECKING:
    from moesaic.policy.balance.gifts import State, Terms

_WORTH = 1.01
"""As much slower a layer must be without copies for them to be made."""

_LOOKING, _LOOKING_EACH_S = 0.01, 4e-9
"""Of a layer's time, what looking for copies for own rows may take; and about what it takes to look
for one, for each rank and each expert."""
_MANY = 1 << 16
"""Ranks times experts beyond which these are not looked for."""


def quota(counts: Ints, setting: Setting) -> Balance:
    """The best state on the ways from everything at home to equal loads."""
    at_home = rows(counts, setting.homes, unchanged())
    plain_s = times_of(at_home, *moved(unchanged(), setting), setting).whole
    if plain_s <= even_s(counts, setting) * _WORTH:
        return unchanged()
    from moesaic.policy.balance import gifts

    start = gifts.State.of(counts, setting, at_home)
    best = _searched(counts, start, gifts.Terms.of(counts, setting), plain_s / _WORTH)
    return unchanged() if best is None else gifts.balance_of(best, start)


def within(counts: Ints, setting: Setting, copies: Ints) -> Balance:
    """The same where copies are there already, and cost nothing any more."""
    if not len(copies):
        return unchanged()
    from moesaic.policy.balance import gifts

    ordered = copies[np.lexsort((copies[:, 1], copies[:, 0]))]
    paid = setting._replace(
        expert_bytes=0.0, gradient_bytes=0.0, latency_s=0.0, room=None, sends=None, least_rows=1
    )
    at_home = rows(counts, paid.homes, unchanged())
    start = gifts.State.of(counts, paid, at_home)
    start.has_ED[:] = True
    start.has_ED[ordered[:, 0], ordered[:, 1]] = False
    plain_s = times_of(at_home, *moved(unchanged(), paid), paid).whole
    best = _searched(counts, start, gifts.Terms.of(counts, paid), plain_s)
    diverted = unchanged().diverted if best is None else gifts.balance_of(best, start).diverted
    return Balance(ordered, diverted)


def _searched(counts: Ints, start: State, terms: Terms, least_s: float) -> Ints | None:
    """The best gifts on all ways, if any are better than that."""
    from moesaic.policy.balance import gifts  # Compiled at first, then read from a cache.

    best = None
    for way in gifts.WAYS:
        most = own_gifts(counts, least_s) if way == gifts.OWN_ROWS else counts.size
        if not most:
            continue
        found, number, step_s = gifts.search(start.again(), terms, way, least_s, most)
        if number:
            least_s, best = step_s, found[:number]
    return best


def own_gifts(counts: Ints, least_s: float) -> int:
    """How many copies for own rows are looked for in a layer that takes so long without any: there
    may be one of each expert on each rank, and everybody waits while they are looked for."""
    if counts.size > _MANY:
        return 0
    return int(_LOOKING * least_s / (_LOOKING_EACH_S * sum(counts.shape)))


def even_s(counts: Ints, setting: Setting) -> float:
    """What rows take that are spread evenly and need not travel."""
    each = int(counts.sum()) / setting.ranks
    return setting.passes * (each / setting.rows_per_s + setting.matrices_s)
