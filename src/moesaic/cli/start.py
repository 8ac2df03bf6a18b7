"""How a process of ours begins, with nothing imported yet.

Imports take seconds, and an interrupt in the middle of one may be swallowed, or end in a traceback.
So it ends the process there and then, without a word: nothing has been done yet.
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
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
TURNS = "50000"
"""Of waiting awake: about a quarter of a millisecond."""


def begin(module: str, *, held: bool = False) -> int:
    """Import `module` and run its `main`; returns the exit status.

    Interrupts that are `held` back, as from a rank, come through from here on.
    """
    with at_once():
        sleep_soon()
        if held:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        main = importing(module).main
    status: int = main()
    return status


def importing(module: str) -> Any:
    """The module of that name. Meanwhile an interrupt ends this process, and nobody looks for
    garbage, as what imports make stays."""
    collects = gc.isenabled()
    with at_once():
        gc.disable()
        try:
            return importlib.import_module(module)
        finally:
            if collects:
                gc.enable()


def sleep_soon() -> None:
    """Have torch's idle threads go to sleep soon, unless somebody has said how they are to wait.

    GNU's OpenMP keeps them awake for milliseconds after every operation, on cores that the threads
    of experts need by then. It must be said before torch is imported; processes that are started
    from here hear of it too.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", TURNS)


@contextmanager
def at_once() -> Iterator[None]:
    """An interrupt ends this process: imports, and waiting for other ranks, would not let it.

    Only a process's first thread hears of interrupts; others go on as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def holding_back() -> Iterator[None]:
    """Interrupts of processes that are started meanwhile are held back until they `begin`.

    Else one could meet a process whose interpreter is just starting, which says so at length. This
    process goes on hearing them: on a thread of its own, as a process inherits from the one that
    starts it.
    """
    done = threading.Event()
    threading.Thread(target=done.wait, daemon=True).start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        done.set()


def end_with_parent(parent: int) -> None:
    """End this process when its parent is gone, however that ended: already, if an interrupt met it
    while it started this one, which then has another parent from the beginning."""
    import ctypes  # Nothing that every process has to wait for.

    if sys.platform == "linux":  # At once: before a lost connection has much to say.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()


def leave(status: int) -> NoReturn:
    """End this process, in which all is closed by now, but do not take its interpreter down.

    That takes a tenth of a second, and a thread of gloo that asks for the interpreter meanwhile, to
    let go of a tensor, would abort the process with a message of its own.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):  # Whoever read it may have gone.
                stream.flush()
    os._exit(status)


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":  # A rank: `python -m moesaic.cli.start PARENT MODULE PART-AS-JSON`.
    end_with_parent(int(sys.argv.pop(1)))
    leave(begin(sys.argv.pop(1), held=True))
