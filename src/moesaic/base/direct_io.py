"""Direct I/O: files that are read or written once, without the page cache.

The cache does not help a file that is used once. Allocating, filling and evicting its pages takes
longer than a fast disk, and evicts the pages of other processes. File systems without direct I/O
(tmpfs, macOS) use the page cache.
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

ALIGNMENT = max(4096, mmap.PAGESIZE)
"""Alignment of file offsets, memory addresses and sizes in direct I/O, in bytes."""

_BLOCK_BYTES = 4 << 20
"""Bytes of one disk request."""

_NUM_BLOCKS = 2
"""Blocks of a file in flight: one is filled while the disk takes the other."""


def write(path: Path, chunks: Iterable[bytes | memoryview], *, sync: bool = True) -> None:
    """Write `chunks` to `path`; flush the file to disk unless `sync` is False.

    A thread writes one block while the next is filled.
    """
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1, "direct") as pool:
        waiting = deque[tuple[Future[None], memoryview]]()
        block, filled = aligned_buffer(_BLOCK_BYTES), 0
        for chunk in chunks:
            left = memoryview(chunk).cast("B")
            while left:
                count = min(len(left), len(block) - filled)
                # numpy releases the GIL while it copies; assigning to a slice of a memoryview does
                # not.
                np.copyto(_as_array(block[filled : filled + count]), _as_array(left[:count]))
                filled, left = filled + count, left[count:]
                if filled == len(block):
                    waiting.append((_submit_write(pool, waiting, file, block), block))
                    block, filled = _next_block(waiting), 0
        while waiting:
            waiting.popleft()[0].result()
        # The last block is partial, so it needs the cache.
        _write_all(file, block[:filled], direct=False)
        if sync:
            os.fsync(file.fileno())


def _submit_write(
    pool: ThreadPoolExecutor,
    waiting: Iterable[tuple[Future[None], memoryview]],
    file: FileIO,
    block: memoryview,
) -> Future[None]:
    """Submit `block` to the writer thread.

    At interpreter shutdown the pool takes no more work: wait for the pending blocks, then write
    `block` in this thread."""
    try:
        return pool.submit(_write_all, file, block, direct=True)
    except RuntimeError:
        for written, _ in waiting:
            written.result()
        _write_all(file, block, direct=True)
        done = Future[None]()
        done.set_result(None)
        return done


def _next_block(waiting: deque[tuple[Future[None], memoryview]]) -> memoryview:
    """Return a block that no pending write uses."""
    if len(waiting) < _NUM_BLOCKS:
        return aligned_buffer(_BLOCK_BYTES)
    written, block = waiting.popleft()
    written.result()
    return block


def read(path: Path, start: int, count: int) -> memoryview:
    """Return `count` bytes of a file from `start` on, in a new buffer."""
    before = start % ALIGNMENT
    buffer = aligned_buffer(before + count)
    with _raise_store_error(path), path.open("rb", buffering=0) as file:
        set_direct_io(file, True)
        file.seek(start - before)
        if _read_all(file, buffer) < before + count:
            raise StoreError(f"'{path}' ends before byte {start + count}: restore it")
    return buffer[before : before + count]


def read_blocks(path: Path, buffer: memoryview) -> Iterator[memoryview]:
    """Read a whole file into `buffer`; yield each block as soon as it is read.

    `buffer` comes from `aligned_buffer` and is at least as large as the file."""
    pool = ThreadPoolExecutor(1, "direct")
    with _raise_store_error(path):
        file = path.open("rb", buffering=0)
    with file:
        set_direct_io(file, True)
        try:
            size = os.fstat(file.fileno()).st_size
            blocks = [slice(at, at + _BLOCK_BYTES) for at in range(0, size, _BLOCK_BYTES)]
            reads = [pool.submit(_read_all, file, buffer[block]) for block in blocks]
            for block, pending in zip(blocks, reads, strict=True):
                end = min(block.stop, size)
                with _raise_store_error(path):
                    count = pending.result()
                if count < end - block.start:
                    raise StoreError(f"'{path}' ends before byte {end}: restore it")
                yield buffer[block.start : end]
        finally:
            pool.shutdown(cancel_futures=True)


def align(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to the alignment of direct I/O."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def reserve(file: FileIO, num_bytes: int) -> None:
    """Reserve disk space for the first `num_bytes` of a file that is open without direct I/O.

    File systems that cannot reserve space get a sparse file."""
    try:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
            raise
        os.ftruncate(file.fileno(), num_bytes)


def read_at(file: FileIO, buffer: memoryview, offset: int, needed: int | None = None) -> int:
    """Fill `buffer` from `offset` on and return the number of bytes read; threads may share `file`.

    With direct I/O the buffer and the offset are aligned. Reading ends once `needed` bytes are
    there; None: all."""
    filled, needed = 0, len(buffer) if needed is None else needed

    def transfer(data: memoryview) -> int:
        return os.preadv(file.fileno(), [data], offset + filled)

    while filled < needed and (count := _with_cache_fallback(file, transfer, buffer[filled:])):
        filled += count
    return filled


def write_at(file: FileIO, data: memoryview, offset: int) -> None:
    """Write `data` from `offset` on; threads may share `file`.

    With direct I/O the data and the offset are aligned."""

    def transfer(left: memoryview) -> int:
        return os.pwritev(file.fileno(), [left], offset + len(data) - len(left))

    left = data
    while left:
        count = _with_cache_fallback(file, transfer, left)
        if not count:
            raise OSError(errno.EIO, "nothing more was written")
        left = left[count:]


def aligned_buffer(num_bytes: int) -> memoryview:
    """Return a buffer of at least `num_bytes` for direct I/O.

    It comes from malloc, which reuses freed memory: faulting in new pages takes longer than
    reading.
    """
    size = align(num_bytes)
    values = np.empty(size + ALIGNMENT, np.uint8)
    first = -values.ctypes.data % ALIGNMENT
    data: memoryview = values.data
    return data[first : first + size]


@contextmanager
def _raise_store_error(path: Path) -> Iterator[None]:
    """Raise a StoreError that names the file if it cannot be read.

    A caller that also writes would otherwise blame the file it writes."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"'{path}' cannot be read ({error.strerror}): restore it") from error


def _as_array(data: memoryview) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8)


def is_direct(file: FileIO) -> bool:
    """Return True if the file bypasses the page cache."""
    return hasattr(os, "O_DIRECT") and bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


def set_direct_io(file: FileIO, direct: bool) -> None:
    """Turn direct I/O on or off for later calls, where the file system supports it."""
    if not hasattr(os, "O_DIRECT"):
        return
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
    if wanted == flags:
        return
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, wanted)
    except OSError:
        return  # A file system without direct I/O (tmpfs).


def _write_all(file: FileIO, data: memoryview, direct: bool) -> None:
    set_direct_io(file, direct)
    while data:
        data = data[_with_cache_fallback(file, file.write, data) :]


def _read_all(file: FileIO, buffer: memoryview) -> int:
    """Fill `buffer` from the file and return the number of bytes read."""
    filled = 0
    while filled < len(buffer) and (
        count := _with_cache_fallback(file, file.readinto, buffer[filled:])
    ):
        filled += count
    return filled


def _with_cache_fallback(
    file: FileIO, transfer: Callable[[memoryview], int], data: memoryview
) -> int:
    """Return `transfer(data)`; use the page cache if direct I/O is refused.

    Direct I/O stays off only if it refuses aligned data, so that the disk requires another
    alignment. The rest of a short transfer may not be aligned."""
    was_direct, stays_off = is_direct(file), False
    try:
        return transfer(data)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    set_direct_io(file, False)
    try:
        count = transfer(data)
        stays_off = not (_as_array(data).ctypes.data | len(data)) % ALIGNMENT
    finally:
        if was_direct and not stays_off:
            set_direct_io(file, True)
    return count
