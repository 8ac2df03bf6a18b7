"""Thread pool in which every torch operation runs on a single thread.

torch uses all threads for one operation and waits for the slowest. Small matmuls finish sooner if
each thread computes its own. OpenMP and MKL keep a thread count per thread, but
`torch.set_num_threads` sets MKL's for the whole process.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode


class ThreadPool:
    """Pool with as many threads as torch uses for one operation."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pool = ThreadPoolExecutor(size, "moesaic-threads", initializer=_use_one_thread)
        self.is_single_threaded = self._pool.submit(torch.get_num_threads).result() == 1
        """True if torch computes on a single thread inside the pool."""

    def run_each(self, work: Callable[[int], None], items: Iterable[int]) -> None:
        """Run `work` on all `items`, started in order, without gradients.

        After an error no more items start; it is raised when the running ones have ended.
        """
        pending, lock = (item for item in items), threading.Lock()
        inference = torch.is_inference_mode_enabled()

        def run_items() -> None:
            with torch.inference_mode(inference), torch.no_grad():
                while True:
                    with lock:
                        item = next(pending, None)
                    if item is None:
                        return
                    try:
                        work(item)
                    except BaseException:
                        with lock:
                            pending.close()
                        raise

        done = [self._pool.submit(run_items) for _ in range(self.size)]
        try:
            wait(done)
        finally:  # An interrupt ends the wait, so start no more items.
            with lock:
                pending.close()
        for future in done:
            future.result()

    def run_with_caller(self, work: Callable[[int], None]) -> None:
        """Run `work` on 0 to `size - 1`; the calling thread takes the last index.

        The caller keeps torch's thread count, so `work` must not call torch."""
        done = list[Future[None]]()
        try:
            done += (self._pool.submit(work, index) for index in range(self.size - 1))
            work(self.size - 1)
        finally:
            wait(done)
        for future in done:
            future.result()


def thread_pool() -> ThreadPool | None:
    """Return the thread pool of this process.

    None if torch has one thread, if thread counts cannot be set, or if a dispatch mode has to
    see every operation.
    """
    size = torch.get_num_threads()
    if size == 1 or _get_current_dispatch_mode() is not None:
        return None
    pool = _make_pool(size, os.getpid())
    return pool if pool is not None and pool.is_single_threaded else None


def run_ranges(work: Callable[[int, int], None], length: int, min_length: int) -> None:
    """Run `work(start, end)` over ranges of 0 to `length`, on all threads from `min_length` on.

    The caller keeps torch's thread count, so `work` must not call torch."""
    pool = thread_pool() if length >= min_length else None
    if pool is None:
        work(0, length)
        return
    size = pool.size
    pool.run_with_caller(lambda part: work(part * length // size, (part + 1) * length // size))


@lru_cache(maxsize=4)
def _make_pool(size: int, pid: int) -> ThreadPool | None:
    """Return the pool of process `pid`, because threads do not survive a fork."""
    del pid
    return ThreadPool(size) if _thread_count_setters() else None


@cache
def _thread_count_setters() -> list[Callable[[int], object]]:
    """Return functions that set the thread count for operations of the calling thread."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return []
    names = ("omp_set_num_threads", "MKL_Set_Num_Threads_Local")
    return [getattr(library, name) for name in names if hasattr(library, name)]


def _use_one_thread() -> None:
    torch.get_num_threads()  # A thread's first call adopts torch's count, so make it before.
    for set_threads in _thread_count_setters():
        set_threads(1)
