"""Disk speed without the page cache: direct I/O on an unnamed file."""

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

from moesaic.base.errors import UserError, write_error
from moesaic.dist.probe.timing import Clock, Figures

SMALL_BLOCK_BYTES, LARGE_BLOCK_BYTES = 4 << 10, 1 << 20
"""Block sizes of random and of sequential access."""
_PATTERNS = {
    "read": (LARGE_BLOCK_BYTES, "read", False),
    "write": (LARGE_BLOCK_BYTES, "write", False),
    "random read": (SMALL_BLOCK_BYTES, "read", True),
    "random write": (SMALL_BLOCK_BYTES, "write", True),
    "mixed": (SMALL_BLOCK_BYTES, "mixed", True),
}
"""Block size, operation, and random order, by pattern."""
_QUEUE_DEPTH = 4
"""Requests in flight; with one a disk mostly waits."""
_ROUNDS = 3
_MAX_PREPARE_S = 5.0
"""Limit for writing the test file; a slow disk is measured with a smaller one."""
_UNSUPPORTED_ERRNOS = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


class NoDirectIO(Exception):
    """The file system has no direct I/O; the message is for the user."""


@contextmanager
def open_direct(directory: Path) -> Iterator[int]:
    """Open a new file in `directory` for direct I/O. It is unlinked at once, so it vanishes on
    close."""
    path = directory / f".moesaic-probe-{uuid.uuid4().hex}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    except OSError as error:
        path.unlink(missing_ok=True)  # Some file systems create the file and then fail.
        if error.errno in _UNSUPPORTED_ERRNOS:
            raise NoDirectIO(_no_direct_io_message(directory)) from None
        raise write_error(f"disks = '{directory}'", error) from None
    try:
        path.unlink()
        yield fd
    finally:
        os.close(fd)


def _no_direct_io_message(directory: Path) -> str:
    return (
        f"disk '{directory}' was not measured: its file system has no direct I/O, and the page "
        "cache would hide its speed; name a directory on another file system in disks"
    )


def check_writable(directory: Path) -> None:
    """Raise UserError if `directory` is not writable; missing direct I/O is accepted."""
    if not directory.is_dir():
        raise UserError(
            f"disks = '{directory}' is not a directory; name one on the disk to measure"
        )
    try:
        with open_direct(directory):
            pass
    except NoDirectIO:
        pass


def measure(directory: Path, num_bytes: int, budget_s: float) -> Figures:
    """Return the bytes per second of every pattern."""
    with open_direct(directory) as fd:
        try:
            size = _prepare(fd, num_bytes)
            share_s = budget_s / len(_PATTERNS) / _ROUNDS
            return {
                name: [_rate(fd, size, *pattern, share_s)] for name, pattern in _PATTERNS.items()
            }
        except OSError as error:
            if error.errno in _UNSUPPORTED_ERRNOS:
                raise NoDirectIO(_no_direct_io_message(directory)) from None
            raise write_error(f"disks = '{directory}'", error) from None


def _prepare(fd: int, num_bytes: int) -> int:
    """Write the file, since unwritten blocks would not be read from disk; return its size."""
    block = _block(LARGE_BLOCK_BYTES)
    deadline = time.perf_counter() + _MAX_PREPARE_S
    for offset in range(0, num_bytes, LARGE_BLOCK_BYTES):
        os.pwritev(fd, [block], offset)
        if time.perf_counter() > deadline:
            num_bytes = offset + LARGE_BLOCK_BYTES
            break
    os.fsync(fd)
    return num_bytes


def _block(length: int) -> mmap.mmap:
    """Return page-aligned memory for direct I/O, with incompressible content."""
    block = mmap.mmap(-1, length)
    block.write(os.urandom(length))
    return block


def _rate(fd: int, size: int, length: int, kind: str, is_random: bool, share_s: float) -> float:
    """Return the median bytes per second of several rounds."""
    rates = []
    for number in range(_ROUNDS):
        offsets = list(range(0, size - length + 1, length))
        if is_random:
            random.Random(number).shuffle(offsets)
        rates.append(_round(fd, length, kind, itertools.cycle(offsets), share_s))
    return median(rates)


def _round(
    fd: int, length: int, kind: str, offsets: Iterator[int], share_s: float,
    clock: Clock = time.perf_counter,
) -> float:  # fmt: skip
    """Return the bytes per second of blocks at `offsets`, from several threads until the time is
    over."""
    done: list[int] = []
    errors: list[OSError] = []
    start = clock()
    deadline = start + share_s

    def work(thread_index: int) -> None:
        block = _block(length)
        try:
            for number in itertools.count(thread_index):
                writes = kind == "write" or (kind == "mixed" and number % 2 == 0)
                call: Callable[..., int] = os.pwritev if writes else os.preadv
                done.append(call(fd, [block], next(offsets)))
                if clock() >= deadline:
                    return
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(_QUEUE_DEPTH)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    if kind != "read":
        os.fsync(fd)
    return sum(done) / (clock() - start)
