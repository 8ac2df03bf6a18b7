"""States for tests: known tensors, cut into boxes in any way, on any number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from moesaic.dist.state import PARAMETER, Piece
from moesaic.dist.world import World

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size."""

Division = Mapping[str, Sequence[tuple[Box, tuple[int, ...]]]]
"""For each tensor, its boxes and the ranks that hold each."""


def rows(shape: Sequence[int], parts: int) -> list[Box]:
    """`shape` cut along its first dimension as FSDP2 cuts it: the last parts may be empty."""
    height = -(-shape[0] // parts)
    edges = [min(shape[0], i * height) for i in range(parts + 1)]
    rest = tuple(shape[1:])
    return [
        ((low, *(0 for _ in rest)), (high - low, *rest)) for low, high in itertools.pairwise(edges)
    ]


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of `shape`."""
    return tuple(0 for _ in shape), tuple(shape)


def cut(
    tensors: Mapping[str, torch.Tensor], division: Division, rank: int, kind: str = PARAMETER
) -> list[Piece]:
    """The pieces of `tensors` that `rank` holds: copies of their values."""
    pieces = []
    for name, boxes in division.items():
        tensor = tensors[name]
        for (offset, size), owners in boxes:
            if rank in owners:
                box = tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))
                shape = tuple(tensor.shape)
                pieces.append(Piece(kind, name, shape, offset, tensor[box].clone(), tuple(owners)))
    return pieces


def blank(pieces: Sequence[Piece]) -> list[Piece]:
    """The same pieces, every byte of them 0x55."""
    fresh = []
    for piece in pieces:
        tensor = torch.empty_like(piece.tensor)
        tensor.reshape(-1).view(torch.uint8).fill_(0x55)
        fresh.append(replace(piece, tensor=tensor))
    return fresh


def same_bits(one: Sequence[Piece], other: Sequence[Piece]) -> bool:
    """Whether two lists hold the same pieces with the same bits."""
    return [_bits(piece) for piece in one] == [_bits(piece) for piece in other]


def worlds(size: int, deadline: timedelta = timedelta(seconds=20)) -> list[World]:
    """The ranks of a world within one process: they share a store and no process group."""
    store = dist.HashStore()
    device = torch.device("cpu")
    return [World(rank, size, device, 0, deadline, store) for rank in range(size)]


def _bits(piece: Piece) -> tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype, bytes]:
    tensor = piece.tensor.detach().contiguous()
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return piece.key, piece.offset, tuple(tensor.shape), tensor.dtype, raw
