"""Weights into a Hugging Face directory, tensor by tensor.

Names, sharding, index and metadata are those that transformers writes, experts one by one; the
same model gives the same bytes every time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moesaic.base.errors import StoreError
from moesaic.base.tensorfile import ITEM_BYTES
from moesaic.facts.job import ModelConfig
from moesaic.facts.workload import parameters
from moesaic.models.hf import names
from moesaic.models.hf.config import CONFIG_NAME, config_text
from moesaic.models.hf.reader import DTYPES, INDEX_NAME, SINGLE_NAME, refuse_loose
from moesaic.models.hf.settings import Precision
from moesaic.models.hf.shards import (
    Item,
    Progress,
    Stream,
    Tensors,
    cut,
    lay_out,
    refuse_occupied,
    staged,
    total_bytes,
)
from moesaic.models.hf.tokens import GENERATION_NAME, rewritten
from moesaic.models.tokenizer import TEMPLATE_FILE, TOOL_USE_FILE

SHARD_BYTES = 5_000_000_000
"""Size that no file exceeds unless one tensor does."""

COMPANIONS = (
    "added_tokens.json", TEMPLATE_FILE, TOOL_USE_FILE, "chat_template.json",
    GENERATION_NAME, "merges.txt", "special_tokens_map.json", "tokenizer.json",
    "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip
"""Files that travel with a model, byte for byte; but see `copy_companions`."""


def find_companions(directory: Path) -> list[Path]:
    """The tokenizer and generation files of `directory`, if it is there."""
    found = [directory / name for name in COMPANIONS]
    for path in found:
        refuse_loose(path)
    return [path for path in found if path.is_file()]


def copy_companions(
    companions: Sequence[Path], directory: Path, special: Mapping[str, Any]
) -> None:
    """Put what `find_companions` found to its place in `directory`; generation settings name the
    `special` tokens then."""
    for path in companions:
        place = directory / next(name for name in COMPANIONS if path.match(name))
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise StoreError(
                f"'{path}' cannot be read ({error.strerror}): mend or remove it"
            ) from error
        place.write_bytes(rewritten(path, data, special) if path.name == GENERATION_NAME else data)


def write_model(
    directory: Path,
    model: ModelConfig,
    tensors: Tensors,
    *,
    dtype: Precision = "keep",
    max_shard_bytes: int = SHARD_BYTES,
    companions: Sequence[Path] = (),
    special: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write `model` with the values of `tensors` as the Hugging Face directory `directory`.

    Args:
        directory: must not exist, or be empty.
        model: what config.json will say.
        tensors: read in the order of the blocks, shard by shard.
        dtype: of the weights on file; keep leaves each tensor its own.
        max_shard_bytes: size of a file, unless one tensor alone is larger.
        companions: files copied beside the weights.
        special: ids of tokens that generation settings among them are to name.
        progress: told of every tensor.
    """
    refuse_occupied(directory)
    items = lay_out(parameters(model), tensors, dtype, lambda p: names.written_name(model, p))
    shards = cut(items, max_shard_bytes)
    config = config_text(model, _dominant(items))
    with staged(directory) as partial:
        with Stream(tensors, total_bytes(items), progress) as stream:
            _write_shards(partial, shards, stream)
        (partial / CONFIG_NAME).write_text(config, encoding="utf-8")
        copy_companions(companions, partial, special or {})


def _dominant(items: Sequence[Item]) -> str:
    """The dtype of most elements, as config.json spells it; it can name only one."""
    sizes: Counter[str] = Counter()
    for item in items:
        sizes[item.entry.dtype] += item.entry.num_bytes // ITEM_BYTES[item.entry.dtype]
    return str(DTYPES[sizes.most_common(1)[0][0]]).removeprefix("torch.")


def _write_shards(directory: Path, shards: Sequence[Sequence[Item]], stream: Stream) -> None:
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        numbered = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file_name = SINGLE_NAME if len(shards) == 1 else numbered
        weight_map |= {item.entry.name: file_name for item in shard}
        stream.write(directory / file_name, shard, {"format": "pt"})
    if len(shards) > 1:
        total = sum(total_bytes(shard) for shard in shards)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / INDEX_NAME).write_text(text, encoding="utf-8")
