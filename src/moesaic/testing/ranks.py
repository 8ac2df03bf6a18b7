"""Rank pool for tests: persistent processes, so that a test starts none.

`RankPool.run(size, function, *arguments)` joins the first `size` processes in a new world and calls
`function(world, *arguments)` on each. It returns the results by rank. Function and arguments are
pickled, so use module-level functions. A rank that raises, dies or times out fails the call with
its traceback; after a death or a timeout, the pool restarts for the next call.

Rank processes end with their parent at any time. They import the script that starts them, which
must be a file that guards its work by `if __name__ == "__main__"`.
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
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.distributed import TCPStore

from moesaic.dist.world import World

_PRELOADED = ["moesaic.train.ctr", "torch.distributed.fsdp", "torch.distributed.pipelining"]
"""Modules that are slow to import, loaded once by the fork server that starts ranks."""


def fork_server() -> ForkServerContext:
    """Return the context whose processes are forks of one that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


class RankFailed(AssertionError):
    """Failure of a rank: it raised, died or timed out."""


class RankPool:
    """Pool of rank processes on this machine, as large as the largest world so far."""

    def __init__(self) -> None:
        self._generation = 0
        self._start()

    def _start(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def _grow(self, size: int) -> None:
        """Start processes until there are `size`."""
        context = fork_server()
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
        """Return the results of `function(world, *arguments)` on ranks 0 to `size - 1`."""
        # No reply is due, so a readable pipe is closed.
        if any(pipe.poll() for pipe in self._pipes):
            self._restart()
        self._grow(size)
        self._generation += 1
        try:
            results, failures, intact = self._run_task(size, timeout_s, function, arguments)
        except BaseException:  # An interrupt or an unpicklable task may leave replies in the pipes.
            self._restart()
            raise
        if not intact:
            self._restart()
        if failures:
            raise RankFailed("\n".join(failures))
        return results

    def _run_task(
        self, size: int, timeout_s: float, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> tuple[list[Any], list[str], bool]:
        """Return results, failures, and true if all processes survived in time."""
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

    def _restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        """Kill the processes."""
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


def _collect_garbage() -> None:
    """Collect the garbage of a run, above all its process groups. Each gloo group has a thread that
    wakes a hundred times a second, and pooled ranks would gather dozens of them."""
    gc.collect()
    gc.freeze()  # Freeze the rest, mostly modules, which take long to traverse.


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
        _run_and_reply(pipe, store, *task)
        del task
        _collect_garbage()


def _run_and_reply(
    pipe: Connection, store: TCPStore, rank: int, size: int, generation: int, timeout_s: float,
    function: Callable[..., Any], arguments: tuple[Any, ...],
) -> None:  # fmt: skip
    """Send success and the result, or failure and the traceback."""
    deadline = timedelta(seconds=timeout_s)
    try:
        if size > 1:
            world = World.join(rank, size, store, generation=generation, timeout=deadline)
        else:
            world = World.solo()
        try:
            result = function(world, *arguments)
        finally:
            world.leave()
        pipe.send((True, result))
    except BaseException:  # noqa: BLE001 - the boundary: any failure becomes the caller's
        pipe.send((False, traceback.format_exc()))
