"""TablePasses: rows are in memory before their step, with the bits of a table in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moesaic.base.errors import ConfigError, StoreError
from moesaic.facts.job.table import TableConfig
from moesaic.policy.table_rows import choose_leaving, choose_pass_length
from moesaic.ps import tiers
from moesaic.ps.drive_rows import DriveRows
from moesaic.ps.index import Int64s
from moesaic.ps.passes import Batches, PassStats, TablePasses
from moesaic.ps.table import Table
from moesaic.ps.tiers import TableTiers

KEYS, DIM, STEP_KEYS = 5000, 8, 150
HOST = 2_750_000


def batches(steps: int, seed: int = 0) -> list[Int64s]:
    """Return keys of steps; some are frequent, and a batch is empty."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(steps):
        frequent = rng.random(STEP_KEYS) < 0.3
        often = rng.integers(0, 50, STEP_KEYS)
        found.append(np.where(frequent, often, rng.integers(0, KEYS, STEP_KEYS)))
    found[steps // 2] = np.empty(0, np.int64)
    return found


def grads_of(keys: Int64s) -> NDArray[np.float32]:
    return np.random.default_rng(len(keys)).standard_normal((len(keys), DIM)).astype(np.float32)


class Pair:
    """A table in memory, and one with tiers, that take the same steps."""

    def __init__(self, directory: Path) -> None:
        self.plain, self.tiered = Table(TableConfig(), DIM), Table(TableConfig(), DIM)
        for keys in np.array_split(np.arange(KEYS), 10):
            self.push(keys)
        self.tiers = TableTiers(self.tiered, directory, HOST, choose_leaving, segment_bytes=100_000)

    def passes(self, keys: Iterator[Int64s] | list[Int64s], steps: int = 0) -> TablePasses:
        return TablePasses(self.tiers, keys, choose_pass_length, steps)

    def push(self, keys: Int64s) -> None:
        for table in (self.plain, self.tiered):
            table.push(keys, grads_of(keys))

    def step(self, keys: Int64s) -> None:
        """Take a step; no row is missing in memory."""
        locations = self.tiered.index.find(keys)
        assert (locations >= 0).all()
        assert np.array_equal(self.plain.pull(keys), self.tiered.pull(keys))
        self.push(keys)

    def pull_others(self) -> None:
        """Pull rows of no step, which takes memory."""
        for keys in np.array_split(np.arange(KEYS), 20):
            self.tiered.pull(keys)

    def check(self) -> None:
        """Compare all rows."""
        keys = np.sort(self.plain.index.items()[0])
        assert np.array_equal(keys, np.sort(self.tiered.index.items()[0]))
        assert np.array_equal(self.plain.read(keys), self.tiered.read(keys))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.tiers.close()


@pytest.mark.parametrize("pass_steps", [0, 1, 3])
def test_passes_change_no_bit(pair: Pair, monkeypatch: pytest.MonkeyPatch, pass_steps: int) -> None:
    monkeypatch.setattr(tiers, "_LEAVE_ROWS", 100)
    keys = batches(60)
    passes = pair.passes(iter(keys), pass_steps)
    stats = list[PassStats]()
    for one in keys:
        passes.begin_step()
        if not stats or passes.stats is not stats[-1]:
            assert passes.stats is not None
            stats.append(passes.stats)
        pair.step(one)
    with pytest.raises(ValueError, match="have had a step"):
        passes.begin_step()
    passes.close()
    pair.check()
    assert sum(one.steps for one in stats) == len(keys)
    assert [one.number for one in stats] == [*range(1, len(stats) + 1)]
    assert all(one.keys == one.hits + one.raised for one in stats)
    assert sum(one.raised for one in stats) > 1000
    assert max(one.memory_bytes for one in stats) <= HOST
    first = 0
    for one in stats:
        distinct = np.unique(np.concatenate(keys[first : first + one.steps]))
        assert one.keys == len(distinct)
        assert not pass_steps or one.steps == pass_steps
        first += one.steps


def test_new_keys_of_one_pass_stay_for_the_next(pair: Pair) -> None:
    new = np.arange(KEYS, KEYS + 200)
    passes = pair.passes([new, new, *batches(4)], 1)
    passes.begin_step()
    passes._scan.exception(60)
    passes._advance()  # The next pass begins to read while its keys have no rows.
    pair.push(new)
    passes.begin_step()
    pair.pull_others()
    pair.step(new)
    passes.close()
    pair.check()


def test_rows_of_passes_stay_while_others_are_pulled(pair: Pair) -> None:
    keys = batches(9)
    passes = pair.passes(keys, 3)
    for number, one in enumerate(keys):
        passes.begin_step()
        pair.step(one)
        if number % 4 == 1:
            pair.pull_others()
    passes.close()
    pair.check()


class Gate:
    """Reads of other threads end only when the gate is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.num_reads = 0
        read = DriveRows.read

        def gated(drive: DriveRows, locations: Int64s, segments: object = None) -> object:
            records = read(drive, locations, segments)  # type: ignore[arg-type]
            if threading.current_thread() is not threading.main_thread():
                self.num_reads += 1
                assert self.open.wait(60)
            return records

        monkeypatch.setattr(DriveRows, "read", gated)


def start_reads(pair: Pair, keys: list[Int64s], gate: Gate) -> tuple[TablePasses, Int64s]:
    """Take no step of the first pass; return passes whose second one is read, and keys of it."""
    gate.open.set()
    passes = pair.passes(keys, 4)
    passes.begin_pass()
    passes.end_pass()
    gate.open.clear()
    passes._start_reads()
    assert passes._coming is not None
    return passes, passes._coming.rows.below


def test_a_row_that_changes_while_it_is_read_is_not_stale(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [one for one in batches(9) if len(one)]
    gate = Gate(monkeypatch)
    passes, below = start_reads(pair, keys, gate)
    changed = below[:40]
    pair.push(changed)  # Reads these rows too, and changes them.
    pair.tiered.remove(changed[:10])
    pair.plain.remove(changed[:10])
    pair.tiers.pinned_pass = None  # Some of them go back to the drive with new bits.
    pair.tiers.make_room(pair.tiers.memory_rows)
    assert (pair.tiered.index.find(changed[10:]) < 0).all()
    pair.tiers.pinned_pass = pair.tiers.pass_number
    gate.open.set()
    passes.begin_pass()
    for one in keys[4:8]:
        pair.push(one)
    passes.close()
    pair.check()


def test_a_row_that_is_pulled_while_it_is_read_stays(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [one for one in batches(9) if len(one)]
    gate = Gate(monkeypatch)
    passes, below = start_reads(pair, keys, gate)
    pair.tiered.pull(below[:40])
    gate.open.set()
    passes.begin_pass()
    pair.pull_others()
    for one in keys[4:8]:
        pair.step(one)
    passes.close()
    pair.check()


def test_a_row_that_moves_while_it_is_read_is_not_read_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [one for one in batches(9) if len(one)]
    monkeypatch.setattr("moesaic.ps.passes.READ_ROWS", 50)
    monkeypatch.setattr(tiers, "_READ_AHEAD_SHARE", 1 << 30)  # One read at a time.
    gate = Gate(monkeypatch)
    passes, below = start_reads(pair, keys, gate)
    before, drive = pair.tiered.index.find(below), pair.tiers.drive
    with monkeypatch.context() as patch:
        patch.setattr(drive, "sparse_segments", lambda: [min(drive.segments)])
        for _ in range(2):
            pair.tiers.rewrite(3 * KEYS)  # Moves every row, some more than once.
    assert (pair.tiered.index.find(below) != before).all()
    gate.open.set()
    monkeypatch.setattr(DriveRows, "read", None)  # A pass has its function already.
    passes.begin_pass()
    assert gate.num_reads > 4
    monkeypatch.undo()
    for one in keys[4:8]:
        pair.step(one)
    passes.close()
    pair.check()


def test_batches_come_in_order_over_any_number_of_passes() -> None:
    source = (np.array([number]) for number in range(100_000))
    coming, found = Batches(source), list[Int64s]()
    while (batch := coming.next()) is not None:
        after = coming.next()
        found.append(batch)
        coming.put_back([] if after is None else [after])
    assert np.array_equal(np.concatenate(found), np.arange(100_000))


def test_an_error_of_the_batches_reaches_training(pair: Pair) -> None:
    def failing() -> Iterator[Int64s]:
        yield from keys[:2]
        raise RuntimeError("no more data")

    keys = batches(6)
    passes = pair.passes(failing(), 2)
    for one in keys[:1]:
        passes.begin_step()
        pair.step(one)
    passes._scan.exception(60)
    with pytest.raises(RuntimeError, match="no more data"):
        passes.begin_step()
    passes.close()
    pair.check()


def test_an_error_of_the_drive_reaches_training(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise StoreError("the drive fails")

    passes = pair.passes(batches(6), 2)
    with monkeypatch.context() as patch:
        patch.setattr(DriveRows, "read", failing)
        with pytest.raises(StoreError, match="the drive fails"):
            passes.begin_step()
    passes.close()
    pair.check()


def test_a_budget_below_two_passes_is_refused(pair: Pair) -> None:
    wide = [np.arange(KEYS)]
    for steps, words in ((0, "a step of two passes"), (1, "the steps of two passes")):
        passes = pair.passes(wide, steps)
        expected = rf"table.host = .* holds \d+ rows .* {words} need {2 * KEYS}: raise table.host"
        with pytest.raises(ConfigError, match=expected):
            passes.begin_step()
        passes.close()
    pair.check()
