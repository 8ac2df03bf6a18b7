"""Segment file: rows of a table by key, in checksummed blocks, appended once and never changed.

All numbers are little-endian. A block has `block_bytes`:

    checksum (uint64) of all later bytes | count (uint32) | kind (uint32) | content, then zeros

Block 0 is the header: its content is JSON of `count` bytes. A block of rows has `count` times a key
(int64) and its record. A block of removed keys has `count` keys. A row's *position* in the file is
block * records_per_block + index in the block.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from moesaic.base import direct_io
from moesaic.base.config import Section
from moesaic.base.errors import StoreError, write_error
from moesaic.facts.job.table import RowDType, TableOptimizer
from moesaic.store.checksum import find_damaged, seal_blocks

FORMAT = "moesaic-table-segment"
VERSION = 1
PREFIX_BYTES = 16
"""Bytes of a block before its content."""
KEY_BYTES = 8
_PAGE_BYTES = 4096
_RUN_BYTES = 1 << 20
"""Bytes of one request to the disk."""


class BlockKind(IntEnum):
    """Content of a block."""

    ROWS = 0
    """Keys and records."""
    REMOVED = 1
    """Keys that no longer have a row."""
    HEADER = 2
    """Layout and version, as JSON."""


class SegmentLayout(Section):
    """Table of a segment, and sizes that follow from it. The header block holds it as JSON."""

    format: str = FORMAT
    """Format name."""
    version: int = VERSION
    """Format version."""
    record_bytes: int = Field(gt=0)
    """Bytes of a record: values, optimizer state and counts of a row."""
    min_block_bytes: int = Field(default=_PAGE_BYTES, gt=0)
    """Bytes of a block at least. Large blocks waste less, small ones are read one by one sooner."""
    table: str = "table"
    """Name of the table."""
    optimizer: TableOptimizer = "sgd"
    """Optimizer of the rows."""
    dim: int = Field(default=1, gt=0)
    """Values of a row."""
    dtype: RowDType = "float32"
    """Type of a value."""
    seed: int = 0
    """Seed of first values."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a key and its record."""
        return KEY_BYTES + self.record_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: the fewest pages of 4 KiB that hold a row and `min_block_bytes`."""
        needed = max(PREFIX_BYTES + self.row_bytes, self.min_block_bytes)
        return -(-needed // _PAGE_BYTES) * _PAGE_BYTES

    @property
    def records_per_block(self) -> int:
        """Rows of a full block."""
        return (self.block_bytes - PREFIX_BYTES) // self.row_bytes

    @property
    def keys_per_block(self) -> int:
        """Keys of a full block of removed keys."""
        return (self.block_bytes - PREFIX_BYTES) // KEY_BYTES

    def find_difference(self, other: SegmentLayout) -> str | None:
        """Return in words the first difference from `other`, other than in blocks, or None."""
        for name in type(self).model_fields:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs and name != "min_block_bytes":
                return f"{name} = {mine}, not {theirs}"
        return None


class Run(NamedTuple):
    """Verified content of consecutive blocks."""

    keys: NDArray[np.int64]
    """Keys of rows, [rows]."""
    records: NDArray[np.uint8]
    """Records of the keys, [rows, record_bytes]."""
    removed: NDArray[np.int64]
    """Keys of blocks of removed keys."""


class SegmentWriter:
    """Writer of one new segment; nothing that was written is changed later.

    Rows wait in memory until `flush`, which ends the last block. One thread uses a writer."""

    def __init__(self, path: Path, layout: SegmentLayout) -> None:
        """Create the file, which must not exist, and write its header."""
        self.path, self.layout = path, layout
        size = layout.block_bytes
        self._blocks = _Blocks(layout, max(1, _RUN_BYTES // size))
        self._num_written = 0
        self._digest = hashlib.sha256()
        try:
            self._file = path.open("xb", buffering=0)
        except OSError as error:
            raise write_error(f"'{path}'", error) from error
        direct_io.set_direct_io(self._file, True)
        text = np.frombuffer(layout.model_dump_json().encode(), np.uint8)
        self._blocks.fill(0, BlockKind.HEADER, text.reshape(-1, 1))
        self._num_filled = 1
        """Blocks in memory, the last of which may take more rows."""
        self._num_rows = layout.records_per_block
        """Rows in the last block in memory; a full block if it holds other content."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def num_blocks(self) -> int:
        """Blocks of the file, those in memory included."""
        return self._num_written + self._num_filled

    @property
    def digest(self) -> str:
        """SHA-256 of the checksums of all blocks that are in the file."""
        return self._digest.hexdigest()

    def append(self, keys: NDArray[np.int64], records: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Append rows and return their positions; records are [rows, record_bytes]."""
        if records.shape != (len(keys), self.layout.record_bytes) or records.dtype != np.uint8:
            raise ValueError(
                f"{records.dtype} records of shape {list(records.shape)} for {len(keys)} keys of "
                f"{self.layout.record_bytes} bytes"
            )
        per_block = self.layout.records_per_block
        positions = np.empty(len(keys), np.int64)
        start = 0
        while start < len(keys):
            if self._num_rows == per_block:
                self._next_block()
                self._num_rows = 0
            run_blocks = self._blocks.num_blocks - self._num_filled + 1
            count = min(len(keys) - start, run_blocks * per_block - self._num_rows)
            end = start + count
            first = (self.num_blocks - 1) * per_block + self._num_rows
            positions[start:end] = np.arange(first, first + count)
            self._fill_rows(keys[start:end], records[start:end])
            start = end
        return positions

    def remove(self, keys: NDArray[np.int64]) -> None:
        """Append keys that no longer have a row."""
        per_block = self.layout.keys_per_block
        for start in range(0, len(keys), per_block):
            self._next_block()
            some = np.ascontiguousarray(keys[start : start + per_block], np.int64)
            self._blocks.fill(self._num_filled - 1, BlockKind.REMOVED, some[:, None])
            self._num_rows = self.layout.records_per_block

    def flush(self) -> None:
        """Write all rows to the file; later rows go to a new block."""
        if not self._num_filled:
            return
        blocks = self._blocks.seal(self._num_filled)
        try:
            direct_io.write_at(
                self._file, blocks.reshape(-1).data, self._num_written * self.layout.block_bytes
            )
        except OSError as error:
            raise write_error(f"'{self.path}'", error) from error
        self._digest.update(blocks[:, :8].tobytes())
        self._num_written += self._num_filled
        self._num_filled, self._num_rows = 0, self.layout.records_per_block

    def sync(self) -> None:
        """Write all rows and wait until the drive holds them."""
        self.flush()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise write_error(f"'{self.path}'", error) from error

    def close(self) -> None:
        """Close the file; rows that were not flushed are lost."""
        self._file.close()

    def _next_block(self) -> None:
        if self._num_filled == self._blocks.num_blocks:
            self.flush()
        self._num_filled += 1

    def _fill_rows(self, keys: NDArray[np.int64], records: NDArray[np.uint8]) -> None:
        """Add rows to the last block and to those after it, which have room for all."""
        per_block = self.layout.records_per_block
        first = self._num_filled - 1
        total = self._num_rows + len(keys)
        count = -(-total // per_block)
        self._blocks.add_rows(first, self._num_rows, keys, records)
        self._num_filled = first + count
        self._num_rows = total - (count - 1) * per_block


class SegmentReader:
    """Reader of one segment, which verifies everything it returns. Threads may share a reader."""

    def __init__(self, path: Path, layout: SegmentLayout | None = None) -> None:
        """Open a file and compare its header with `layout`; None: any table."""
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)
            size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            direct_io.set_direct_io(self._file, True)
            self.layout = self._read_header(layout, size)
            self.num_blocks, rest = divmod(size, self.layout.block_bytes)
            if rest:
                raise self._damaged(f"ends inside block {self.num_blocks}")
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def scan(self, digest: str | None = None) -> Iterator[Run]:
        """Yield all rows and removed keys in order.

        At the end, compare the checksums of all blocks with `digest` of the writer."""
        found = hashlib.sha256()
        blocks = _Blocks(self.layout, max(1, _RUN_BYTES // self.layout.block_bytes))
        for start in range(0, self.num_blocks, blocks.num_blocks):
            count = min(blocks.num_blocks, self.num_blocks - start)
            self._read_blocks(blocks, start, count)
            found.update(blocks.memory[:count, :8].tobytes())
            yield blocks.run(count)
        if digest is not None and found.hexdigest() != digest:
            raise self._damaged("is another file than the one of the snapshot")

    def _read_header(self, expected: SegmentLayout | None, size: int) -> SegmentLayout:
        page = direct_io.aligned_buffer(_PAGE_BYTES)
        if self._read_at(page, 0) < _PAGE_BYTES:
            raise self._damaged("has no whole header")
        count = int(np.frombuffer(page[8:12], "<u4")[0])
        try:
            raw = json.loads(bytes(page[PREFIX_BYTES:][:count]))
            sizes = SegmentLayout(
                record_bytes=raw["record_bytes"], min_block_bytes=raw["min_block_bytes"]
            )
        except (ValueError, TypeError, KeyError):
            raise self._damaged("has an unreadable header") from None
        if sizes.block_bytes > size:
            raise self._damaged("has no whole header")
        blocks = _Blocks(sizes, 1)
        self._read_blocks(blocks, 0, 1)
        if (raw.get("format"), raw.get("version")) != (FORMAT, VERSION):
            raise StoreError(
                f"'{self.path}' has the format '{raw.get('format')}' in version "
                f"{raw.get('version')}, and this moesaic reads '{FORMAT}' in version {VERSION}; "
                "open it with the moesaic that wrote it"
            )
        layout = SegmentLayout.model_validate(raw)
        if expected is not None and (difference := layout.find_difference(expected)):
            raise StoreError(
                f"'{self.path}' is of a table with {difference}: set the table as it was, or start "
                "a new run"
            )
        return layout

    def _read_blocks(self, blocks: _Blocks, start: int, count: int) -> None:
        size = blocks.layout.block_bytes
        data = blocks.memory[:count].reshape(-1).data
        if self._read_at(data, start * size) < len(data):
            raise self._damaged(f"ends before block {start + count - 1}")
        damaged = blocks.find_damaged(count)
        if damaged >= 0:
            raise self._damaged(f"differs from what was written in block {start + damaged}")

    def _read_at(self, data: memoryview, offset: int) -> int:
        try:
            return direct_io.read_at(self._file, data, offset)
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> StoreError:
        return StoreError(
            f"'{self.path}' cannot be read ({error.strerror}): restore it, or resume from an "
            "earlier checkpoint"
        )

    def _damaged(self, what: str) -> StoreError:
        return StoreError(
            f"'{self.path}' {what}: restore the file, or resume from an earlier checkpoint"
        )


class _Blocks:
    """Blocks of a segment in memory, aligned for direct I/O."""

    def __init__(self, layout: SegmentLayout, num_blocks: int) -> None:
        self.layout, self.num_blocks = layout, num_blocks
        size, per_block = layout.block_bytes, layout.records_per_block
        buffer = direct_io.aligned_buffer(num_blocks * size)[: num_blocks * size]
        self.memory = np.frombuffer(buffer, np.uint8).reshape(num_blocks, size)
        self.memory[:] = 0
        row = np.dtype([("key", "<i8"), ("record", "u1", (layout.record_bytes,))])
        self.rows = np.ndarray(
            (num_blocks, per_block), row, buffer, PREFIX_BYTES, (size, layout.row_bytes)
        )
        """Rows by block and index, whatever the block's kind."""
        prefix = np.dtype([("checksum", "<u8"), ("count", "<u4"), ("kind", "<u4")])
        self._prefix = np.ndarray((num_blocks,), prefix, buffer, 0, (size,))

    @property
    def counts(self) -> NDArray[np.uint32]:
        """Rows, keys or bytes of each block."""
        counts: NDArray[np.uint32] = self._prefix["count"]
        return counts

    @property
    def kinds(self) -> NDArray[np.uint32]:
        """Kind of each block."""
        kinds: NDArray[np.uint32] = self._prefix["kind"]
        return kinds

    def fill(self, block: int, kind: BlockKind, items: NDArray[np.generic]) -> None:
        """Make `items`, [count, 1], the content of a block."""
        content = items.reshape(-1).view(np.uint8)
        self.memory[block] = 0
        self.memory[block, PREFIX_BYTES : PREFIX_BYTES + len(content)] = content
        self.kinds[block], self.counts[block] = kind, len(items)

    def add_rows(
        self, block: int, slot: int, keys: NDArray[np.int64], records: NDArray[np.uint8]
    ) -> None:
        """Add rows from `slot` of a block on, and to the blocks after it."""
        per_block = self.layout.records_per_block
        head = min(per_block - slot, len(keys))
        if not slot:
            self.memory[block] = 0
        self._put(self.rows[block, slot : slot + head], keys[:head], records[:head])
        self.counts[block], self.kinds[block] = slot + head, BlockKind.ROWS
        num_full, rest = divmod(len(keys) - head, per_block)
        end = head + num_full * per_block
        full = slice(block + 1, block + 1 + num_full)
        if num_full:
            self.memory[full] = 0
            shape = (num_full, per_block)
            self.rows["key"][full] = keys[head:end].reshape(shape)
            self.rows["record"][full] = records[head:end].reshape(*shape, -1)
            self.counts[full], self.kinds[full] = per_block, BlockKind.ROWS
        if rest:
            self.add_rows(full.stop, 0, keys[end:], records[end:])

    @staticmethod
    def _put(rows: NDArray[np.void], keys: NDArray[np.int64], records: NDArray[np.uint8]) -> None:
        rows["key"], rows["record"] = keys, records

    def seal(self, count: int) -> NDArray[np.uint8]:
        """Write the checksums of the first blocks and return these blocks."""
        seal_blocks(self._words(count))
        return self.memory[:count]

    def find_damaged(self, count: int) -> int:
        """Return the first of `count` blocks whose checksum is wrong, or -1."""
        return int(find_damaged(self._words(count)))

    def run(self, count: int) -> Run:
        """Return the content of the first `count` blocks."""
        kinds, counts = self.kinds[:count], self.counts[:count]
        slots, has_rows = np.arange(self.layout.records_per_block), kinds == BlockKind.ROWS
        rows = self.rows[:count][(slots < counts[:, None]) & has_rows[:, None]]
        removed = [
            self.memory[block, PREFIX_BYTES:].view("<i8")[: counts[block]].copy()
            for block in np.flatnonzero(kinds == BlockKind.REMOVED)
        ]
        return Run(
            np.ascontiguousarray(rows["key"]),
            np.ascontiguousarray(rows["record"]),
            np.concatenate([np.zeros(0, np.int64), *removed]),
        )

    def _words(self, count: int) -> NDArray[np.uint64]:
        return self.memory[:count].view("<u8")
