"""One process at a time: a lock file that names its holder and goes when it is let go.

The kernel frees the lock when the last process that has it ends, a forked child included; a file
that stays behind locks nothing.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, TextIO


class Held(Exception):
    """Another has the lock."""


def leave(holder: str) -> NoReturn:
    """For `locked`: do not wait."""
    raise Held(holder)


@contextmanager
def locked(path: Path, busy: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock at `path`, alone among those who ask for it.

    While another holds it, `busy` is called again and again with the words for that holder; it
    waits a moment, or raises.
    """
    file = _take(path, busy)
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
    finally:
        # Gone while still locked: whoever takes the next file of this name has the lock alone.
        with file, suppress(OSError):
            if _is_at(file, path):
                path.unlink()


def _take(path: Path, busy: Callable[[str], None]) -> TextIO:
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read()
            file.close()
            busy(holder or "another process")
            continue
        except BaseException:
            file.close()
            raise
        if _is_at(file, path):
            return file
        file.close()  # Its holder removed it between our opening and our locking.


def _is_at(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
