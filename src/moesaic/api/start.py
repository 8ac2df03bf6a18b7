"""Start and end of processes: imports, signals and threads.

Imports take seconds, and an interrupt during one may be swallowed or end in a traceback. So SIGINT
ends the process during imports, without unwinding; nothing has been done yet.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_INTERRUPTED = 130
"""Exit status after SIGINT."""
SAME_COMMAND = (
    "ended by SIGTERM before the first step: nothing was saved, the same command starts anew"
)
"""Line of a run that ended so early."""
SPIN_COUNT = "50000"
"""OpenMP's spins before an idle thread sleeps: about a quarter of a millisecond."""


def run_main(module: str, *, interrupts_blocked: bool = False, handler: Any = None) -> int:
    """Import `module`, run its `main` and return the exit status.

    With `interrupts_blocked` the parent has blocked SIGINT (`block_interrupts`); unblock it. `main`
    runs under `handler` of SIGINT; None: the one that is set.
    """
    with exit_on_interrupt():
        set_spin_count()
        if interrupts_blocked:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        main = import_module(module).main
    if handler is not None:
        signal.signal(signal.SIGINT, handler)
    status: int = main()
    return status


def import_module(module: str) -> Any:
    """Import and return a module, without garbage collection; SIGINT ends this process meanwhile.

    Imported objects stay, so collecting garbage would only cost time.
    """
    was_enabled = gc.isenabled()
    with exit_on_interrupt():
        gc.disable()
        try:
            return importlib.import_module(module)
        finally:
            if was_enabled:
                gc.enable()


def set_spin_count() -> None:
    """Make torch's idle OpenMP threads sleep soon, unless the environment says how they wait.

    GNU's OpenMP lets them spin for milliseconds after every operation, on cores that the expert
    threads need. Call this before torch is imported; child processes inherit it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Let SIGINT end this process, since imports and waiting for other ranks may swallow it.

    A thread does it, because the main one may be in a library that waits. Only the main thread gets
    interrupts, so other threads change nothing. A block inside another one changes nothing either.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    is_inner = isinstance(before, partial) and before.func is _pass_on
    if not is_main or is_inner or before is signal.SIG_IGN:
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    threading.Thread(target=_exit_at_interrupt, args=(reader,), daemon=True).start()
    # Between the calls garbage collection may take a fifth of a second, so the handler counts too.
    signal.signal(signal.SIGINT, partial(_pass_on, writer))
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGINT, before)
        os.close(writer)


@contextmanager
def exit_on_sigterm(line: str, status: int = 75) -> Iterator[None]:
    """Let SIGTERM end this process with a line and a status, and ranks silently; leave it to the
    system afterwards.

    Nothing is unwound, since imports may swallow an error: no rank and no file may be open yet.
    """

    def end(_signal: int, _frame: FrameType | None) -> None:
        _end(line, status)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _pass_on(writer: int, number: int, _frame: FrameType | None) -> None:
    """Tell the thread of `exit_on_interrupt` about a signal, as the wakeup descriptor does."""
    os.write(writer, bytes([number]))


def _exit_at_interrupt(reader: int) -> None:
    """End the process once the pipe has the number of SIGINT."""
    while number := os.read(reader, 1):
        if number[0] == signal.SIGINT:
            _end("interrupted", _INTERRUPTED)
    os.close(reader)


def _end(line: str, status: int) -> NoReturn:
    """End the process without unwinding; a rank prints no line."""
    if "LOCAL_WORLD_SIZE" not in os.environ:
        with suppress(OSError):
            # A progress bar hides the cursor.
            os.write(2, b"\r\x1b[2K\x1b[?25h" * os.isatty(2) + f"{line}\n".encode())
    os._exit(status)


@contextmanager
def block_interrupts() -> Iterator[None]:
    """Block SIGINT in processes that are started meanwhile, until their `run_main`.

    Otherwise SIGINT could hit an interpreter that is just starting and print a traceback. This
    process still gets SIGINT, on a thread of its own: children inherit the starting thread's mask.
    """
    done = threading.Event()
    threading.Thread(target=done.wait, daemon=True).start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        done.set()


def exit_with_parent(parent: int) -> None:
    """Kill this process as soon as its parent is gone; at once if it is gone already."""
    import ctypes  # Only ranks need it.

    if sys.platform == "linux":  # The kernel does it before a lost connection prints errors.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def exit_process(status: int) -> NoReturn:
    """End this process without shutting down the interpreter; all resources must be closed.

    A shutdown takes a tenth of a second. A gloo thread that frees a tensor meanwhile would abort
    the process with an error message.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):  # The reader may be gone.
                stream.flush()
    os._exit(status)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _set_rank_environment() -> None:
    """Set what torchrun leaves to its user: threads per rank, and the loopback interface."""
    threads = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


if __name__ == "__main__":  # A rank: `python -m moesaic.api.start PARENT MODULE TASK-AS-JSON`.
    exit_with_parent(int(sys.argv.pop(1)))
    _set_rank_environment()
    exit_process(run_main(sys.argv.pop(1), interrupts_blocked=True))
