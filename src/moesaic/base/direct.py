"""Files that are read or written once, past the system's page cache.

A model that goes through once gains nothing from the cache: its pages must be found, filled, copied
and given up again, which takes longer than a quick disk does, and what others have there goes.
Where a file system knows no way past it (tmpfs, macOS), the same bytes go through it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moesaic.base.errors import StoreError

_ALIGNMENT = max(4096, mmap.PAGESIZE)
"""What places in a file, in memory and sizes must be a multiple of."""

_BLOCK_BYTES = 4 << 20
"""What is asked of the disk at a time."""

_BLOCKS = 2
"""Blocks of a file under way: one is filled while the disk takes the other."""


def write(path: Path, chunks: Iterable[bytes | memoryview], *, synced: bool = True) -> None:
    """Write `chunks` to `path`, and have the disk keep them, unless somebody else does.

    A thread writes a block while the next one is filled.
    """
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1, "direct") as pool:
        waiting = deque[tuple[Future[None], memoryview]]()
        block, filled = memory(_BLOCK_BYTES), 0
        for chunk in chunks:
            left = memoryview(chunk).cast("B")
            while left:
                count = min(len(left), len(block) - filled)
                # numpy lets other threads run while it copies; slices of a memoryview do not.
                np.copyto(_numbers(block[filled : filled + count]), _numbers(left[:count]))
                filled, left = filled + count, left[count:]
                if filled == len(block):
                    waiting.append((_begin(pool, waiting, file, block), block))
                    block, filled = _next_block(waiting), 0
        while waiting:
            waiting.popleft()[0].result()
        _write_whole(file, block[:filled], past=False)  # The end is no whole block.
        if synced:
            os.fsync(file.fileno())


def _begin(
    pool: ThreadPoolExecutor,
    waiting: Iterable[tuple[Future[None], memoryview]],
    file: FileIO,
    block: memoryview,
) -> Future[None]:
    """Have a thread write `block` behind all that waits; or write it, if none begins anything any
    more, for the interpreter is leaving."""
    try:
        return pool.submit(_write_whole, file, block, past=True)
    except RuntimeError:
        for written, _ in waiting:
            written.result()
        _write_whole(file, block, past=True)
        done = Future[None]()
        done.set_result(None)
        return done


def _next_block(waiting: deque[tuple[Future[None], memoryview]]) -> memoryview:
    """A block that nothing is written from."""
    if len(waiting) < _BLOCKS:
        return memory(_BLOCK_BYTES)
    written, block = waiting.popleft()
    written.result()
    return block


def read(path: Path, start: int, count: int) -> memoryview:
    """`count` bytes of a file from `start` on, in memory of their own."""
    before = start % _ALIGNMENT
    buffer = memory(before + count)
    with _readable(path), path.open("rb", buffering=0) as file:
        _go_past(file, True)
        file.seek(start - before)
        if _read_whole(file, buffer) < before + count:
            raise StoreError(f"'{path}' ends before byte {start + count}: restore it")
    return buffer[before : before + count]


def parts(path: Path, buffer: memoryview) -> Iterator[memoryview]:
    """All of a file into `buffer`, which is `memory` enough; each part as soon as it is there."""
    pool = ThreadPoolExecutor(1, "direct")
    with _readable(path):
        file = path.open("rb", buffering=0)
    with file:
        _go_past(file, True)
        try:
            size = os.fstat(file.fileno()).st_size
            places = [slice(at, at + _BLOCK_BYTES) for at in range(0, size, _BLOCK_BYTES)]
            coming = [pool.submit(_read_whole, file, buffer[place]) for place in places]
            for place, count in zip(places, coming, strict=True):
                end = min(place.stop, size)
                with _readable(path):
                    found = count.result()
                if found < end - place.start:
                    raise StoreError(f"'{path}' ends before byte {end}: restore it")
                yield buffer[place.start : end]
        finally:
            pool.shutdown(cancel_futures=True)


def memory(num_bytes: int) -> memoryview:
    """Memory for at least so many bytes that a file can be read into.

    The C library gives again what was given back: pages that nobody had yet cost more than reading.
    """
    size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    values = np.empty(size + _ALIGNMENT, np.uint8)
    first = -values.ctypes.data % _ALIGNMENT
    data: memoryview = values.data
    return data[first : first + size]


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Name the file that cannot be read: whoever writes meanwhile would take it for its own."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"'{path}' cannot be read ({error.strerror}): restore it") from error


def _numbers(data: memoryview) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


def _go_past(file: FileIO, past: bool) -> None:
    """Have what follows go past the page cache, or not, where the file system can."""
    if not hasattr(os, "O_DIRECT"):
        return
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if past else flags & ~os.O_DIRECT
    if wanted == flags:
        return
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, wanted)
    except OSError:
        return  # A file system that has but one way (tmpfs).


def _write_whole(file: FileIO, data: memoryview, past: bool) -> None:
    _go_past(file, past)
    while data:
        data = data[_retrying(file, file.write, data) :]


def _read_whole(file: FileIO, buffer: memoryview) -> int:
    """Fill `buffer` as far as the file goes; how far that was."""
    filled = 0
    while filled < len(buffer) and (count := _retrying(file, file.readinto, buffer[filled:])):
        filled += count
    return filled


def _retrying(file: FileIO, move: Callable[[memoryview], int], data: memoryview) -> int:
    """What `move` says of `data`, through the page cache if the disk wants another alignment."""
    try:
        return move(data)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    _go_past(file, False)
    return move(data)
