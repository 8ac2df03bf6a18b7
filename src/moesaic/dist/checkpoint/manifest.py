"""What a checkpoint says of itself: the manifest, and the commit record that vouches for it.

The manifest names every tensor, the boxes it is cut into, the file that holds each box, and the
hash of every file. The commit record holds the hash of the manifest and is a function of the
manifest's bytes alone, so a change of any bit of either is seen.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field, ValidationError

from moesaic.base.config import Section
from moesaic.base.errors import StoreError
from moesaic.base.tensorfile import ITEM_BYTES
from moesaic.dist.state import overlap

FORMAT = "moesaic-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
COMMIT = "COMMIT"

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
"""torch's types by safetensors' names."""

_SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


class PieceRecord(Section):
    """One box of a tensor, and where its values are."""

    offset: tuple[int, ...]
    """Where the box starts in the tensor."""
    size: tuple[int, ...]
    """Its extent."""
    file: str
    """The file that holds it, beside the manifest."""
    entry: str
    """Its name in that file."""


class TensorRecord(Section):
    """One tensor of the state."""

    dtype: str
    """As safetensors spells it."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    pieces: tuple[PieceRecord, ...]
    """Boxes that cover it, each element once."""


class FileRecord(Section):
    """One data file."""

    num_bytes: int = Field(alias="bytes", ge=0)
    """Its length."""
    sha256: str
    """Its hash."""


class Manifest(Section):
    """All that a checkpoint holds."""

    format: str = FORMAT
    """What kind of file this is."""
    version: int = VERSION
    """Which form of it."""
    serial: int
    """Order of commits in one directory; steps may repeat, when a run goes back."""
    step: int
    """Finished optimizer steps."""
    counters: dict[str, int]
    """Position in the run and in the data."""
    facts: dict[str, Any]
    """What the run says of itself: job, plan."""
    tensors: dict[str, TensorRecord]
    """By kind/name."""
    files: dict[str, FileRecord]
    """By name."""

    def to_bytes(self) -> bytes:
        """The file's contents."""
        return json.dumps(self.model_dump(mode="json", by_alias=True)).encode()

    def find_flaw(self) -> str | None:
        """What makes this no description of a whole state; None if nothing does."""
        for name in self.files:
            if not _SAFE_NAME.fullmatch(name):
                return f"the file name '{name}' leads out of the checkpoint's directory"
        for key, tensor in self.tensors.items():
            if tensor.dtype not in ITEM_BYTES:
                return f"{key} has the unknown type {tensor.dtype}"
            stray = next((p.file for p in tensor.pieces if p.file not in self.files), None)
            if stray is not None:
                return f"{key} lies in '{stray}', which is not among the files"
            boxes = [(piece.offset, piece.size) for piece in tensor.pieces]
            if flaw := _find_tiling_flaw(tensor.shape, boxes):
                return f"{key} of shape {list(tensor.shape)} {flaw}"
        return None


def parse_manifest(data: bytes) -> Manifest:
    """The manifest that `data` holds; StoreError says what is wrong with it."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"'{MANIFEST}' is not JSON ({error})") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise StoreError(f"'{MANIFEST}' does not describe a moesaic checkpoint")
    if raw.get("version") != VERSION:
        raise StoreError(
            f"it is in version {raw.get('version')} of the format and this moesaic reads "
            f"version {VERSION}: load it with the moesaic that wrote it"
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
    """The contents of the commit record of the manifest whose bytes are `data`."""
    record = {
        "format": FORMAT, "version": VERSION, "serial": manifest.serial, "step": manifest.step,
        "manifest_sha256": hashlib.sha256(data).hexdigest(),
    }  # fmt: skip
    return (json.dumps(record, indent=1) + "\n").encode()


def _find_tiling_flaw(
    shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> str | None:
    """Why `boxes` do not hold every element of `shape` exactly once; None if they do."""
    for offset, size in boxes:
        fits = len(offset) == len(size) == len(shape) and all(
            low >= 0 and extent >= 1 and low + extent <= limit
            for low, extent, limit in zip(offset, size, shape, strict=True)
        )
        if not fits:
            return f"has a piece at {list(offset)} of size {list(size)}, which lies outside it"
    covered = sum(math.prod(size) for _, size in boxes)
    if covered < math.prod(shape):
        return f"is not wholly covered: {covered} of {math.prod(shape)} elements are there"
    # Sweep along the first dimension: only boxes that are still open can meet the next one.
    still_open: list[tuple[Sequence[int], Sequence[int]]] = []
    for offset, size in sorted(boxes, key=lambda box: tuple(box[0])):
        if shape:
            still_open = [(o, s) for o, s in still_open if o[0] + s[0] > offset[0]]
        for other_offset, other_size in still_open:
            if overlap(offset, size, other_offset, other_size) is not None:
                return f"has pieces at {list(other_offset)} and {list(offset)} that overlap"
        still_open.append((offset, size))
    return None
