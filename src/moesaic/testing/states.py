"""States for tests: known tensors, cut into boxes in any way, on any number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
import torch.distributed as dist

from moesaic.dist.checkpoint import Checkpoint
from moesaic.dist.checkpoint.manifest import DTYPES
from moesaic.dist.state import PARAMETER, TensorShard
from moesaic.dist.world import World

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size of a box."""

Division = Mapping[str, Sequence[tuple[Box, tuple[int, ...]]]]
"""Boxes of each tensor, with the ranks that hold each box."""


def row_boxes(shape: Sequence[int], parts: int) -> list[Box]:
    """Return the boxes of `shape` cut along its first dimension like FSDP2; the last ones may be
    empty."""
    height = -(-shape[0] // parts)
    edges = [min(shape[0], i * height) for i in range(parts + 1)]
    rest = tuple(shape[1:])
    return [
        ((low, *(0 for _ in rest)), (high - low, *rest)) for low, high in itertools.pairwise(edges)
    ]


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box that covers `shape`."""
    return tuple(0 for _ in shape), tuple(shape)


def whole_shard(name: str, values: torch.Tensor, kind: str = PARAMETER) -> TensorShard:
    """Return a tensor that rank 0 holds whole."""
    shape = tuple(values.shape)
    return TensorShard.of_tensor(kind, name, shape, (0,) * len(shape), values, (0,))


def make_shards(
    tensors: Mapping[str, torch.Tensor], division: Division, rank: int, kind: str = PARAMETER
) -> list[TensorShard]:
    """Return the shards of `tensors` on `rank`, with copied values."""
    shards = []
    for name, boxes in division.items():
        tensor = tensors[name]
        for (offset, size), owners in boxes:
            if rank in owners:
                box = tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))
                shape = tuple(tensor.shape)
                shards.append(
                    TensorShard.of_tensor(
                        kind, name, shape, offset, tensor[box].clone(), tuple(owners)
                    )
                )
    return shards


def blank_shards(shards: Sequence[TensorShard]) -> list[TensorShard]:
    """Return the same shards, with every byte 0x55."""
    blanks = []
    for shard in shards:
        tensor = torch.empty(shard.size, dtype=shard.dtype)
        tensor.view(-1).view(torch.uint8).fill_(0x55)
        blanks.append(shard.with_tensor(tensor))
    return blanks


def live_values(shard: TensorShard) -> torch.Tensor:
    """Return the live values of a shard, valid while they stay in memory."""
    with shard.borrow() as tensor:
        return tensor


def read_checkpoint(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Return every tensor of an intact checkpoint, unsharded, by kind/name."""
    checkpoint, found = Checkpoint.open(path), dict[str, npt.NDArray[Any]]()
    checkpoint.verify()
    for key, record in checkpoint.tensors.items():
        tensor = torch.empty(record.shape, dtype=DTYPES[record.dtype])
        kind, _, name = key.partition("/")
        checkpoint.fill([whole_shard(name, tensor, kind)])
        found[key] = tensor.numpy()
    return found


def same_bits(one: Sequence[TensorShard], other: Sequence[TensorShard]) -> bool:
    """Return true if both lists have the same shards with the same bits."""
    return [_bits(shard) for shard in one] == [_bits(shard) for shard in other]


def worlds(size: int, deadline: timedelta = timedelta(seconds=20)) -> list[World]:
    """Return the ranks of a world in one process, which share a store but no process group."""
    store = dist.HashStore()
    device = torch.device("cpu")
    return [World(rank, size, device, 0, deadline, store) for rank in range(size)]


def _bits(shard: TensorShard) -> tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype, bytes]:
    with shard.borrow() as values:
        tensor = values.detach().contiguous()
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return shard.key, shard.offset, tuple(tensor.shape), tensor.dtype, raw
