"""Packed directories: Hugging Face directories whose experts are read from a drive at once.

Files hold either experts or the other tensors. Gate, up and down of an expert are neighbours, and
the first expert of a file begins at a multiple of 4 KiB. A file beside them has a hash of each
expert.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moesaic.base.direct_io import ALIGNMENT
from moesaic.base.errors import WeightsError
from moesaic.base.safetensors_file import ITEM_BYTES, Digest
from moesaic.models.hf.shards import FileItem, split_into_shards, total_bytes

HASHES_NAME = "experts.json"
HEADER_ALIGNMENT = ALIGNMENT
"""Multiple of bytes at which the tensors of a packed file begin."""

_FORMAT, _VERSION = "moesaic-experts", 1
_MATRICES = 3
"""Matrices of an expert: gate, up, down."""


class ExpertHashes:
    """Hashes of experts, from the bytes of their matrices as they are written."""

    def __init__(self) -> None:
        self._digests: dict[str, Digest] = {}

    def add(self, item: FileItem, data: memoryview) -> None:
        """Add the bytes of one parameter; those that are no expert's are ignored."""
        if ".moe.experts." in item.logical:
            name = item.logical.rpartition(".")[0]
            self._digests.setdefault(name, hashlib.sha256()).update(data)

    def write(self, directory: Path) -> None:
        """Write all hashes."""
        hashes = {name: digest.hexdigest() for name, digest in self._digests.items()}
        content = {"format": _FORMAT, "version": _VERSION, "sha256": hashes}
        text = json.dumps(content, indent=1) + "\n"
        (directory / HASHES_NAME).write_text(text, encoding="utf-8")


def read_expert_hashes(directory: Path) -> dict[str, str]:
    """Return the hash of each expert by logical name; none if the directory is not packed."""
    path = directory / HASHES_NAME
    if not path.exists():
        return {}
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        hashes = content["sha256"]
        if (content["format"], content["version"]) != (_FORMAT, _VERSION):
            raise ValueError(f"format {content['format']}, version {content['version']}")
        return {str(name): str(digest) for name, digest in hashes.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(
            f"'{path}' cannot be read ({error}): restore it, or convert the model again"
        ) from None


def split_into_packed_shards(
    items: Sequence[FileItem], max_shard_bytes: int
) -> list[list[FileItem]]:
    """Split `items` into shards of experts and shards of others, of at most `max_shard_bytes`; one
    larger expert or tensor is a shard of its own."""
    others = [item for item in items if ".moe.experts." not in item.logical]
    in_experts = [item for item in items if ".moe.experts." in item.logical]
    shards, filled = list[list[FileItem]](), 0
    starts = range(0, len(in_experts), _MATRICES)
    experts = [in_experts[start : start + _MATRICES] for start in starts]
    # With wider dtypes first, every tensor is aligned.
    for expert in sorted(experts, key=_item_bytes, reverse=True):
        num_bytes = total_bytes(expert)
        if not shards or filled + num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1] += expert
        filled += num_bytes
    return split_into_shards(others, max_shard_bytes) + shards


def _item_bytes(expert: Sequence[FileItem]) -> int:
    return max(ITEM_BYTES[item.entry.dtype] for item in expert)
