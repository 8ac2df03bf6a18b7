"""Conversion of a model into a Hugging Face directory, a checkpoint or a LoRA adapter directory.

Weights are converted one tensor at a time. A converted checkpoint holds parameters only.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from moesaic.base.errors import ConfigError
from moesaic.dist.checkpoint.manifest import (
    COMMIT,
    MANIFEST,
    FileRecord,
    Manifest,
    ShardRecord,
    TensorRecord,
    commit_record,
)
from moesaic.dist.state import PARAMETER
from moesaic.facts.workload import parameters
from moesaic.models.hf.adapter import write_adapter
from moesaic.models.hf.origin import TOKENIZER, Origin, open_origin
from moesaic.models.hf.settings import ConvertConfig, ModelFormat, Precision
from moesaic.models.hf.shards import (
    Progress,
    TensorWriter,
    atomic_directory,
    check_empty_directory,
    plan_items,
    split_into_shards,
)
from moesaic.models.hf.writer import SHARD_BYTES, copy_companions, write_model


def convert(
    source: Path,
    target: Path,
    to: ModelFormat = "huggingface",
    dtype: Precision = "keep",
    max_shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
    student: str | None = None,
) -> Origin:
    """Write the model at `source` as `target` and return its origin, with warnings.

    Args:
        source: a Hugging Face directory, a checkpoint, or a run (its newest intact checkpoint).
        target: a directory that does not exist yet.
        to: format of the target; packed is a Hugging Face directory that is served fastest from a
            drive, a checkpoint holds parameters only, an adapter those of a LoRA run.
        dtype: dtype of the weights on file; keep: the dtype of each tensor.
        max_shard_bytes: maximum bytes of a file, except for one larger tensor or an adapter.
        progress: callback with (bytes done, bytes in total) after every tensor.
        student: student of a run to write instead of its teacher.
    """
    check_empty_directory(target)
    origin = open_origin(source, reads_once=True, student=student)
    if to == "packed" and not origin.model.experts:
        raise ConfigError(
            f"'{origin.path}' has no experts to pack: write it with to = \"huggingface\""
        )
    if to == "checkpoint":
        _write_checkpoint(target, origin, dtype, max_shard_bytes, progress)
    elif to == "adapter":
        write_adapter(target, origin, dtype, progress)
    else:
        settings = ConvertConfig(to=to, dtype=dtype, max_shard_bytes=max_shard_bytes)
        write_model(
            target, origin.model, origin.tensors, settings, companions=origin.companions,
            special_token_ids=origin.special_token_ids, progress=progress,
        )  # fmt: skip
    return origin


def _write_checkpoint(
    target: Path, origin: Origin, dtype: Precision, max_shard_bytes: int, progress: Progress | None
) -> None:
    all_parameters = parameters(origin.model)
    items = plan_items(all_parameters, origin.tensors, dtype, lambda p: f"{PARAMETER}/{p.name}")
    files: dict[str, FileRecord] = {}
    tensors: dict[str, TensorRecord] = {}
    stream = TensorWriter(origin.tensors, items, progress)
    with atomic_directory(target) as partial, stream:
        for number, shard in enumerate(split_into_shards(items, max_shard_bytes)):
            name = f"rank-0-{number}.safetensors" if number else "rank-0.safetensors"
            digest = hashlib.sha256()
            stream.write(partial / name, shard, digest=digest)
            size = (partial / name).stat().st_size
            files[name] = FileRecord(bytes=size, sha256=digest.hexdigest())
            for item in shard:
                entry = item.entry
                shard_record = ShardRecord(
                    offset=(0,) * len(entry.shape), size=entry.shape, file=name, entry=entry.name
                )
                tensors[entry.name] = TensorRecord(
                    dtype=entry.dtype, shape=entry.shape, shards=(shard_record,)
                )
        manifest = Manifest(
            serial=1, step=0, counters={}, facts=origin.facts, tensors=tensors, files=files
        )
        data = manifest.to_bytes()
        (partial / MANIFEST).write_bytes(data)
        (partial / COMMIT).write_bytes(commit_record(manifest, data))
        copy_companions(origin.companions, partial / TOKENIZER, origin.special_token_ids)
