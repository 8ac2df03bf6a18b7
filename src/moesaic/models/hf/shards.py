"""Export of tensors into files: split into shards, converted, one tensor in memory at a time.

Output first goes to a directory beside the target, which is renamed to the target once complete.
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

from moesaic.base import direct_io, safetensors_file
from moesaic.base.errors import ConfigError, StoreError, WeightsError
from moesaic.base.safetensors_file import HEADER_ALIGNMENT, ITEM_BYTES, Digest, TensorEntry
from moesaic.dist.state import PRECISIONS, TensorShard
from moesaic.facts.workload import Parameter
from moesaic.models.hf.reader import DTYPES
from moesaic.models.hf.settings import Precision
from moesaic.store.expert_files import StoredMatrix

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Progress = Callable[[int, int], None]
"""Callback with (bytes done, bytes in total) after every tensor."""


class TensorReader(Protocol):
    """Reader of a model's parameters by logical name, one at a time."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of one parameter."""

    def read(self, name: str) -> Tensor:
        """Return one whole parameter; the next call may overwrite its memory."""


class StoredTensors(TensorReader, Protocol):
    """Reader of a model's parameters from files."""

    def locate(self, name: str) -> list[StoredMatrix]:
        """Return where the boxes of one expert's matrix are stored; they begin at position 0 of a
        block that has the matrix alone."""


class InMemoryTensors:
    """Reader of a whole model that this process holds."""

    def __init__(self, shards: Iterable[TensorShard]) -> None:
        self._shards = {shard.name: shard for shard in shards}

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of one parameter."""
        return self._shards[name].dtype

    def read(self, name: str) -> Tensor:
        """Return one parameter, valid while it stays in memory."""
        with self._shards[name].borrow() as tensor:
            return tensor


@dataclass(frozen=True)
class FileItem:
    """One parameter of a file: its logical name and its entry."""

    logical: str
    entry: TensorEntry


def plan_items(
    parameters: Iterable[Parameter],
    tensors: TensorReader,
    dtype: Precision,
    name: Callable[[Parameter], str],
) -> list[FileItem]:
    """Return a file item per parameter, in order; `name` returns its name on file."""
    result = []
    for parameter in parameters:
        stored_dtype = tensors.dtype(parameter.name)
        # A narrower router bias would lose its small updates.
        keeps_dtype = dtype == "keep" or parameter.kind == "bias"
        dtype_name = _DTYPE_NAMES[stored_dtype if keeps_dtype else PRECISIONS[dtype]]
        result.append(
            FileItem(parameter.name, TensorEntry(name(parameter), dtype_name, parameter.shape))
        )
    return result


def split_into_shards(items: Sequence[FileItem], max_shard_bytes: int) -> list[list[FileItem]]:
    """Split `items` in order into shards of at most `max_shard_bytes`; one larger tensor is a shard
    of its own."""
    shards: list[list[FileItem]] = []
    filled = 0
    for item in items:
        if not shards or filled + item.entry.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += item.entry.num_bytes
    # Readers map tensors in place; with wider dtypes first, every tensor is aligned.
    return [sorted(shard, key=lambda i: -ITEM_BYTES[i.entry.dtype]) for shard in shards]


class TensorWriter:
    """Writer of tensors into files that counts bytes.

    One thread reads, converts and hashes tensors while another writes them. Finished files are
    synced in the background; leaving the context waits for that.
    """

    def __init__(
        self,
        tensors: TensorReader,
        items: Sequence[FileItem],
        progress: Progress | None,
        on_tensor: Callable[[FileItem, memoryview], None] | None = None,
    ) -> None:
        """Prepare to write `items`, the tensors of all files; `on_tensor` gets the bytes of
        each."""
        self._tensors, self._progress, self._on_tensor = tensors, progress, on_tensor
        self._done_bytes, self._total_bytes = 0, total_bytes(items)
        self._pool = ThreadPoolExecutor(1, "sync")
        self._syncing: list[Future[None]] = []

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the syncs and raise their first error, unless another exception is active."""
        self._pool.shutdown(cancel_futures=kind is not None)
        for sync in self._syncing if kind is None else ():
            sync.result()

    def write(
        self,
        path: Path,
        shard: Sequence[FileItem],
        metadata: dict[str, str] | None = None,
        digest: Digest | None = None,
        alignment: int = HEADER_ALIGNMENT,
    ) -> None:
        """Write one file; `digest` hashes all of its bytes. Values begin at a multiple of
        `alignment` bytes."""
        entries = [item.entry for item in shard]
        content = safetensors_file.file_chunks(
            entries, self._buffers(shard), metadata, digest, alignment
        )
        direct_io.write(path, content, sync=False)
        self._syncing.append(self._pool.submit(safetensors_file.sync, path))

    def _buffers(self, shard: Sequence[FileItem]) -> Iterator[memoryview]:
        for item in shard:
            data = _tensor_bytes(self._tensors.read(item.logical), item)
            if self._on_tensor is not None:
                self._on_tensor(item, data)
            yield data
            self._done_bytes += item.entry.num_bytes
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes)


def total_bytes(items: Sequence[FileItem]) -> int:
    """Return the bytes of all tensors of `items`."""
    return sum(item.entry.num_bytes for item in items)


def _tensor_bytes(tensor: Tensor, item: FileItem) -> memoryview:
    entry = item.entry
    if tuple(tensor.shape) != entry.shape:
        raise ValueError(f"{item.logical} has shape {tuple(tensor.shape)}, not {entry.shape}")
    dtype = DTYPES[entry.dtype]
    result = tensor.detach().to("cpu", dtype).contiguous()
    is_narrower = torch.finfo(dtype).max < torch.finfo(tensor.dtype).max
    if is_narrower and not result.isfinite().all() and _overflows(tensor, result):
        wider = "bf16" if dtype == torch.float16 else "keep"
        raise WeightsError(
            f"tensor '{entry.name}' holds values that overflow "
            f"{str(dtype).removeprefix('torch.')}: set dtype to {wider}"
        )
    data: memoryview = result.reshape(-1).view(torch.uint8).numpy().data
    return data


def _overflows(tensor: Tensor, narrow: Tensor) -> bool:
    """Return whether a finite value became infinite."""
    return bool((narrow.isinf() & tensor.detach().cpu().isfinite()).any())


def check_empty_directory(directory: Path) -> None:
    """Raise unless `directory` is absent, or empty and replaceable."""
    if directory.is_dir() and not any(directory.iterdir()):
        if directory.is_symlink() or os.path.ismount(directory):
            kind = "a link" if directory.is_symlink() else "a mount point"
            raise ConfigError(
                f"'{directory}' is {kind}, which the output cannot replace: name a directory in it"
            )
        return
    if directory.exists() or directory.is_symlink():
        kind = "is not empty" if directory.is_dir() else "is a file"
        raise ConfigError(f"'{directory}' {kind}: name a directory that does not exist yet")


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to `target` at the end, or removed on failure.

    Raise unless `target` is absent or empty.
    """
    check_empty_directory(target)
    target = Path(os.path.realpath(target))
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        if partial.exists():
            shutil.rmtree(partial)  # Left by a killed process with the same pid.
        partial.mkdir(parents=True)
        yield partial
        for path in (*sorted(partial.rglob("*")), partial):
            (safetensors_file.sync_directory if path.is_dir() else safetensors_file.sync)(path)
        partial.rename(target)
        safetensors_file.sync_directory(target.parent)
    except OSError as error:
        raise StoreError(
            f"writing '{target}' failed ({error}), and no output was kept: "
            "make room, or name another place"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
