"""Snapshots of a table: incremental ones equal full ones, and no failure loses the last."""

from __future__ import annotations

import errno
import json
import os
import random as python_random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from shards import LAYOUT, DictShard, Facts, rows_of

from moesaic.base import direct_io
from moesaic.base.errors import StoreError
from moesaic.ps.snapshots import TableSnapshots
from moesaic.ps.stored_rows import StoredRows, export_rows


def owned_by(rank: int, ranks: int) -> Callable[[NDArray[np.int64]], NDArray[np.bool_]]:
    return lambda keys: keys % ranks == rank


class Ranks:
    """Shards of one table on several ranks, and their checkpoints."""

    def __init__(self, directory: Path, size: int, kept: list[Facts]) -> None:
        self.directory, self.size, self.kept = directory, size, kept
        self.shards = [DictShard() for _ in range(size)]
        self.snapshots = [
            TableSnapshots(directory, shard, rank, size, lambda: kept)
            for rank, shard in enumerate(self.shards)
        ]

    def change(self, random: np.random.Generator, count: int) -> None:
        """Change random keys on their owners."""
        whole = DictShard()
        whole.change(random, count, keys=600)
        for rank, shard in enumerate(self.shards):
            keys = np.array([key for key in whole.rows if key % self.size == rank], np.int64)
            shard.put(keys, whole._records(keys))
            shard.remove(key for key in random.integers(0, 600, count // 4))

    def save(self, step: int, keep: int = 2) -> Facts:
        """Make a checkpoint, after which the newest `keep` are kept."""
        waits = [one.begin(step) for one in self.snapshots]
        facts = {str(rank): wait() for rank, wait in enumerate(waits)}
        self.kept.append(facts)
        del self.kept[:-keep]
        return facts

    def restore(self, facts: Facts) -> None:
        """Restore all shards."""
        stored = StoredRows.open_snapshot(self.directory, facts, LAYOUT)
        for rank, (shard, snapshots) in enumerate(zip(self.shards, self.snapshots, strict=True)):
            shard.restore(stored.runs(owned_by(rank, self.size)))
            snapshots.resume(facts)

    def rows(self) -> dict[int, bytes]:
        """Return the rows of all shards."""
        return {key: record for shard in self.shards for key, record in shard.rows.items()}

    def close(self) -> None:
        """Unlock the directories."""
        for one in self.snapshots:
            one.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], Ranks]]:
    """Yield a function that starts ranks on one directory; earlier ones must be closed."""
    kept, started = list[Facts](), list[Ranks]()

    def start_ranks(size: int) -> Ranks:
        started.append(Ranks(tmp_path / "tables" / "ads", size, kept))
        return started[-1]

    yield start_ranks
    for ranks in started:
        ranks.close()


def stored_rows(ranks: Ranks, facts: Facts) -> dict[int, bytes]:
    """Return the rows of a snapshot, read in both ways."""
    stored = StoredRows.open_snapshot(ranks.directory, facts)
    whole = DictShard()
    whole.restore(stored.runs())
    assert stored.num_rows == len(whole.rows)
    assert rows_of(stored.live_rows()) == whole.rows
    return whole.rows


def test_incremental_snapshots_equal_the_table(start: Callable[[int], Ranks]) -> None:
    """Many snapshots with removed rows; a snapshot writes changes until half is outdated."""
    random, ranks = np.random.default_rng(0), start(2)
    ranks.change(random, 1500)
    sizes = list[int]()
    for step in range(15):
        facts = ranks.save(step)
        before = ranks.rows()
        assert stored_rows(ranks, facts) == before
        sizes.append(sum(one["rows"] for one in facts.values()))
        ranks.change(random, 100)
        assert stored_rows(ranks, ranks.kept[0]) != ranks.rows()
    full = len(before)
    assert min(sizes[1:]) < 0.3 * full
    assert max(sizes[1:]) > 0.5 * full, "no snapshot rewrote the rows"
    files = {path.name for path in ranks.directory.rglob("segment-*")}
    assert len(files) < 10, "segments that no checkpoint needs are removed"
    assert stored_rows(ranks, ranks.kept[0]) != stored_rows(ranks, ranks.kept[1])


def test_any_number_of_ranks_restores(start: Callable[[int], Ranks]) -> None:
    random, ranks = np.random.default_rng(1), start(3)
    for size in (3, 2, 4, 4, 1):
        if size != ranks.size or not ranks.kept:
            expected, facts = ranks.rows(), ranks.kept[-1] if ranks.kept else {}
            ranks.close()
            ranks = start(size)
            if facts:
                ranks.restore(facts)
            assert ranks.rows() == expected
        ranks.change(random, 600)
        facts = ranks.save(size)
        assert stored_rows(ranks, facts) == ranks.rows()
    shards = {path.name: {*path.glob("snapshot-*")} for path in ranks.directory.iterdir()}
    assert shards["shard-3"], "the checkpoint of four ranks is kept"
    expected = ranks.rows()
    ranks.save(9)
    ranks.close()
    again = start(1)
    again.restore(again.kept[-1])
    assert again.rows() == expected
    assert {path.name for path in again.directory.iterdir()} == {"shard-0"}
    again.change(random, 100)
    assert again.save(10)["0"]["rows"] <= 100, "a resume on as many ranks goes on incrementally"


def test_a_resume_ignores_later_snapshots(start: Callable[[int], Ranks]) -> None:
    random, ranks = np.random.default_rng(2), start(1)
    ranks.change(random, 900)
    first = ranks.save(1)
    expected = ranks.rows()
    for step in (2, 3):
        ranks.change(random, 100)
        ranks.save(step, keep=3)
    del ranks.kept[1:]
    ranks.close()
    again = start(1)
    again.restore(first)
    assert again.rows() == expected
    names = {path.name for path in (again.directory / "shard-0").iterdir()}
    assert names == {"LOCK", "segment-000001", "snapshot-000001.json"}
    again.change(random, 50)
    facts = again.save(2)
    assert stored_rows(again, facts) == again.rows()
    assert facts["0"]["rows"] <= 50


def test_state_besides_rows_is_restored(start: Callable[[int], Ranks], tmp_path: Path) -> None:
    ranks = start(1)
    (shard,) = ranks.shards
    shard.facts["day"] = 7
    shard.arrays = {"keys": np.arange(5), "counts": np.ones((5, 2), np.float32)}
    facts = ranks.save(4)
    stored = StoredRows.open_snapshot(ranks.directory, facts)
    assert (stored.manifests[0].facts, stored.manifests[0].step) == ({"day": 7}, 4)
    (arrays,) = stored.arrays()
    assert arrays.keys() == shard.arrays.keys()
    for name, values in arrays.items():
        np.testing.assert_array_equal(values, shard.arrays[name])
        assert values.dtype == shard.arrays[name].dtype
    # An empty table has files, too.
    assert rows_of(stored.live_rows()) == {}


def test_an_export_is_a_whole_table(start: Callable[[int], Ranks], tmp_path: Path) -> None:
    random, ranks = np.random.default_rng(3), start(2)
    for step in range(3):
        ranks.change(random, 400)
        facts = ranks.save(step)
    stored = StoredRows.open_snapshot(ranks.directory, facts)
    out = tmp_path / "out"
    export_rows(out, stored.layout, stored.live_rows(), step=2, facts={"day": 1})
    opened = StoredRows.open_export(out)
    assert rows_of(opened.live_rows()) == ranks.rows()
    assert opened.num_rows == len(ranks.rows())
    assert (opened.manifests[0].step, opened.manifests[0].facts) == (2, {"day": 1})
    with pytest.raises(StoreError, match=r"segment-0' cannot be written \(File exists\)"):
        export_rows(out, stored.layout, stored.live_rows())
    opened.verify()


def test_damage_is_found_in_every_file(start: Callable[[int], Ranks]) -> None:
    random, ranks = np.random.default_rng(4), start(2)
    ranks.shards[0].arrays = {"keys": np.arange(5)}
    for step in range(2):
        ranks.change(random, 300)
        facts = ranks.save(step)
    files = sorted(path for path in ranks.directory.rglob("*-0*") if path.is_file())
    needed = [path for path in files if path.name.startswith("segment") or "-000002" in path.name]
    assert len(needed) == 7
    found = 0
    for path in needed:
        whole = path.read_bytes()
        remedy = rf"{path}' .*restore (it|the file), or resume from an earlier checkpoint"
        damages = [whole[:-1], whole[: len(whole) // 2], whole + b"\0" * 4096]
        for bit in random.integers(0, 8 * len(whole), 17):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            damages.append(bytes(flipped))
        for damaged in damages:
            path.write_bytes(damaged)
            with pytest.raises(StoreError, match=remedy):
                StoredRows.open_snapshot(ranks.directory, facts).verify()
            found += 1
        path.unlink()
        with pytest.raises(StoreError, match=remedy):
            StoredRows.open_snapshot(ranks.directory, facts).verify()
        path.write_bytes(whole)
    assert found == 7 * 20
    StoredRows.open_snapshot(ranks.directory, facts).verify()
    with pytest.raises(StoreError, match=r"names the shards \[1\] of the table"):
        StoredRows.open_snapshot(ranks.directory, {"1": facts["1"]})
    swapped = {"0": {**facts["0"], "digest": facts["1"]["digest"]}, "1": facts["1"]}
    with pytest.raises(StoreError, match="differs from what was written"):
        StoredRows.open_snapshot(ranks.directory, swapped)


@pytest.mark.parametrize("at", ["segment", "manifest"])
def test_a_full_disk_keeps_the_last_snapshot(
    start: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """The failure is one sentence; the next snapshot has everything."""
    random, ranks = np.random.default_rng(5), start(1)
    ranks.change(random, 800)
    first, expected = ranks.save(1), ranks.rows()
    ranks.change(random, 100)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(*_: Any) -> None:
        raise full

    with monkeypatch.context() as patch:
        if at == "segment":
            patch.setattr(direct_io, "write_at", fail)
        else:
            patch.setattr(Path, "replace", fail)
        with pytest.raises(StoreError, match=r"cannot be written \(No space left .*: make room"):
            ranks.save(2)
    names = {path.name for path in (ranks.directory / "shard-0").iterdir()}
    assert names == {"LOCK", "segment-000001", "snapshot-000001.json"}
    assert stored_rows(ranks, first) == expected
    ranks.change(random, 100)
    assert stored_rows(ranks, ranks.save(3)) == ranks.rows()


def test_two_processes_on_one_directory_are_refused(start: Callable[[int], Ranks]) -> None:
    ranks = start(1)
    with pytest.raises(StoreError, match=r"shard-0' is used by process \d+ on .*: stop it, or"):
        start(1)
    ranks.save(1)
    ranks.close()
    start(1)


def write_until_killed(directory: Path) -> None:
    """Make snapshots and log the committed ones, as rank 0 does with checkpoints."""
    log, random = directory / "log", np.random.default_rng(6)
    ranks = Ranks(directory, 1, [])
    for step in range(10_000):
        ranks.change(random, 400)
        facts = ranks.save(step)
        rows = {key: record.hex() for key, record in ranks.rows().items()}
        partial = log.with_suffix(".partial")
        partial.write_text(json.dumps({"facts": facts, "rows": rows}))
        partial.replace(log)


def kill_writers(root: Path) -> None:
    """Start a writer per directory, and kill it at a random time after its first snapshot."""
    seeded, directories = python_random.Random(7), sorted(root.iterdir())
    warm = Ranks(root / "warm", 1, [])  # Every writer would load compiled code anew.
    warm.change(np.random.default_rng(0), 400)
    for step in range(9):
        warm.save(step)
    warm.close()
    for directory in directories:
        process = os.fork()
        if not process:
            write_until_killed(directory)
            os._exit(0)
        while not (directory / "log").exists():
            time.sleep(0.002)
        time.sleep(seeded.uniform(0.0, 0.1))
        os.kill(process, signal.SIGKILL)
        assert os.waitpid(process, 0)[1] == signal.SIGKILL


def test_a_killed_writer_leaves_the_last_snapshot(tmp_path: Path) -> None:
    """The rows of the last committed checkpoint are exact, whenever the process is killed."""
    for number in range(4):
        (tmp_path / str(number)).mkdir()
    code = "import sys, pathlib, test_snapshots as t; t.kill_writers(pathlib.Path(sys.argv[1]))"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "PYTHONPATH": path},
        check=True, timeout=300,
    )  # fmt: skip
    for number in range(4):
        directory = tmp_path / str(number)
        saved = json.loads((directory / "log").read_text())
        again = Ranks(directory, 1, [saved["facts"]])
        again.restore(saved["facts"])
        again.close()
        rows = {str(key): record.hex() for key, record in again.rows().items()}
        assert rows == saved["rows"]
        stored = StoredRows.open_snapshot(directory, saved["facts"])
        needed = stored.manifests[0].files | {saved["facts"]["0"]["snapshot"]}
        assert {path.name for path in (directory / "shard-0").iterdir()} == needed
