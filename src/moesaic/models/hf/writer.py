"""Weights into a Hugging Face directory, tensor by tensor.

Names, sharding, index and metadata are those that transformers writes, experts one by one; the
same model gives the same bytes every time. Everything is written to a directory beside the target,
which takes the target's name only when it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from moesaic.base import tensorfile
from moesaic.base.errors import ConfigError, StoreError, WeightsError
from moesaic.base.tensorfile import ITEM_BYTES, Entry
from moesaic.dist.state import Piece
from moesaic.facts.job import ModelConfig
from moesaic.facts.workload import parameters
from moesaic.models.hf import names
from moesaic.models.hf.config import CONFIG_NAME, config_text
from moesaic.models.hf.reader import DTYPES, INDEX_NAME, SINGLE_NAME

SHARD_BYTES = 5_000_000_000
"""Size that no file exceeds unless one tensor does."""

COMPANIONS = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "generation_config.json",
    "merges.txt", "special_tokens_map.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip
"""Files that travel with a model, byte for byte."""

Precision = Literal["keep", "fp64", "fp32", "bf16", "fp16"]
PRECISIONS = {
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip
_SPELLED = {dtype: name for name, dtype in DTYPES.items()}

Progress = Callable[[int, int], None]
"""Told (bytes done, bytes in all) after every tensor."""


class Tensors(Protocol):
    """A model's parameters by logical name, to be had one at a time."""

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of one parameter."""

    def read(self, name: str) -> Tensor:
        """One whole parameter."""


class PieceTensors:
    """The pieces of a model that lies whole in this process."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._tensors = {piece.name: piece.tensor for piece in pieces}

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of one parameter."""
        return self._tensors[name].dtype

    def read(self, name: str) -> Tensor:
        """One whole parameter."""
        return self._tensors[name]


@dataclass(frozen=True)
class _Item:
    """A parameter and how it stands on file."""

    logical: str
    entry: Entry


def find_companions(directory: Path) -> list[Path]:
    """The tokenizer and generation files of `directory`, if it is there."""
    return [path for name in COMPANIONS if (path := directory / name).is_file()]


def write_model(
    directory: Path,
    model: ModelConfig,
    tensors: Tensors,
    *,
    dtype: Precision = "keep",
    max_shard_bytes: int = SHARD_BYTES,
    companions: Sequence[Path] = (),
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
        progress: told of every tensor.
    """
    refuse_occupied(directory)
    items = _items(model, tensors, dtype)
    shards = _cut(items, max_shard_bytes)
    config = config_text(model, _dominant(items))
    with staged(directory) as partial:
        _write_shards(partial, shards, tensors, progress)
        (partial / CONFIG_NAME).write_text(config, encoding="utf-8")
        for path in companions:
            shutil.copyfile(path, partial / path.name)


def refuse_occupied(directory: Path) -> None:
    """Raise unless `directory` can be created: absent, or empty."""
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.exists() or directory.is_symlink():
        kind = "is not empty" if directory.is_dir() else "is a file"
        raise ConfigError(f"'{directory}' {kind}: name a directory that does not exist yet")


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A new directory that takes the name `target` at the end, and is gone if anything fails."""
    target = Path(os.path.abspath(target))
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        if partial.exists():
            shutil.rmtree(partial)  # left by a killed process that had our number
        partial.mkdir(parents=True)
        yield partial
        for path in sorted(partial.iterdir()):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        tensorfile.sync_directory(partial)
        partial.rename(target)
        tensorfile.sync_directory(target.parent)
    except OSError as error:
        raise StoreError(
            f"writing '{target}' failed ({error}) and nothing of it is kept: "
            "make room, or name another place"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _cut(items: Sequence[_Item], max_shard_bytes: int) -> list[list[_Item]]:
    """`items` in order as shards of at most `max_shard_bytes`, or of one tensor."""
    shards: list[list[_Item]] = []
    filled = 0
    for item in items:
        if not shards or filled + item.entry.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += item.entry.num_bytes
    # Readers map tensors in place, so wider items go first: then every tensor is aligned.
    return [sorted(s, key=lambda i: -ITEM_BYTES[i.entry.dtype]) for s in shards]


def _items(model: ModelConfig, tensors: Tensors, dtype: Precision) -> list[_Item]:
    result = []
    for parameter in parameters(model):
        kept = tensors.dtype(parameter.name)
        spelled = _SPELLED[kept if dtype == "keep" else PRECISIONS[dtype]]
        entry = Entry(names.written_name(model, parameter), spelled, parameter.shape)
        result.append(_Item(parameter.name, entry))
    return result


def _dominant(items: Sequence[_Item]) -> str:
    """The dtype of most elements, as config.json spells it; it can name only one."""
    sizes: Counter[str] = Counter()
    for item in items:
        sizes[item.entry.dtype] += item.entry.num_bytes // ITEM_BYTES[item.entry.dtype]
    return str(DTYPES[sizes.most_common(1)[0][0]]).removeprefix("torch.")


def _write_shards(
    directory: Path,
    shards: Sequence[Sequence[_Item]],
    tensors: Tensors,
    progress: Progress | None,
) -> None:
    total = sum(item.entry.num_bytes for shard in shards for item in shard)
    done = 0
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file_name = SINGLE_NAME if len(shards) == 1 else name
        weight_map |= {item.entry.name: file_name for item in shard}

        def buffers(shard: Sequence[_Item] = shard) -> Iterator[memoryview]:
            nonlocal done
            for item in shard:
                yield _bytes(tensors.read(item.logical), item)
                done += item.entry.num_bytes
                if progress is not None:
                    progress(done, total)

        entries = [item.entry for item in shard]
        tensorfile.write(directory / file_name, entries, buffers(), {"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / INDEX_NAME).write_text(text, encoding="utf-8")


def _bytes(tensor: Tensor, item: _Item) -> memoryview:
    entry = item.entry
    if tuple(tensor.shape) != entry.shape:
        raise ValueError(f"{item.logical} has shape {tuple(tensor.shape)}, not {entry.shape}")
    dtype = DTYPES[entry.dtype]
    result = tensor.detach().to("cpu", dtype).contiguous()
    if dtype == torch.float16 and tensor.dtype != dtype and not bool(result.isfinite().all()):
        raise WeightsError(
            f"tensor '{entry.name}' holds values that float16 cannot: convert to bf16 instead"
        )
    data: memoryview = result.reshape(-1).view(torch.uint8).numpy().data
    return data
