"""Reading ahead: a thread prepares the next batches while one trains."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")

_DEPTH = 4
"""Batches that wait at most."""


class ReadAhead(Generic[T]):
    """Batches of ranges that follow one another by equal steps, read before they are needed.

    Other ranges are read when they are needed. One thread calls `load`.
    """

    def __init__(self, read: Callable[[range], T], stop: int | None = None) -> None:
        """Read batches by `read`, and none ahead from index `stop` on."""
        self._read, self._stop = read, stop
        self._pool: ThreadPoolExecutor | None = None
        self._waiting = deque[tuple[range, Future[T]]]()
        self._last: range | None = None

    def load(self, indices: range) -> T:
        """Return the batch of `indices`, and read the next ones meanwhile."""
        last, self._last = self._last, indices
        step = 0 if last is None or len(last) != len(indices) else indices.start - last.start
        if self._waiting and self._waiting[0][0] == indices:
            future = self._waiting.popleft()[1]
        else:
            future = self._drop_waiting(indices)
        if step > 0:
            self._read_next(indices, step)
        return future.result()

    def _drop_waiting(self, indices: range) -> Future[T]:
        """Read a range that was not expected; forget those that were."""
        for _, future in self._waiting:
            future.cancel()
        self._waiting.clear()
        future = Future[T]()
        future.set_result(self._read(indices))
        return future

    def _read_next(self, indices: range, step: int) -> None:
        """Start to read the ranges that follow `indices`."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "read-ahead")
        newest = self._waiting[-1][0] if self._waiting else indices
        while len(self._waiting) < _DEPTH:
            newest = range(newest.start + step, newest.stop + step)
            if self._stop is not None and newest.start >= self._stop:
                return
            self._waiting.append((newest, self._pool.submit(self._read, newest)))
