"""Changes of a rank's table for its snapshots, and their restore."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.base.host_memory import free_memory_bytes
from moesaic.kernels.threads import run_ranges
from moesaic.ps.drive_rows import CHANGED_BIT
from moesaic.ps.index import ABSENT, MIN_THREADED_KEYS, Int64s
from moesaic.ps.records import CHANGED_SINCE_SNAPSHOT
from moesaic.ps.segments import SegmentLayout
from moesaic.ps.snapshots import TableChanges
from moesaic.ps.stored_rows import KeysAndRecords, StoredRows
from moesaic.ps.table import Table

_BLOCK_BYTES = 1 << 16
"""Bytes of a block: a table of any width fills most of it with rows."""
_CHUNK_ROWS = 65_536
"""Rows that are read at once from a table with a drive."""
_COPY_SHARE = 8
"""Free memory over that of a copy of changed rows, at least; several ranks may copy at once."""
_SAMPLE_KEYS = 10_000
"""Keys from which the share of a rank is known."""


class TableShard:
    """Rows of a table that changed since the last snapshot; a `SnapshotTable`.

    It gets the keys of all rows that the table removes."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.segment_layout = SegmentLayout(
            record_bytes=table.layout.record_bytes, min_block_bytes=_BLOCK_BYTES,
            table=table.name, optimizer=table.config.optimizer, dim=table.dim,
            dtype=table.layout.dtype, seed=table.seed,
        )  # fmt: skip
        """Layout of the table's records."""
        self._removed = list[Int64s]()
        table.on_remove = self._removed.append

    def copy_changes(self, *, everything: bool) -> TableChanges:
        """Return a copy of the rows that changed since the last call, or of all rows.

        If there is a drive, or memory has no room for a copy, the chunks read the live table."""
        table = self.table
        removed = _distinct(self._removed)
        removed = removed[table.index.find(removed) == ABSENT]
        self._removed.clear()
        if everything:
            self._set_changed(True)
        keys, rows = self._changed_in_memory()
        num_bytes = len(keys) * self.segment_layout.row_bytes
        is_live = table.tier is not None or _COPY_SHARE * num_bytes > free_memory_bytes()
        chunks = self._read_changes(keys, rows) if is_live else [(keys, self._copy(rows))]
        candidates, counts = table.candidates.items()
        return TableChanges(
            chunks, removed[:0] if everything else removed, table.num_rows, is_live, self._facts(),
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
        if shard is None:
            table.index.reserve(int(stored.num_rows * _owned_share(is_owned)))
        else:
            table.index.reserve(stored.manifests[shard].num_rows)
        for run in stored.runs(is_owned, shard):
            self._drop(run.keys)
            step = min(_CHUNK_ROWS, max(table.arena.capacity // 4, 1))
            for start in range(0, len(run.keys), step):
                part = slice(start, start + step)
                table.load(run.keys[part], run.records[part])
            self._drop(run.removed)
        table.today = int(stored.manifests[0].facts["day"])
        for arrays in filter(None, stored.arrays(shard)):
            candidates, counts = arrays["candidates"], arrays["candidate_counts"]
            chosen = slice(None) if is_owned is None else is_owned(candidates)
            table.candidates.reserve(len(candidates[chosen]))
            table.candidates.set(candidates[chosen], counts[chosen])
        self._set_changed(False)
        self._removed.clear()

    def _facts(self) -> dict[str, Any]:
        return {"day": self.table.today, "config": self.table.config.model_dump(mode="json")}

    def _changed_in_memory(self) -> tuple[Int64s, Int64s]:
        """Return keys and rows of records in memory that changed since the last snapshot."""
        arena = self.table.arena
        used = arena.used_rows()
        used &= arena.changed[: len(used)] & CHANGED_SINCE_SNAPSHOT != 0
        return self.table.index.find_keys(used)

    def _set_changed(self, is_changed: bool) -> None:
        """Count all rows as changed since the last snapshot, or none."""
        arena, index = self.table.arena, self.table.index
        flags = arena.changed[: len(arena.used_rows())]
        if is_changed:
            flags |= CHANGED_SINCE_SNAPSHOT
        else:
            flags &= ~CHANGED_SINCE_SNAPSHOT
        if self.table.tier is not None:
            keys, locations = index.items()
            keys, locations = keys[locations < 0], locations[locations < 0]
            index.set(keys, locations & ~CHANGED_BIT if is_changed else locations | CHANGED_BIT)

    def _copy(self, rows: Int64s) -> NDArray[np.uint8]:
        """Return a copy of the records at `rows`, which count as unchanged from now on."""
        arena = self.table.arena
        records = np.empty((len(rows), self.segment_layout.record_bytes), np.uint8)

        def copy(start: int, end: int) -> None:
            part = rows[start:end]
            arena.records.take(part, 0, records[start:end], "clip")  # Without a buffer.
            arena.changed[part] &= ~CHANGED_SINCE_SNAPSHOT

        run_ranges(copy, len(rows), MIN_THREADED_KEYS)
        return records

    def _read_changes(self, keys: Int64s, rows: Int64s) -> Iterator[KeysAndRecords]:
        """Yield rows in memory, and then those on the drive that changed."""
        for start in range(0, len(keys), _CHUNK_ROWS):
            part = slice(start, start + _CHUNK_ROWS)
            yield keys[part], self._copy(rows[part])
        if self.table.tier is not None:
            yield from self.table.tier.take_changes()

    def _drop(self, keys: Int64s) -> None:
        """Remove the rows of those `keys` that have one."""
        found = self.table.index.find(keys) != ABSENT
        if found.any():
            self.table.remove(keys[found])


def _owned_share(is_owned: Callable[[Int64s], NDArray[np.bool_]] | None) -> float:
    """Return the share of all keys that are kept, and some more."""
    if is_owned is None:
        return 1.0
    sample = np.random.default_rng(0).integers(-(1 << 63), 1 << 63, _SAMPLE_KEYS, np.int64)
    return min(1.1 * float(is_owned(sample).mean()), 1.0)


def _distinct(keys: list[Int64s]) -> Int64s:
    return np.unique(np.concatenate([np.empty(0, np.int64), *keys]))
