"""Scratch file: blocks of equal size with direct I/O and a checksum for each.

The file has no name, so that its space is free when the process ends, however that happens.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moesaic.base import direct_io
from moesaic.base.errors import StoreError, write_error
from moesaic.base.units import format_bytes
from moesaic.store.checksum import block_checksum

_REMEDY = "resume from the newest checkpoint"


class BlockFile:
    """Blocks of equal size in a scratch file, with direct I/O and a checksum for each.

    Threads may read and write different blocks at once."""

    is_read_only = False

    def __init__(self, path: Path, num_blocks: int, block_bytes: int) -> None:
        """Create `path`, reserve its space, and remove the name, which remains in errors."""
        self.path = path
        self.num_blocks = num_blocks
        self.stride_bytes = direct_io.align(block_bytes)
        """Bytes of a block in the file and in memory, rounded up for direct I/O."""
        try:
            self._file = path.open("wb+", buffering=0)
        except OSError as error:
            raise write_error(f"'{path}'", error) from error
        try:
            path.unlink()
            self._reserve()
            direct_io.set_direct_io(self._file, True)
            # Some disks need another alignment, which only a read reveals.
            direct_io.read_at(self._file, direct_io.aligned_buffer(1), 0)
        except BaseException:
            self.close()
            raise
        self._has = np.zeros(num_blocks, np.bool_)
        self._checksums = np.zeros(num_blocks, np.uint64)

    @property
    def is_direct(self) -> bool:
        """False where the file system or disk refuses direct I/O and the page cache is used."""
        return direct_io.is_direct(self._file)

    def _reserve(self) -> None:
        size = self.num_blocks * self.stride_bytes
        stats = os.statvfs(self.path.parent)
        free = stats.f_bavail * stats.f_frsize
        try:
            if size > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            direct_io.reserve(self._file, size)
        except OSError as error:
            raise StoreError(
                f"'{self.path}' needs {format_bytes(size)}, and {format_bytes(free)} are free "
                f"({error.strerror}): make room, or name a directory on another disk"
            ) from error

    def has(self, block: int) -> bool:
        """Return True if the block was written since creation."""
        return bool(self._has[block])

    def read(self, block: int, memory: NDArray[np.uint8]) -> None:
        """Fill `memory`, [stride_bytes], with the block, and verify its checksum."""
        offset = self._offset(block, memory)
        place = f"'{self.path}' at byte {offset}"
        try:
            count = direct_io.read_at(self._file, memory.data, offset)
        except OSError as error:
            raise StoreError(f"{place} cannot be read ({error.strerror}): {_REMEDY}") from error
        if count < self.stride_bytes:
            raise StoreError(f"{place} ends after {count} of {self.stride_bytes} bytes: {_REMEDY}")
        if block_checksum(memory) != self._checksums[block]:
            raise StoreError(
                f"{place} differs from what was written, so the disk may be failing: {_REMEDY}"
            )

    def write(self, block: int, memory: NDArray[np.uint8]) -> None:
        """Write `memory`, [stride_bytes], as the block."""
        offset = self._offset(block, memory)
        self._checksums[block] = block_checksum(memory)
        try:
            direct_io.write_at(self._file, memory.data, offset)
        except OSError as error:
            failure = write_error(f"'{self.path}' at byte {offset}", error)
            raise StoreError(f"{failure}; then {_REMEDY}") from error
        self._has[block] = True

    def close(self) -> None:
        """Close the file, which frees its space."""
        self._file.close()

    def _offset(self, block: int, memory: NDArray[np.uint8]) -> int:
        if not 0 <= block < self.num_blocks or memory.shape != (self.stride_bytes,):
            raise ValueError(
                f"block {block} of {self.num_blocks}, {memory.shape} of {self.stride_bytes} bytes"
            )
        return block * self.stride_bytes
