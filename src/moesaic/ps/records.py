"""Arena of records, and the tier below it. `facts.job.table` has the layout of a record."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moesaic.base.errors import StoreError
from moesaic.base.host_memory import reserve_memory, total_memory_bytes
from moesaic.facts.job.table import RecordLayout
from moesaic.ps.index import Int64s

Floats = NDArray[Any]
"""Array of the table's dtype."""

CHANGED_SINCE_WRITE = np.uint8(1)
"""Flag of a record that differs from its copy on the drive."""
CHANGED_SINCE_SNAPSHOT = np.uint8(2)
"""Flag of a record that differs from the last snapshot."""
CHANGED = np.uint8(3)
"""Both flags."""


class RecordArena:
    """Records of equal size in memory that grows in place, addressed by their row."""

    def __init__(self, layout: RecordLayout, capacity: int | None = None) -> None:
        """Make an empty arena.

        Args:
            layout: the records' layout.
            capacity: records it may hold; None: as many as the machine's memory.
        """
        size = layout.record_bytes
        self.layout = layout
        self.capacity = total_memory_bytes() // size if capacity is None else capacity
        num_bytes = max(self.capacity * size, 1)
        self._memory = reserve_memory(num_bytes)
        memory = np.frombuffer(self._memory, np.uint8)[: self.capacity * size]
        self.records: NDArray[np.uint8] = memory.reshape(self.capacity, size)
        """Records, [capacity, record_bytes]; pages without records take no memory."""
        self.numbers: Floats = self.records.view(layout.dtype)
        """Values and optimizer state of the records, then other fields, [capacity, numbers]."""
        self.words: NDArray[np.float32] = self.records.view(np.float32)
        """Records as float32: show and click stand at `layout.counters`."""
        self.whole_words: NDArray[np.int32] = self.records.view(np.int32)
        """Records as int32: last day and steps stand behind show and click."""
        flags = reserve_memory(max(self.capacity, 1))
        self.changed: NDArray[np.uint8] = np.frombuffer(flags, np.uint8)[: self.capacity]
        """`CHANGED_SINCE_WRITE` and `CHANGED_SINCE_SNAPSHOT` of each record, [capacity]."""
        self._used = 0
        self._free = np.empty(0, np.int64)
        self._num_free = 0

    def __len__(self) -> int:
        return self._used - self._num_free

    @property
    def num_free(self) -> int:
        """Records that can be allocated."""
        return self.capacity - len(self)

    @property
    def memory_bytes(self) -> int:
        """Bytes of pages that have held records."""
        return self._used * (self.layout.record_bytes + 1)

    @property
    def extent(self) -> int:
        """Rows that ever held records; their pages take memory."""
        return self._used

    def used_rows(self) -> NDArray[np.bool_]:
        """Return which rows hold records, up to the last row that ever did."""
        used = np.ones(self._used, np.bool_)
        used[self._free[: self._num_free]] = False
        return used

    def truncate(self, capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Set the capacity, which all records fit, and give back the memory above it.

        Returns:
            Rows above the capacity that held records, and the rows where they are now.
        """
        self.capacity = capacity
        used = self.used_rows()
        old = np.flatnonzero(used[capacity:]) + capacity
        if len(used) <= capacity:
            return old, old
        free = np.flatnonzero(~used[:capacity])
        new, self._free = free[: len(old)], free[len(old) :]
        self._used, self._num_free = capacity, len(self._free)
        self.records[new], self.changed[new] = self.records[old], self.changed[old]
        start = -(-capacity * self.layout.record_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if start < len(self._memory):
            self._memory.madvise(mmap.MADV_DONTNEED, start)
        return old, new

    def allocate(self, count: int) -> Int64s:
        """Return `count` rows for new records, whose bytes are arbitrary and whose flags are set.

        Raises:
            StoreError: the arena is full.
        """
        if count > self.num_free:
            raise StoreError(
                f"{count} more rows do not fit into memory for {self.capacity} rows, "
                f"{len(self)} of which are used: raise table.host, or bound rows by table.max_rows"
            )
        reused = min(count, self._num_free)
        self._num_free -= reused
        rows = np.concatenate(
            [
                self._free[self._num_free : self._num_free + reused][::-1],
                np.arange(self._used, self._used + count - reused),
            ]
        )
        self._used += count - reused
        self.changed[rows] = CHANGED
        return rows

    def free(self, rows: Int64s) -> None:
        """Free the records at distinct `rows`."""
        if self._num_free + len(rows) > len(self._free):
            grown = np.empty(max(2 * len(self._free), self._num_free + len(rows)), np.int64)
            grown[: self._num_free] = self._free[: self._num_free]
            self._free = grown
        self._free[self._num_free : self._num_free + len(rows)] = rows
        self._num_free += len(rows)


class Tier(Protocol):
    """Storage of a table's rows below memory, at negative locations: `~position`."""

    def raise_rows(self, keys: Int64s) -> None:
        """Bring the records of `keys`, distinct and all below memory, into the arena.

        The index gets their new locations. Rows of `Table.pinned_rows` keep theirs."""

    def make_room(self, count: int) -> None:
        """Free rows that are not pinned, until the arena can allocate `count`.

        Raises:
            StoreError: pinned rows leave too little room.
        """

    def fit(self) -> None:
        """Let rows leave memory if other uses of memory grew. Rows in memory may move."""

    def read(self, locations: Int64s) -> NDArray[np.uint8]:
        """Return the records at negative `locations`, [n, record_bytes]; all stay where they are.

        The end of a day and exports read rows by it."""

    def remove(self, locations: Int64s) -> None:
        """Forget the records at `locations`; the index has no entry for them any more."""

    def take_changes(self) -> Iterator[tuple[Int64s, NDArray[np.uint8]]]:
        """Yield keys and records below memory that changed since the last snapshot, and count them
        as unchanged."""
