"""How fast a disk is, past the page cache: direct I/O on a file that has no name."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from moesaic.base.errors import UserError, unwritable
from moesaic.dist.probe.timing import Clock, Figures

SMALL, LARGE = 4 << 10, 1 << 20
"""Bytes of a block."""
_PATTERNS = {
    "read": (LARGE, "read", False),
    "write": (LARGE, "write", False),
    "random read": (SMALL, "read", True),
    "random write": (SMALL, "write", True),
    "mixed": (SMALL, "mixed", True),
}
"""Size of the blocks, what is done with them, and whether in no order."""
_IN_FLIGHT = 4
"""Requests that are on their way at once; with one at a time a disk waits more than it works."""
_ROUNDS = 3
_MOST_PREPARING_S = 5.0
"""A slow disk is measured with as much of the file as it takes in this time."""
_REFUSALS = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


class NoDirectAccess(Exception):
    """The file system always goes through memory; the message is a sentence for the user."""


@contextmanager
def opened(directory: Path) -> Iterator[int]:
    """A new file in `directory` for direct I/O; without a name, it ends with its last user."""
    path = directory / f".moesaic-probe-{uuid.uuid4().hex}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    except OSError as error:
        path.unlink(missing_ok=True)  # Some file systems make it and then refuse.
        if error.errno in _REFUSALS:
            raise NoDirectAccess(_refusal(directory)) from None
        raise unwritable(f"disks = '{directory}'", error) from None
    try:
        path.unlink()
        yield fd
    finally:
        os.close(fd)


def _refusal(directory: Path) -> str:
    return (
        f"disk '{directory}' was not measured: its file system takes no direct I/O, and through "
        "memory its speed says nothing; name a directory on another file system in disks"
    )


def check(directory: Path) -> None:
    """Refuse a directory that nothing can be written to; no direct I/O is no mistake."""
    if not directory.is_dir():
        raise UserError(f"disks = '{directory}' is no directory: name one on the disk to measure")
    try:
        with opened(directory):
            pass
    except NoDirectAccess:
        pass


def measure(directory: Path, num_bytes: int, budget_s: float) -> Figures:
    """Bytes a second of every pattern."""
    with opened(directory) as fd:
        try:
            size = _prepare(fd, num_bytes)
            share_s = budget_s / len(_PATTERNS) / _ROUNDS
            return {name: [_rate(fd, size, *how, share_s)] for name, how in _PATTERNS.items()}
        except OSError as error:
            if error.errno in _REFUSALS:
                raise NoDirectAccess(_refusal(directory)) from None
            raise unwritable(f"disks = '{directory}'", error) from None


def _prepare(fd: int, num_bytes: int) -> int:
    """Fill the file: what was never written is read from nowhere. Returns its size."""
    block = _block(LARGE)
    until = time.perf_counter() + _MOST_PREPARING_S
    for offset in range(0, num_bytes, LARGE):
        os.pwritev(fd, [block], offset)
        if time.perf_counter() > until:
            num_bytes = offset + LARGE
            break
    os.fsync(fd)
    return num_bytes


def _block(length: int) -> mmap.mmap:
    """Memory as direct I/O wants it, on whole pages; its content cannot be compressed away."""
    block = mmap.mmap(-1, length)
    block.write(os.urandom(length))
    return block


def _rate(fd: int, size: int, length: int, kind: str, scattered: bool, share_s: float) -> float:
    """The median of a few rounds."""
    rates = []
    for number in range(_ROUNDS):
        offsets = list(range(0, size - length + 1, length))
        if scattered:
            random.Random(number).shuffle(offsets)
        rates.append(_round(fd, length, kind, itertools.cycle(offsets), share_s))
    return median(rates)


def _round(
    fd: int, length: int, kind: str, offsets: Iterator[int], share_s: float,
    clock: Clock = time.perf_counter,
) -> float:  # fmt: skip
    """Bytes a second of blocks at `offsets`, taken by a few threads until the time is over."""
    done: list[int] = []
    failed: list[OSError] = []
    start = clock()
    until = start + share_s

    def work(turn: int) -> None:
        block = _block(length)
        try:
            for number in itertools.count(turn):
                writes = kind == "write" or (kind == "mixed" and number % 2 == 0)
                call: Callable[..., int] = os.pwritev if writes else os.preadv
                done.append(call(fd, [block], next(offsets)))
                if clock() >= until:
                    return
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(_IN_FLIGHT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    if kind != "read":
        os.fsync(fd)
    return sum(done) / (clock() - start)
