"""One form of a model into another: Hugging Face directory, checkpoint or run into either of two,
and the adapters of a run into a directory of their own.

Weights go through one tensor at a time. A checkpoint that is made here holds parameters only.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from moesaic.base.errors import ConfigError
from moesaic.dist.checkpoint.manifest import (
    COMMIT,
    MANIFEST,
    FileRecord,
    Manifest,
    PieceRecord,
    TensorRecord,
    commit_record,
)
from moesaic.dist.state import PARAMETER
from moesaic.facts.job import ModelConfig
from moesaic.facts.workload import parameters
from moesaic.models.hf.adapter import write_adapter
from moesaic.models.hf.origin import TOKENIZER, Origin, open_origin
from moesaic.models.hf.settings import Form, Precision
from moesaic.models.hf.shards import (
    Progress,
    Stream,
    cut,
    lay_out,
    refuse_occupied,
    staged,
    total_bytes,
)
from moesaic.models.hf.writer import SHARD_BYTES, copy_companions, write_model


def convert(
    source: Path,
    target: Path,
    to: Form = "huggingface",
    dtype: Precision = "keep",
    max_shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Converted:
    """Write the model at `source` as `target`; returns where it was read, with warnings.

    Args:
        source: a Hugging Face directory, a checkpoint, or a run (its newest intact checkpoint).
        target: a directory that does not exist yet.
        to: the form of the target; a checkpoint holds parameters only, an adapter what a LoRA run
            learnt.
        dtype: of the weights on file; keep leaves each tensor its own.
        max_shard_bytes: size of a file, unless one tensor alone is larger, or it is an adapter.
        progress: told (bytes done, bytes in all) after every tensor.
    """
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes = {max_shard_bytes}: give a size from 1")
    refuse_occupied(target)
    origin = open_origin(source, once=True)
    if to == "checkpoint":
        _write_checkpoint(target, origin, dtype, max_shard_bytes, progress)
    elif to == "adapter":
        write_adapter(target, origin, dtype, progress)
    else:
        write_model(
            target, origin.model, origin.tensors, dtype=dtype, max_shard_bytes=max_shard_bytes,
            companions=origin.companions, special=origin.special, progress=progress,
        )  # fmt: skip
    return Converted(origin.path, origin.model, origin.warnings)


class Converted(NamedTuple):
    """What has been read."""

    path: Path
    """The directory that the weights are in."""
    model: ModelConfig
    warnings: list[str]
    """What a person should know."""


def _write_checkpoint(
    target: Path, origin: Origin, dtype: Precision, max_shard_bytes: int, progress: Progress | None
) -> None:
    every = parameters(origin.model)
    items = lay_out(every, origin.tensors, dtype, lambda p: f"{PARAMETER}/{p.name}")
    files: dict[str, FileRecord] = {}
    tensors: dict[str, TensorRecord] = {}
    stream = Stream(origin.tensors, total_bytes(items), progress)
    with staged(target) as partial, stream:
        for number, shard in enumerate(cut(items, max_shard_bytes)):
            name = f"rank-0-{number}.safetensors" if number else "rank-0.safetensors"
            digest = hashlib.sha256()
            stream.write(partial / name, shard, digest=digest)
            size = (partial / name).stat().st_size
            files[name] = FileRecord(bytes=size, sha256=digest.hexdigest())
            for item in shard:
                entry = item.entry
                place = PieceRecord(
                    offset=(0,) * len(entry.shape), size=entry.shape, file=name, entry=entry.name
                )
                tensors[entry.name] = TensorRecord(
                    dtype=entry.dtype, shape=entry.shape, pieces=(place,)
                )
        manifest = Manifest(
            serial=1, step=0, counters={}, facts=origin.facts, tensors=tensors, files=files
        )
        data = manifest.to_bytes()
        (partial / MANIFEST).write_bytes(data)
        (partial / COMMIT).write_bytes(commit_record(manifest, data))
        copy_companions(origin.companions, partial / TOKENIZER, origin.special)
