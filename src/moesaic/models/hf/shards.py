"""A model's tensors on their way into files: cut into shards, converted, one in memory at a time.

Whatever is written here goes to a directory beside the target first, which takes the target's name
when it is whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from moesaic.base import direct, tensorfile
from moesaic.base.errors import ConfigError, StoreError, WeightsError
from moesaic.base.tensorfile import ITEM_BYTES, Digest, Entry
from moesaic.dist.state import PRECISIONS, Piece
from moesaic.facts.workload import Parameter
from moesaic.models.hf.reader import DTYPES
from moesaic.models.hf.settings import Precision

_SPELLED = {dtype: name for name, dtype in DTYPES.items()}

Progress = Callable[[int, int], None]
"""Told (bytes done, bytes in all) after every tensor."""


class Tensors(Protocol):
    """A model's parameters by logical name, to be had one at a time."""

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of one parameter."""

    def read(self, name: str) -> Tensor:
        """One whole parameter; what is read once may lie where the next one will."""


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
class Item:
    """A parameter and how it will stand on file."""

    logical: str
    entry: Entry


def lay_out(
    some: Iterable[Parameter], tensors: Tensors, dtype: Precision, name: Callable[[Parameter], str]
) -> list[Item]:
    """Parameters in their order, on file as `name` says."""
    result = []
    for parameter in some:
        kept = tensors.dtype(parameter.name)
        exact = dtype == "keep" or parameter.kind == "bias"  # A narrower one would lose its steps.
        spelled = _SPELLED[kept if exact else PRECISIONS[dtype]]
        result.append(Item(parameter.name, Entry(name(parameter), spelled, parameter.shape)))
    return result


def cut(items: Sequence[Item], max_shard_bytes: int) -> list[list[Item]]:
    """`items` in order as shards of at most `max_shard_bytes`, or of one tensor."""
    shards: list[list[Item]] = []
    filled = 0
    for item in items:
        if not shards or filled + item.entry.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += item.entry.num_bytes
    # Readers map tensors in place, so wider items go first: then every tensor is aligned.
    return [sorted(shard, key=lambda i: -ITEM_BYTES[i.entry.dtype]) for shard in shards]


class Stream:
    """Takes tensors out of one place and into files, counting bytes.

    One thread reads, converts and hashes what the next one writes, and the disk takes a file while
    the one behind it is written: whoever is done with all has it wait.
    """

    def __init__(self, tensors: Tensors, total_bytes: int, progress: Progress | None) -> None:
        self._tensors, self._total_bytes, self._progress = tensors, total_bytes, progress
        self._done_bytes = 0
        self._pool = ThreadPoolExecutor(1, "sync")
        self._syncing: list[Future[None]] = []

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the disk; what it refuses is raised, if nothing else is."""
        self._pool.shutdown(cancel_futures=kind is not None)
        for sync in self._syncing if kind is None else ():
            sync.result()

    def write(
        self,
        path: Path,
        shard: Sequence[Item],
        metadata: dict[str, str] | None = None,
        digest: Digest | None = None,
    ) -> None:
        """Write one file; `digest` takes all of its bytes."""
        entries = [item.entry for item in shard]
        content = tensorfile.content(entries, self._buffers(shard), metadata, digest)
        direct.write(path, content, synced=False)
        self._syncing.append(self._pool.submit(tensorfile.sync, path))

    def _buffers(self, shard: Sequence[Item]) -> Iterator[memoryview]:
        for item in shard:
            yield _bytes(self._tensors.read(item.logical), item)
            self._done_bytes += item.entry.num_bytes
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes)


def total_bytes(items: Sequence[Item]) -> int:
    """Bytes of all tensors of `items`."""
    return sum(item.entry.num_bytes for item in items)


def _bytes(tensor: Tensor, item: Item) -> memoryview:
    entry = item.entry
    if tuple(tensor.shape) != entry.shape:
        raise ValueError(f"{item.logical} has shape {tuple(tensor.shape)}, not {entry.shape}")
    dtype = DTYPES[entry.dtype]
    result = tensor.detach().to("cpu", dtype).contiguous()
    narrower = torch.finfo(dtype).max < torch.finfo(tensor.dtype).max
    if narrower and not bool(result.isfinite().all()) and _overflows(tensor, result):
        wider = "bf16" if dtype == torch.float16 else "keep"
        raise WeightsError(
            f"tensor '{entry.name}' holds values that {str(dtype).removeprefix('torch.')} cannot: "
            f"set dtype to {wider}"
        )
    data: memoryview = result.reshape(-1).view(torch.uint8).numpy().data
    return data


def _overflows(tensor: Tensor, narrow: Tensor) -> bool:
    """Whether something that was finite is not any more."""
    return bool((narrow.isinf() & tensor.detach().cpu().isfinite()).any())


def refuse_occupied(directory: Path) -> None:
    """Raise unless `directory` can be created: absent, or empty."""
    if directory.is_dir() and not any(directory.iterdir()):
        if directory.is_symlink() or os.path.ismount(directory):
            what = "a link" if directory.is_symlink() else "where something is mounted"
            raise ConfigError(
                f"'{directory}' is {what}, and what is written takes its name at the end: "
                "name a directory in it"
            )
        return
    if directory.exists() or directory.is_symlink():
        kind = "is not empty" if directory.is_dir() else "is a file"
        raise ConfigError(f"'{directory}' {kind}: name a directory that does not exist yet")


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A new directory that takes the name `target` at the end, and is gone if anything fails."""
    target = Path(os.path.realpath(target))
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        if partial.exists():
            shutil.rmtree(partial)  # left by a killed process that had our number
        partial.mkdir(parents=True)
        yield partial
        for path in (*sorted(partial.rglob("*")), partial):
            (tensorfile.sync_directory if path.is_dir() else tensorfile.sync)(path)
        partial.rename(target)
        tensorfile.sync_directory(target.parent)
    except OSError as error:
        raise StoreError(
            f"writing '{target}' failed ({error}) and nothing of it is kept: "
            "make room, or name another place"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
