"""Which keys have a row: admission, eviction, tiers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from moesaic.base.errors import StoreError
from moesaic.facts.job.table import RecordLayout, TableConfig
from moesaic.ps.index import ABSENT
from moesaic.ps.records import (
    CHANGED_SINCE_SNAPSHOT,
    CHANGED_SINCE_WRITE,
    RecordArena,
)
from moesaic.ps.table import Table

DIM = 4


def push(table: Table, keys: list[int], clicks: list[int] | None = None) -> None:
    table.push(keys, np.ones((len(keys), DIM)), clicks)


def has_row(table: Table, keys: list[int]) -> list[bool]:
    return (table.index.find(np.array(keys)) != ABSENT).tolist()


def test_a_key_gets_a_row_at_its_count() -> None:
    table = Table(TableConfig(optimizer="sgd", lr=1.0, admit_count=3), DIM)
    first = table.pull([1, 2])
    push(table, [1, 2])
    push(table, [1])
    assert has_row(table, [1, 2]) == [False, False]
    assert (table.pull([1, 2]) == first).all()
    assert table.stats().candidates == 2
    push(table, [2, 1])  # This gradient of key 1 counts, the earlier ones do not.
    assert has_row(table, [1, 2]) == [True, False]
    assert (table.pull([1, 2]) == first - np.float32([[1], [0]])).all()
    push(table, [2, 2, 2])
    assert (table.pull([2]) == first[1] - np.float32(3)).all()
    assert (table.stats().rows, table.stats().admitted, table.stats().candidates) == (2, 2, 0)
    _, scores, _ = table.ages()
    assert sorted(scores.tolist()) == pytest.approx([0.3, 0.5])


def test_a_key_gets_a_row_at_its_score() -> None:
    table = Table(TableConfig(admit_score=0.25, nonclick_weight=0.1, click_weight=1.0), DIM)
    push(table, [1, 1, 2], [0, 0, 1])
    assert has_row(table, [1, 2]) == [False, True]
    push(table, [1])
    assert has_row(table, [1]) == [True]


def test_counts_of_keys_without_a_row_decay_and_end() -> None:
    table = Table(TableConfig(admit_count=4, decay=0.8), DIM)
    push(table, [1, 2, 2, 3, 3, 3])
    table.end_day()  # Counts are 0.8, 1.6 and 2.4.
    assert table.stats().candidates == 2
    push(table, [3, 3])
    assert has_row(table, [3]) == [True]
    table.end_day()
    push(table, [2, 2])
    assert has_row(table, [2]) == [False]
    for _ in range(10):
        table.end_day()
    assert table.stats().candidates == 0


def test_rows_are_evicted_by_score() -> None:
    table = Table(TableConfig(decay=0.5, evict_score=0.11), DIM)
    push(table, [1, 2, 2, 2, 3], [1, 0, 0, 0, 0])
    assert table.end_day() == 1  # Scores are 0.5, 0.15 and 0.05.
    assert has_row(table, [1, 2, 3]) == [True, True, False]
    assert table.end_day() == 1
    assert has_row(table, [1, 2]) == [True, False]
    assert (table.stats().evicted, table.stats().rows, table.stats().day) == (2, 1, 2)


def test_rows_are_evicted_after_idle_days() -> None:
    table = Table(TableConfig(evict_days=2), DIM)
    push(table, [1, 2])
    for day in range(4):
        push(table, [2])
        table.end_day()
        assert has_row(table, [1, 2]) == [day < 2, True]


def test_rows_with_the_lowest_scores_are_evicted_beyond_a_number() -> None:
    table = Table(TableConfig(max_rows=3), DIM)
    push(table, [1, 2, 2, 3, 3, 3, 4, 4, 5])
    assert table.end_day() == 2
    assert has_row(table, [1, 2, 3, 4, 5]) == [False, True, True, True, False]


def test_rows_have_scores_and_idle_days() -> None:
    table = Table(TableConfig(), DIM)
    push(table, [1, 2, 3], [0, 1, 0])
    table.end_day()
    push(table, [3])
    table.end_day()
    keys, scores, idle_days = table.ages()
    by_key = dict(zip(keys.tolist(), zip(scores, idle_days, strict=True), strict=True))
    assert by_key[1] == (pytest.approx(0.1 * 0.98**2), 1)
    assert by_key[2] == (pytest.approx(0.98**2), 1)
    assert by_key[3] == (pytest.approx((0.1 * 0.98 + 0.1) * 0.98), 0)


def test_a_listener_sees_evicted_keys_which_start_anew() -> None:
    table = Table(TableConfig(max_rows=2), DIM)
    push(table, [1, 2, 3], [1, 0, 1])
    removed = []
    table.on_remove = removed.append
    assert table.end_day() == 1
    assert [keys.tolist() for keys in removed] == [[2]]
    assert (table.pull([2]) == Table(TableConfig(), DIM).pull([2])).all()


def test_a_day_without_evictions_reads_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(TableConfig(), DIM)
    push(table, [1])
    monkeypatch.delattr(Table, "ages")
    assert table.end_day() == 0
    assert table.today == 1


def test_records_move_to_another_table() -> None:
    table = Table(TableConfig(optimizer="adam"), DIM)
    for _ in range(3):
        push(table, [1, 2, 2, 3])
    keys = np.array([1, 2, 3])
    other = Table(TableConfig(optimizer="adam"), DIM)
    other.load(keys, table.read(keys))
    for one in (table, other):
        push(one, [2, 3])
    assert (table.read(keys) == other.read(keys)).all()


def test_changed_records_have_both_flags() -> None:
    table = Table(TableConfig(), DIM)
    push(table, [1, 2])
    rows = table.index.find(np.array([1, 2]))
    assert (table.arena.changed[rows] == CHANGED_SINCE_WRITE | CHANGED_SINCE_SNAPSHOT).all()
    table.arena.changed[rows] = 0
    push(table, [2])
    assert (table.arena.changed[rows] > 0).tolist() == [False, True]


def test_rows_of_an_arena_are_used_again() -> None:
    layout = RecordLayout(DIM, "float32", "sgd")
    assert (layout.record_bytes, RecordLayout(3, "float64", "adam").record_bytes) == (28, 88)
    arena = RecordArena(layout, capacity=5)
    rows = arena.allocate(4)
    assert sorted(rows.tolist()) == [0, 1, 2, 3]
    arena.free(rows[1:3])
    assert (len(arena), arena.num_free) == (2, 3)
    assert sorted(arena.allocate(3).tolist()) == [1, 2, 4]
    with pytest.raises(StoreError, match="1 more rows do not fit into memory for 5 rows, 5 of"):
        arena.allocate(1)


class DictTier:
    """Tier that keeps records in a dict, and demotes any row that is not pinned."""

    def __init__(self, table: Table) -> None:
        self.table, self.records, self.raised = table, dict[int, np.ndarray](), 0
        table.tier = self

    def raise_rows(self, keys: np.ndarray) -> None:
        locations = self.table.index.find(keys)
        assert len(set(keys.tolist())) == len(keys)
        assert ((locations < 0) & (locations != ABSENT)).all()
        self.raised += len(keys)
        if len(keys) > self.table.arena.num_free:
            self.make_room(len(keys))
        rows = self.table.arena.allocate(len(keys))
        self.table.arena.records[rows] = [self.records.pop(int(one)) for one in locations]
        self.table.index.set(keys, rows)

    def make_room(self, count: int) -> None:
        keys, rows = self.table.index.items()
        free = (rows >= 0) & ~np.isin(rows, self.table.pinned_rows())
        keys, rows = keys[free][: count + 2], rows[free][: count + 2]
        start = -1 - len(self.records) - self.raised * 1000
        below = np.arange(start, start - len(rows), -1)
        for location, row in zip(below.tolist(), rows.tolist(), strict=True):
            self.records[location] = self.table.arena.records[row].copy()
        self.table.arena.free(rows)
        self.table.index.set(keys, below)

    def fit(self) -> None:
        pass

    def read(self, locations: np.ndarray) -> np.ndarray:
        return np.array([self.records[int(one)] for one in locations], np.uint8)

    def remove(self, locations: np.ndarray) -> None:
        for location in locations[locations < 0].tolist():
            del self.records[location]

    def take_changes(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return iter(())


def test_rows_below_memory_change_no_bit() -> None:
    config = TableConfig(evict_score=0.12, decay=0.9)
    table, small = Table(config, DIM), Table(config, DIM, capacity=20)
    tier = DictTier(small)
    draw = np.random.default_rng(0)
    for step in range(40):
        keys = np.minimum(draw.zipf(1.2, 14), 80)
        grads = draw.standard_normal((7, DIM))
        for one in (table, small):
            lookup = one.look_up(keys, np.arange(0, 15, 2), training=True)
            one.pull([99])
            lookup.push(grads, keys[::2] % 2)
            one.step()
            if step % 10 == 9:
                one.end_day()
        assert (table.index.items()[0] == small.index.items()[0]).all()
        every = table.index.items()[0]
        assert (table.read(every) == small.read(every)).all()
        some = draw.permutation(100)[:15]
        assert (table.pull(some) == small.pull(some)).all()
    assert tier.raised > 100
    assert table.stats().evicted == small.stats().evicted > 0
    assert small.stats().rows_in_memory <= 20 < small.num_rows
