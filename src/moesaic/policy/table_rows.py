"""Rows of an embedding table: which leave memory, and the length of a pass.

A row is hot if its score reaches a base score, it was seen today or yesterday, and its shows exceed
a threshold. The threshold is a quantile, so that hot rows fit the memory for them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moesaic.facts.table_rows import MemoryRows, PassLength, PassNeeds

HOT_DAYS = 1
"""Idle days of a hot row at most."""
MAX_PASS_STEPS = 64
"""Steps of a pass at most, where the job does not say."""


def choose_leaving(facts: MemoryRows) -> NDArray[np.int64]:
    """Return the rows that leave memory: ascending positions among those of the facts.

    Rows that were idle for too long leave. If more must, those that are not hot leave first: by
    last pass, then by score, then by position. If there are too few rows, all leave."""
    num_rows = len(facts.scores)
    leaves = np.zeros(num_rows, np.bool_)
    if facts.demote_days:
        leaves |= facts.idle_days > facts.demote_days
    is_hot = _may_be_hot(facts) & (facts.shows > _hot_shows(facts))
    for group in (~is_hot & ~leaves, is_hot & ~leaves):
        lacking = facts.num_needed - int(np.count_nonzero(leaves))
        if lacking > 0:
            leaves[_first(np.flatnonzero(group), lacking, facts.last_pass, facts.scores)] = True
    return np.flatnonzero(leaves)


def choose_pass_length(facts: PassNeeds) -> PassLength:
    """Return the steps of the next pass, so that memory holds its rows and those of another one."""
    most = min(facts.pass_steps or MAX_PASS_STEPS, len(facts.step_rows))
    least = most if facts.pass_steps else 1
    half = facts.memory_rows // 2
    steps = next((n for n in range(most, least - 1, -1) if facts.step_rows[n - 1] <= half), 0)
    return PassLength(steps, 2 * facts.step_rows[max(steps, least) - 1])


def _may_be_hot(facts: MemoryRows) -> NDArray[np.bool_]:
    return (facts.scores >= facts.base_score) & (facts.idle_days <= HOT_DAYS)


def _hot_shows(facts: MemoryRows) -> float:
    """Return the lowest threshold above which at most `num_hot` rows are hot."""
    shows = facts.shows[_may_be_hot(facts)]
    if len(shows) <= facts.num_hot:
        return -1.0
    place = len(shows) - facts.num_hot - 1
    return float(np.partition(shows, place)[place])


def _first(rows: NDArray[np.int64], count: int, *orders: NDArray[np.generic]) -> NDArray[np.int64]:
    """Return the first `count` of ascending `rows` by `orders`, and by position in ties.

    Partitions take linear time; a sort of millions of rows takes a second."""
    if count >= len(rows) or not orders:
        return rows[:count]
    values = orders[0][rows]
    last = np.partition(values, count - 1)[count - 1]
    before = rows[values < last]
    tied = rows[values == last]
    return np.concatenate([before, _first(tied, count - len(before), *orders[1:])])
