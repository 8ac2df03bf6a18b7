"""TableTiers: a table with a small budget of memory equals one in memory, bit for bit."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from numpy.typing import NDArray

from moesaic.base import direct_io
from moesaic.base.errors import ConfigError, StoreError
from moesaic.facts.job.table import TableConfig
from moesaic.facts.table_rows import MemoryRows
from moesaic.policy.table_rows import choose_leaving
from moesaic.ps.drive_rows import DriveRows
from moesaic.ps.segments import SegmentLayout
from moesaic.ps.table import Table
from moesaic.ps.tiers import TableTiers

KEYS, DIM = 10_000, 8
BUFFERS = 2_300_000
"""Bytes of buffers, more or less."""


def small_tiers(table: Table, directory: Path, rows: int = 2600) -> TableTiers:
    """Return tiers of a new table that hold so many rows at most, and fewer as the index grows."""
    host = BUFFERS + 130 * rows
    return TableTiers(table, directory, host, choose_leaving, segment_bytes=300_000)


def draw_keys(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Return keys, some of which are frequent."""
    frequent = rng.random(count) < 0.3
    return np.where(frequent, rng.integers(0, KEYS // 50, count), rng.integers(0, KEYS, count))


def assert_equal(one: Table, other: Table) -> None:
    keys, others = (np.sort(table.index.items()[0]) for table in (one, other))
    assert np.array_equal(keys, others)
    assert np.array_equal(one.read(keys), other.read(keys))


@pytest.fixture
def table() -> Table:
    return Table(TableConfig(), DIM)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory in memory if there is one, as only some tests need a drive."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with TemporaryDirectory(dir=memory) as name:
        yield Path(name)


@pytest.fixture
def tiers(table: Table, directory: Path) -> Iterator[TableTiers]:
    tiers = small_tiers(table, directory / "rows")
    yield tiers
    tiers.close()


EVICTING = TableConfig(optimizer="adam", admit_count=2, evict_score=0.05, decay=0.5, max_rows=4000)
CONFIGS = [(TableConfig(demote_days=1, ssd="here"), 2600, 9), (EVICTING, 4200, 2)]


@pytest.mark.parametrize(("config", "rows", "part"), CONFIGS, ids=["rowwise-adagrad", "adam"])
def test_a_small_budget_changes_no_bit(
    directory: Path, monkeypatch: pytest.MonkeyPatch, config: TableConfig, rows: int, part: int
) -> None:
    monkeypatch.setattr("moesaic.ps.tiers._LEAVE_ROWS", 100)
    plain, tiered = Table(config, DIM), Table(config, DIM)
    tiers = small_tiers(tiered, directory, rows)
    rng = np.random.default_rng(1)
    for step in range(200):
        keys = draw_keys(rng, 300)
        pulled = plain.pull(keys)
        assert np.array_equal(pulled, tiered.pull(keys))
        grads = rng.standard_normal((300, DIM)) + pulled
        clicks = rng.integers(0, 2, 300)
        for table in (plain, tiered):
            table.push(keys, grads.astype(np.float32), clicks)
            if step % 50 == 49:
                table.end_day()
        tiers.fit()
        assert tiers.stats().memory_bytes <= tiers.host_bytes
    assert_equal(plain, tiered)
    stats = tiers.stats()
    assert stats.memory_rows < plain.num_rows / part
    assert stats.raised > 5000
    assert stats.rewritten > 0
    tiers.close()


@pytest.mark.parametrize("share", [0.6, 0.95])
def test_a_step_may_need_most_of_the_memory(
    directory: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Rows are read in several parts, and none of them demotes another."""
    monkeypatch.setattr("moesaic.ps.tiers.READ_ROWS", 100)
    plain, tiered = Table(TableConfig(), DIM), Table(TableConfig(), DIM)
    tiers = small_tiers(tiered, directory, 4200)
    for table in (plain, tiered):
        fill(table)
    rng = np.random.default_rng(0)
    for _ in range(3):
        keys = rng.permutation(KEYS)[: int(share * tiers.memory_rows)]
        offsets = np.arange(len(keys) + 1)
        for table in (plain, tiered):
            lookup = table.look_up(keys, offsets, training=True)
            assert np.array_equal(lookup.sums, plain.pull(keys))
            lookup.push(2 * lookup.sums)
        for table in (plain, tiered):
            table.step()
    assert_equal(plain, tiered)
    with pytest.raises(StoreError, match="lower the batch; in a loop of your own, call step"):
        tiered.look_up(np.arange(KEYS), np.arange(KEYS + 1), training=True)
    tiers.close()


def fill(table: Table, count: int = KEYS) -> None:
    """Make rows in several steps."""
    for keys in np.array_split(np.arange(count), 25):
        table.push(keys, np.ones((len(keys), DIM), np.float32))


def pull_all(table: Table, count: int = KEYS) -> None:
    """Pull rows in several steps."""
    for keys in np.array_split(np.arange(count), 25):
        table.pull(keys)


def test_rows_that_did_not_change_are_dropped(table: Table, tiers: TableTiers) -> None:
    fill(table)
    pull_all(table)
    before = tiers.stats()
    for _ in range(3):
        pull_all(table)
    after = tiers.stats()
    assert after.demoted - before.demoted >= 3 * KEYS
    assert after.written - before.written <= before.memory_rows


def test_segments_with_few_rows_in_use_are_rewritten(table: Table, tiers: TableTiers) -> None:
    fill(table)
    for seed in range(20):
        keys = np.random.default_rng(seed).permutation(KEYS)[:3000]
        for part in np.array_split(keys, 5):
            table.push(part, np.ones((len(part), DIM), np.float32))
    live = tiers.drive.num_rows * (tiers.drive.layout.row_bytes + 1)
    assert tiers.stats().rewritten > 0
    assert tiers.drive.num_bytes < 3 * live


def test_files_have_no_names(table: Table, tiers: TableTiers) -> None:
    fill(table)
    assert tiers.drive.num_bytes > 500_000
    assert not [*tiers.drive.directory.iterdir()]


def test_removed_rows_are_forgotten(table: Table, tiers: TableTiers) -> None:
    fill(table)
    pull_all(table, KEYS // 2)
    table.remove(np.arange(0, KEYS, 2))
    plain = Table(TableConfig(), DIM)
    fill(plain)
    plain.remove(np.arange(0, KEYS, 2))
    for one in (plain, table):  # New rows of removed keys begin anew.
        one.push(np.arange(600), np.ones((600, DIM), np.float32))
    assert_equal(plain, table)
    table.remove(table.index.items()[0])
    assert tiers.drive.num_rows == len(table.arena) == 0


def rewrite_all(tiers: TableTiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewrite every segment."""
    tiers.drive._close_writer()
    old = [*tiers.drive.segments]
    with monkeypatch.context() as patch:
        patch.setattr(
            tiers.drive, "sparse_segments", lambda: [n for n in old if n in tiers.drive.segments]
        )
        tiers.rewrite(10 * KEYS)
    assert not {*old} & {*tiers.drive.segments}


def test_changes_since_a_snapshot_survive_the_drive(
    table: Table, tiers: TableTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(table)
    below = np.flatnonzero(table.index.find(np.arange(KEYS)) < 0)
    found = [*tiers.take_changes()]
    assert np.array_equal(np.sort(np.concatenate([keys for keys, _ in found])), below)
    for keys, records in found:
        assert np.array_equal(records, table.read(keys))
    assert not [*tiers.take_changes()]
    table.arena.changed[: tiers.memory_rows] &= ~np.uint8(2)
    table.push(below[:10], np.ones((10, DIM), np.float32))
    tiers.raise_rows(np.flatnonzero(table.index.find(np.arange(KEYS)) < 0)[:500])
    tiers.make_room(tiers.memory_rows)
    rewrite_all(tiers, monkeypatch)
    changed = np.concatenate([keys for keys, _ in tiers.take_changes()])
    assert np.array_equal(np.sort(changed), below[:10])


def test_the_index_takes_memory_from_rows(table: Table, tiers: TableTiers) -> None:
    plain = Table(TableConfig(), DIM)
    before = tiers.memory_rows
    for count in (KEYS // 2, KEYS):
        num_used = table.arena.extent
        fill(plain, count)
        fill(table, count)
        if count < KEYS:
            pull_all(table, 2000)  # Rows in memory have copies when the index grows again.
    assert tiers.memory_rows < before - 1000
    table.index._grow()
    tiers.make_room(10)
    assert table.arena.extent > tiers.memory_rows
    tiers.fit()
    assert table.arena.extent <= tiers.memory_rows < num_used
    above = table.arena.records[tiers.memory_rows + 100 : num_used]
    assert len(above)
    assert not above.any()  # The system took these pages back.
    pull_all(table)
    assert_equal(plain, table)
    table.remove(table.index.items()[0])
    assert tiers.drive.num_rows == 0


def test_a_choice_gets_the_rows_that_may_leave(table: Table, tmp_path: Path) -> None:
    asked: list[MemoryRows] = []

    def choose(facts: MemoryRows) -> np.ndarray:
        asked.append(facts)
        return choose_leaving(facts)

    tiers = TableTiers(table, tmp_path, BUFFERS + 300_000, choose)
    fill(table, 2000)
    table.push(np.arange(5), np.ones((5, DIM), np.float32), np.ones(5))
    table.end_day()
    table.look_up(np.arange(1000), np.arange(1001), training=True)
    tiers.make_room(tiers.memory_rows - 1000)
    (facts,) = asked
    assert len(facts.scores) == 1000
    assert facts.num_needed == 1000
    assert set(facts.idle_days) == {1}
    assert np.allclose(facts.scores, 0.1 * 0.98)
    assert (table.index.find(np.arange(1000)) >= 0).all()
    tiers.close()


def test_idle_rows_leave_at_the_end_of_a_day(tmp_path: Path) -> None:
    table = Table(TableConfig(ssd="here", demote_days=1), DIM)
    tiers = small_tiers(table, tmp_path)
    keys = np.arange(100)
    table.push(keys, np.ones((100, DIM), np.float32))
    for day in range(3):
        table.push(keys[:10], np.ones((10, DIM), np.float32))
        assert (table.index.find(keys) < 0).sum() == (90 if day == 2 else 0)
        table.end_day()
    tiers.close()


def test_a_step_beyond_the_budget_is_refused(table: Table, tiers: TableTiers) -> None:
    fill(table)
    plain = Table(TableConfig(), DIM)
    fill(plain)
    offsets = np.arange(KEYS // 2 + 1)
    with pytest.raises(StoreError, match=r"table.host = .* holds \d+ rows .* raise table.host to"):
        table.look_up(offsets[:-1], offsets, training=True)
    table.step()
    assert_equal(plain, table)


def test_a_drive_that_takes_no_files_is_refused(table: Table, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"table.ssd = '.*file' cannot be written .*: give a"):
        small_tiers(table, tmp_path / "file")


def test_a_budget_without_rows_is_refused(table: Table, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'table.host = "976.6 KiB" holds no rows.*need [2-9]'):
        TableTiers(table, tmp_path, 1_000_000, choose_leaving)


def test_a_full_drive_loses_no_row(
    table: Table, tiers: TableTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(table)
    plain = Table(TableConfig(), DIM)
    fill(plain)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    keys, grads = np.arange(500), np.ones((500, DIM), np.float32)
    table.push(keys, grads)
    with monkeypatch.context() as patch:
        patch.setattr(direct_io, "write_at", full)
        with pytest.raises(StoreError, match=r"No space left on device\): make room"):
            pull_all(table)
    plain.push(keys, grads)
    for one in (plain, table):
        one.push(keys, grads)
    assert_equal(plain, table)


def test_a_flipped_bit_is_found(table: Table, tiers: TableTiers) -> None:
    fill(table)
    segment = tiers.drive.segments[0]
    with Path(f"/proc/self/fd/{segment.file.fileno()}").open("r+b") as file:
        file.seek(3 * tiers.drive.layout.block_bytes + 1000)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(StoreError, match=f"at byte {3 * 4096} differs"):
        pull_all(table)


@pytest.mark.parametrize("record_bytes", [12, 300, 5000])
def test_rows_are_read_from_many_segments(tmp_path: Path, record_bytes: int) -> None:
    layout = SegmentLayout(record_bytes=record_bytes)
    drive = DriveRows(tmp_path, layout, buffer_bytes=0, segment_bytes=30_000)
    rng = np.random.default_rng(0)
    records = rng.integers(0, 256, (500, record_bytes), np.uint8)
    locations = np.concatenate(
        [drive.append(part, records[part]) for part in np.array_split(np.arange(500), 7)]
    )
    assert (locations < 0).all()
    assert len(drive.segments) > 1 or record_bytes == 12
    assert not drive.sparse_segments()
    drive.forget(locations[10:])
    assert drive.sparse_segments() == [one for one in drive.segments if one != drive._newest]
    order = rng.permutation(500)
    assert np.array_equal(drive.read(locations[order]), records[order])
    for number in drive.segments:
        for keys, places, found in drive.scan(number):
            assert np.array_equal(locations[keys], places)
            assert np.array_equal(records[keys], found)
    drive.close()
