"""Threads that compute side by side, each operation on the one thread that asks for it.

torch has all threads work on one operation, and on the next when the last of them is done. Small
products are done sooner if each thread has some of its own. OpenMP and MKL keep for every thread
how many it may use, but torch's own function sets MKL's number for the whole process.
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


class Crew:
    """As many threads as torch has for one operation."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pool = ThreadPoolExecutor(size, "moesaic-crew", initializer=_be_alone)
        self.works = self._pool.submit(torch.get_num_threads).result() == 1
        """Whether its threads do compute alone."""

    def each(self, work: Callable[[int], None], items: Iterable[int]) -> None:
        """`work` on all `items`, begun in their order, without gradients.

        After an error nothing more is begun, and it is raised when all that was begun has ended.
        """
        waiting, lock = (item for item in items), threading.Lock()
        inference = torch.is_inference_mode_enabled()

        def take() -> None:
            with torch.inference_mode(inference), torch.no_grad():
                while True:
                    with lock:
                        item = next(waiting, None)
                    if item is None:
                        return
                    try:
                        work(item)
                    except BaseException:
                        with lock:
                            waiting.close()
                        raise

        done = [self._pool.submit(take) for _ in range(self.size)]
        try:
            wait(done)
        finally:  # An interrupt ends the wait; what is left is not to be begun.
            with lock:
                waiting.close()
        for one in done:
            one.result()

    def with_caller(self, work: Callable[[int], None]) -> None:
        """`work` on 0 to `size - 1`, the last of them by the calling thread, which has all of
        torch's threads: for work that asks torch for nothing."""
        done = list[Future[None]]()
        try:
            done += (self._pool.submit(work, place) for place in range(self.size - 1))
            work(self.size - 1)
        finally:
            wait(done)
        for one in done:
            one.result()


def crew() -> Crew | None:
    """The crew of this process; None where a thread would be alone, or cannot be, or where a mode
    of the calling thread is to see every operation."""
    size = torch.get_num_threads()
    if size == 1 or _get_current_dispatch_mode() is not None:
        return None
    found = _crew(size, os.getpid())
    return found if found is not None and found.works else None


@lru_cache(maxsize=4)
def _crew(size: int, process: int) -> Crew | None:
    """Of a process, for threads do not outlive a fork."""
    del process
    return Crew(size) if _settings() else None


@cache
def _settings() -> list[Callable[[int], object]]:
    """Functions that set how many threads operations of the calling thread use."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return []
    names = ("omp_set_num_threads", "MKL_Set_Num_Threads_Local")
    return [getattr(library, name) for name in names if hasattr(library, name)]


def _be_alone() -> None:
    torch.get_num_threads()  # A thread that asks for the first time takes over torch's number.
    for set_threads in _settings():
        set_threads(1)
