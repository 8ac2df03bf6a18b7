"""A rank's part of a save: its shards, its files, and the host buffer that it writes from.

One owner writes each replicated shard. All owners of a box know the same list of boxes, so each
computes alone which are its own: largest first, to the owner with the fewest bytes. Later saves
reuse the buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from moesaic.base.errors import StoreError
from moesaic.base.safetensors_file import TensorEntry
from moesaic.dist.checkpoint.manifest import DTYPES, ShardRecord, TensorRecord
from moesaic.dist.state import State, TensorShard
from moesaic.kernels import device as devices

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 64
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class DataFile:
    """One of a rank's files."""

    file: str
    """File name."""
    entries: tuple[TensorEntry, ...]
    """Tensors in the file, in order."""
    shard_indices: tuple[int, ...]
    """Index of each entry in the list of shards."""
    start: int
    """Offset of the values in the buffer, in bytes."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return sum(entry.num_bytes for entry in self.entries)


@dataclass(frozen=True)
class RankFiles:
    """Files that one rank writes in one save."""

    files: tuple[DataFile, ...]
    """Files of the rank."""
    tensors: dict[str, TensorRecord]
    """Shards that the rank writes, by tensor; empty tensors are listed without shards."""


class Staging:
    """Host buffer for this rank's part of the live state, reused by every save."""

    def __init__(self, rank: int, device: torch.device, file_bytes: int) -> None:
        self._rank, self._device, self._file_bytes = rank, device, file_bytes
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._signature: list[object] | None = None
        self._rank_files = RankFiles((), {})
        self._slots: list[tuple[torch.Tensor, int]] = []

    def plan_files(self, shards: Sequence[TensorShard]) -> RankFiles:
        """Return this rank's files for `shards`; cached while their metadata stays the same."""
        signature: list[object] = [
            (shard.kind, shard.name, shard.shape, shard.offset, shard.owners, shard.size,
             shard.dtype) for shard in shards
        ]  # fmt: skip
        if signature != self._signature:
            self._rank_files = _plan_files(shards, self._rank, self._file_bytes)
            self._slots, self._signature = [], signature
        return self._rank_files

    def prepare(self, rank_files: RankFiles) -> None:
        """Allocate the buffer for `rank_files` and touch its pages, so that copies do not fault."""
        self.reserve(rank_files)
        self._buffer[::_PAGE_BYTES] = 0

    def reserve(self, rank_files: RankFiles) -> None:
        """Allocate the buffer for `rank_files`."""
        if self._slots:
            return
        total = max((file.start + file.num_bytes for file in rank_files.files), default=0)
        if self._buffer.numel() < total:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # Free the old one first.
            pinned = self._device.type != "cpu"
            self._buffer = torch.empty(total, dtype=torch.uint8, pin_memory=pinned)
        for file in rank_files.files:
            start = file.start
            for entry, index in zip(file.entries, file.shard_indices, strict=True):
                raw = self._buffer[start : start + entry.num_bytes]
                self._slots.append((raw.view(DTYPES[entry.dtype]).view(entry.shape), index))
                start += entry.num_bytes

    @torch.no_grad()
    def copy(self, shards: Sequence[TensorShard]) -> None:
        """Copy this rank's shards into the buffer and wait for the copy."""
        for slot, index in self._slots:
            with shards[index].borrow() as tensor:
                slot.copy_(tensor, non_blocking=True)
        devices.synchronized_time_s(self._device)

    def staged_values(self, data_file: DataFile) -> Iterator[memoryview]:
        """Yield the buffered values of a file's entries, in order."""
        values = self._buffer.numpy().data
        start = data_file.start
        for entry in data_file.entries:
            yield values[start : start + entry.num_bytes]
            start += entry.num_bytes


@torch.no_grad()
def live_values(data_file: DataFile, state: State) -> Iterator[memoryview]:
    """Yield the live values of a file's entries, copied to the host one at a time."""
    shards = [state.shards[index] for index in data_file.shard_indices]
    if state.expect_reads is not None:
        state.expect_reads(shards)
    for shard in shards:
        with shard.borrow() as tensor:
            host = tensor.detach().to("cpu").contiguous()
            yield host.reshape(-1).view(torch.uint8).numpy().data


def select_shards(shards: Sequence[TensorShard], rank: int) -> list[int]:
    """Return the indices of the `shards` of `rank` that `rank` writes."""
    chosen: list[int] = []
    shared: dict[tuple[int, ...], list[int]] = {}
    for index, shard in enumerate(shards):
        if not shard.num_elements:
            continue
        if shard.owners == (rank,):
            chosen.append(index)
        else:
            shared.setdefault(shard.owners, []).append(index)
    for owners, indices in shared.items():
        indices.sort(key=lambda i: (-shards[i].num_bytes, shards[i].key, shards[i].offset))
        loads = dict.fromkeys(owners, 0)
        for index in indices:
            writer = min(owners, key=loads.__getitem__)
            loads[writer] += shards[index].num_bytes
            if writer == rank:
                chosen.append(index)
    return chosen


def _plan_files(shards: Sequence[TensorShard], rank: int, file_bytes: int) -> RankFiles:
    chosen = select_shards(shards, rank)
    # Wide dtypes first, so that every entry is aligned to its item size.
    chosen.sort(key=lambda i: (-shards[i].dtype.itemsize, shards[i].key, shards[i].offset))
    files: list[DataFile] = []
    records: dict[str, list[ShardRecord]] = {}
    start = 0
    for indices in _split_by_bytes([(i, shards[i].num_bytes) for i in chosen], file_bytes):
        suffix = f"-{len(files)}" if files else ""
        entries = tuple(_entry(shards[i]) for i in indices)
        file = DataFile(f"rank-{rank}{suffix}.safetensors", entries, tuple(indices), start)
        start += -(-file.num_bytes // _ALIGNMENT) * _ALIGNMENT
        files.append(file)
        for entry, shard in zip(entries, (shards[i] for i in indices), strict=True):
            records.setdefault(shard.key, []).append(
                ShardRecord(offset=shard.offset, size=entry.shape, file=file.file, entry=entry.name)
            )
    for shard in shards:
        if math.prod(shard.shape) == 0:
            records.setdefault(shard.key, [])
    tensors = {
        shard.key: TensorRecord(
            dtype=_dtype_name(shard), shape=shard.shape, shards=tuple(records[shard.key])
        )
        for shard in shards
        if shard.key in records
    }
    return RankFiles(tuple(files), tensors)


def _split_by_bytes(sizes: Sequence[tuple[int, int]], limit: int) -> Iterator[list[int]]:
    """Yield consecutive items of (item, bytes) in lists of at most `limit` bytes; a larger item is
    alone."""
    run: list[int] = []
    total = 0
    for item, num_bytes in sizes:
        if run and total + num_bytes > limit:
            yield run
            run, total = [], 0
        run.append(item)
        total += num_bytes
    if run:
        yield run


def _entry(shard: TensorShard) -> TensorEntry:
    is_whole = shard.size == tuple(shard.shape)
    name = shard.key if is_whole else f"{shard.key}@{','.join(map(str, shard.offset))}"
    return TensorEntry(name, _dtype_name(shard), shard.size)


def _dtype_name(shard: TensorShard) -> str:
    name = _DTYPE_NAMES.get(shard.dtype)
    if name is None:
        raise StoreError(f"{shard.key} has dtype {shard.dtype}, which checkpoints do not support")
    return name
