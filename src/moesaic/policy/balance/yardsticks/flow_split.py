"""Rows shifted between the places of experts until no rank has more than it must, compiled.

X experts that have copies, P places of theirs (homes and copies), D ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from moesaic.facts.balance import Ints, Setting
from moesaic.policy.balance.compiled import compiled


class Places(NamedTuple):
    """Where experts that have copies can be computed."""

    experts: Ints
    """Those, [X]."""
    of: Ints
    """The first place of each, which is its home; one number more, [X + 1]."""
    expert: Ints
    """Of each place, counted among those that have copies, [P]."""
    rank: Ints
    """Of each place, [P]."""
    at: Ints
    """Where places of each rank begin in `by_rank`; one number more, [D + 1]."""
    by_rank: Ints
    """Places, rank by rank, [P]."""

    @classmethod
    def of_copies(cls, copies: Ints, setting: Setting) -> Places:
        """Of copies (expert, rank) in that order."""
        experts, first, number = np.unique(copies[:, 0], return_index=True, return_counts=True)
        rank = np.insert(copies[:, 1], first, setting.homes[experts])
        return cls(
            experts, np.append(0, np.cumsum(number + 1)),
            np.repeat(np.arange(len(experts)), number + 1), rank,
            np.append(0, np.cumsum(np.bincount(rank, minlength=setting.ranks))),
            np.argsort(rank, kind="stable"),
        )  # fmt: skip


def least(counts_XD: Any, elsewhere: Ints, places: Places) -> Ints:
    """Rows of each place, [P], with which the busiest rank has the least, given what ranks have of
    experts without copies."""
    target = -(-(int(counts_XD.sum()) + int(elsewhere.sum())) // len(elsewhere))
    start = _own(counts_XD, places)
    rows, needed = _shifted(start.copy(), elsewhere, places, target)
    if needed > target:  # Once more, so that nothing is shifted that may stay.
        rows, _ = _shifted(start, elsewhere, places, needed)
    found: Ints = rows
    return found


@compiled
def _own(counts_XD: Any, places: Places) -> Any:
    """Of each place, where ranks with copies compute their own rows."""
    rows = np.zeros(len(places.rank), np.int64)
    for expert in range(len(places.experts)):
        home = places.of[expert]
        rows[home] = counts_XD[expert].sum()
        for place in range(home + 1, places.of[expert + 1]):
            rows[place] = counts_XD[expert, places.rank[place]]
            rows[home] -= rows[place]
    return rows


@compiled
def _shifted(rows: Ints, elsewhere: Ints, places: Places, target: int) -> tuple[Any, int]:
    """Rows of places, and the least that the busiest rank can have of them from `target` up.

    Rows go along chains of ranks, of which each takes some of one expert and hands on as many of
    another, to a rank that has less than the target. Where no chain leads to one, all that the
    ranks on the way have must stay among them: the busiest of these has their mean at least, and
    that is the target from then on. So it is never above what is possible, and reached at last.
    """
    load = elsewhere.copy()
    for place in range(len(rows)):
        load[places.rank[place]] += rows[place]
    search = (
        np.zeros(len(load), np.int64), np.zeros(len(places.experts), np.int64),
        np.empty(len(load), np.int64), np.empty(len(load), np.int64),
        np.empty(len(load), np.int64),
    )  # fmt: skip
    queue, leaves, gets = search[2:]
    turn = 0
    for rank in range(len(load)):
        while load[rank] > target:
            turn += 1
            reached, end = _chain(rows, load, places, target, rank, turn, search)
            if end < 0:
                among = 0
                for at in range(reached):
                    among += load[queue[at]]
                target = -(-among // reached)
                continue
            number = min(load[rank] - target, target - load[end])
            at = end
            while at != rank:
                number = min(number, rows[leaves[at]])
                at = places.rank[leaves[at]]
            load[rank] -= number
            load[end] += number
            while end != rank:
                rows[leaves[end]] -= number
                rows[gets[end]] += number
                end = places.rank[leaves[end]]
    return rows, target


@compiled
def _chain(
    rows: Ints, load: Ints, places: Places, target: int, first: int, turn: int, search: Any
) -> tuple[int, int]:
    """How many ranks rows of `first` can get to, and the nearest that has room, or -1; for each
    rank on the way, the places that an expert's rows leave and get to."""
    seen, seen_X, queue, leaves, gets = search
    seen[first], queue[0] = turn, first
    at, reached = 0, 1
    while at < reached:
        rank = queue[at]
        at += 1
        for one in places.by_rank[places.at[rank] : places.at[rank + 1]]:
            expert = places.expert[one]
            if rows[one] == 0 or seen_X[expert] == turn:
                continue
            seen_X[expert] = turn
            for other in range(places.of[expert], places.of[expert + 1]):
                to = places.rank[other]
                if seen[to] == turn:
                    continue
                seen[to], queue[reached] = turn, to
                leaves[to], gets[to] = one, other
                reached += 1
                if load[to] < target:
                    return reached, to
    return reached, -1


@compiled
def taken(counts_XD: Any, rows: Ints, places: Places) -> Any:
    """(expert, source, target, rows) of every copy: its own rank's rows first, then what is left of
    ranks in their order; `rows` are those of places, and what no copy takes is the home's."""
    size = 2 * len(rows) + counts_XD.size
    found, at = np.empty((size, 4), np.int64), 0
    for expert in range(len(places.experts)):
        left, home, end = counts_XD[expert].copy(), places.of[expert], places.of[expert + 1]
        rest = rows[home:end].copy()
        for turn in range(len(rest)):
            rank = places.rank[home + turn]
            own = min(left[rank], rest[turn])
            left[rank] -= own
            rest[turn] -= own
            if turn > 0 and own > 0:
                found[at, 0], found[at, 1] = places.experts[expert], rank
                found[at, 2], found[at, 3] = rank, own
                at += 1
        source = 0
        for turn in range(1, len(rest)):
            while rest[turn] > 0:
                part = min(left[source], rest[turn])
                if part == 0:
                    source += 1
                    continue
                left[source] -= part
                rest[turn] -= part
                found[at, 0], found[at, 1] = places.experts[expert], source
                found[at, 2], found[at, 3] = places.rank[home + turn], part
                at += 1
    return found[:at].copy()
