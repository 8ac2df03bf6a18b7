"""A table shard in a dict, to test snapshots with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.ps.segments import Run, SegmentLayout
from moesaic.ps.snapshots import TableChanges

LAYOUT = SegmentLayout(record_bytes=80, dim=16, optimizer="rowwise-adagrad")


class DictShard:
    """Records by key; the slow version of a table."""

    def __init__(self, layout: SegmentLayout = LAYOUT) -> None:
        self.segment_layout = layout
        self.rows: dict[int, bytes] = {}
        self.facts: dict[str, Any] = {"day": 0}
        self.arrays: dict[str, NDArray[Any]] = {}
        self._changed = set[int]()
        self._removed = set[int]()

    def put(self, keys: Iterable[int], records: NDArray[np.uint8]) -> None:
        """Add or change rows."""
        for key, record in zip(map(int, keys), records, strict=True):
            self.rows[key] = record.tobytes()
            self._changed.add(key)
            self._removed.discard(key)

    def remove(self, keys: Iterable[int]) -> None:
        """Remove rows that are there."""
        for key in map(int, keys):
            if self.rows.pop(key, None) is not None:
                self._changed.discard(key)
                self._removed.add(key)

    def change(self, random: np.random.Generator, count: int, keys: int = 2000) -> None:
        """Change and remove random rows."""
        chosen = random.integers(0, keys, count)
        size = self.segment_layout.record_bytes
        self.put(chosen, random.integers(0, 256, (count, size), np.uint8))
        self.remove(random.integers(0, keys, count // 4))

    def restore(self, runs: Iterable[Run]) -> None:
        """Replace all rows by those of a snapshot."""
        self.rows.clear()
        for run in runs:
            self.put(run.keys, run.records)
            self.remove(run.removed)
        self._changed.clear()
        self._removed.clear()

    def copy_changes(self, *, everything: bool) -> TableChanges:
        """Return the rows that changed, in two chunks."""
        chosen = np.array(sorted(self.rows if everything else self._changed), np.int64)
        removed = np.array([] if everything else sorted(self._removed), np.int64)
        self._changed.clear()
        self._removed.clear()
        chunks = [(keys, self._records(keys)) for keys in np.array_split(chosen, 2)]
        return TableChanges(
            chunks, removed, len(self.rows),
            facts=dict(self.facts), arrays=dict(self.arrays),
        )  # fmt: skip

    def _records(self, keys: NDArray[np.int64]) -> NDArray[np.uint8]:
        data = b"".join(self.rows[int(key)] for key in keys)
        return np.frombuffer(data, np.uint8).reshape(len(keys), -1 if len(keys) else 80)


def rows_of(chunks: Iterable[tuple[NDArray[np.int64], NDArray[np.uint8]]]) -> dict[int, bytes]:
    """Return records by key; every key must come once."""
    rows = [
        (int(key), record.tobytes())
        for keys, records in chunks
        for key, record in zip(keys, records, strict=True)
    ]
    assert len(dict(rows)) == len(rows)
    return dict(rows)


Facts = Mapping[str, Mapping[str, Any]]
