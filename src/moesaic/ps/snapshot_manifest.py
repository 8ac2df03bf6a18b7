"""Manifest of a table's snapshot: the segments of one shard, oldest first, and their digests.

Later segments win. A segment that no manifest names does not exist. The file ends with the hash of
its first line, and a checkpoint stores the same hash."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from moesaic.base import direct_io
from moesaic.base.config import Section
from moesaic.base.errors import StoreError, write_error
from moesaic.base.files import atomic_replace
from moesaic.base.safetensors_file import (
    TensorEntry,
    file_chunks,
    parse_entries,
    sync_directory,
)
from moesaic.ps.segments import SegmentLayout

FORMAT = "moesaic-table-snapshot"
VERSION = 1
REMEDY = "restore it, or resume from an earlier checkpoint"

_DTYPES = {"F64": "<f8", "F32": "<f4", "I64": "<i8", "I32": "<i4", "U64": "<u8", "U8": "|u1"}
"""numpy types by safetensors name."""
_SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


class SegmentRecord(Section):
    """Segment of a snapshot."""

    file: str
    """File name, beside the manifest."""
    num_blocks: int = Field(gt=0)
    """Blocks of the file."""
    num_rows: int = Field(ge=0)
    """Rows in the file."""
    num_removed: int = Field(ge=0)
    """Removed keys in the file."""
    digest: str
    """SHA-256 of the checksums of all blocks."""

    @property
    def num_keys(self) -> int:
        """Keys in the file, of rows and of removed rows."""
        return self.num_rows + self.num_removed


class ArraysRecord(Section):
    """File of the arrays that a table keeps besides its rows."""

    file: str
    """File name, beside the manifest."""
    sha256: str
    """SHA-256 of the content."""


class SnapshotManifest(Section):
    """Content of the snapshot of one shard."""

    format: str = FORMAT
    """Format name."""
    version: int = VERSION
    """Format version."""
    table_layout: SegmentLayout
    """Layout of every segment."""
    shard: int = Field(ge=0)
    """Number of the shard."""
    num_shards: int = Field(gt=0)
    """Shards of the table."""
    step: int = Field(ge=0)
    """Finished optimizer steps."""
    num_rows: int = Field(ge=0)
    """Rows of the shard."""
    segments: tuple[SegmentRecord, ...]
    """Segments, oldest first."""
    arrays: ArraysRecord | None = None
    """File of further arrays."""
    facts: dict[str, Any] = Field(default_factory=dict)
    """State of the table besides rows, such as its day."""

    @property
    def files(self) -> set[str]:
        """Names of the files that the snapshot needs."""
        arrays = [] if self.arrays is None else [self.arrays.file]
        return {*arrays, *(segment.file for segment in self.segments)}

    def write(self, path: Path) -> str:
        """Write the manifest durably and return its hash."""
        line = json.dumps(self.model_dump(mode="json"), allow_nan=False)
        digest = hashlib.sha256(line.encode()).hexdigest()
        try:
            with atomic_replace(path) as partial, partial.open("w", encoding="utf-8") as file:
                file.write(f"{line}\n{digest}\n")
                file.flush()
                os.fsync(file.fileno())
            sync_directory(path.parent)
        except OSError as error:
            raise write_error(f"'{path}'", error) from error
        return digest


def read_manifest(path: Path, digest: str | None = None) -> SnapshotManifest:
    """Return the manifest in a file, which has the hash `digest`; None: any."""
    try:
        line, end, found = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise StoreError(f"'{path}' cannot be read ({error.strerror}): {REMEDY}") from error
    own = hashlib.sha256(line).hexdigest()
    if not end or found != f"{own}\n".encode() or own != (digest or own):
        raise StoreError(f"'{path}' differs from what was written: {REMEDY}")
    raw = json.loads(line)
    if (raw["format"], raw["version"]) != (FORMAT, VERSION):
        raise StoreError(
            f"'{path}' has the format '{raw['format']}' in version {raw['version']}, and this "
            f"moesaic reads '{FORMAT}' in version {VERSION}; open it with the moesaic that wrote it"
        )
    try:
        manifest = SnapshotManifest.model_validate_json(line)
    except ValidationError as error:
        raise StoreError(f"'{path}' is malformed ({error.errors()[0]['msg']}): {REMEDY}") from None
    for name in manifest.files:
        if not _SAFE_NAME.fullmatch(name):
            raise StoreError(f"'{path}' names the file '{name}' outside its directory: {REMEDY}")
    return manifest


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> ArraysRecord:
    """Write arrays durably to a safetensors file."""
    names = {np.dtype(kind): name for name, kind in _DTYPES.items()}
    entries = [TensorEntry(name, names[one.dtype], one.shape) for name, one in arrays.items()]
    buffers = (np.ascontiguousarray(one).reshape(-1).view(np.uint8).data for one in arrays.values())
    digest = hashlib.sha256()
    try:
        direct_io.write(path, file_chunks(entries, buffers, digest=digest))
    except OSError as error:
        raise write_error(f"'{path}'", error) from error
    return ArraysRecord(file=path.name, sha256=digest.hexdigest())


def read_arrays(directory: Path, record: ArraysRecord | None) -> dict[str, NDArray[Any]]:
    """Return the verified arrays of a snapshot, by name."""
    if record is None:
        return {}
    path = directory / record.file
    try:
        content = memoryview(path.read_bytes())
    except OSError as error:
        raise StoreError(f"'{path}' cannot be read ({error.strerror}): {REMEDY}") from error
    if hashlib.sha256(content).hexdigest() != record.sha256:
        raise StoreError(f"'{path}' differs from what was written: {REMEDY}")
    arrays = dict[str, NDArray[Any]]()
    for name, (entry, start) in parse_entries(path, content).items():
        values = np.frombuffer(content[start : start + entry.num_bytes], _DTYPES[entry.dtype])
        arrays[name] = values.reshape(entry.shape)
    return arrays
