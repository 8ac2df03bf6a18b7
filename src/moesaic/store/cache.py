"""Block cache: slots in memory that hold blocks of a file, with read-ahead and write-behind."""

from __future__ import annotations

import mmap
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from moesaic.store.io_threads import BlockStorage, IOThreads

_SLOTS_PER_READ_AHEAD = 8
"""Slots for each access that is read ahead; with fewer, more blocks are read twice."""


_MIN_READ_AHEAD = 4
"""Least accesses that are read ahead."""


class Residency(Protocol):
    """The policy that chooses the blocks that leave memory."""

    def access(self, block: int) -> None:
        """Note that the computation uses the block, whether memory holds it or not."""
        ...

    def evict(self, candidates: Sequence[int], coming: Mapping[int, int]) -> int:
        """Return the candidate that leaves memory.

        `coming` maps a block to the index of its next expected access, if there is one."""
        ...

    def removed(self, block: int) -> None:
        """Note that the block left memory: it was evicted or discarded."""
        ...


class CacheStats(NamedTuple):
    """Counts and seconds of a `BlockCache` since the last call of `take_stats`."""

    accesses: int
    """Blocks of all holds, in memory or not."""
    misses: int
    """Blocks that a hold had to request from the file: neither in memory nor read ahead."""
    reads: int
    read_bytes: int
    writes: int
    written_bytes: int
    stall_s: float
    """Seconds that holds waited for transfers."""
    read_s: float
    """Seconds of reads, summed over threads."""
    write_s: float
    """Seconds of writes, summed over threads."""


class BlockCache:
    """Slots in memory that hold blocks of a file; reads ahead and writes behind on threads.

    One thread calls it. Every decision depends on its calls alone, never on the time that a
    transfer takes: the same calls give the same reads and writes with any storage.

    An I/O error of a thread is raised once, by the next call that waits or starts transfers.
    Blocks may be lost then, so later calls raise too. `close` raises none of them.
    """

    def __init__(
        self, file: BlockStorage, num_slots: int, residency: Residency, num_threads: int = 4
    ) -> None:
        self._file = file
        self._residency = residency
        self._stride_bytes = file.stride_bytes
        size = num_slots * self._stride_bytes
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Large pages fault in, and are pinned for direct I/O, in less time. A forked process needs
        # none of them, and sharing pages with it would disturb direct I/O in flight.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with suppress(AttributeError, OSError):
                pages.madvise(getattr(mmap, advice))
        self.memory: NDArray[np.uint8] = np.frombuffer(pages, np.uint8).reshape(num_slots, -1)
        """Contents of the slots, [slots, stride_bytes]; it starts at a page."""
        self._distance = max(num_slots // _SLOTS_PER_READ_AHEAD, _MIN_READ_AHEAD)
        """Expected accesses ahead of the last one that are read."""
        self._threads = IOThreads(file, self.memory, num_threads)
        self._slots: dict[int, int] = {}
        """Slots of the blocks in memory, in the order of loading."""
        self._free = list(range(num_slots))[::-1]
        self._pins: Counter[int] = Counter()
        self._dirty: set[int] = set()
        self._unfilled: set[int] = set()
        """Blocks without a copy that no hold has filled yet."""
        self._is_stored: dict[int, bool] = {}
        """True for blocks whose write was submitted, False for discarded ones."""
        self._expected: Sequence[int] = ()
        self._positions: dict[int, deque[int]] = {}
        """Indices of the expected accesses of each block that are still to come."""
        self._coming: dict[int, int] = {}
        """Index of the next expected access of each block."""
        self._read_ahead_at = 0
        """Index in the expected accesses; read-ahead is done with those before it."""
        self._consumed = 0
        """Index behind the last expected access that has happened."""
        self._closed = False
        self._accesses = self._misses = self._reads = self._writes = 0
        self._stall_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return len(self.memory)

    def is_in_memory(self, block: int) -> bool:
        """Return True if a slot holds the block, or will once its read ends."""
        return block in self._slots

    def checksum(self, block: int) -> int:
        """Return a checksum of a held block, to find out later if it has changed."""
        return self._file.checksum(self.memory[self._slots[block]])

    @contextmanager
    def hold(self, blocks: Sequence[int], *, overwrites: bool = False) -> Iterator[dict[int, int]]:
        """Yield the slot of each block; the blocks stay in memory until the end.

        All missing blocks are read at once, in the order of the file. A block that is neither in
        memory nor in the file comes as zeros, without a read. With `overwrites` it has any content,
        and the caller writes all of it. Holds nest."""
        self._check_usable()
        wanted = list(dict.fromkeys(blocks))
        num_pinned = len(self._pins.keys() | set(wanted))
        if num_pinned > self.num_slots:
            raise RuntimeError(
                f"{num_pinned} blocks are held at once, and there are {self.num_slots} slots"
            )
        self._pins.update(wanted)
        try:
            self._load(wanted, overwrites=overwrites)
            yield {block: self._slots[block] for block in wanted}
        finally:
            for block in wanted:
                self._pins[block] -= 1
                if not self._pins[block]:
                    del self._pins[block]
            self._read_ahead()

    def mark_dirty(self, block: int) -> None:
        """Note that a held block has changed; it is written when it is evicted or flushed."""
        if block not in self._pins:
            raise RuntimeError(f"block {block} is not held")
        self._dirty.add(block)

    def discard(self, block: int) -> None:
        """Forget the content of a block; nothing is written, and its next hold gives zeros."""
        self._check_usable()
        if block in self._pins:
            raise RuntimeError(f"block {block} is held")
        self._is_stored[block] = False
        if block in self._slots:
            self._dirty.discard(block)
            self._free.append(self._remove(block))
            self._read_ahead()

    def expect(self, blocks: Sequence[int]) -> None:
        """Replace the expected accesses by `blocks`, in this order, and start reading ahead."""
        self._check_usable()
        self._expected = list(blocks)
        self._positions = {}
        for index, block in enumerate(self._expected):
            self._positions.setdefault(block, deque()).append(index)
        self._coming = {block: indices[0] for block, indices in self._positions.items()}
        self._read_ahead_at = self._consumed = 0
        self._read_ahead()

    def flush(self) -> None:
        """Write every dirty block; return when the file has all of them."""
        self._check_usable()
        for block in sorted(self._dirty):
            self._write(block, urgent=True)
        self._threads.wait_for_writes()

    def take_stats(self) -> CacheStats:
        """Return counts and seconds since the last call."""
        read_s, write_s = self._threads.take_busy_s()
        stats = CacheStats(
            self._accesses, self._misses, self._reads, self._reads * self._stride_bytes,
            self._writes, self._writes * self._stride_bytes, self._stall_s, read_s, write_s,
        )  # fmt: skip
        self._accesses = self._misses = self._reads = self._writes = 0
        self._stall_s = 0.0
        return stats

    def close(self) -> None:
        """End the threads and close the file; dirty blocks are not written.

        Memory is freed as soon as no array refers to it."""
        if not self._closed:
            self._closed = True
            self._threads.close()
            self.memory = np.empty((0, self._stride_bytes), np.uint8)
            self._file.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise RuntimeError("the block cache is closed")
        self._threads.raise_error()

    def _load(self, blocks: list[int], *, overwrites: bool) -> None:
        """Bring blocks into memory, and wait for them."""
        for block in blocks:
            self._residency.access(block)
            self._consume(block)
        self._accesses += len(blocks)
        for block in sorted(block for block in blocks if block not in self._slots):
            candidates = [] if self._free else [b for b in self._slots if b not in self._pins]
            self._take_slot(block, candidates, urgent=True)
            if self._has_copy(block):
                self._misses += 1
                self._read(block, urgent=True)
            else:
                self._unfilled.add(block)
        start = time.perf_counter()
        self._threads.wait_for_slots(self._slots[block] for block in blocks)
        self._stall_s += time.perf_counter() - start
        for block in self._unfilled.intersection(blocks):
            if not overwrites:
                self.memory[self._slots[block]] = 0
            self._unfilled.remove(block)

    def _consume(self, block: int) -> None:
        """Drop the next expected access of a block, if there is one."""
        indices = self._positions.get(block)
        if not indices:
            return
        self._consumed = max(self._consumed, indices.popleft() + 1)
        if indices:
            self._coming[block] = indices[0]
        else:
            del self._coming[block]

    def _read_ahead(self) -> None:
        """Read expected blocks, in their order, until a slot would come from one expected before.

        The distance is limited: a block that is read much too early takes the slot of one that is
        used again before it. An error in a transfer ends read-ahead."""
        end = min(len(self._expected), self._consumed + self._distance)
        while self._read_ahead_at < end and not self._threads.failed:
            index = self._read_ahead_at
            block = self._expected[index]
            if self._coming.get(block) == index and self._can_be_read(block):
                candidates = [] if self._free else self._not_expected_before(index)
                if not self._free and not candidates:
                    return
                self._take_slot(block, candidates, urgent=False)
                self._read(block, urgent=False)
            self._read_ahead_at = index + 1

    def _can_be_read(self, block: int) -> bool:
        return block not in self._slots and self._has_copy(block)

    def _not_expected_before(self, index: int) -> list[int]:
        """Return the blocks in memory that are not held, nor expected before `index`."""
        never = len(self._expected)
        return [
            block for block in self._slots
            if block not in self._pins and self._coming.get(block, never) > index
        ]  # fmt: skip

    def _has_copy(self, block: int) -> bool:
        """Return True if the file has the block, or will have it after a submitted write."""
        if block not in self._is_stored:
            self._is_stored[block] = self._file.has(block)
        return self._is_stored[block]

    def _take_slot(self, block: int, candidates: Sequence[int], *, urgent: bool) -> None:
        """Give `block` a free slot, or that of a candidate, which is written if it is dirty."""
        if not self._free:
            victim = self._residency.evict(candidates, self._coming)
            if victim not in candidates:
                raise RuntimeError(f"the residency policy evicts {victim}, not a candidate")
            if victim in self._dirty:
                self._write(victim, urgent=urgent)
            self._free.append(self._remove(victim))
        self._slots[block] = self._free.pop()

    def _remove(self, block: int) -> int:
        """Take a block out of memory and return its slot."""
        self._residency.removed(block)
        self._read_ahead_at = min(self._read_ahead_at, self._coming.get(block, len(self._expected)))
        return self._slots.pop(block)

    def _read(self, block: int, *, urgent: bool) -> None:
        self._reads += 1
        self._threads.submit(block, self._slots[block], writes=False, urgent=urgent)

    def _write(self, block: int, *, urgent: bool) -> None:
        self._writes += 1
        self._dirty.remove(block)
        self._is_stored[block] = True
        self._threads.submit(block, self._slots[block], writes=True, urgent=urgent)
