"""Manifest and commit record of a checkpoint.

The manifest lists every tensor, its shards, the file of each shard, and the hash of every file. The
commit record holds the hash of the manifest and derives from its bytes alone, so any flipped bit in
either is detected.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field, ValidationError

from moesaic.base.config import Section
from moesaic.base.errors import StoreError
from moesaic.dist.state import overlap

FORMAT = "moesaic-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
COMMIT = "COMMIT"

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
"""torch dtypes by safetensors name."""

Prefix = Annotated[str, Field(min_length=0)]
"""Prefix of a part; that of a single part is empty."""
_SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


class ShardRecord(Section):
    """Box of a tensor, and the file entry that holds it."""

    offset: tuple[int, ...]
    """Start of the box in each dimension."""
    size: tuple[int, ...]
    """Shape of the box."""
    file: str
    """File name, beside the manifest."""
    entry: str
    """Tensor name in the file."""


class TensorRecord(Section):
    """Tensor of the state."""

    dtype: str
    """Dtype, as safetensors spells it."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    shards: tuple[ShardRecord, ...]
    """Boxes that cover the tensor, each element once."""


class FileRecord(Section):
    """Data file."""

    num_bytes: int = Field(alias="bytes", ge=0)
    """Size in bytes."""
    sha256: str
    """SHA-256 of the content."""


class Manifest(Section):
    """Content of a checkpoint."""

    format: str = FORMAT
    """Format name."""
    version: int = VERSION
    """Format version."""
    serial: int
    """Order of commits in a directory; steps may repeat after a rollback."""
    step: int
    """Finished optimizer steps."""
    counters: dict[str, int]
    """Position in the run and in the data."""
    facts: dict[str, Any]
    """Job and plan of the run."""
    tensors: dict[str, TensorRecord]
    """Tensors by kind/name."""
    files: dict[str, FileRecord]
    """Files by name."""
    snapshots: dict[Prefix, dict[str, dict[str, Any]]] = Field(default_factory=dict)
    """Facts of external snapshots, by prefix of their part, then by rank."""

    def to_bytes(self) -> bytes:
        """Return the manifest as file content."""
        return json.dumps(self.model_dump(mode="json", by_alias=True)).encode()

    def find_flaw(self) -> str | None:
        """Return why the manifest does not describe a whole state, or None if it does."""
        for name in self.files:
            if not _SAFE_NAME.fullmatch(name):
                return f"the file name '{name}' points outside the checkpoint's directory"
        for key, tensor in self.tensors.items():
            if tensor.dtype not in DTYPES:
                return f"{key} has the unknown type {tensor.dtype}"
            missing = next((p.file for p in tensor.shards if p.file not in self.files), None)
            if missing is not None:
                return f"{key} is in '{missing}', which is not among the files"
            boxes = [(shard.offset, shard.size) for shard in tensor.shards]
            if flaw := _find_tiling_flaw(tensor.shape, boxes):
                return f"{key} of shape {list(tensor.shape)} {flaw}"
        return None


def parse_manifest(data: bytes) -> Manifest:
    """Return the manifest in `data`; StoreError says what is wrong with it."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"'{MANIFEST}' is not JSON ({error})") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise StoreError(f"'{MANIFEST}' does not describe a moesaic checkpoint")
    if raw.get("version") != VERSION:
        raise StoreError(
            f"it has format version {raw.get('version')} and this moesaic reads version {VERSION}; "
            "load it with the moesaic that wrote it"
        )
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise StoreError(f"'{MANIFEST}' is malformed at {where}: {first['msg']}") from None
    if flaw := manifest.find_flaw():
        raise StoreError(f"'{MANIFEST}' is inconsistent: {flaw}")
    return manifest


def commit_record(manifest: Manifest, data: bytes) -> bytes:
    """Return the commit record for the manifest with bytes `data`."""
    record = {
        "format": FORMAT, "version": VERSION, "serial": manifest.serial, "step": manifest.step,
        "manifest_sha256": hashlib.sha256(data).hexdigest(),
    }  # fmt: skip
    return (json.dumps(record, indent=1) + "\n").encode()


def _find_tiling_flaw(
    shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> str | None:
    """Return why `boxes` do not cover every element of `shape` exactly once, or None if they do."""
    for offset, size in boxes:
        fits = len(offset) == len(size) == len(shape) and all(
            low >= 0 and extent >= 1 and low + extent <= limit
            for low, extent, limit in zip(offset, size, shape, strict=True)
        )
        if not fits:
            return f"has a shard at {list(offset)} of size {list(size)}, which lies outside it"
    covered = sum(math.prod(size) for _, size in boxes)
    if covered < math.prod(shape):
        return f"is not wholly covered: {covered} of {math.prod(shape)} elements are present"
    # Sweep along the first dimension: only open boxes can overlap the next one.
    open_boxes: list[tuple[Sequence[int], Sequence[int]]] = []
    for offset, size in sorted(boxes, key=lambda box: tuple(box[0])):
        if shape:
            open_boxes = [(o, s) for o, s in open_boxes if o[0] + s[0] > offset[0]]
        for other_offset, other_size in open_boxes:
            if overlap(offset, size, other_offset, other_size) is not None:
                return f"has shards at {list(other_offset)} and {list(offset)} that overlap"
        open_boxes.append((offset, size))
    return None
