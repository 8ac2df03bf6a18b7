"""safetensors files written as a stream, hashed on the way.

The library's own writer wants every tensor of a file in memory at once and hashes nothing; this
one takes them one by one, in the order of the header, and returns the SHA-256 of the file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file to be."""

    name: str
    dtype: str
    """As safetensors spells it: F32, BF16, ..."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def header(entries: Sequence[Entry], metadata: dict[str, str] | None = None) -> bytes:
    """The opening bytes of a safetensors file that holds `entries` in this order."""
    table: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for entry in entries:
        end = start + entry.num_bytes
        table[entry.name] = {
            "dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, end],
        }  # fmt: skip
        start = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(
    path: Path,
    entries: Sequence[Entry],
    buffers: Iterable[memoryview],
    metadata: dict[str, str] | None = None,
) -> str:
    """Write `buffers` (one per entry, in order) to `path`, sync it, and return its SHA-256."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        opening = header(entries, metadata)
        file.write(opening)
        digest.update(opening)
        for entry, buffer in zip(entries, buffers, strict=True):
            if buffer.nbytes != entry.num_bytes:
                raise ValueError(f"{entry.name}: {buffer.nbytes} bytes for {entry}")
            file.write(buffer)
            digest.update(buffer)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_directory(path: Path) -> None:
    """Make renames inside `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
