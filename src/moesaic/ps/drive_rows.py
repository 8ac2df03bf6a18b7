"""Rows on a drive: scratch segments without names, whose rows have negative locations.

A location is the complement of a position: one bit for changes since the last snapshot, then the
number of the segment, then the row's position in it. Segments are written once and in order. No
location is ever used for another row, so an equal location means an equal record.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moesaic.base import direct_io
from moesaic.base.compiled import cached_loop
from moesaic.base.errors import ConfigError, write_error
from moesaic.ps.index import Int64s
from moesaic.ps.segments import PREFIX_BYTES, SegmentLayout, SegmentWriter
from moesaic.store.random_reads import RandomReads

Records = NDArray[np.uint8]
"""Records, [rows, record_bytes], of whole words of 4 bytes."""

CHANGED_BIT = np.int64(1 << 62)
"""Bit of a position whose row has changed since the last snapshot."""
_SEGMENT_SHIFT = 32
SEGMENT_BYTES = 256 << 20
"""Bytes from which on a segment takes no more rows."""
_MIN_READ_BLOCKS = 64
"""Blocks that one read holds at least."""
_WRITE_BYTES = 1 << 20
"""Bytes that a writer of segments buffers."""
_MIN_LIVE = 0.5
"""Share of rows that are in use, below which a segment is rewritten."""


@dataclass(eq=False)
class Segment:
    """Segment whose file has no name; its space is free as soon as nothing refers to it."""

    file: FileIO
    num_rows: int = 0
    """Rows that were written."""
    num_live: int = 0
    """Rows whose location is in use."""
    num_blocks: int = 1
    """Blocks of the file, with its header."""

    def __post_init__(self) -> None:
        weakref.finalize(self, self.file.close)


class DriveRows:
    """Rows in segments on a drive. One thread changes them; other threads may read."""

    def __init__(
        self,
        directory: Path,
        layout: SegmentLayout,
        *,
        buffer_bytes: int,
        num_threads: int = 8,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """Check that the directory takes files, and write none yet.

        Args:
            directory: directory for segments.
            layout: layout of the rows.
            buffer_bytes: bytes of blocks that one read holds, if those are enough blocks.
            num_threads: reads in flight.
            segment_bytes: bytes from which on a segment takes no more rows.

        Raises:
            ConfigError: the directory takes no files.
        """
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise ConfigError(
                f"table.ssd = '{directory}' cannot be written ({error.strerror}): give a "
                "directory on a drive of this machine"
            ) from None
        self.directory, self.layout = directory, layout
        self.segments: dict[int, Segment] = {}
        """Segments by number."""
        self._reads = RandomReads(layout.block_bytes, num_threads)
        self._read_blocks = max(buffer_bytes // layout.block_bytes, _MIN_READ_BLOCKS)
        """Blocks that one read holds."""
        self._segment_bytes = segment_bytes
        self._numbers = itertools.count()
        self._writer: SegmentWriter | None = None
        self._newest = -1
        """Number of the segment that takes rows; -1: none."""

    @property
    def num_rows(self) -> int:
        """Rows whose location is in use."""
        return sum(segment.num_live for segment in self.segments.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments."""
        blocks = sum(segment.num_blocks for segment in self.segments.values())
        return blocks * self.layout.block_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of buffers while a segment is written and read, and two threads read ahead."""
        return 4 * self._read_blocks * self.layout.block_bytes + _WRITE_BYTES

    def append(self, keys: Int64s, records: Records) -> Int64s:
        """Write rows to the drive and return their locations, which are in use."""
        if not len(keys):
            return np.empty(0, np.int64)
        writer = self._open_writer()
        number = self._newest
        segment = self.segments[number]
        positions = writer.append(keys, records)
        writer.flush()
        segment.num_rows += len(keys)
        segment.num_live += len(keys)
        segment.num_blocks = writer.num_blocks
        if segment.num_blocks * self.layout.block_bytes >= self._segment_bytes:
            self._close_writer()
        return ~(np.int64(number << _SEGMENT_SHIFT) | positions)

    def forget(self, locations: Int64s) -> None:
        """Record that locations are in use no more."""
        numbers, counts = np.unique(_segment_numbers(locations), return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            self.segments[number].num_live -= count

    def reader(self) -> Callable[[Int64s], Records]:
        """Return `read` for other threads: it reads locations in use now, at any time later."""
        return partial(self.read, segments=dict(self.segments))

    def read(self, locations: Int64s, segments: Mapping[int, Segment] | None = None) -> Records:
        """Return verified records, [locations, record_bytes]; ascending positions are fastest.

        Args:
            locations: locations in use.
            segments: copy of `segments` of a time when the locations were in use; None: now. It
                lets another thread read while segments are deleted.
        """
        segments = self.segments if segments is None else segments
        records = np.empty((len(locations), self.layout.record_bytes), np.uint8)
        step = self._read_blocks
        buffer = self._reads.buffer(min(step, len(locations)))
        for start in range(0, len(locations), step):
            part = slice(start, start + step)
            self._read_part(locations[part], segments, buffer, records[part])
        return records

    def scan(self, number: int) -> Iterator[tuple[Int64s, Int64s, Records]]:
        """Yield keys, locations and records of all rows of a segment, in use or not."""
        segment, layout = self.segments[number], self.layout
        step = self._read_blocks
        buffer = self._reads.buffer(min(step, segment.num_blocks - 1))
        words = buffer.view(np.uint32)
        for start in range(1, segment.num_blocks, step):
            blocks = np.arange(start, min(start + step, segment.num_blocks))
            self._reads.read([segment.file], np.zeros_like(blocks), blocks, buffer[: len(blocks)])
            counts = words[: len(blocks), 2].astype(np.int64)
            block, slot = np.nonzero(np.arange(layout.records_per_block) < counts[:, None])
            keys = np.empty(len(block), np.int64)
            records = np.empty((len(block), layout.record_bytes), np.uint8)
            self._take(buffer, block, slot, keys, records)
            positions = (start + block) * layout.records_per_block + slot
            yield keys, ~(np.int64(number << _SEGMENT_SHIFT) | positions), records

    def sparse_segments(self) -> list[int]:
        """Return the segments to rewrite: less than half of their rows are in use."""
        return [
            number
            for number, segment in self.segments.items()
            if number != self._newest and segment.num_live < _MIN_LIVE * segment.num_rows
        ]

    def delete(self, number: int) -> None:
        """Delete a segment; reads that have begun can end."""
        del self.segments[number]

    def close(self) -> None:
        """Delete everything."""
        self._reads.close()
        self._close_writer()
        self.segments.clear()

    def _read_part(
        self,
        locations: Int64s,
        segments: Mapping[int, Segment],
        buffer: NDArray[np.uint8],
        records: Records,
    ) -> None:
        numbers = _segment_numbers(locations)
        positions = ~locations & np.int64((1 << _SEGMENT_SHIFT) - 1)
        blocks, slots = np.divmod(positions, self.layout.records_per_block)
        distinct, places = np.unique(numbers << _SEGMENT_SHIFT | blocks, return_inverse=True)
        used, file_of = np.unique(distinct >> _SEGMENT_SHIFT, return_inverse=True)
        files = [segments[number].file for number in used.tolist()]
        wanted = distinct & np.int64((1 << _SEGMENT_SHIFT) - 1)
        self._reads.read(files, file_of, wanted, buffer[: len(distinct)])
        self._take(buffer, places, slots, np.empty(len(places), np.int64), records)

    @staticmethod
    def _take(
        blocks: NDArray[np.uint8], places: Int64s, slots: Int64s, keys: Int64s, records: Records
    ) -> None:
        """Copy keys and records out of blocks."""
        words = keys.view(np.uint32).reshape(-1, 2)
        _take_rows(blocks.view(np.uint32), places, slots, words, records.view(np.uint32))

    def _open_writer(self) -> SegmentWriter:
        if self._writer is not None:
            return self._writer
        number = next(self._numbers)
        path = self.directory / f".table-rows-{os.getpid()}-{id(self)}-{number}"
        try:
            writer = SegmentWriter(path, self.layout)
            try:
                file = path.open("rb", buffering=0)
            finally:
                path.unlink()
        except OSError as error:
            raise write_error(f"'{path}'", error) from error
        direct_io.set_direct_io(file, True)
        self._writer, self._newest, self.segments[number] = writer, number, Segment(file)
        return writer

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer, self._newest = None, -1


def _segment_numbers(locations: Int64s) -> Int64s:
    return (~locations & ~CHANGED_BIT) >> _SEGMENT_SHIFT


@cached_loop
def _take_rows(
    blocks: NDArray[np.uint32],
    places: Int64s,
    slots: Int64s,
    keys: NDArray[np.uint32],
    records: NDArray[np.uint32],
) -> None:
    """Copy keys, [rows, 2], and records out of blocks; all are words of 4 bytes."""
    words = records.shape[1]
    for row in range(len(places)):
        block = places[row]
        start = PREFIX_BYTES // 4 + slots[row] * (2 + words)
        keys[row, 0], keys[row, 1] = blocks[block, start], blocks[block, start + 1]
        for word in range(words):
            records[row, word] = blocks[block, start + 2 + word]
