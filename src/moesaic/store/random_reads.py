"""Random reads: many small blocks of several files, with direct I/O and a checksum for each.

A drive reaches its rate only with many requests in flight. Threads run compiled loops that hold no
interpreter lock: each reads a share of the blocks and verifies their checksums.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from itertools import pairwise
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from moesaic.base import direct_io
from moesaic.base.compiled import cached_loop
from moesaic.base.errors import StoreError
from moesaic.store.checksum import block_sum

_MIN_SHARE = 16
"""Blocks of a thread below which waking another one takes longer than it saves."""
_SHARES_PER_THREAD = 2
"""Shares of each thread in a large read, so that a thread that ends early takes another one."""
_RUN_BLOCKS = 64
"""Blocks of a request at most."""
_REMEDY = "resume from the newest checkpoint"

_PREAD: Any = types.ExternalFunction(
    "pread", types.intp(types.int32, types.uintp, types.uintp, types.int64)
)
"""libc's function, found by name in the process, so that compiled loops can be cached on disk."""


@cached_loop
def _read_blocks(
    fds: NDArray[np.int32], offsets: NDArray[np.int64], words: NDArray[np.uint64], first: int
) -> Any:
    """Read and verify blocks from `first` on; return the first that failed, or their number.

    Blocks that follow one another in a file are one request."""
    count, block_bytes = len(offsets), words.shape[1] * 8
    start = first
    while start < count:
        end = start + 1
        while (
            end < min(count, start + _RUN_BLOCKS)
            and fds[end] == fds[start]
            and offsets[end] == offsets[end - 1] + block_bytes
        ):
            end += 1
        size = (end - start) * block_bytes
        address = np.uintp(words[start].ctypes.data)
        if _PREAD(fds[start], address, np.uintp(size), offsets[start]) != size:
            return start
        for block in range(start, end):
            if block_sum(words[block]) != words[block, 0]:
                return block
        start = end
    return count


class RandomReads:
    """Threads that read blocks of equal size. The first word of a block is its checksum.

    Several threads may call `read` at once."""

    def __init__(self, block_bytes: int, num_threads: int = 8) -> None:
        """Start no thread yet; the first large read does.

        Args:
            block_bytes: bytes of a block, a multiple of the alignment of direct I/O.
            num_threads: reads in flight.
        """
        if block_bytes <= 0 or block_bytes % direct_io.ALIGNMENT:
            raise ValueError(f"a block of {block_bytes} bytes is no multiple of the alignment")
        self.block_bytes = block_bytes
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, "random-reads")

    def buffer(self, num_blocks: int) -> NDArray[np.uint8]:
        """Return memory for blocks, [num_blocks, block_bytes], with the alignment of direct I/O."""
        memory = np.frombuffer(direct_io.aligned_buffer(num_blocks * self.block_bytes), np.uint8)
        return memory[: num_blocks * self.block_bytes].reshape(num_blocks, self.block_bytes)

    def read(
        self,
        files: Sequence[FileIO],
        file_of: NDArray[np.int64],
        blocks: NDArray[np.int64],
        out: NDArray[np.uint8],
    ) -> None:
        """Read blocks and verify each.

        Blocks that are sorted by file and place, and distinct, are read fastest.

        Args:
            files: files, open for reading.
            file_of: position in `files` of each block's file, [num_blocks].
            blocks: number of each block inside its file, [num_blocks].
            out: memory of `buffer`, [num_blocks, block_bytes].
        """
        fds = np.array([file.fileno() for file in files], np.int32)[file_of]
        offsets = blocks * self.block_bytes
        words = out.view(np.uint64)
        num_shares = min(self._num_threads * _SHARES_PER_THREAD, max(len(blocks) // _MIN_SHARE, 1))
        bounds = np.linspace(0, len(blocks), num_shares + 1).astype(np.int64)
        shares = [slice(*pair) for pair in pairwise(bounds)]

        def read_share(share: slice) -> None:
            done, count = 0, share.stop - share.start
            while True:
                done = _read_blocks(fds[share], offsets[share], words[share], done)
                if done == count:
                    return
                place = share.start + done
                self._read_again(files[file_of[place]], int(offsets[place]), out[place])
                done += 1

        if len(shares) == 1:
            read_share(shares[0])
        else:
            for _ in self._pool.map(read_share, shares):
                pass

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _read_again(self, file: FileIO, offset: int, memory: NDArray[np.uint8]) -> None:
        """Read a block that failed, without direct I/O where that was refused; raise its error."""
        place = f"'{file.name}' at byte {offset}"
        try:
            count = direct_io.read_at(file, memory.data, offset)
        except OSError as error:
            raise StoreError(f"{place} cannot be read ({error.strerror}): {_REMEDY}") from error
        if count < self.block_bytes:
            raise StoreError(f"{place} ends after {count} of {self.block_bytes} bytes: {_REMEDY}")
        words = memory.view(np.uint64)
        if block_sum(words) != words[0]:
            raise StoreError(
                f"{place} differs from what was written, so the disk may be failing: {_REMEDY}"
            )
