"""Table of one rank as snapshots see it: changed rows out, stored rows in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.base.compiled import cached_njit, prefetch
from moesaic.base.host_memory import free_memory_bytes
from moesaic.facts.job.table import TableConfig
from moesaic.ps.index import ABSENT, Int64s
from moesaic.ps.records import CHANGED_SINCE_SNAPSHOT
from moesaic.ps.segments import SegmentLayout
from moesaic.ps.snapshots import TableChanges
from moesaic.ps.stored_rows import KeysAndRecords, StoredRows, export_rows
from moesaic.ps.table import Table

_CHUNK_ROWS = 65_536
"""Rows that are read at once from a table with a drive."""
_LOAD_ROWS = 1024
"""Rows that come into memory at once, which memory above a drive must hold."""
_AHEAD = 8
"""Rows between a prefetch and its use."""


class TableShard:
    """Rows of a table that changed since the last snapshot; a `SnapshotTable`.

    It gets the keys of all rows that the table removes."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.segment_layout = SegmentLayout(
            record_bytes=table.layout.record_bytes, table=table.name,
            optimizer=table.config.optimizer, dim=table.dim, dtype=table.layout.dtype,
            seed=table.seed,
        )  # fmt: skip
        """Layout of the table's records."""
        self._removed = list[Int64s]()
        self._demoted = list[Int64s]()
        table.on_remove = self._removed.append

    def note_demoted(self, keys: Int64s) -> None:
        """Take keys of rows that changed since the last snapshot and leave memory for the drive."""
        self._demoted.append(keys)

    def copy_changes(self, *, everything: bool) -> TableChanges:
        """Return a copy of the rows that changed since the last call, or of all rows.

        If there is a drive, or memory has no room for a copy, the chunks read the live table."""
        table = self.table
        removed = _distinct(self._removed)
        removed = removed[table.index.find(removed) == ABSENT]
        if everything:
            keys, locations = table.index.items()
        else:
            keys, locations = self._changed_items()
        num_bytes = len(keys) * self.segment_layout.row_bytes
        is_live = table.tier is not None or num_bytes > free_memory_bytes() // 2
        chunks = self._read(keys) if is_live else [(keys, self._copy(locations))]
        self._removed.clear()
        self._demoted.clear()
        candidates, counts = table.candidates.items()
        return TableChanges(
            chunks, len(keys), removed[:0] if everything else removed, table.num_rows, is_live,
            self._facts(),
            {"candidates": candidates, "candidate_counts": counts} if len(candidates) else {},
        )  # fmt: skip

    def restore(
        self,
        stored: StoredRows,
        is_owned: Callable[[Int64s], NDArray[np.bool_]] | None = None,
        shard: int | None = None,
    ) -> None:
        """Fill the empty table with stored rows; `is_owned` and `shard` as in `StoredRows.runs`."""
        table = self.table
        for run in stored.runs(is_owned, shard):
            self._drop(run.keys)
            for start in range(0, len(run.keys), _LOAD_ROWS):
                part = slice(start, start + _LOAD_ROWS)
                table.load(run.keys[part], run.records[part])
            self._drop(run.removed)
        table.today = int(stored.manifests[0].facts["day"])
        for arrays in filter(None, stored.arrays(shard)):
            candidates, counts = arrays["candidates"], arrays["candidate_counts"]
            chosen = slice(None) if is_owned is None else is_owned(candidates)
            table.candidates.set(candidates[chosen], counts[chosen])
        _, rows = table.index.flagged_items(table.arena.changed, CHANGED_SINCE_SNAPSHOT)
        table.arena.changed[rows] &= ~CHANGED_SINCE_SNAPSHOT
        self._removed.clear()
        self._demoted.clear()

    def export(self, directory: Path, step: int = 0) -> None:
        """Write all rows into a new directory, which `StoredRows.open_export` opens."""
        keys, _ = self.table.index.items()
        export_rows(
            directory, self.segment_layout, self._read(keys, is_snapshot=False), step=step,
            facts=self._facts(),
        )  # fmt: skip

    def _facts(self) -> dict[str, Any]:
        return {"day": self.table.today, "config": self.table.config.model_dump(mode="json")}

    def _changed_items(self) -> tuple[Int64s, Int64s]:
        """Return keys and locations of rows that changed, in memory and below it."""
        table = self.table
        keys, locations = table.index.flagged_items(table.arena.changed, CHANGED_SINCE_SNAPSHOT)
        if not self._demoted:
            return keys, locations
        keys = _distinct([keys, *self._demoted])
        locations = table.index.find(keys)
        return keys[locations != ABSENT], locations[locations != ABSENT]

    def _copy(self, rows: Int64s) -> NDArray[np.uint8]:
        """Return a copy of the records at `rows`, which count as unchanged from now on."""
        arena = self.table.arena
        records = np.empty((len(rows), self.segment_layout.record_bytes), np.uint8)
        _copy_records(arena.whole_words, arena.changed, rows, records.view(np.int32))
        return records

    def _read(self, keys: Int64s, *, is_snapshot: bool = True) -> Iterator[KeysAndRecords]:
        """Yield the rows of `keys` from memory and drive."""
        table = self.table
        for start in range(0, len(keys), _CHUNK_ROWS):
            some = keys[start : start + _CHUNK_ROWS]
            yield some, table.read(some)
            if is_snapshot:
                rows = table.index.find(some)
                table.arena.changed[rows[rows >= 0]] &= ~CHANGED_SINCE_SNAPSHOT

    def _drop(self, keys: Int64s) -> None:
        """Remove the rows of those `keys` that have one."""
        found = self.table.index.find(keys) != ABSENT
        if found.any():
            self.table.remove(keys[found])


def open_read_only(stored: StoredRows) -> Table:
    """Return a read-only table with all stored rows."""
    layout = stored.layout
    config = TableConfig.model_validate_json(json.dumps(stored.manifests[0].facts["config"]))
    table = Table(
        config, layout.dim, seed=layout.seed, name=layout.table, dtype=layout.dtype, read_only=True
    )
    TableShard(table).restore(stored)
    return table


def _distinct(keys: list[Int64s]) -> Int64s:
    return np.unique(np.concatenate([np.empty(0, np.int64), *keys]))


@cached_njit(nogil=True)
def _copy_records(
    words: NDArray[np.int32], changed: NDArray[np.uint8], rows: Int64s, copy: NDArray[np.int32]
) -> None:
    """Copy the records at `rows` and clear their flag for snapshots."""
    count, width = copy.shape
    flat, mask = words.reshape(-1), np.uint8(0xFF) ^ CHANGED_SINCE_SNAPSHOT
    for index in range(count):
        if index + _AHEAD < count:
            first = rows[index + _AHEAD] * width
            for word in range(first, first + width, 16):
                prefetch(flat, word)
        row = rows[index]
        for word in range(width):
            copy[index, word] = words[row, word]
        changed[row] &= mask
