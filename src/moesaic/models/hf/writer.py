"""Writer of Hugging Face directories, tensor by tensor.

Names, sharding, index and metadata match transformers, with one tensor per expert matrix. Output is
reproducible: one model always gives equal bytes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moesaic.base.errors import StoreError
from moesaic.base.safetensors_file import HEADER_ALIGNMENT, ITEM_BYTES
from moesaic.facts.job import ModelConfig
from moesaic.facts.workload import parameters
from moesaic.models.hf import names, packed
from moesaic.models.hf.config import CONFIG_NAME, config_text
from moesaic.models.hf.packed import ExpertHashes, split_into_packed_shards
from moesaic.models.hf.reader import DTYPES, INDEX_NAME, SINGLE_NAME, check_not_dangling
from moesaic.models.hf.settings import ConvertConfig
from moesaic.models.hf.shards import (
    FileItem,
    Progress,
    TensorReader,
    TensorWriter,
    atomic_directory,
    plan_items,
    split_into_shards,
    total_bytes,
)
from moesaic.models.hf.special_tokens import GENERATION_CONFIG_NAME, update_generation_config
from moesaic.models.tokenizer import COMPANION_FILES, TOKENIZER_FILE

SHARD_BYTES = 5_000_000_000
"""Default maximum bytes of a weight file; one larger tensor still fills one file."""

COMPANION_NAMES = (
    TOKENIZER_FILE, *COMPANION_FILES, "chat_template.json", GENERATION_CONFIG_NAME, "vocab.txt",
)  # fmt: skip
"""Files copied with a model, byte for byte except for `copy_companions`."""


def find_companions(directory: Path) -> list[Path]:
    """Return the tokenizer and generation files that exist in `directory`."""
    paths = [directory / name for name in COMPANION_NAMES]
    for path in paths:
        check_not_dangling(path)
    return [path for path in paths if path.is_file()]


def copy_companions(
    companions: Sequence[Path], directory: Path, special_token_ids: Mapping[str, Any]
) -> None:
    """Copy `companions` into `directory`, with `special_token_ids` in the generation settings."""
    for path in companions:
        target = directory / next(name for name in COMPANION_NAMES if path.match(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise StoreError(
                f"'{path}' cannot be read ({error.strerror}): fix or remove it"
            ) from error
        target.write_bytes(
            update_generation_config(path, data, special_token_ids)
            if path.name == GENERATION_CONFIG_NAME
            else data
        )


def write_model(
    directory: Path,
    model: ModelConfig,
    tensors: TensorReader,
    settings: ConvertConfig | None = None,
    *,
    companions: Sequence[Path] = (),
    special_token_ids: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write `model` with the values of `tensors` as the Hugging Face directory `directory`.

    Args:
        directory: must not exist, or be empty.
        model: model config, for config.json.
        tensors: values, read in the order of the blocks, shard by shard.
        settings: dtype and size of the weight files; they may be packed.
        companions: files to copy beside the weights.
        special_token_ids: special token ids for the generation settings among them.
        progress: callback after every tensor.
    """
    settings = settings or ConvertConfig()
    is_packed, max_bytes = settings.to == "packed", settings.max_shard_bytes
    items = plan_items(
        parameters(model), tensors, settings.dtype, lambda p: names.written_name(model, p)
    )
    split = split_into_packed_shards if is_packed else split_into_shards
    alignment = packed.HEADER_ALIGNMENT if is_packed else HEADER_ALIGNMENT
    hashes = ExpertHashes() if is_packed else None
    config = config_text(model, _dominant_dtype(items))
    with atomic_directory(directory) as partial:
        with TensorWriter(
            tensors, items, progress, None if hashes is None else hashes.add
        ) as stream:
            _write_shards(partial, split(items, max_bytes), stream, alignment)
        if hashes is not None:
            hashes.write(partial)
        (partial / CONFIG_NAME).write_text(config, encoding="utf-8")
        copy_companions(companions, partial, special_token_ids or {})


def _dominant_dtype(items: Sequence[FileItem]) -> str:
    """Return the dtype of most elements for config.json, which can name only one."""
    sizes: Counter[str] = Counter()
    for item in items:
        sizes[item.entry.dtype] += item.entry.num_bytes // ITEM_BYTES[item.entry.dtype]
    return str(DTYPES[sizes.most_common(1)[0][0]]).removeprefix("torch.")


def _write_shards(
    directory: Path, shards: Sequence[Sequence[FileItem]], stream: TensorWriter, alignment: int
) -> None:
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        numbered = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file_name = SINGLE_NAME if len(shards) == 1 else numbered
        weight_map |= {item.entry.name: file_name for item in shard}
        stream.write(directory / file_name, shard, {"format": "pt"}, alignment=alignment)
    if len(shards) > 1:
        total = sum(total_bytes(shard) for shard in shards)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / INDEX_NAME).write_text(text, encoding="utf-8")
