"""Experts in safetensors files, as read-only blocks of one dtype.

A block has the matrices of one expert side by side: gate, up and down. Each reading checks that the
files are those that were opened, and that the block equals its first reading.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moesaic.base import direct_io
from moesaic.base.errors import StoreError
from moesaic.base.safetensors_file import ITEM_BYTES
from moesaic.store.checksum import block_checksum
from moesaic.store.number_formats import NUMPY_DTYPES, apply_scales, from_floats, to_floats

_REMEDY = "restore the file and start again"
_CHUNK_ELEMENTS = 1 << 16
"""Elements that are converted at once and stay in the CPU's cache."""


@dataclass(frozen=True)
class StoredBytes:
    """Contiguous numbers in a file."""

    tensor: str
    """Name of their tensor in the file."""
    file: Path
    offset: int
    """Byte of the file where they begin."""
    dtype: str
    """Dtype name of safetensors."""
    shape: tuple[int, int]

    @property
    def stop(self) -> int:
        """Byte of the file behind the last one."""
        return self.offset + self.shape[0] * self.shape[1] * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix of an expert, or a box of one."""

    values: StoredBytes
    position: int
    """Element of the block where it begins."""
    row_stride: int
    """Elements of the block from one row to the next."""
    scales: StoredBytes | None = None
    """Scales of fp8 values, one for each square block."""
    first_row: int = 0
    """Row of the first value, counted from the first row of scales."""


@dataclass(frozen=True)
class StoredExpert:
    """One expert in files."""

    name: str
    """Logical name, such as layers.0.moe.experts.3."""
    matrices: tuple[StoredMatrix, ...]
    """Boxes that cover the block: those of gate, then of up, then of down."""
    sha256: str | None = None
    """Hash of their bytes in this order, if it was written with them."""

    @property
    def parts(self) -> list[StoredBytes]:
        """Everything that is read."""
        found = [part for one in self.matrices for part in (one.values, one.scales)]
        return [part for part in found if part is not None]

    def describe(self, path: Path | None = None) -> str:
        """Return the names of its tensors, of one file or of all."""
        names = {f"'{one.tensor}'": None for one in self.parts if path in (None, one.file)}
        return f"tensor{'s' * (len(names) > 1)} {', '.join(names)}"


class _OpenFile(NamedTuple):
    """An open file, and its size and time of change when it was opened."""

    file: FileIO
    size: int
    changed_ns: int


class _Range(NamedTuple):
    """Bytes of a file that are read at once."""

    path: Path
    start: int
    stop: int

    @property
    def aligned_start(self) -> int:
        """Start of the range, rounded down for direct I/O."""
        return self.start - self.start % direct_io.ALIGNMENT

    @property
    def aligned_bytes(self) -> int:
        """Bytes from there, rounded up for direct I/O."""
        return direct_io.align(self.stop - self.aligned_start)


class ExpertFiles:
    """Experts in safetensors files, a block each, as a `BlockStorage`.

    Threads may read different blocks at once."""

    is_read_only = True

    def __init__(self, experts: Sequence[StoredExpert], num_elements: int, dtype: str) -> None:
        """Open the files; no expert is read yet.

        Args:
            experts: experts by block.
            num_elements: elements of each expert.
            dtype: safetensors name of the dtype of blocks in memory.
        """
        self._experts, self._dtype = experts, dtype
        self._block_bytes = num_elements * ITEM_BYTES[dtype]
        self.stride_bytes = direct_io.align(self._block_bytes)
        """Bytes of a block in memory, rounded up for direct I/O."""
        self._checksums: list[int | None] = [None] * len(experts)
        """Checksums of the first readings, by block."""
        self._buffers, self._lock = threading.local(), threading.Lock()
        self.read_bytes = 0
        """Bytes read so far from the files."""
        self._files: dict[Path, _OpenFile] = {}
        with ExitStack() as stack:
            for path in {part.file for expert in experts for part in expert.parts}:
                self._files[path] = _open(path, stack)
            self._resources = stack.pop_all()

    @property
    def is_direct(self) -> bool:
        """False where the file system refuses direct I/O and the page cache is used."""
        return all(direct_io.is_direct(one.file) for one in self._files.values())

    def has(self, block: int) -> bool:
        """Return True: every expert is in the files."""
        del block
        return True

    def read(self, block: int, memory: NDArray[np.uint8]) -> None:
        """Fill `memory`, [stride_bytes], with the block, and verify it."""
        expert = self._experts[block]
        ranges = merge_ranges(expert.parts)
        for path in {one.path for one in ranges}:
            self._check_unchanged(path, expert)
        if self._is_in_place(expert, ranges[0]):
            self._fill(ranges[0], memory.data, expert)
            contents = {ranges[0]: memory}
        else:
            contents = self._read_ranges(ranges, expert)
            for matrix in expert.matrices:
                _write_matrix(matrix, contents, memory, self._dtype)
        self._verify(block, contents, memory)

    def write(self, block: int, memory: NDArray[np.uint8]) -> None:
        """Raise: blocks never change."""
        del memory
        raise StoreError(f"{self._experts[block].describe()} must not be written")

    def close(self) -> None:
        """Close the files."""
        self._resources.close()

    def _is_in_place(self, expert: StoredExpert, one: _Range) -> bool:
        """Return whether the range holds the block as it is in memory, aligned for direct I/O."""
        item_bytes = ITEM_BYTES[self._dtype]
        return (
            one.start == one.aligned_start
            and one.stop - one.start == self._block_bytes
            and all(
                matrix.values.dtype == self._dtype
                and matrix.values.file == one.path
                and matrix.values.offset - one.start == matrix.position * item_bytes
                and matrix.row_stride == matrix.values.shape[1]
                for matrix in expert.matrices
            )
        )

    def _check_unchanged(self, path: Path, expert: StoredExpert) -> None:
        """Raise if a file is not as it was when it was opened."""
        opened = self._files[path]
        stat = os.fstat(opened.file.fileno())
        if (stat.st_size, stat.st_mtime_ns) != (opened.size, opened.changed_ns):
            raise StoreError(
                f"'{path}' has changed since it was opened, with {stat.st_size} bytes now and "
                f"{opened.size} then, and {expert.describe(path)} may be damaged: {_REMEDY}"
            )

    def _read_ranges(
        self, ranges: Sequence[_Range], expert: StoredExpert
    ) -> dict[_Range, NDArray[np.uint8]]:
        """Return the bytes of each range, valid until this thread's next reading."""
        buffer, at = self._buffer(sum(one.aligned_bytes for one in ranges)), 0
        contents = {}
        for one in ranges:
            data = buffer[at : at + one.aligned_bytes]
            self._fill(one, data, expert)
            contents[one] = np.frombuffer(data, np.uint8)[one.start - one.aligned_start :]
            at += one.aligned_bytes
        return contents

    def _buffer(self, num_bytes: int) -> memoryview:
        """Return this thread's buffer of at least `num_bytes`."""
        buffer: memoryview | None = getattr(self._buffers, "buffer", None)
        if buffer is None or len(buffer) < num_bytes:
            self._buffers.buffer = None  # Free it first.
            self._buffers.buffer = buffer = direct_io.aligned_buffer(num_bytes)
        return buffer

    def _fill(self, one: _Range, data: memoryview, expert: StoredExpert) -> None:
        """Read a range into `data`, from its aligned start on."""
        needed = one.stop - one.aligned_start
        try:
            count = direct_io.read_at(self._files[one.path].file, data, one.aligned_start, needed)
        except OSError as error:
            raise StoreError(
                f"'{one.path}' cannot be read ({error.strerror}) at byte {one.start}, which has "
                f"{expert.describe(one.path)}: {_REMEDY}"
            ) from error
        with self._lock:
            self.read_bytes += count
        if count < needed:
            raise StoreError(f"'{one.path}' ends within {expert.describe(one.path)}: {_REMEDY}")

    def _verify(
        self, block: int, contents: Mapping[_Range, NDArray[np.uint8]], memory: NDArray[np.uint8]
    ) -> None:
        """Raise if the block differs from its first reading, or that from the hash of packing."""
        expert = self._experts[block]
        memory[self._block_bytes :] = 0
        checksum, first = block_checksum(memory), self._checksums[block]
        if first is not None:
            if checksum != first:
                raise StoreError(
                    f"'{expert.parts[0].file}': {expert.describe()} differ from what was read "
                    f"before, so the drive may be failing: {_REMEDY}"
                )
            return
        if expert.sha256 is not None:
            digest = hashlib.sha256()
            for matrix in expert.matrices:
                digest.update(_bytes_of(matrix.values, contents).data)
            if digest.hexdigest() != expert.sha256:
                raise StoreError(
                    f"'{expert.parts[0].file}': {expert.describe()} differ from what was packed: "
                    "restore the file, or convert the model again"
                )
        self._checksums[block] = checksum


def merge_ranges(parts: Iterable[StoredBytes]) -> list[_Range]:
    """Return the ranges of files that hold `parts`; neighbours are one range."""
    ranges = list[_Range]()
    for part in sorted(parts, key=lambda one: (one.file, one.offset)):
        last = ranges[-1] if ranges else None
        if last is not None and last.path == part.file and part.offset <= last.stop:
            ranges[-1] = last._replace(stop=max(last.stop, part.stop))
        else:
            ranges.append(_Range(part.file, part.offset, part.stop))
    return ranges


def buffer_bytes(expert: StoredExpert) -> int:
    """Return the bytes of the buffer that a thread needs to read `expert`."""
    return sum(one.aligned_bytes for one in merge_ranges(expert.parts))


def _open(path: Path, stack: ExitStack) -> _OpenFile:
    try:
        file = stack.enter_context(path.open("rb", buffering=0))
    except OSError as error:
        raise StoreError(f"'{path}' cannot be read ({error.strerror}): restore it") from error
    direct_io.set_direct_io(file, True)
    stat = os.fstat(file.fileno())
    return _OpenFile(file, stat.st_size, stat.st_mtime_ns)


def _bytes_of(part: StoredBytes, contents: Mapping[_Range, NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Return the bytes of `part` among the ranges that were read."""
    found = next(
        one for one in contents if one.path == part.file and one.start <= part.offset < one.stop
    )
    return contents[found][part.offset - found.start : part.stop - found.start]


def _numbers(part: StoredBytes, contents: Mapping[_Range, NDArray[np.uint8]]) -> NDArray[Any]:
    """Return the stored numbers of `part`, [rows, columns]."""
    raw = _bytes_of(part, contents)
    return raw.view(NUMPY_DTYPES[part.dtype]).reshape(part.shape)


def _write_matrix(
    matrix: StoredMatrix,
    contents: Mapping[_Range, NDArray[np.uint8]],
    memory: NDArray[np.uint8],
    dtype: str,
) -> None:
    """Write a matrix to its place in a block of `dtype`."""
    stored, source = _numbers(matrix.values, contents), matrix.values.dtype
    block, item_bytes = memory.view(NUMPY_DTYPES[dtype]), ITEM_BYTES[dtype]
    target: NDArray[Any] = np.lib.stride_tricks.as_strided(
        block[matrix.position :], stored.shape, (matrix.row_stride * item_bytes, item_bytes)
    )
    if source == dtype:
        target[:] = stored
        return
    scales = None
    if matrix.scales is not None:
        scales = to_floats(_numbers(matrix.scales, contents), matrix.scales.dtype)
    step = max(_CHUNK_ELEMENTS // stored.shape[1], 1)
    for first in range(0, len(stored), step):
        values = to_floats(stored[first : first + step], source)
        if scales is not None:
            values = apply_scales(values, scales, matrix.first_row + first)
        target[first : first + step] = from_floats(values, dtype)
