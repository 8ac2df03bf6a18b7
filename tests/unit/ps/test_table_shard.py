"""A table's snapshots with its checkpoints: any earlier state of the table comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shards import rows_of

from moesaic.dist.checkpoint import Checkpoint, Saver, list_committed, list_snapshots
from moesaic.dist.state import State
from moesaic.dist.world import World
from moesaic.facts.job.table import TableConfig
from moesaic.policy.table_rows import choose_leaving
from moesaic.ps import table_shard
from moesaic.ps.snapshots import TableSnapshots
from moesaic.ps.stored_rows import StoredRows
from moesaic.ps.table import Table
from moesaic.ps.table_shard import TableShard
from moesaic.ps.tiers import TableTiers
from moesaic.testing.states import whole_shard

CONFIG = TableConfig(optimizer="adam", admit_count=2, evict_days=4, decay=1.0)


def make_table(drive: Path | None = None) -> Table:
    """Return an empty table; with a drive, most rows are on it."""
    table = Table(CONFIG, 6, seed=5, name="ads", capacity=5000)
    if drive is not None:
        TableTiers(table, drive, 2_520_000, choose_leaving, segment_bytes=100_000)
    return table


def train(table: Table, random: np.random.Generator, days: int = 1) -> None:
    """Push random gradients, and end days, so that rows come and go."""
    for _ in range(days):
        for _ in range(3):
            keys = random.integers(-1500, 1500, 400)
            grads = random.standard_normal((400, 6)).astype(np.float32)
            table.push(keys, grads, random.integers(0, 2, 400))
        table.end_day()


def content(table: Table) -> dict[str, Any]:
    """Return everything that training goes on from."""
    keys, _ = table.index.items()
    order = np.argsort(keys)
    candidates, counts = table.candidates.items()
    rows = zip(keys[order].tolist(), table.read(keys[order]), strict=True)
    return {
        "rows": {key: record.tobytes() for key, record in rows},
        "candidates": dict(zip(candidates.tolist(), counts.tolist(), strict=True)),
        "day": table.today,
    }


@pytest.mark.parametrize("place", ["memory", "little memory", "drive"])
def test_a_checkpoint_brings_the_table_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Training continues with the same bits; snapshots that no checkpoint needs are removed."""
    drive = tmp_path / "drive" if place == "drive" else None
    if place == "little memory":  # There is none for a copy.
        monkeypatch.setattr(table_shard, "free_memory_bytes", lambda: 0)
        monkeypatch.setattr(table_shard, "_CHUNK_ROWS", 50)
    checkpoints, tables = tmp_path / "checkpoints", tmp_path / "tables" / "ads"
    random, table = np.random.default_rng(0), make_table(drive)
    saver = Saver(checkpoints, World.solo(), keep=2)
    contents = dict[int, Any]()
    dense = torch.zeros(3)
    with TableSnapshots(
        tables, TableShard(table), 0, 1, lambda: list_snapshots(checkpoints, "table.")
    ) as snapshots:
        for step in range(6):
            train(table, random)
            state = State([whole_shard("dense", dense)], {}, {"table.": snapshots})
            saver.save(state, step, {})
            contents[step] = content(table)
            train(table, random)
            saver.wait()
    if drive is not None:
        assert table.stats().rows_in_memory < table.num_rows / 2
    newest, before = list_committed(checkpoints)
    assert len(contents[5]["candidates"]) > 50
    assert contents[5]["rows"].keys() - contents[4]["rows"].keys()
    assert contents[4]["rows"].keys() - contents[5]["rows"].keys(), "no row was evicted"
    for step, path in ((5, newest), (4, before)):
        again = make_table(drive)
        facts = Checkpoint.open(path).snapshots["table."]
        TableShard(again).restore(StoredRows.open_snapshot(tables, facts))
        assert content(again) == contents[step]
    first, second = make_table(), make_table(drive)
    for one in (first, second):
        TableShard(one).restore(StoredRows.open_snapshot(tables, facts), shard=0)
        train(one, np.random.default_rng(1))
    assert content(first) == content(second)
    changes = [
        rows_of(TableShard(one).copy_changes(everything=False).chunks) for one in (first, second)
    ]
    assert changes[0] == changes[1]
    assert len(changes[0]) < len(contents[4]["rows"])
    whole = TableShard(second).copy_changes(everything=True)
    assert rows_of(whole.chunks) == content(first)["rows"]
    numbers = {int(path.name[9:15]) for path in (tables / "shard-0").glob("snapshot-*")}
    assert numbers == {4, 5, 6}, "the checkpoint of 4 went only after snapshot 6"


def test_a_snapshot_has_the_changed_rows_alone(tmp_path: Path) -> None:
    random, table = np.random.default_rng(2), Table(TableConfig(), 4, capacity=5000)
    shard = TableShard(table)
    table.push(np.arange(3000), random.standard_normal((3000, 4)).astype(np.float32))
    (((keys, _),), removed) = all_changes(shard)
    assert (len(keys), len(removed)) == (3000, 0)
    table.push(np.arange(90, 100), np.ones((10, 4), np.float32))
    table.remove(np.arange(95, 200))
    table.push(np.arange(190, 200), np.ones((10, 4), np.float32))
    (((keys, records),), removed) = all_changes(shard)
    assert sorted(keys) == [*range(90, 95), *range(190, 200)]
    assert sorted(removed) == [*range(95, 190)]
    np.testing.assert_array_equal(records, table.read(keys))
    (((keys, _),), removed) = all_changes(shard)
    assert (len(keys), len(removed)) == (0, 0)
    changes = shard.copy_changes(everything=True)
    (((keys, records)),) = changes.chunks
    assert (len(keys), len(changes.removed)) == (table.num_rows, 0)
    np.testing.assert_array_equal(records, table.read(keys))


def all_changes(shard: TableShard) -> tuple[list[Any], list[int]]:
    """Return chunks and removed keys of the next snapshot."""
    changes = shard.copy_changes(everything=False)
    assert not changes.is_live
    return [*changes.chunks], changes.removed.tolist()
