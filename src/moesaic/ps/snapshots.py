"""Incremental snapshots of one shard of a table, consistent over ranks by the checkpoint.

A snapshot writes the rows that changed since the last one, and the keys removed since then, into a
new segment. Its manifest names this segment and all earlier ones. The facts of all ranks go into
the checkpoint's manifest, so a snapshot counts once the checkpoint is committed. When less than
half of the rows in earlier segments are valid, it writes all valid rows into one segment.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from moesaic.base.errors import StoreError, write_error
from moesaic.base.lock import LockHeld, fail_if_locked, file_lock
from moesaic.base.safetensors_file import sync_directory
from moesaic.ps.segments import SegmentLayout
from moesaic.ps.snapshot_manifest import (
    SegmentRecord,
    SnapshotManifest,
    read_manifest,
    write_arrays,
)
from moesaic.ps.stored_rows import (
    Keys,
    KeysAndRecords,
    StoredSegments,
    shard_directory,
    write_segment,
)

LOCK = "LOCK"
MIN_LIVE = 0.5
"""Share of stored rows that are valid, below which a snapshot rewrites all."""

_WRITER_NICENESS = 10
_FILE = re.compile(
    r"segment-(\d+)|arrays-(\d+)\.safetensors|snapshot-(\d+)\.json|\..*\.partial-\d+"
)


@dataclass(frozen=True)
class TableChanges:
    """Changes of a shard since the last snapshot."""

    chunks: Iterable[KeysAndRecords]
    """Keys and records of rows that changed, each key once. They are read once."""
    removed: Keys
    """Keys whose row was removed and that have none now."""
    num_rows: int
    """Rows of the shard now."""
    is_live: bool = False
    """True if `chunks` reads the live table, so that training waits until they are written."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """State of the shard besides rows, as JSON."""
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Further arrays, written whole each time."""


class SnapshotTable(Protocol):
    """Shard of a table that snapshots read."""

    @property
    def segment_layout(self) -> SegmentLayout:
        """Layout of the records."""

    def copy_changes(self, *, everything: bool) -> TableChanges:
        """Return what changed since the last call, or all rows; training waits for it."""


class TableSnapshots:
    """Snapshots of one shard, as an `ExternalSnapshot`. A thread writes while training goes on.

    Args:
        directory: directory of the table in the run.
        table: the shard.
        shard: number of the shard, which is a rank of the part.
        num_shards: shards of the table.
        kept: function that returns the facts of each committed checkpoint, by rank, such as
            `dist.checkpoint.list_snapshots`. Files that none of them needs are removed.
    """

    def __init__(
        self,
        directory: Path,
        table: SnapshotTable,
        shard: int,
        num_shards: int,
        kept: Callable[[], Iterable[Mapping[str, Mapping[str, Any]]]],
    ) -> None:
        self.directory = shard_directory(directory, shard)
        self._root, self._table, self._kept = directory, table, kept
        self._shard, self._num_shards = shard, num_shards
        self._segments = tuple[SegmentRecord, ...]()
        self._is_incremental = False
        """False: the next snapshot writes all rows."""
        self._recent = list[str]()
        """Own snapshots whose checkpoint may be the newest, whatever this rank sees of it."""
        self._pending: Future[dict[str, Any]] | None = None
        self._stack = ExitStack()
        with self._stack:
            self._lock()
            self._number = max(map(_number, self.directory.iterdir()), default=0)
            self._writer = ThreadPoolExecutor(1, "table-snapshot", _lower_priority)
            self._stack.callback(self._writer.shutdown)
            self._stack = self._stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the writer, and unlock the directory."""
        self._stack.close()

    def resume(self, facts: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue from the snapshot with these facts, to which the table was restored; none: from
        an empty table.

        Other files that no checkpoint needs are removed. The next snapshot writes all rows if the
        snapshot has another number of shards or is of another directory."""
        own = next((one for one in facts.values() if one["shard"] == self._shard), None)
        if own is not None and len(facts) == self._num_shards:
            with suppress(StoreError):  # The run that wrote the snapshot has another directory.
                manifest = read_manifest(self.directory / own["snapshot"], own["digest"])
                self._segments, self._recent = manifest.segments, [own["snapshot"]]
                self._is_incremental = True
        self._remove_unneeded(self.directory)
        self._remove_former_shards()

    def begin(self, step: int) -> Callable[[], dict[str, Any]]:
        """Copy what changed, start to write it, and return a function that waits for the facts."""
        if self._pending is not None:
            futures.wait([self._pending])
        changes = self._table.copy_changes(everything=not self._is_incremental)
        self._pending = self._writer.submit(self._write, step, changes)
        if changes.is_live:
            futures.wait([self._pending])
        return self._pending.result

    def _write(self, step: int, changes: TableChanges) -> dict[str, Any]:
        if not self._is_incremental:
            self._segments = ()
        # Until this snapshot is durable, the next one must not build on it.
        self._is_incremental = False
        self._number += 1
        try:
            facts = self._write_files(step, changes)
        except BaseException:
            for file in self.directory.iterdir():
                if _number(file) == self._number:
                    file.unlink(missing_ok=True)
            raise
        self._is_incremental = True
        self._recent = [*self._recent[-1:], facts["snapshot"]]
        self._remove_unneeded(self.directory)
        return facts

    def _write_files(self, step: int, changes: TableChanges) -> dict[str, Any]:
        layout = self._table.segment_layout
        rows: Iterable[KeysAndRecords] = changes.chunks
        removed: Keys | None = changes.removed
        kept = self._segments
        stored = sum(segment.num_rows for segment in kept)
        if kept and changes.num_rows < MIN_LIVE * stored:
            rows, removed, kept = self._live_rows(changes), None, ()
        record = write_segment(self._path("segment-{:06d}"), layout, rows, removed)
        manifest = SnapshotManifest(
            table_layout=layout, shard=self._shard, num_shards=self._num_shards, step=step,
            num_rows=changes.num_rows, segments=(*kept, record), facts=dict(changes.facts),
            arrays=write_arrays(self._path("arrays-{:06d}.safetensors"), changes.arrays)
            if changes.arrays else None,
        )  # fmt: skip
        if not kept and record.num_rows != changes.num_rows:
            raise AssertionError(f"{record.num_rows} rows were written of {changes.num_rows}")
        path = self._path("snapshot-{:06d}.json")
        digest = manifest.write(path)
        self._segments = manifest.segments
        num_bytes = sum(
            file.stat().st_size
            for file in self.directory.iterdir()
            if _number(file) == self._number
        )
        return {
            "shard": self._shard, "snapshot": path.name, "digest": digest, "rows": record.num_rows,
            "bytes": num_bytes,
        }  # fmt: skip

    def _live_rows(self, changes: TableChanges) -> Iterator[KeysAndRecords]:
        """Yield all valid rows: those of the changes, and those of the segments before."""
        newer = [changes.removed]
        for keys, records in changes.chunks:
            newer.append(keys)
            yield keys, records
        stored = StoredSegments(self.directory, self._table.segment_layout, self._segments)
        yield from stored.live_rows(np.concatenate(newer))

    def _path(self, name: str) -> Path:
        return self.directory / name.format(self._number)

    def _lock(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._stack.enter_context(file_lock(self.directory / LOCK, fail_if_locked))
            sync_directory(self.directory.parent)
        except LockHeld as held:
            raise StoreError(
                f"'{self.directory}' is used by {held}: stop it, or give this run another directory"
            ) from None
        except OSError as error:
            raise write_error(f"'{self.directory}'", error) from error

    def _remove_unneeded(self, directory: Path) -> None:
        """Remove the files of a shard that no checkpoint needs."""
        try:
            names = {
                str(one["snapshot"])
                for facts in self._kept()
                for one in facts.values()
                if shard_directory(self._root, one["shard"]) == directory
            }
            if directory == self.directory:
                names |= {*self._recent}
            manifests = [read_manifest(directory / name) for name in names]
        except (StoreError, OSError):
            return  # A checkpoint is damaged, or rank 0 removes it now: keep everything.
        needed = names.union(*(manifest.files for manifest in manifests))
        for file in directory.iterdir():
            if _FILE.fullmatch(file.name) and file.name not in needed:
                with suppress(OSError):  # The next snapshot tries again.
                    file.unlink(missing_ok=True)

    def _remove_former_shards(self) -> None:
        """Remove unneeded files of shards that no rank has any more; ranks share the work."""
        for directory in self._root.glob("shard-*"):
            number = directory.name.removeprefix("shard-")
            if not number.isdecimal() or int(number) < self._num_shards:
                continue
            if int(number) % self._num_shards != self._shard:
                continue
            with suppress(LockHeld, OSError):
                with file_lock(directory / LOCK, fail_if_locked):
                    self._remove_unneeded(directory)
                directory.rmdir()


def _number(file: Path) -> int:
    match = _FILE.fullmatch(file.name)
    return next((int(one) for one in match.groups() if one), 0) if match else 0


def _lower_priority() -> None:
    """Give training priority over this thread; on Linux niceness applies per thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _WRITER_NICENESS)
