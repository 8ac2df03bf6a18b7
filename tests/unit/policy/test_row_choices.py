"""Rows that leave memory, against a sort; the length of a pass."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.facts.table_rows import MemoryRows, PassLength, PassNeeds
from moesaic.policy.table_rows import (
    HOT_DAYS,
    MAX_PASS_STEPS,
    choose_leaving,
    choose_pass_length,
)


def memory_rows(seed: int, **changes: object) -> MemoryRows:
    """Return facts with many ties."""
    rng = np.random.default_rng(seed)
    count = 200
    facts = MemoryRows(
        idle_days=rng.integers(0, 6, count, np.int32),
        last_pass=rng.integers(0, 4, count, np.int32),
        shows=rng.integers(0, 9, count).astype(np.float32),
        scores=rng.integers(0, 9, count).astype(np.float32),
        num_needed=int(rng.integers(0, count + 20)),
        demote_days=int(rng.integers(0, 5)),
        base_score=float(rng.integers(0, 5)),
        num_hot=int(rng.integers(0, count)),
    )
    return facts._replace(**changes)


def slow_leaving(facts: MemoryRows) -> list[int]:
    """Return the rows that leave, by one sort."""
    rows = range(len(facts.scores))
    old = [n for n in rows if facts.demote_days and facts.idle_days[n] > facts.demote_days]
    able = {n for n in rows if facts.scores[n] >= facts.base_score and facts.idle_days[n] <= 1}
    threshold = next(
        show for show in range(-1, 10) if sum(facts.shows[n] > show for n in able) <= facts.num_hot
    )
    hot = {n for n in able if facts.shows[n] > threshold}
    rest = sorted(
        set(rows) - set(old), key=lambda n: (n in hot, facts.last_pass[n], facts.scores[n], n)
    )
    return sorted(old + rest[: max(facts.num_needed - len(old), 0)])


@pytest.mark.parametrize("seed", range(40))
def test_rows_leave_in_the_order_of_a_sort(seed: int) -> None:
    facts = memory_rows(seed)
    leaving = choose_leaving(facts)
    assert leaving.tolist() == slow_leaving(facts)
    again = choose_leaving(facts)
    assert again.tolist() == leaving.tolist()


def test_hot_rows_leave_last() -> None:
    facts = memory_rows(
        0, num_needed=180, demote_days=0, base_score=0.0, num_hot=20,
        idle_days=np.full(200, HOT_DAYS, np.int32), shows=np.arange(200, dtype=np.float32),
    )  # fmt: skip
    leaving = choose_leaving(facts)
    assert leaving.tolist() == list(range(180))
    idle = facts._replace(idle_days=np.full(200, HOT_DAYS + 1, np.int32), num_needed=50)
    assert choose_leaving(idle).tolist() != list(range(50))


def test_idle_rows_leave_though_there_is_room() -> None:
    facts = memory_rows(1, num_needed=0, demote_days=3)
    assert choose_leaving(facts).tolist() == np.flatnonzero(facts.idle_days > 3).tolist()
    assert len(choose_leaving(facts._replace(demote_days=0))) == 0


@pytest.mark.parametrize(
    ("needs", "length"),
    [
        (PassNeeds(100, (10, 20, 50, 51, 51), 0), PassLength(3, 100)),
        (PassNeeds(100, (10, 20), 0), PassLength(2, 40)),
        (PassNeeds(1000, tuple(range(99)), 0), PassLength(MAX_PASS_STEPS, 2 * MAX_PASS_STEPS - 2)),
        (PassNeeds(100, (51, 60), 0), PassLength(0, 102)),
        (PassNeeds(100, (10, 20, 50), 3), PassLength(3, 100)),
        (PassNeeds(100, (10, 20, 51), 3), PassLength(0, 102)),
        (PassNeeds(100, (10, 20), 3), PassLength(2, 40)),
        (PassNeeds(0, (0,), 0), PassLength(1, 0)),
    ],
)
def test_memory_holds_two_passes(needs: PassNeeds, length: PassLength) -> None:
    assert choose_pass_length(needs) == length
