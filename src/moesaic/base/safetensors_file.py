"""Streaming writer of safetensors files, with optional hashing, and reader of their headers.

The safetensors library needs every tensor of a file in memory at once and hashes nothing. This
writer takes tensors one by one, in the order of the header.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from moesaic.base.errors import StoreError

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes per element, by safetensors dtype name."""

HEADER_ALIGNMENT = 8
"""Multiple of bytes at which values begin in every safetensors file."""

_CHUNK_BYTES = 4 << 20
"""Bytes hashed and written at a time."""


@dataclass(frozen=True)
class TensorEntry:
    """Name, dtype and shape of one tensor in a file."""

    name: str
    dtype: str
    """Dtype name of safetensors: F32, BF16, ..."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Digest(Protocol):
    """A hash object, like those of hashlib."""

    def update(self, data: bytes | memoryview, /) -> object:
        """Add more bytes."""

    def hexdigest(self) -> str:
        """Return the hash as hex."""


def encode_header(
    entries: Sequence[TensorEntry],
    metadata: dict[str, str] | None = None,
    alignment: int = HEADER_ALIGNMENT,
) -> bytes:
    """Return the header bytes of a safetensors file with `entries` in this order; their values
    begin at a multiple of `alignment` bytes."""
    table: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for entry in entries:
        end = start + entry.num_bytes
        table[entry.name] = {
            "dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, end],
        }  # fmt: skip
        start = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text


def file_chunks(
    entries: Sequence[TensorEntry],
    buffers: Iterable[memoryview],
    metadata: dict[str, str] | None = None,
    digest: Digest | None = None,
    alignment: int = HEADER_ALIGNMENT,
) -> Iterator[bytes | memoryview]:
    """Yield all bytes of a file with `buffers`, one per entry, in order; add them to `digest`.

    Hashing takes as long as a fast disk: pass a digest only if it is used.
    """
    for chunk in _chunks(entries, buffers, metadata, alignment):
        if digest is not None:
            digest.update(chunk)
        yield chunk


def _chunks(
    entries: Sequence[TensorEntry],
    buffers: Iterable[memoryview],
    metadata: dict[str, str] | None,
    alignment: int,
) -> Iterator[bytes | memoryview]:
    yield encode_header(entries, metadata, alignment)
    for entry, buffer in zip(entries, buffers, strict=True):
        if buffer.nbytes != entry.num_bytes:
            raise ValueError(f"{entry.name}: {buffer.nbytes} bytes for {entry}")
        flat = buffer.cast("B")
        for start in range(0, flat.nbytes, _CHUNK_BYTES):
            yield flat[start : start + _CHUNK_BYTES]


def sync(path: Path) -> None:
    """Flush a file to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def read_entries(path: Path) -> dict[str, tuple[TensorEntry, int]]:
    """Return the tensors of a file by name, each with the file offset of its data."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return _parse_header(path, size, lambda start, end: file.read(end - start))
    except OSError as error:
        raise StoreError(f"'{path}' cannot be read ({error.strerror}): restore it") from error


def parse_entries(path: Path, content: memoryview) -> dict[str, tuple[TensorEntry, int]]:
    """Return the same as `read_entries`, for a file whose content is in memory."""
    return _parse_header(path, len(content), lambda start, end: bytes(content[start:end]))


def _parse_header(
    path: Path, size: int, read: Callable[[int, int], bytes]
) -> dict[str, tuple[TensorEntry, int]]:
    """Parse the header; `read` is called for consecutive byte ranges of the file."""
    try:
        length = int.from_bytes(read(0, 8), "little")
        if not 2 <= length <= size - 8:
            raise ValueError(f"a header of {length} bytes does not fit in the file")
        table = json.loads(read(8, 8 + length))
        return {
            name: (TensorEntry(name, item["dtype"], tuple(item["shape"])), 8 + length + start)
            for name, item in table.items()
            if name != "__metadata__"
            for start, _ in (item["data_offsets"],)
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"'{path}' is not a safetensors file ({error}): restore it") from None


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(path: Path) -> None:
    """Flush renames inside the directory `path` to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
