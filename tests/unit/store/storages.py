from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moesaic.store.cache import BlockCache, Residency
from moesaic.store.file import BlockFile
from moesaic.store.io_threads import BlockStorage
from moesaic.testing.residency import RandomResidency, SlowResidency

NUM_BLOCKS, BLOCK_BYTES = 24, 5000


class LRU(SlowResidency):
    """The least recently used block leaves, first of those that are not expected."""

    def __init__(self) -> None:
        super().__init__()
        self.used: dict[int, None] = {}

    def access(self, block: int) -> None:
        super().access(block)
        self.used.pop(block, None)
        self.used[block] = None

    def choose(self, candidates: Sequence[int], coming: Mapping[int, int]) -> int:
        order = {block: index for index, block in enumerate(self.used)}
        return min(candidates, key=lambda block: (block in coming, order.get(block, -1)))

    def removed(self, block: int) -> None:
        super().removed(block)
        self.used.pop(block, None)


class Belady(SlowResidency):
    """The block whose next expected access is last leaves."""

    def choose(self, candidates: Sequence[int], coming: Mapping[int, int]) -> int:
        assert all(position >= 0 for position in coming.values())
        return max(candidates, key=lambda block: coming.get(block, 1 << 60))


RESIDENCIES: list[Callable[[], Residency]] = [LRU, Belady, RandomResidency]


class Recorder:
    """Storage that lists its transfers and may be slow; without a file it moves nothing."""

    is_read_only = False

    def __init__(self, file: BlockFile | None, delay_s: float = 0.0) -> None:
        self.file = file
        self.stride_bytes = file.stride_bytes if file else 8192
        self.delay_s = delay_s
        self.transfers: list[tuple[str, int]] = []
        self.running: set[int] = set()
        self.lock = threading.Lock()
        self.random = random.Random(0)

    def has(self, block: int) -> bool:
        return self.file is not None and self.file.has(block)

    def read(self, block: int, memory: NDArray[np.uint8]) -> None:
        self._move("read", block, self.file.read if self.file else None, memory)

    def write(self, block: int, memory: NDArray[np.uint8]) -> None:
        self._move("write", block, self.file.write if self.file else None, memory)

    def _move(
        self, kind: str, block: int, move: Callable[..., None] | None, memory: NDArray[np.uint8]
    ) -> None:
        with self.lock:
            self.transfers.append((kind, block))
            assert block not in self.running, "two transfers of a block at once"
            self.running.add(block)
            delay_s = self.delay_s * self.random.random()
        if delay_s:
            time.sleep(delay_s)
        if move:
            move(block, memory)
        with self.lock:
            self.running.remove(block)

    def close(self) -> None:
        if self.file:
            self.file.close()


OPERATIONS = {"hold": 12, "follow": 4, "expect": 2, "discard": 2, "flush": 1}
"""Operations of a twin and how often they come."""


class Twin:
    """A cache and its slow, obvious twin: a dict of byte arrays, driven by random operations."""

    def __init__(self, cache: BlockCache, seed: int, compares: bool = True) -> None:
        self.cache = cache
        self.compares = compares
        self.random = random.Random(seed)
        self.contents: dict[int, bytes] = {}

    def run(self, num_operations: int) -> None:
        """Compare the bytes of every block that is held."""
        for _ in range(num_operations):
            names, weights = zip(*OPERATIONS.items(), strict=True)
            getattr(self, self.random.choices(names, weights)[0])()

    def hold(self, blocks: Sequence[int] | None = None, room: int | None = None) -> None:
        room = self.cache.num_slots if room is None else room
        if blocks is None:
            blocks = self.random.sample(range(NUM_BLOCKS), self.random.randint(1, min(room, 4)))
        with self.cache.hold(blocks) as slots:
            assert list(slots) == list(blocks)
            for block in blocks:
                self.compare(block, slots[block])
            if room > 2 * len(blocks) and self.random.random() < 0.3:
                self.hold(room=room - len(blocks))
            for block in blocks:
                if self.random.random() < 0.5:
                    self.change(block, slots[block])

    def compare(self, block: int, slot: int) -> None:
        expected = self.contents.get(block, bytes(BLOCK_BYTES))
        assert not self.compares or self.cache.memory[slot, :BLOCK_BYTES].tobytes() == expected, (
            block
        )

    def change(self, block: int, slot: int) -> None:
        self.contents[block] = self.random.randbytes(BLOCK_BYTES)
        self.cache.memory[slot, :BLOCK_BYTES] = np.frombuffer(self.contents[block], np.uint8)
        self.cache.mark_dirty(block)

    def follow(self) -> None:
        """Announce accesses, then make them; a few are missing or others."""
        blocks = [self.random.randrange(NUM_BLOCKS) for _ in range(12)]
        self.cache.expect(blocks)
        for block in blocks:
            if self.random.random() < 0.9:
                self.hold([block])
            if self.random.random() < 0.1:
                self.hold()

    def expect(self) -> None:
        count = self.random.randrange(20)
        self.cache.expect([self.random.randrange(NUM_BLOCKS) for _ in range(count)])

    def discard(self) -> None:
        block = self.random.randrange(NUM_BLOCKS)
        self.cache.discard(block)
        self.contents.pop(block, None)

    def flush(self) -> None:
        self.cache.flush()

    def compare_all(self) -> None:
        for block in range(NUM_BLOCKS):
            with self.cache.hold([block]) as slots:
                self.compare(block, slots[block])


def new_file(directory: Path) -> BlockFile:
    return BlockFile(directory / "blocks", NUM_BLOCKS, BLOCK_BYTES)


def filled(storage: BlockStorage, num_slots: int, num_threads: int = 4) -> BlockCache:
    """Return a cache whose file has all blocks, each filled with its number; memory has none."""
    cache = BlockCache(storage, num_slots, LRU(), num_threads)
    for block in range(NUM_BLOCKS):
        with cache.hold([block]) as slots:
            cache.memory[slots[block]] = block
            cache.mark_dirty(block)
    cache.flush()
    return cache
