"""Reads and writes of slots on threads, in an order that keeps every block and slot consistent."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moesaic.base.errors import StoreError


class BlockStorage(Protocol):
    """The interface of files of blocks: `store.file.BlockFile`, `store.expert_files.ExpertFiles`.

    Threads call `read` and `write` for different blocks at once."""

    stride_bytes: int
    """Bytes of a block in memory."""
    is_read_only: bool
    """True if blocks never change, so that an error loses none."""

    def has(self, block: int) -> bool:
        """Return True if the block can be read; asked once, before its first read or write."""
        ...

    def read(self, block: int, memory: NDArray[np.uint8]) -> None:
        """Fill `memory`, [stride_bytes], with the block."""
        ...

    def write(self, block: int, memory: NDArray[np.uint8]) -> None:
        """Write `memory`, [stride_bytes], as the block."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


@dataclass(eq=False)
class _Transfer:
    """A read or write of one block, from or into one slot."""

    number: int
    block: int
    slot: int
    writes: bool
    urgent: bool
    after: list[_Transfer]
    """Unfinished transfers of the same block or slot; this one starts when they are done."""
    followers: list[_Transfer] = field(default_factory=list)
    started: bool = False


class IOThreads:
    """Threads that transfer blocks; one other thread submits and waits.

    Transfers of the same block, and transfers of the same slot, run in the order of submission.
    Otherwise urgent ones start first, then the oldest. After the first error no transfer starts.
    """

    def __init__(self, storage: BlockStorage, memory: NDArray[np.uint8], num_threads: int) -> None:
        """Start the threads; with none, `submit` itself transfers."""
        self._storage = storage
        self._memory = memory
        self._changed = threading.Condition()
        """Guards everything below."""
        self._ready: list[tuple[bool, int, _Transfer]] = []
        """Heap of transfers that may start; one that became urgent is in it twice."""
        self._numbers = itertools.count()
        self._last_of_block: dict[int, _Transfer] = {}
        self._last_of_slot: dict[int, _Transfer] = {}
        """The newest transfer of each block and slot, while it is unfinished."""
        self._num_writes = 0
        """Unfinished writes."""
        self._running = {False: 0, True: 0}
        """Reads and writes in flight."""
        self._busy_s = {False: 0.0, True: 0.0}
        """Seconds with reads and with writes in flight, until `_counted_s`."""
        self._counted_s = time.perf_counter()
        self._error: Exception | None = None
        self._raised = False
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"store-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def failed(self) -> bool:
        """True after an error."""
        return self._error is not None

    @property
    def has_raised(self) -> bool:
        """True once the caller knows of the error."""
        return self._raised

    def submit(self, block: int, slot: int, *, writes: bool, urgent: bool) -> None:
        """Write `block` from `slot`, or read it into `slot`, once earlier transfers allow."""
        with self._changed:
            last = {self._last_of_block.get(block), self._last_of_slot.get(slot)}
            after = [transfer for transfer in last if transfer is not None]
            transfer = _Transfer(next(self._numbers), block, slot, writes, urgent, after)
            for earlier in after:
                earlier.followers.append(transfer)
            self._last_of_block[block] = self._last_of_slot[slot] = transfer
            self._num_writes += writes
            if urgent:
                self._make_urgent(transfer)
            if not after and self._threads:
                self._push(transfer)
            elif not after and self._error is None:
                self._count_busy_s()
                self._running[writes] += 1
                self._run(transfer)

    def wait_for_any(self, slots: Iterable[int]) -> set[int]:
        """Return those of `slots` without a transfer, as soon as there are any; raise the first
        error."""
        wanted = set(slots)
        with self._changed:
            for slot in wanted & self._last_of_slot.keys():
                self._make_urgent(self._last_of_slot[slot])
            self._wait(lambda: not wanted <= self._last_of_slot.keys())
            return wanted - self._last_of_slot.keys()

    def wait_for_writes(self) -> None:
        """Return when no write is left; raise the first error."""
        with self._changed:
            self._wait(lambda: not self._num_writes)

    def raise_error(self) -> None:
        """Raise the first error once; afterwards raise a StoreError that names it."""
        if self._error is None:
            return
        if self._raised:
            raise StoreError(f"blocks were lost by an earlier error: {self._error}")
        self._raised = True
        raise self._error

    @property
    def busy_s(self) -> tuple[float, float]:
        """Seconds with reads and with writes in flight since `reset_busy_s`."""
        with self._changed:
            self._count_busy_s()
            return self._busy_s[False], self._busy_s[True]

    def reset_busy_s(self) -> None:
        """Count seconds from zero."""
        with self._changed:
            self._count_busy_s()
            self._busy_s = {False: 0.0, True: 0.0}

    def close(self) -> None:
        """Wait for running transfers, drop the others and end the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._memory = np.empty((0, 0), np.uint8)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        while not is_done() and self._error is None:
            self._changed.wait()
        self.raise_error()

    def _push(self, transfer: _Transfer) -> None:
        heapq.heappush(self._ready, (not transfer.urgent, transfer.number, transfer))
        self._changed.notify_all()

    def _make_urgent(self, transfer: _Transfer) -> None:
        """Start the transfer, and those it waits for, before all others."""
        waiting = [transfer]
        while waiting:
            transfer = waiting.pop()
            if not transfer.urgent and not transfer.started:
                transfer.urgent = True
                if not transfer.after:
                    self._push(transfer)
            waiting += [earlier for earlier in transfer.after if not earlier.urgent]

    def _work(self) -> None:
        while (transfer := self._next()) is not None:
            self._run(transfer)

    def _run(self, transfer: _Transfer) -> None:
        error = None
        try:
            move = self._storage.write if transfer.writes else self._storage.read
            move(transfer.block, self._memory[transfer.slot])
        except Exception as failure:  # noqa: BLE001 - the caller's thread raises it.
            error = failure
        with self._changed:
            self._count_busy_s()
            self._running[transfer.writes] -= 1
            if error is None:
                self._finish(transfer)
            elif self._error is None:
                self._error = error
            self._changed.notify_all()

    def _next(self) -> _Transfer | None:
        """Return the next transfer to run, or None when the threads end."""
        with self._changed:
            while not self._closed:
                while self._ready and self._error is None:
                    transfer = heapq.heappop(self._ready)[2]
                    if not transfer.started:
                        transfer.started = True
                        self._count_busy_s()
                        self._running[transfer.writes] += 1
                        return transfer
                self._changed.wait()
        return None

    def _count_busy_s(self) -> None:
        """Count the seconds until now; call it before the number of running transfers changes."""
        now_s = time.perf_counter()
        for writes, number in self._running.items():
            self._busy_s[writes] += (now_s - self._counted_s) * (number > 0)
        self._counted_s = now_s

    def _finish(self, transfer: _Transfer) -> None:
        self._num_writes -= transfer.writes
        if self._last_of_block[transfer.block] is transfer:
            del self._last_of_block[transfer.block]
        if self._last_of_slot[transfer.slot] is transfer:
            del self._last_of_slot[transfer.slot]
        for follower in transfer.followers:
            follower.after.remove(transfer)
            if not follower.after:
                self._push(follower)
