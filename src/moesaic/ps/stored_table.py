"""State of a table for its files: what changed since the last snapshot, and rows read back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from moesaic.ps.index import ABSENT, Int64s
from moesaic.ps.records import CHANGED_SINCE_SNAPSHOT
from moesaic.ps.segments import SegmentLayout
from moesaic.ps.snapshots import TableChanges
from moesaic.ps.stored_rows import KeysAndRecords, StoredRows
from moesaic.ps.table import Table

_CHUNK_ROWS = 65_536
"""Rows that are copied at a time."""


def segment_layout(table: Table) -> SegmentLayout:
    """Return the layout of a table's rows in files."""
    layout = table.layout
    return SegmentLayout(
        record_bytes=layout.record_bytes, table=table.name, optimizer=layout.optimizer,
        dim=table.dim, dtype=layout.dtype, seed=table.seed,
    )  # fmt: skip


class ChangedRows:
    """Changes of a table since its last snapshot; implements `SnapshotTable`."""

    def __init__(self, table: Table) -> None:
        """Watch a table, from the state that it has now."""
        self.segment_layout = segment_layout(table)
        """Layout of the rows in files."""
        self._table = table
        self._removed = list[Int64s]()
        table.on_remove = self._removed.append

    def copy_changes(self, *, everything: bool) -> TableChanges:
        """Copy the rows that changed since the last call, or all rows."""
        table = self._table
        keys, locations = table.index.items()
        if not everything:
            changed = table.arena.changed[locations] & CHANGED_SINCE_SNAPSHOT > 0
            keys, locations = keys[changed], locations[changed]
        chunks = list(read_rows(table, keys))
        table.arena.changed[locations] &= ~CHANGED_SINCE_SNAPSHOT
        removed = np.unique(np.concatenate([np.empty(0, np.int64), *self._removed]))
        self._removed.clear()
        gone = removed[table.index.find(removed) == ABSENT]
        candidates, counts = table.candidates.items()
        return TableChanges(
            chunks, gone[: 0 if everything else None], table.num_rows,
            {"day": table.today, "config": table.config.model_dump(mode="json")},
            {"candidates": candidates, "candidate_counts": counts},
        )  # fmt: skip


def read_rows(table: Table, keys: Int64s) -> Iterator[KeysAndRecords]:
    """Yield keys and copies of their records, a chunk at a time."""
    for start in range(0, len(keys), _CHUNK_ROWS):
        part = keys[start : start + _CHUNK_ROWS]
        yield part, table.read(part)


def restore(
    table: Table,
    stored: StoredRows,
    is_owned: Callable[[Int64s], NDArray[np.bool_]] | None = None,
) -> None:
    """Fill an empty table from files, which must have its layout.

    Args:
        table: the table.
        stored: rows of all shards.
        is_owned: returns which keys belong to this table; None: all.
    """
    for run in stored.runs(is_owned):
        table.remove(run.keys[table.index.find(run.keys) != ABSENT])
        table.load(run.keys, run.records)
        table.remove(run.removed[table.index.find(run.removed) != ABSENT])
    for arrays in stored.arrays():
        keys = arrays["candidates"]
        chosen = np.ones(len(keys), np.bool_) if is_owned is None else is_owned(keys)
        table.candidates.set(keys[chosen], arrays["candidate_counts"][chosen])
    _, locations = table.index.items()
    table.arena.changed[locations] &= ~CHANGED_SINCE_SNAPSHOT
    table.today = max(int(manifest.facts["day"]) for manifest in stored.manifests)
