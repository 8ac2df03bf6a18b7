"""File lock: one process at a time; the file names the holder and is removed on release.

The kernel frees the lock when the last process that holds it ends, including forked children. A
file left behind locks nothing.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, TextIO


class LockHeld(Exception):
    """Another process holds the lock."""


def fail_if_locked(holder: str) -> NoReturn:
    """Raise LockHeld instead of waiting; an `on_busy` for `file_lock`."""
    raise LockHeld(holder)


@contextmanager
def file_lock(path: Path, on_busy: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock at `path` exclusively.

    While another process holds it, `on_busy` is called repeatedly with a description of the holder;
    it must sleep or raise.
    """
    file = _acquire(path, on_busy)
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
    finally:
        # Remove the file while it is locked: the process that creates the next one then holds the
        # lock alone.
        with file, suppress(OSError):
            if _is_same_file(file, path):
                path.unlink()


def _acquire(path: Path, on_busy: Callable[[str], None]) -> TextIO:
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read()
            file.close()
            on_busy(holder or "another process")
            continue
        except BaseException:
            file.close()
            raise
        if _is_same_file(file, path):
            return file
        file.close()  # The holder removed the file between our open and our lock.


def _is_same_file(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
