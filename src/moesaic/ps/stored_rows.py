"""Reader of a table's files: a snapshot of all shards, or an exported table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from moesaic.base.errors import StoreError
from moesaic.ps.index import ABSENT, KeyIndex
from moesaic.ps.segments import Run, SegmentLayout, SegmentReader, SegmentWriter
from moesaic.ps.snapshot_manifest import (
    REMEDY,
    SegmentRecord,
    SnapshotManifest,
    read_arrays,
    read_manifest,
)

EXPORT_MANIFEST = "table.json"
_EXPORT_SEGMENT = "segment-0"

Keys = NDArray[np.int64]
KeysAndRecords = tuple[Keys, NDArray[np.uint8]]


@dataclass(frozen=True)
class StoredSegments:
    """Segments of one shard."""

    directory: Path
    """Directory of the files."""
    layout: SegmentLayout
    """Layout of every segment."""
    segments: Sequence[SegmentRecord]
    """Segments, oldest first."""

    def runs(self) -> Iterator[Run]:
        """Yield verified content in order; later rows win, and removed keys remove earlier rows."""
        for record in self.segments:
            yield from self._scan(record)

    def live_rows(self, newer: Keys | None = None) -> Iterator[KeysAndRecords]:
        """Yield each row that is still valid once, newest segment first.

        Rows of the keys `newer` are replaced or removed already."""
        seen = KeyIndex()
        seen.reserve(sum(record.num_keys for record in self.segments[1:]))
        if newer is not None:
            seen.set(newer, np.zeros(len(newer), np.int64))
        for number, record in reversed([*enumerate(self.segments)]):
            found = list[Keys]()
            for run in self._scan(record):
                chosen = seen.find(run.keys) == ABSENT
                yield run.keys[chosen], run.records[chosen]
                if number:  # Older segments follow.
                    found += [run.keys[chosen], run.removed]
            for keys in found:
                seen.set(keys, np.zeros(len(keys), np.int64))

    def _scan(self, record: SegmentRecord) -> Iterator[Run]:
        path = self.directory / record.file
        with SegmentReader(path, self.layout) as reader:
            if reader.num_blocks != record.num_blocks:
                raise StoreError(
                    f"'{path}' has {reader.num_blocks} blocks and had {record.num_blocks} when it "
                    f"was written: {REMEDY}"
                )
            yield from reader.scan(record.digest)


class StoredRows:
    """Rows of a table in files, opened to read them once or several times."""

    def __init__(self, shards: Sequence[tuple[Path, SnapshotManifest]]) -> None:
        """Take the directory and the manifest of every shard."""
        self.layout = shards[0][1].table_layout
        self.manifests = [manifest for _, manifest in shards]
        self._shards = [
            StoredSegments(directory, manifest.table_layout, manifest.segments)
            for directory, manifest in shards
        ]

    @classmethod
    def open_snapshot(
        cls,
        directory: Path,
        facts: Mapping[str, Mapping[str, Any]],
        layout: SegmentLayout | None = None,
    ) -> Self:
        """Open the snapshot that a checkpoint names.

        Args:
            directory: directory of the table.
            facts: facts of the snapshot, by rank, as the checkpoint has them.
            layout: layout that the table must have; None: any.
        """
        shards = []
        for one in sorted(facts.values(), key=lambda one: int(one["shard"])):
            path = shard_directory(directory, one["shard"]) / one["snapshot"]
            shards.append((path, read_manifest(path, one["digest"])))
        numbers = [manifest.shard for _, manifest in shards]
        if not shards or numbers != [*range(shards[0][1].num_shards)]:
            raise StoreError(
                f"'{directory}': the checkpoint names the shards {numbers} of the table and not "
                "all of them: resume from an earlier checkpoint"
            )
        for path, manifest in shards:
            _check_layout(path, manifest.table_layout, layout or shards[0][1].table_layout)
        return cls([(path.parent, manifest) for path, manifest in shards])

    @classmethod
    def open_export(cls, directory: Path) -> Self:
        """Open the table that `export_rows` wrote into a directory."""
        return cls([(directory, read_manifest(directory / EXPORT_MANIFEST))])

    @property
    def num_rows(self) -> int:
        """Rows of all shards."""
        return sum(manifest.num_rows for manifest in self.manifests)

    def runs(
        self,
        is_owned: Callable[[Keys], NDArray[np.bool_]] | None = None,
        shard: int | None = None,
    ) -> Iterator[Run]:
        """Yield runs to apply in order: put the rows, then remove the removed keys.

        This takes no memory, and rows that changed often come several times.

        Args:
            is_owned: function that returns which keys to keep; None: all.
            shard: number of the only shard to read; None: all.
        """
        for one in self._shards if shard is None else [self._shards[shard]]:
            for run in one.runs():
                if is_owned is None:
                    yield run
                    continue
                chosen = is_owned(run.keys)
                yield Run(
                    run.keys[chosen],
                    run.records[chosen],
                    run.removed[is_owned(run.removed)],
                )

    def live_rows(self) -> Iterator[KeysAndRecords]:
        """Yield every row once, in no particular order."""
        for shard in self._shards:
            yield from shard.live_rows()

    def arrays(self, shard: int | None = None) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield the further arrays of each shard, or of one alone."""
        for number, manifest in enumerate(self.manifests):
            if shard is None or number == shard:
                yield read_arrays(self._shards[number].directory, manifest.arrays)

    def verify(self) -> None:
        """Read all files; raise StoreError at the first damage."""
        for _ in self.runs():
            pass
        for _ in self.arrays():
            pass


def shard_directory(directory: Path, shard: int) -> Path:
    """Return the directory of a shard's files."""
    return directory / f"shard-{shard}"


def export_rows(
    directory: Path,
    layout: SegmentLayout,
    rows: Iterable[KeysAndRecords],
    *,
    step: int = 0,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write a whole table into a new directory, which any process can open.

    Args:
        directory: directory to write to; it must not hold a table.
        layout: layout of the records.
        rows: every row once, in any number of chunks.
        step: finished optimizer steps.
        facts: state of the table besides rows.
    """
    directory.mkdir(parents=True, exist_ok=True)
    record = write_segment(directory / _EXPORT_SEGMENT, layout, rows)
    SnapshotManifest(
        table_layout=layout, shard=0, num_shards=1, step=step, num_rows=record.num_rows,
        segments=(record,), facts=dict(facts or {}),
    ).write(directory / EXPORT_MANIFEST)  # fmt: skip


def write_segment(
    path: Path,
    layout: SegmentLayout,
    rows: Iterable[KeysAndRecords],
    removed: Keys | None = None,
) -> SegmentRecord:
    """Write a segment durably; a failure removes the file."""
    num_rows, removed = 0, np.empty(0, np.int64) if removed is None else removed
    with SegmentWriter(path, layout) as writer:
        try:
            for keys, records in rows:
                writer.append(keys, records)
                num_rows += len(keys)
            writer.remove(removed)
            writer.sync()
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return SegmentRecord(
            file=path.name, num_blocks=writer.num_blocks, num_rows=num_rows,
            num_removed=len(removed), digest=writer.digest,
        )  # fmt: skip


def _check_layout(path: Path, found: SegmentLayout, wanted: SegmentLayout) -> None:
    if difference := found.find_difference(wanted):
        raise StoreError(
            f"'{path}' is of a table with {difference}: set the table as it was, or start a new run"
        )
