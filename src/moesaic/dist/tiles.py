"""Products of slots on a GPU by kernels of our own: a tile of a slot's rows for each program.

All slots are one launch, whatever their numbers of rows, types and sizes. Matrices may be of
another type than rows: a tile of one is converted when it has been read, and no copy of all is
made. In eight bits each row, and each column of a matrix, is scaled by its own largest number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from moesaic.dist.kernels import rows_by_matrices, rows_by_rows

EIGHT = torch.float8_e4m3fn
_LARGEST = torch.finfo(EIGHT).max
_LEAST = torch.finfo(torch.float32).tiny


class Blocks(NamedTuple):
    """Of a tile: its rows and columns, and what is added up at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def blocks(dtype: torch.dtype, rows: float) -> Blocks:
    """For so many rows a slot."""
    high = 16
    while high < min(rows, 128):
        high *= 2
    depth = {4: 32, 2: 64, 1: 128}[dtype.itemsize]
    return Blocks(high, 128, depth, 8 if high == 128 else 4, 3)


def grouped_mm(
    rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool, out: Tensor, *, eight: bool
) -> None:
    """rows[s] @ weight[s] for every slot s, or rows[s] @ weight[s].T if `transposed`; multiplied in
    `eight` bits, or in the type of the rows."""
    matrices = weight.transpose(1, 2) if transposed else weight
    depth, width = matrices.shape[1:]
    busy = int(counts.count_nonzero())
    if not busy or not width:
        return
    row_scales = column_scales = out
    if eight:
        rows, row_scales = narrowed(rows, 1)
        matrices, column_scales = narrowed(matrices, 1)
    own = blocks(rows.dtype, len(rows) / busy)
    tiles = cut(counts, own.rows).to(rows.device, non_blocking=True)
    rows_by_matrices[len(tiles), triton.cdiv(width, own.columns)](
        rows, matrices, out, tiles, row_scales, column_scales, width, depth,
        *rows.stride(), *matrices.stride(), out.stride(0),
        eight, own.rows, own.columns, own.depth, num_warps=own.warps, num_stages=own.stages,
    )  # fmt: skip


def narrowed(numbers: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """In eight bits, and scales that bring them back: one for all numbers along `dim`."""
    scales = numbers.abs().amax(dim, keepdim=True).float().clamp_(min=_LEAST * _LARGEST) / _LARGEST
    return (numbers / scales).to(EIGHT), scales.squeeze(dim)


def cut(counts: Tensor, size: int) -> Tensor:
    """Slot, first row and end of the slot's rows, of all tiles of so many rows."""
    ends, tiles = counts.cumsum(0), (counts + size - 1) // size
    slots = torch.repeat_interleave(tiles)
    within = torch.arange(len(slots)) - (tiles.cumsum(0) - tiles)[slots]
    return torch.stack([slots, (ends - counts)[slots] + within * size, ends[slots]], 1).int()


def grouped_outer(left: Tensor, right: Tensor, counts: Tensor, out: Tensor, added: bool) -> None:
    """left[s].T @ right[s] for every slot s, into out[s] or `added` to it."""
    slots, height, width = out.shape
    if not out.numel():
        return
    own = blocks(left.dtype, height)
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    rows_by_rows[slots, triton.cdiv(height, own.rows), triton.cdiv(width, own.columns)](
        left, right, out, ends.to(left.device, non_blocking=True), height, width,
        *left.stride(), *right.stride(), *out.stride(),
        added, own.rows, own.columns, 32, num_warps=own.warps, num_stages=own.stages,
    )  # fmt: skip
