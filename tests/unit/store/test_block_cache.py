from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from storages import (
    BLOCK_BYTES,
    LRU,
    NUM_BLOCKS,
    RESIDENCIES,
    Belady,
    Recorder,
    Twin,
    filled,
    new_file,
)

from moesaic.store.cache import BlockCache, Residency
from moesaic.store.io_threads import IOThreads

pytestmark = pytest.mark.timeout(60)
"""The deadline: a hang fails."""


def wait_for_all(threads: IOThreads, slots: Iterable[int]) -> None:
    """Return when no transfer of the slots is left."""
    left = set(slots)
    while left:
        left -= threads.wait_for_any(left)


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize("num_slots", [1, 3, 7, NUM_BLOCKS])
@pytest.mark.parametrize("delay_s", [0, 0.001])
def test_random_operations_equal_a_dict(
    tmp_path: Path, residency: Callable[[], Residency], num_slots: int, delay_s: float
) -> None:
    recorder = Recorder(new_file(tmp_path), delay_s)
    with BlockCache(recorder, num_slots, residency()) as cache:
        twin = Twin(cache, num_slots)
        twin.run(60 if delay_s else 300)
        twin.compare_all()
        cache.flush()
        stats = cache.take_stats()
    kinds = [kind for kind, _ in recorder.transfers]
    # Read-ahead may still run at the end.
    assert kinds.count("write") == stats.writes
    assert 0 <= stats.reads - kinds.count("read") <= num_slots


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_transfers_do_not_depend_on_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, residency: Callable[[], Residency]
) -> None:
    submit = IOThreads.submit

    def recording(threads: IOThreads, block: int, slot: int, **how: bool) -> None:
        submitted[-1].append(("write" if how["writes"] else "read", block, slot, how["urgent"]))
        submit(threads, block, slot, **how)

    monkeypatch.setattr(IOThreads, "submit", recording)
    submitted: list[list[tuple[object, ...]]] = []
    for delay_s, num_threads in ((0, 0), (0, 1), (0, 4), (0.001, 1), (0.001, 4), (None, 4)):
        submitted.append([])
        file = None if delay_s is None else new_file(tmp_path)
        storage = Recorder(file, delay_s or 0)
        with BlockCache(storage, 6, residency(), num_threads) as cache:
            Twin(cache, 3, compares=file is not None).run(40)
            stats = cache.take_stats()
            wait_for_all(cache._threads, range(6))
        # Threads run the transfers of each block in the order of submission.
        assert len(storage.transfers) == len(submitted[-1]) == stats.reads + stats.writes > 100
        for block in range(NUM_BLOCKS):
            assert [transfer for transfer in storage.transfers if transfer[1] == block] == [
                transfer[:2] for transfer in submitted[-1] if transfer[1] == block
            ]
    assert all(others == submitted[0] for others in submitted)


class Gated(Recorder):
    """Storage whose transfers of some blocks wait until a gate opens."""

    def __init__(self, directory: Path, num_slots: int) -> None:
        super().__init__(new_file(directory))
        self.gates: dict[int, threading.Event] = {}
        self.waiting = threading.Event()
        self.cache = filled(self, num_slots)
        self.transfers.clear()
        self.cache.take_stats()

    def shut(self, block: int) -> threading.Event:
        return self.gates.setdefault(block, threading.Event())

    def _move(self, kind: str, block: int, *rest: object) -> None:
        if block in self.gates:
            self.waiting.set()
            assert self.gates[block].wait(30)
        super()._move(kind, block, *rest)  # type: ignore[arg-type]

    def hold_and_change(self, block: int) -> None:
        with self.cache.hold([block]) as slots:
            self.cache.memory[slots[block]] = 100 + block
            self.cache.mark_dirty(block)

    def value(self, block: int) -> int:
        with self.cache.hold([block]) as slots:
            (value,) = np.unique(self.cache.memory[slots[block]])
        return int(value)


def test_a_hold_waits_for_its_own_blocks_only(tmp_path: Path) -> None:
    storage = Gated(tmp_path, 4)
    gate = storage.shut(5)
    storage.cache.expect([5, 6])
    assert storage.value(7) == 7
    assert storage.value(6) == 6
    assert ("read", 5) not in storage.transfers
    gate.set()
    assert storage.value(5) == 5
    storage.cache.close()


def test_requested_blocks_are_there_one_by_one(tmp_path: Path) -> None:
    storage = Gated(tmp_path, 4)
    cache = storage.cache
    assert storage.value(3) == 3
    gates = {block: storage.shut(block) for block in (7, 9)}
    with cache.request([9, 3, 7]) as slots:
        left = set(slots)
        for block in (3, 7, 9):
            if block != 3:
                gates[block].set()
            assert cache.wait_for_any(left) == [block]
            assert (cache.memory[slots[block]] == block).all()
            left.remove(block)
    cache.close()


def test_all_missing_blocks_are_read_at_once(tmp_path: Path) -> None:
    class Meeting(Recorder):
        barrier = threading.Barrier(1)

        def read(self, block: int, memory: NDArray[np.uint8]) -> None:
            self.barrier.wait(30)
            super().read(block, memory)

    storage = Meeting(new_file(tmp_path))
    cache = filled(storage, 4)
    storage.barrier = threading.Barrier(4)
    with cache.hold([9, 3, 7, 1]) as slots:
        assert [cache.memory[slot, 0] for slot in slots.values()] == [9, 3, 7, 1]
    cache.close()


def test_missing_blocks_are_read_in_the_order_of_the_file(tmp_path: Path) -> None:
    storage = Recorder(new_file(tmp_path))
    with filled(storage, 4, num_threads=1) as cache, cache.hold([9, 3, 7, 1]) as slots:
        assert list(slots) == [9, 3, 7, 1]
    assert storage.transfers[-4:] == [("read", 1), ("read", 3), ("read", 7), ("read", 9)]


def test_an_evicted_block_that_is_wanted_again_waits_for_its_write(tmp_path: Path) -> None:
    storage = Gated(tmp_path, 2)
    storage.hold_and_change(1)
    gate = storage.shut(1)
    assert storage.value(2) == 2
    storage.cache.expect([3, 4])  # 1 leaves.
    opener = threading.Timer(0.05, gate.set)
    opener.start()
    assert storage.value(1) == 101
    order = [transfer for transfer in storage.transfers if transfer[1] == 1]
    assert order[-2:] == [("write", 1), ("read", 1)]
    opener.join()
    storage.cache.close()


def test_a_discarded_block_whose_write_still_runs_can_be_filled_again(tmp_path: Path) -> None:
    storage = Gated(tmp_path, 2)
    storage.hold_and_change(1)
    gate = storage.shut(1)
    storage.cache.expect([3, 4])  # 1 leaves.
    storage.cache.discard(1)
    opener = threading.Timer(0.05, gate.set)
    opener.start()
    assert storage.value(1) == 0
    with storage.cache.hold([1]) as slots:
        storage.cache.memory[slots[1]] = 50
        storage.cache.mark_dirty(1)
    assert [storage.value(block) for block in (5, 6, 1)] == [5, 6, 50]
    opener.join()
    storage.cache.close()


def test_urgent_transfers_overtake_others_but_not_their_own_block_or_slot(tmp_path: Path) -> None:
    storage = Gated(tmp_path, 1)
    gate = storage.shut(0)
    memory = np.zeros((6, storage.stride_bytes), np.uint8)
    threads = IOThreads(storage, memory, 1)
    threads.submit(0, 0, writes=False, urgent=False)
    assert storage.waiting.wait(30)
    for block, slot in ((1, 1), (2, 2), (3, 3), (4, 2)):
        threads.submit(block, slot, writes=False, urgent=False)
    threads.submit(5, 5, writes=False, urgent=True)
    threads.submit(6, 3, writes=True, urgent=True)  # It needs 3 before.
    with threads._changed:
        threads._make_urgent(threads._last_of_slot[2])  # 4, and 2 before it.
    gate.set()
    wait_for_all(threads, [2, 3, 5])
    wait_for_all(threads, [1])
    assert [block for _, block in storage.transfers] == [0, 2, 3, 4, 5, 6, 1]
    threads.close()
    storage.cache.close()


def test_absent_blocks_come_as_zeros_without_a_read(tmp_path: Path) -> None:
    storage = Recorder(new_file(tmp_path))
    with BlockCache(storage, 2, LRU()) as cache:
        for block in (0, 1, 2, 0):
            with cache.hold([block]) as slots:
                assert not cache.memory[slots[block]].any()
                cache.memory[slots[block]] = 7  # Without mark_dirty it is lost.
        assert storage.transfers == []
        stats = cache.take_stats()
        assert (stats.accesses, stats.reads, stats.writes) == (4, 0, 0)


def test_absent_blocks_that_are_overwritten_are_not_cleared(tmp_path: Path) -> None:
    with BlockCache(Recorder(new_file(tmp_path)), 1, LRU()) as cache:
        with cache.hold([0], overwrites=True) as slots:
            cache.memory[slots[0]] = 7
        with cache.hold([1], overwrites=True) as slots:
            assert (cache.memory[slots[1]] == 7).all()


def test_discarded_blocks_are_not_written_and_are_absent(tmp_path: Path) -> None:
    storage = Gated(tmp_path, 3)
    cache = storage.cache
    storage.hold_and_change(1)
    cache.discard(1)
    cache.discard(2)  # Not in memory.
    cache.discard(2)
    cache.flush()
    assert ("write", 1) not in storage.transfers
    assert [storage.value(block) for block in (1, 2, 3)] == [0, 0, 3]
    cache.close()


def test_only_dirty_blocks_are_written_once(tmp_path: Path) -> None:
    storage = Gated(tmp_path, 3)
    for block in (9, 4):
        storage.hold_and_change(block)
    assert storage.value(5) == 5
    storage.cache.flush()
    storage.cache.flush()
    writes = [block for kind, block in storage.transfers if kind == "write"]
    assert sorted(writes) == [4, 9]
    for block in (10, 11, 12):
        storage.value(block)
    assert len([kind for kind, _ in storage.transfers if kind == "write"]) == 2
    storage.cache.close()


class Watching(Belady):
    """Belady that notes its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[object] = []

    def access(self, block: int) -> None:
        super().access(block)
        self.calls.append(("access", block))

    def choose(self, candidates: Sequence[int], coming: Mapping[int, int]) -> int:
        self.calls.append((sorted(candidates), dict(coming)))
        return super().choose(candidates, coming)

    def removed(self, block: int) -> None:
        super().removed(block)
        self.calls.append(("removed", block))


def test_read_ahead_follows_the_expected_accesses(tmp_path: Path) -> None:
    storage, watching = Gated(tmp_path, 3), Watching()
    cache = storage.cache
    for block in list(cache._slots):
        cache.discard(block)
    cache._residency = watching
    cache.expect([1, 2, 1, 3, 4, 2])
    assert list(cache._slots) == [1, 2, 3]  # 4 finds none: all others are expected before it.
    assert watching.calls == []
    with cache.hold([1]):
        pass
    assert watching.calls == [("access", 1)]
    with cache.hold([2]):
        pass
    assert watching.calls[1:] == [
        ("access", 2),
        ([2], {1: 2, 2: 5, 3: 3}),  # Only 2 is not expected before 4.
        ("removed", 2),
    ]
    with cache.hold([1]):
        assert 2 not in cache.contents()[0]
    assert watching.calls[4:] == [("access", 1), ([1], {3: 3, 4: 4}), ("removed", 1)]
    coming = {3: 3, 4: 4}
    with cache.hold([7]):  # Unexpected: 2 is the last to be used, and comes again when 7 ends.
        assert watching.calls[7:] == [("access", 7), ([2, 3, 4], {2: 5, **coming}), ("removed", 2)]
    assert watching.calls[10:] == [([7], coming), ("removed", 7)]
    cache.discard(3)
    assert cache.take_stats().accesses == 4
    cache.close()


def test_held_blocks_stay(tmp_path: Path) -> None:
    storage = Gated(tmp_path, 3)
    cache = storage.cache
    with cache.hold([1, 2]) as outer:
        with cache.hold([2, 3]) as inner:
            assert inner[2] == outer[2]
            with pytest.raises(RuntimeError, match="4 blocks are held at once, and there are 3"):
                storage.value(4)
            with pytest.raises(RuntimeError, match="block 3 is held"):
                cache.discard(3)
        cache.expect([4, 5, 6])
        assert [storage.value(block) for block in (4, 5, 6)] == [4, 5, 6]
        assert [cache.memory[slot, 0] for slot in outer.values()] == [1, 2]
        with pytest.raises(RuntimeError, match="block 6 is not held"):
            cache.mark_dirty(6)
    with pytest.raises(RuntimeError, match="4 blocks are held at once"), cache.hold([1, 2, 3, 4]):
        pass
    assert [storage.value(block) for block in (7, 8, 9)] == [7, 8, 9]
    cache.close()


def test_a_residency_that_evicts_no_candidate_is_refused(tmp_path: Path) -> None:
    storage = Gated(tmp_path, 2)
    evict = storage.cache._residency.evict
    with storage.cache.hold([1]):
        storage.cache._residency.evict = lambda after: 1  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="evicts 1, not a candidate"):
            storage.value(5)
    storage.cache._residency.evict = evict  # type: ignore[method-assign]
    assert [storage.value(block) for block in (1, 5)] == [1, 5]
    storage.cache.close()


def test_a_body_that_fails_releases_its_blocks(tmp_path: Path) -> None:
    storage = Gated(tmp_path, 1)
    with pytest.raises(KeyError), storage.cache.hold([1]):
        raise KeyError
    assert storage.value(2) == 2
    storage.cache.close()


def test_stats_count_since_the_last_call(tmp_path: Path) -> None:
    storage = Gated(tmp_path, 2)
    storage.hold_and_change(1)
    for block in (2, 3):
        storage.value(block)
    stats = storage.cache.take_stats()
    assert (stats.accesses, stats.reads, stats.writes) == (3, 3, 1)
    stride_bytes = storage.stride_bytes
    assert (stats.read_bytes, stats.written_bytes) == (3 * stride_bytes, stride_bytes)
    assert min(stats.stall_s, stats.read_s, stats.write_s) > 0
    assert not any(storage.cache.take_stats())
    storage.cache.close()


def test_memory_is_aligned_and_outlives_the_cache_in_views(tmp_path: Path) -> None:
    storage = Gated(tmp_path, 2)
    cache = storage.cache
    assert cache.memory.shape == (2, storage.stride_bytes)
    assert cache.memory.ctypes.data % 4096 == 0
    with cache.hold([1]) as slots:
        view = cache.memory[slots[1], :BLOCK_BYTES]
    cache.close()
    cache.close()
    assert (view == 1).all()
    assert not (tmp_path / "blocks").exists()
    for call in (cache.flush, lambda: storage.value(1), lambda: cache.expect([1])):
        with pytest.raises(RuntimeError, match="the block cache is closed"):
            call()


def test_close_drops_what_has_not_started(tmp_path: Path) -> None:
    storage = Gated(tmp_path, 12)
    gates = [storage.shut(block) for block in range(12)]
    storage.cache.expect(range(12))
    opener = threading.Timer(0.05, lambda: [gate.set() for gate in gates])
    opener.start()
    storage.cache.close()
    opener.join()
    assert len(storage.transfers) <= 12
    assert not (tmp_path / "blocks").exists()
    assert not any(thread.is_alive() for thread in storage.cache._threads._threads)
