"""Launchers of the Triton kernels: grouped matmul, SwiGLU, permutation and sorting.

One launch covers all slots. The host never reads the counts: programs follow a table of tiles that
is built on the GPU.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moesaic.kernels import triton_kernels
from moesaic.kernels.device import (
    KERNEL_DTYPES,
    TUNED_CAPABILITY,
    compute_capability,
    num_multiprocessors,
)

_ALIGNMENT_BYTES = 16
"""Alignment of the addresses and strides of tensor descriptors."""
_PRECISION = "tf32x3"
"""Three TF32 products are as accurate as one in fp32, and faster; narrower dtypes ignore this."""
_GROUP_TILES = 4
_MIN_WIDE_ROWS = 512
_ELEMENTWISE_BLOCK = 1024
_SORT_BLOCK, _SORT_SLOTS = 128, 64
"""Assignments per program, and slots per step of a program."""


class _CompiledKernel:
    """A Triton kernel with a cache of its compiled variants.

    Triton inspects every argument at each launch to find the variant. This class inspects only the
    properties that it can depend on, at a fraction of the time.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._compiled = dict[tuple[Any, ...], Any]()

    def __call__(
        self, grid: tuple[int, ...], *args: Any, fixed: tuple[Any, ...], warps: int = 4,
        stages: int = 3,
    ) -> None:  # fmt: skip
        """Launch the kernel over `grid`; the `fixed` arguments are compile-time constants."""
        if not isinstance(self._function, triton.JITFunction):  # Triton's interpreter.
            self._function[grid](*args, *fixed)
            return
        key = tuple(map(_specialization, args)), fixed, warps, stages
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._function.warmup(
                *args, *fixed, grid=grid, num_warps=warps, num_stages=stages
            )
            self._compiled[key] = compiled
        compiled[(*grid, 1, 1)[:3]](*args, *fixed)


def _specialization(arg: Any) -> object:
    """Return the properties of an argument that select the compiled variant."""
    if isinstance(arg, int):
        return arg == 1, arg % _ALIGNMENT_BYTES == 0, arg.bit_length() > 31
    if isinstance(arg, Tensor):
        return arg.dtype, arg.device, arg.data_ptr() % _ALIGNMENT_BYTES == 0
    if isinstance(arg, TensorDescriptor):
        return arg.base.dtype, *arg.block_shape
    return type(arg)


_MAKE_TILES, _COUNT_SLOTS, _PREFIX_SUM, _SORT_ROWS = map(
    _CompiledKernel,
    (
        triton_kernels.make_tiles,
        triton_kernels.count_slots,
        triton_kernels.prefix_sum,
        triton_kernels.sort_by_slot,
    ),
)
_GROUPED_MM, _GROUPED_WGRAD = (
    _CompiledKernel(triton_kernels.grouped_mm),
    _CompiledKernel(triton_kernels.grouped_wgrad),
)
_SWIGLU_BACKWARD, _PERMUTE, _UNPERMUTE = map(
    _CompiledKernel,
    (triton_kernels.swiglu_backward, triton_kernels.permute, triton_kernels.unpermute),
)


class TileSize(NamedTuple):
    """Tile of a matmul: rows, columns, and elements per step of the sum."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tile_size(
    dtype: torch.dtype, rows: float, capability: tuple[int, int] = TUNED_CAPABILITY[0]
) -> TileSize:
    """Return the tile size for `rows` rows per slot; GPUs that were not timed get sizes that fit
    any."""
    size, tuned = dtype.itemsize, capability in TUNED_CAPABILITY
    if rows <= 64:
        height = max(16, triton.next_power_of_2(math.ceil(rows)))
        depth = (256 if tuned else 128) // size
        return TileSize(height, 128, depth, 4, 4 if tuned and size == 2 else 3 if tuned else 2)
    if not tuned:
        return TileSize(128, 128, 128 // size, 8, 2)
    return TileSize(128, 128 if size == 4 else 256, 128 // size, 8, 4 if size == 2 else 3)


def wgrad_tile_size(
    dtype: torch.dtype, rows: float, capability: tuple[int, int] = TUNED_CAPABILITY[0]
) -> TileSize:
    """Return the tile size of a weight gradient over `rows` rows per slot; with few, writes
    dominate."""
    size, tuned = dtype.itemsize, capability in TUNED_CAPABILITY
    wide = 256 if rows > _MIN_WIDE_ROWS and size == 2 and tuned else 128
    return TileSize(128, wide, 128 // size, 8, 3 if tuned else 2)


def start_triton() -> None:
    """Initialize Triton's GPU driver, which needs a C compiler, or raise the reason it fails."""
    _ = triton.runtime.driver.active.utils


def is_supported(rows: Tensor, others: Tensor) -> bool:
    """Return whether dtype, strides and addresses suit the kernels, once `others` has the dtype of
    `rows`."""
    if rows.dtype not in KERNEL_DTYPES:
        return False
    aligned = _is_aligned(rows.stride(), rows) and rows.data_ptr() % _ALIGNMENT_BYTES == 0
    if others.dtype != rows.dtype:
        return aligned and _is_aligned((*others.shape[1:], 1), rows)
    return (
        aligned and _is_aligned(others.stride(), rows) and others.data_ptr() % _ALIGNMENT_BYTES == 0
    )


def _is_aligned(strides: tuple[int, ...], like: Tensor) -> bool:
    *outer, inner = strides
    return inner == 1 and not any(
        stride * like.element_size() % _ALIGNMENT_BYTES for stride in outer
    )


def grouped_mm(rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool, out: Tensor) -> None:
    """Write rows[s] @ weight[s], or rows[s] @ weight[s].T if `transposed`, to `out` for every slot
    s."""
    _grouped_mm(rows, weight, counts, out, None, transposed=transposed)


def grouped_swiglu(
    rows: Tensor,
    gate_up: Tensor,
    counts: Tensor,
    inner: Tensor | None,
    activated: Tensor,
) -> None:
    """Write silu(gate) * up of rows[s] @ gate_up[s].T to `activated` for every slot s. `inner`, if
    given, receives gate and up."""
    _grouped_mm(rows, gate_up, counts, inner, activated, transposed=True)


def _grouped_mm(
    rows: Tensor,
    weight: Tensor,
    counts: Tensor,
    out: Tensor | None,
    activated: Tensor | None,
    *,
    transposed: bool,
) -> None:
    gated = activated is not None
    target = activated if out is None else out
    assert target is not None
    if not target.numel():
        return
    weight = weight.to(rows.dtype)
    width, depth = weight.shape[1:] if transposed else weight.shape[:0:-1]
    size = tile_size(rows.dtype, len(rows) / len(weight), compute_capability(rows.device))
    if gated:
        weight, width = weight.unflatten(1, (2, -1)), width // 2
        tile = [1, 2, size.columns // 2, size.depth]
    else:
        tile = [1, size.columns, size.depth] if transposed else [1, size.depth, size.columns]
    tiles, _ = tile_table(counts.to(rows.device, non_blocking=True), len(rows), size.rows)
    programs = num_multiprocessors(rows.device)  # Some may have no tile.
    _GROUPED_MM(
        (programs,),
        TensorDescriptor.from_tensor(rows, [size.rows, size.depth]),
        TensorDescriptor.from_tensor(weight, tile),
        target, target if activated is None else activated, tiles, width, depth, target.stride(0),
        fixed=(
            transposed, gated, out is not None, _PRECISION, programs, _GROUP_TILES,
            size.rows, size.columns, size.depth,
        ),
        warps=size.warps, stages=size.stages,
    )  # fmt: skip


def tile_table(counts: Tensor, rows: int, height: int) -> tuple[Tensor, Tensor]:
    """Return the tiles of `height` rows for slots with `counts` rows, at most `rows` in all, and
    the row offsets of the slots.

    The first table starts with the number of tiles; then slot, first row and end of the slot's rows
    for each."""
    return _TILE_TABLES.table(counts, rows, height)


class _TileTableCache:
    """Cache of the last tile table: all matmuls of a layer share one."""

    def __init__(self) -> None:
        self._cached: tuple[Tensor, tuple[int, int, int], tuple[Tensor, Tensor]] | None = None

    def table(self, counts: Tensor, rows: int, height: int) -> tuple[Tensor, Tensor]:
        """Return the cached table if `counts` is the same unmodified tensor, else a new one. The
        cache keeps `counts` alive, so no other tensor reuses its memory."""
        if counts.is_inference():  # Without a version counter.
            return _make_tile_table(counts, rows, height)
        cached, key = self._cached, (counts._version, rows, height)
        if cached is not None and cached[1] == key and cached[0].is_set_to(counts):
            return cached[2]
        tables = _make_tile_table(counts, rows, height)
        self._cached = counts, key, tables
        return tables


def _make_tile_table(counts: Tensor, rows: int, height: int) -> tuple[Tensor, Tensor]:
    slots, device = len(counts), counts.device
    tiles = torch.empty(1 + 3 * (-(-rows // height) + slots), dtype=torch.int32, device=device)
    ends = torch.empty(slots + 1, dtype=torch.int32, device=device)
    fixed = triton.next_power_of_2(slots), height, 64
    _MAKE_TILES((slots,), counts, tiles, ends, slots, fixed=fixed, warps=1)
    return tiles, ends


_TILE_TABLES = _TileTableCache()


def grouped_wgrad(
    left: Tensor, right: Tensor, counts: Tensor, out: Tensor, accumulate: bool
) -> None:
    """Write left[s].T @ right[s] to out[s] for every slot s, or add it if `accumulate`."""
    slots, height, width = out.shape
    if not out.numel():
        return
    if not left.numel() or not right.numel():
        if not accumulate:
            out.zero_()
        return
    size = wgrad_tile_size(left.dtype, len(left) / slots, compute_capability(left.device))
    table_size = tile_size(left.dtype, len(left) / slots, compute_capability(left.device))
    _, ends = tile_table(counts.to(left.device, non_blocking=True), len(left), table_size.rows)
    tiles = slots * triton.cdiv(height, size.rows) * triton.cdiv(width, size.columns)
    _GROUPED_WGRAD(
        (tiles,),
        TensorDescriptor.from_tensor(left, [size.depth, size.rows]),
        TensorDescriptor.from_tensor(right, [size.depth, size.columns]),
        out, ends, height, width, out.stride(0), out.stride(1),
        fixed=(accumulate, _PRECISION, size.rows, size.columns, size.depth),
        warps=size.warps, stages=size.stages,
    )  # fmt: skip


def swiglu_backward(
    inner: Tensor, grad: Tensor, weights: Tensor | None, order: Tensor, grad_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradient of `inner`, and the activations times the weights of their rows.

    See `fused.swiglu_backward`."""
    rows, ffn = grad.shape
    grad_inner, activated = torch.empty_like(inner), torch.empty_like(grad)
    if grad.numel():
        width = min(_ELEMENTWISE_BLOCK, triton.next_power_of_2(ffn))
        weighted = weights is not None
        _SWIGLU_BACKWARD(
            (rows,),
            inner, grad, weights if weighted else grad, order, grad_inner, activated,
            grad_weights if weighted else grad, ffn, inner.stride(0), grad.stride(0),
            fixed=(weighted, width),
        )  # fmt: skip
    return grad_inner, activated


def permute(tokens: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Return tokens[order // top_k]: one row per token assignment in `order`."""
    rows, hidden, block_rows = len(order), tokens.shape[1], 4
    tokens = tokens if tokens.stride(1) == 1 else tokens.contiguous()
    out = tokens.new_empty((rows, hidden))
    width = min(_ELEMENTWISE_BLOCK, triton.next_power_of_2(hidden))
    if out.numel():
        grid = triton.cdiv(rows, block_rows), triton.cdiv(hidden, width)
        _PERMUTE(
            grid,
            tokens,
            order,
            out,
            rows,
            top_k,
            hidden,
            tokens.stride(0),
            fixed=(block_rows, width),
        )
    return out


def unpermute(rows: Tensor, row_indices: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sum over k of weights[n, k] * rows[row_indices[n, k]], or of the rows if `weights`
    is None."""
    tokens, top_k = row_indices.shape
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    row_indices, weights = (
        row_indices.contiguous(),
        None if weights is None else weights.contiguous(),
    )
    out = rows.new_empty((tokens, rows.shape[1]))
    width = min(_ELEMENTWISE_BLOCK, triton.next_power_of_2(rows.shape[1]))
    if out.numel():
        _UNPERMUTE(
            (tokens, triton.cdiv(rows.shape[1], width)),
            rows, row_indices, rows if weights is None else weights, out, top_k, rows.shape[1],
            rows.stride(0), fixed=(weights is not None, width),
        )  # fmt: skip
    return out


def sort_by_slot(slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the counts per slot, the assignment of each row, and the row of each assignment.

    See `fused.sort_by_slot`."""
    length, device = len(slots), slots.device
    counts = torch.empty(num_slots, dtype=torch.int64, device=device)
    order, rows = (torch.empty(length, dtype=torch.int64, device=device) for _ in range(2))
    blocks = triton.cdiv(length, _SORT_BLOCK)
    block_counts = torch.empty((blocks, num_slots), dtype=torch.int32, device=device)
    if blocks:
        _COUNT_SLOTS(
            (blocks,), slots, block_counts, length, num_slots, fixed=(_SORT_BLOCK, _SORT_SLOTS)
        )
    _PREFIX_SUM((num_slots,), block_counts, counts, blocks, num_slots, fixed=(1024,))
    if blocks:
        fixed = triton.next_power_of_2(num_slots), _SORT_BLOCK
        _SORT_ROWS(
            (blocks,), slots, block_counts, counts, order, rows, length, num_slots, fixed=fixed
        )
    return counts, order, rows
