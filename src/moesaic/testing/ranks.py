"""Ranks for tests: a pool of processes that persists, so that a test costs no process start.

`Ranks.run(size, function, *arguments)` joins the first `size` processes in a new generation of
world, calls `function(world, *arguments)` on each, and returns the results by rank. Function and
arguments are pickled: use functions of a module. A rank that raises, dies or overstays fails the
call with its traceback; where one died or overstays, the pool starts afresh for the next call.
Whatever they are at, they end with the process that has them. They import the script that starts
them, which has to be a file whose work stands under `if __name__ == "__main__"`.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.distributed import TCPStore

from moesaic.dist.world import World

_PRELOADED = ["moesaic.train.assemble", "torch.distributed.fsdp", "torch.distributed.pipelining"]
"""What takes seconds to load, is loaded once, by a process that does nothing but start ranks."""


class RankFailed(AssertionError):
    """A rank raised, died or did not answer in time."""


class Ranks:
    """A pool of rank processes on this machine, as large as the largest world so far."""

    def __init__(self) -> None:
        self._generation = 0
        self._start()

    def _start(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def _grow(self, size: int) -> None:
        """Have as many processes as are asked for; those that are there stay."""
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        while len(self._processes) < size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._store.port), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(
        self, size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 100.0
    ) -> list[Any]:
        """The results of `function(world, *arguments)` on ranks 0 to `size - 1`."""
        if any(pipe.poll() for pipe in self._pipes):  # Nothing is asked: one has closed its end.
            self._start_afresh()
        self._grow(size)
        self._generation += 1
        try:
            results, failures, intact = self._asked(size, timeout_s, function, arguments)
        except BaseException:  # An interrupt, or what cannot be pickled: answers may be under way.
            self._start_afresh()
            raise
        if not intact:
            self._start_afresh()
        if failures:
            raise RankFailed("\n".join(failures))
        return results

    def _asked(
        self, size: int, timeout_s: float, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> tuple[list[Any], list[str], bool]:
        """Results, what went wrong, and whether all processes are as they were."""
        results: list[Any] = [None] * size
        failures: list[str] = []
        intact = True
        waiting: dict[Any, int] = {self._pipes[rank]: rank for rank in range(size)}
        for pipe, rank in waiting.items():
            pipe.send((rank, size, self._generation, timeout_s, function, arguments))
        end = time.monotonic() + timeout_s
        while waiting:
            ready: list[Any] = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                failures.append(f"ranks {sorted(waiting.values())} did not answer in time")
                return results, failures, False
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    ok, results[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    ok, intact, results[rank] = False, False, "the process died"
                if not ok:
                    failures.append(f"rank {rank}: {results[rank]}")
                    end = min(end, time.monotonic() + 10)
        return results, failures, intact

    def _start_afresh(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _forget() -> None:
    """Collect what a run has left: its groups above all, for gloo has a thread for each that wakes
    a hundred times in a second, and a pool's ranks would gather dozens of them."""
    gc.collect()
    gc.freeze()  # What is still there stays: modules, which take long to look through.


def _serve(pipe: Connection, port: int) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        _answer(pipe, store, *task)
        del task
        _forget()


def _answer(
    pipe: Connection, store: TCPStore, rank: int, size: int, generation: int, timeout_s: float,
    function: Callable[..., Any], arguments: tuple[Any, ...],
) -> None:  # fmt: skip
    """Send whether that went well, and its result or what was raised."""
    deadline = timedelta(seconds=timeout_s)
    try:
        if size > 1:
            world = World.join(rank, size, store, generation=generation, deadline=deadline)
        else:
            world = World.solo()
        try:
            result = function(world, *arguments)
        finally:
            world.leave()
        pipe.send((True, result))
    except BaseException:  # noqa: BLE001 - the boundary: any failure becomes the caller's
        pipe.send((False, traceback.format_exc()))
