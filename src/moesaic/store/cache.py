"""Block cache: slots in memory that hold blocks of a file, with read-ahead and write-behind."""

from __future__ import annotations

import mmap
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from moesaic.store.expected import ExpectedAccesses
from moesaic.store.io_threads import BlockStorage, IOThreads

_SLOTS_PER_READ_AHEAD = 8
"""Slots for each access that is read ahead; with fewer, more blocks are read twice."""
_MIN_READ_AHEAD = 4
"""Fewest accesses that are read ahead."""
_WINDOW_PER_SLOT = 16
"""Expected accesses that count for evictions, for each slot."""


class Residency(Protocol):
    """The policy that chooses the blocks that leave memory."""

    def access(self, block: int) -> None:
        """Note that the computation uses the block, in memory or not; it stays until `release`."""
        ...

    def release(self, block: int, next_access: int | None) -> None:
        """Note that the block, in memory, may leave, or that its next expected access changed.

        `next_access` is the access's position, if there is one."""
        ...

    def evict(self, after: int) -> int | None:
        """Return the block that leaves memory, one that may; None if there is none.

        Blocks with an expected access at or before position `after` stay."""
        ...

    def removed(self, block: int) -> None:
        """Note that the block left memory: it was evicted or discarded."""
        ...


class CacheStats(NamedTuple):
    """Counts and seconds of a `BlockCache` since the last call of `take_stats`."""

    accesses: int
    """Blocks of all holds, in memory or not."""
    hits: int
    """Blocks that a hold used without a read: in memory, and not read ahead for it."""
    misses: int
    """Blocks that a hold had to request from the file: neither in memory nor read ahead."""
    reads: int
    read_bytes: int
    writes: int
    written_bytes: int
    stall_s: float
    """Seconds that holds waited for transfers."""
    read_s: float
    """Seconds with reads in flight."""
    write_s: float
    """Seconds with writes in flight."""


class BlockCache:
    """Slots in memory that hold blocks of a file; reads ahead and writes behind on threads.

    One thread calls it. Every decision depends on its calls alone, never on the time that a
    transfer takes: the same calls give the same reads and writes with any storage.

    An I/O error of a thread is raised once, by the next call that waits or starts transfers.
    Blocks may be lost then, so later calls raise too. `close` raises none of them. Storage that is
    read only loses nothing: once no block is held, the cache starts again, empty.
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
        self._default_distance = max(num_slots // _SLOTS_PER_READ_AHEAD, _MIN_READ_AHEAD)
        self._distance = self._default_distance
        """Expected accesses ahead of the last one that are read."""
        self._num_threads = num_threads
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
        self._expected = ExpectedAccesses((), 0)
        self._read_ahead_at = 0
        """Position in the expected accesses; read-ahead is done with those before it."""
        self._closed = False
        self._accesses = self._hits = self._misses = self._reads = self._writes = 0
        self._stall_s = 0.0
        self._unused: set[int] = set()
        """Blocks that were read ahead, and that no hold has used yet."""

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

    def contents(self) -> tuple[frozenset[int], frozenset[int]]:
        """Return the blocks that slots hold, or will once they are read, and the changed ones; any
        thread may call this."""
        return frozenset(self._slots), frozenset(self._dirty)

    def is_blank(self, block: int) -> bool:
        """Return True if a held block is all zeros and was never stored, so no write is needed."""
        is_new = block not in self._dirty and not self._has_copy(block)
        return is_new and not self.memory[self._slots[block]].view(np.uint64).any()

    @contextmanager
    def hold(self, blocks: Sequence[int], *, overwrites: bool = False) -> Iterator[dict[int, int]]:
        """Yield the slot of each block, once all are in memory; they stay until the end.

        With `overwrites`, blocks that come without a read have any content, and the caller writes
        all of it. Holds nest."""
        with self.request(blocks) as slots:
            if overwrites:
                self._unfilled.difference_update(blocks)
            left = set(blocks)
            while left:
                left.difference_update(self.wait_for_any(left))
            yield slots

    @contextmanager
    def request(self, blocks: Sequence[int]) -> Iterator[dict[int, int]]:
        """Yield the slot of each block as `hold` does, but without waiting: `wait_for_any` says
        which blocks are there.

        All missing blocks are read at once, in the order of the file. A block that is neither in
        memory nor in the file comes as zeros, without a read."""
        self._check_usable()
        wanted = list(dict.fromkeys(blocks))
        num_pinned = len(self._pins.keys() | set(wanted))
        if num_pinned > self.num_slots:
            raise RuntimeError(
                f"{num_pinned} blocks are held at once, and there are {self.num_slots} slots"
            )
        self._pins.update(wanted)
        try:
            self._load(wanted)
            yield {block: self._slots[block] for block in wanted}
        finally:
            for block in wanted:
                self._pins[block] -= 1
                if not self._pins[block]:
                    del self._pins[block]
                    self._release(block)
            self._read_ahead()

    def wait_for_any(self, blocks: Iterable[int]) -> list[int]:
        """Return those of some requested blocks that are in memory, as soon as there are any.

        No later transfer depends on which they are."""
        start = time.perf_counter()
        slots = {self._slots[block]: block for block in blocks}
        found = [slots[slot] for slot in self._threads.wait_for_any(slots)]
        self._stall_s += time.perf_counter() - start
        for block in self._unfilled.intersection(found):
            self.memory[self._slots[block]] = 0
            self._unfilled.remove(block)
        return found

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

    def expect(self, *segments: Sequence[int], distance: int | None = None) -> None:
        """Replace the expected accesses by `segments`, in this order, and start reading ahead.

        `distance` is the number of accesses that are read ahead; None: one for each 8 slots."""
        self._check_usable()
        self._distance = self._default_distance if distance is None else distance
        self._expected = ExpectedAccesses(segments, _WINDOW_PER_SLOT * self.num_slots)
        self._begin_read_ahead(self._slots)

    def expect_from(self, start: int, changes: Mapping[int, Sequence[int]] | None = None) -> None:
        """Begin segment number `start` of the expected accesses.

        `changes` has the accesses of segments, from there on, of which more is known now."""
        self._check_usable()
        self._begin_read_ahead(self._expected.advance(start, changes))

    def _begin_read_ahead(self, changed: Iterable[int]) -> None:
        """Read ahead from the start, when the next accesses of the `changed` blocks differ."""
        self._read_ahead_at = self._expected.start
        for block in changed:
            self._release(block)
        self._read_ahead()

    def flush(self) -> None:
        """Write every dirty block; return when the file has all of them."""
        self._check_usable()
        for block in sorted(self._dirty):
            self._write(block, urgent=True)
        self._threads.wait_for_writes()

    @property
    def stats(self) -> CacheStats:
        """Counts and seconds since the last `take_stats`; any thread may ask for them."""
        return CacheStats(
            self._accesses, self._hits, self._misses, self._reads, self._reads * self._stride_bytes,
            self._writes, self._writes * self._stride_bytes, self._stall_s, *self._threads.busy_s,
        )  # fmt: skip

    def take_stats(self) -> CacheStats:
        """Return counts and seconds since the last call."""
        stats = self.stats
        self._threads.reset_busy_s()
        self._accesses = self._hits = self._misses = self._reads = self._writes = 0
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
        if self._file.is_read_only and self._threads.has_raised and not self._pins:
            self._start_again()
        self._threads.raise_error()

    def _start_again(self) -> None:
        """Forget all blocks after an error, and start new threads."""
        self._threads.close()
        self._threads = IOThreads(self._file, self.memory, self._num_threads)
        self._expected, self._read_ahead_at = ExpectedAccesses((), 0), 0
        for block in list(self._slots):
            self._free.append(self._remove(block))

    def _load(self, blocks: list[int]) -> None:
        """Give blocks slots, and start to read those that are missing."""
        for block in blocks:
            self._residency.access(block)
            self._expected.consume(block)
        self._accesses += len(blocks)
        self._hits += sum(block in self._slots and block not in self._unused for block in blocks)
        self._unused.difference_update(blocks)
        for block in sorted(block for block in blocks if block not in self._slots):
            self._take_slot(block, after=-1, urgent=True)
            if self._has_copy(block):
                self._misses += 1
                self._read(block, urgent=True)
            else:
                self._unfilled.add(block)

    def _read_ahead(self) -> None:
        """Read expected blocks, in their order, until a slot would come from one expected before.

        The distance is limited: a block that is read much too early takes the slot of one that is
        used again before it. An error in a transfer ends read-ahead."""
        expected = self._expected
        end = expected.ahead(self._distance)
        while self._read_ahead_at < end and not self._threads.failed:
            position = self._read_ahead_at
            block = expected.block(position)
            if block is not None and self._is_read_ahead(block, position):
                if not self._take_slot(block, after=position, urgent=False):
                    return
                self._unused.add(block)
                self._read(block, urgent=False)
                self._release(block)
            self._read_ahead_at = expected.following(position)

    def _is_read_ahead(self, block: int, position: int) -> bool:
        """Return True if a block can be read, and its next expected access is at `position`."""
        is_next = self._expected.coming.get(block) == position
        return is_next and block not in self._slots and self._has_copy(block)

    def _has_copy(self, block: int) -> bool:
        """Return True if the file has the block, or will have it after a submitted write."""
        if block not in self._is_stored:
            self._is_stored[block] = self._file.has(block)
        return self._is_stored[block]

    def _take_slot(self, block: int, *, after: int, urgent: bool) -> bool:
        """Give `block` a free slot, or that of another one, which is written if it is dirty.

        Return False if all others are held or expected at or before position `after`."""
        if not self._free:
            victim = self._residency.evict(after)
            if victim is None and not urgent:
                return False
            if victim is None or not self._may_leave(victim, after):
                raise RuntimeError(f"the residency policy evicts {victim}, not a candidate")
            if victim in self._dirty:
                self._write(victim, urgent=urgent)
            self._free.append(self._remove(victim))
        self._slots[block] = self._free.pop()
        return True

    def _may_leave(self, block: int, after: int) -> bool:
        is_idle = block in self._slots and block not in self._pins
        return is_idle and self._expected.coming.get(block, self._expected.end) > after

    def _release(self, block: int) -> None:
        """Let the residency policy evict a block if it is in memory and nothing holds it."""
        if block in self._slots and block not in self._pins:
            self._residency.release(block, self._expected.coming.get(block))

    def _remove(self, block: int) -> int:
        """Take a block out of memory and return its slot."""
        self._residency.removed(block)
        self._unfilled.discard(block)
        self._unused.discard(block)
        next_access = self._expected.coming.get(block, self._expected.end)
        self._read_ahead_at = min(self._read_ahead_at, next_access)
        return self._slots.pop(block)

    def _read(self, block: int, *, urgent: bool) -> None:
        self._reads += 1
        self._threads.submit(block, self._slots[block], writes=False, urgent=urgent)

    def _write(self, block: int, *, urgent: bool) -> None:
        self._writes += 1
        self._dirty.remove(block)
        self._is_stored[block] = True
        self._threads.submit(block, self._slots[block], writes=True, urgent=urgent)
