"""Products of slots on a GPU by kernels of our own, and the passes between them.

All slots are one launch, whatever their numbers of rows, and nothing is asked of these on the host:
programs go by a table of tiles that is made where the numbers are. In eight bits each row, and each
column of a matrix, is scaled by its own largest number.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moesaic.dist import kernels
from moesaic.dist.device import MEASURED, OF_KERNELS, generation, processors

EIGHT = torch.float8_e4m3fn
_LARGEST = torch.finfo(EIGHT).max
_LEAST = torch.finfo(torch.float32).tiny
_WHOLE_BYTES = 16
"""What is read by tiles begins, and goes on, at multiples of so many."""
_PRECISION = "tf32x3"
"""Three products by units that have eleven bits of a number are as exact as one in fp32, and
faster; narrower types are multiplied as they are."""
_TOGETHER = 4
_FEW = 512
_WIDE = 1024
_BLOCK, _SLOTS = 128, 64
"""What a program takes of what is to be sorted, and of slots at a time."""


class _Kernel:
    """A kernel that is launched again and again.

    Triton looks at every argument anew to find what it has compiled for such; what is looked at
    here is no more than what that can depend on, at a fraction of the time.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._compiled = dict[tuple[Any, ...], Any]()

    def __call__(
        self, grid: tuple[int, ...], *args: Any, fixed: tuple[Any, ...], warps: int = 4,
        stages: int = 3,
    ) -> None:  # fmt: skip
        """Launch a program for each place of `grid`; all that is `fixed` is compiled in."""
        if not isinstance(self._function, triton.JITFunction):  # It is interpreted.
            self._function[grid](*args, *fixed)
            return
        like = tuple(map(_kind, args)), fixed, warps, stages
        compiled = self._compiled.get(like)
        if compiled is None:
            compiled = self._function.warmup(
                *args, *fixed, grid=grid, num_warps=warps, num_stages=stages
            )
            self._compiled[like] = compiled
        compiled[(*grid, 1, 1)[:3]](*args, *fixed)


def _kind(arg: Any) -> object:
    """What of an argument Triton compiles for, and where."""
    if isinstance(arg, int):
        return arg == 1, arg % _WHOLE_BYTES == 0, arg.bit_length() > 31
    if isinstance(arg, Tensor):
        return arg.dtype, arg.device, arg.data_ptr() % _WHOLE_BYTES == 0
    if isinstance(arg, TensorDescriptor):
        return arg.base.dtype, *arg.block_shape
    return type(arg)


_CUT, _COUNT, _PILE, _SORT = map(_Kernel, (kernels.cut, kernels.count, kernels.pile, kernels.sort))
_ROWS_BY_MATRICES, _ROWS_BY_ROWS = _Kernel(kernels.rows_by_matrices), _Kernel(kernels.rows_by_rows)
_GATED, _GATED_BACK, _ADD_UP = map(_Kernel, (kernels.gated, kernels.gated_back, kernels.add_up))
_COPIES = _Kernel(kernels.copies)
_NARROWED, _TURNED = _Kernel(kernels.narrowed), _Kernel(kernels.turned)


class Blocks(NamedTuple):
    """Of a tile: its rows and columns, and what is added up at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def blocks(dtype: torch.dtype, rows: float, generation: tuple[int, int] = MEASURED[0]) -> Blocks:
    """For so many rows a slot; on other GPUs than those that were measured less at a time, which
    any of them has room for."""
    size, known = dtype.itemsize, generation in MEASURED
    if rows <= 64:
        high = max(16, triton.next_power_of_2(math.ceil(rows)))
        depth = (256 if known else 128) // size
        return Blocks(high, 128, depth, 4, 4 if known and size == 2 else 3 if known else 2)
    if not known:
        return Blocks(128, 128, 128 // size, 8, 2)
    return Blocks(128, 128 if size == 4 else 256, 128 // size, 8, 4 if size == 2 else 3)


def blocks_of_outer(
    dtype: torch.dtype, rows: float, generation: tuple[int, int] = MEASURED[0]
) -> Blocks:
    """For a sum over so many rows a slot: with few, writing is what takes time."""
    size, known = dtype.itemsize, generation in MEASURED
    wide = 256 if rows > _FEW and size == 2 and known else 128
    return Blocks(128, wide, 128 // size, 8, 3 if known else 2)


def start() -> None:
    """Have Triton make ready for the GPU, which takes a C compiler, or raise what hinders it."""
    _ = triton.runtime.driver.active.utils


def serve(rows: Tensor, others: Tensor) -> bool:
    """Whether they are of a type that tiles are of, and lie as what is read by tiles must, or will
    when both are of one type."""
    if rows.dtype not in OF_KERNELS:
        return False
    lies = _lies(rows.stride(), rows) and rows.data_ptr() % _WHOLE_BYTES == 0
    if others.dtype != rows.dtype:
        return lies and _lies((*others.shape[1:], 1), rows)
    return lies and _lies(others.stride(), rows) and others.data_ptr() % _WHOLE_BYTES == 0


def _lies(strides: tuple[int, ...], like: Tensor) -> bool:
    *outer, inner = strides
    return inner == 1 and not any(one * like.element_size() % _WHOLE_BYTES for one in outer)


def grouped_mm(
    rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool, out: Tensor, *, eight: bool
) -> None:
    """rows[s] @ weight[s] for every slot s, or rows[s] @ weight[s].T if `transposed`; multiplied in
    `eight` bits, or in the type of the rows."""
    _by_matrices(rows, weight, counts, out, None, transposed=transposed, eight=eight)


def grouped_gated(
    rows: Tensor,
    gate_up: Tensor,
    counts: Tensor,
    inner: Tensor | None,
    activated: Tensor,
    *,
    eight: bool,
) -> None:
    """silu(gate) * up of rows[s] @ gate_up[s].T for every slot s, which stay in `inner`, if that is
    wanted."""
    _by_matrices(rows, gate_up, counts, inner, activated, transposed=True, eight=eight)


def _by_matrices(
    rows: Tensor,
    weight: Tensor,
    counts: Tensor,
    out: Tensor | None,
    activated: Tensor | None,
    *,
    transposed: bool,
    eight: bool,
) -> None:
    gated = activated is not None
    place = activated if out is None else out
    assert place is not None
    if not place.numel():
        return
    row_scales = column_scales = place
    if eight:
        rows, row_scales = narrowed(rows)
        weight, column_scales = narrowed(weight) if transposed else narrowed_turned(weight)
        transposed = True
    elif weight.dtype != rows.dtype:
        weight = weight.to(rows.dtype)
    width, depth = weight.shape[1:] if transposed else weight.shape[:0:-1]
    own = blocks(rows.dtype, len(rows) / len(weight), generation(rows.device))
    if gated:
        weight, width = weight.unflatten(1, (2, -1)), width // 2
        tile = [1, 2, own.columns // 2, own.depth]
    else:
        tile = [1, own.columns, own.depth] if transposed else [1, own.depth, own.columns]
    tiles, _ = table(counts.to(rows.device, non_blocking=True), len(rows), own.rows)
    programs = processors(rows.device)  # Of which some may find nothing to do.
    _ROWS_BY_MATRICES(
        (programs,),
        TensorDescriptor.from_tensor(rows, [own.rows, own.depth]),
        TensorDescriptor.from_tensor(weight, tile),
        place, place if activated is None else activated, tiles, row_scales, column_scales,
        width, depth, place.stride(0),
        fixed=(
            transposed, gated, out is not None, eight, _PRECISION, programs, _TOGETHER,
            own.rows, own.columns, own.depth,
        ),
        warps=own.warps, stages=own.stages,
    )  # fmt: skip


def table(counts: Tensor, rows: int, height: int) -> tuple[Tensor, Tensor]:
    """Tiles of so many rows of slots that have `counts` of them, at most so many together: their
    number, then slot, first row and end of the slot's rows of each; and where rows of slots end."""
    return _LAST.table(counts, rows, height)


class _Last:
    """The table that was asked for last: all products of a layer go by one."""

    def __init__(self) -> None:
        self._known: tuple[Tensor, tuple[int, int, int], tuple[Tensor, Tensor]] | None = None

    def table(self, counts: Tensor, rows: int, height: int) -> tuple[Tensor, Tensor]:
        """The same, if these are the same numbers: as long as it is known, so are they, and nobody
        else has their memory."""
        if counts.is_inference():  # Nobody tells whether these have changed.
            return _table(counts, rows, height)
        known, like = self._known, (counts._version, rows, height)
        if known is not None and known[1] == like and known[0].is_set_to(counts):
            return known[2]
        found = _table(counts, rows, height)
        self._known = counts, like, found
        return found


def _table(counts: Tensor, rows: int, height: int) -> tuple[Tensor, Tensor]:
    slots, device = len(counts), counts.device
    tiles = torch.empty(1 + 3 * (-(-rows // height) + slots), dtype=torch.int32, device=device)
    ends = torch.empty(slots + 1, dtype=torch.int32, device=device)
    fixed = triton.next_power_of_2(slots), height, 64
    _CUT((slots,), counts, tiles, ends, slots, fixed=fixed, warps=1)
    return tiles, ends


_LAST = _Last()


def grouped_outer(left: Tensor, right: Tensor, counts: Tensor, out: Tensor, added: bool) -> None:
    """left[s].T @ right[s] for every slot s, into out[s] or `added` to it."""
    slots, height, width = out.shape
    if not out.numel():
        return
    if not left.numel() or not right.numel():
        if not added:
            out.zero_()
        return
    own = blocks_of_outer(left.dtype, len(left) / slots, generation(left.device))
    others = blocks(left.dtype, len(left) / slots, generation(left.device))
    _, ends = table(counts.to(left.device, non_blocking=True), len(left), others.rows)
    tiles = slots * triton.cdiv(height, own.rows) * triton.cdiv(width, own.columns)
    _ROWS_BY_ROWS(
        (tiles,),
        TensorDescriptor.from_tensor(left, [own.depth, own.rows]),
        TensorDescriptor.from_tensor(right, [own.depth, own.columns]),
        out, ends, height, width, out.stride(0), out.stride(1),
        fixed=(added, _PRECISION, own.rows, own.columns, own.depth),
        warps=own.warps, stages=own.stages,
    )  # fmt: skip


def activate(inner: Tensor) -> Tensor:
    """silu(gate) * up of gate and up side by side."""
    rows, ffn = len(inner), inner.shape[1] // 2
    activated = inner.new_empty((rows, ffn))
    wide = min(_WIDE, triton.next_power_of_2(ffn))
    if activated.numel():
        grid = rows, triton.cdiv(ffn, wide)
        _GATED(grid, inner, activated, ffn, inner.stride(0), fixed=(wide,))
    return activated


def gated_back(
    inner: Tensor, grad: Tensor, weights: Tensor | None, order: Tensor, grad_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradient of `inner`, gate and up side by side, and silu(gate) * up times the weights of
    rows, which are those of `order`; `grad` is the gradient of that without them. The weights' own
    gradients go to their places."""
    rows, ffn = grad.shape
    grad_inner, activated = torch.empty_like(inner), torch.empty_like(grad)
    if grad.numel():
        wide = min(_WIDE, triton.next_power_of_2(ffn))
        weighed = weights is not None
        _GATED_BACK(
            (rows,),
            inner, grad, weights if weighed else grad, order, grad_inner, activated,
            grad_weights if weighed else grad, ffn, inner.stride(0), grad.stride(0),
            fixed=(weighed, wide),
        )  # fmt: skip
    return grad_inner, activated


def copies(tokens: Tensor, order: Tensor, choices: int) -> Tensor:
    """A row for each place of `order`: of the token that has it among its `choices`."""
    rows, hidden, high = len(order), tokens.shape[1], 4
    tokens = tokens if tokens.stride(1) == 1 else tokens.contiguous()
    out = tokens.new_empty((rows, hidden))
    wide = min(_WIDE, triton.next_power_of_2(hidden))
    if out.numel():
        grid = triton.cdiv(rows, high), triton.cdiv(hidden, wide)
        _COPIES(
            grid, tokens, order, out, rows, choices, hidden, tokens.stride(0), fixed=(high, wide)
        )
    return out


def add_up(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """Sum over k of weights[n, k] * rows[places[n, k]]."""
    tokens, choices = places.shape
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    places, weights = places.contiguous(), None if weights is None else weights.contiguous()
    out = rows.new_empty((tokens, rows.shape[1]))
    wide = min(_WIDE, triton.next_power_of_2(rows.shape[1]))
    if out.numel():
        _ADD_UP(
            (tokens, triton.cdiv(rows.shape[1], wide)),
            rows, places, rows if weights is None else weights, out, choices, rows.shape[1],
            rows.stride(0), fixed=(weights is not None, wide),
        )  # fmt: skip
    return out


def narrowed(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """In eight bits, and scales that bring them back: one for all numbers in the last dimension."""
    *outer, lines, width = numbers.shape
    numbers = numbers if numbers.stride(-1) == 1 else numbers.contiguous()
    eight = _eight(*outer, lines, width, device=numbers.device)
    scales = torch.empty(numbers.shape[:-1], dtype=torch.float32, device=numbers.device)
    apart = numbers.stride(0) if outer else 0
    if numbers.numel():
        _NARROWED(
            (scales.numel(),),
            numbers, eight, scales, lines, width, apart, numbers.stride(-2), eight.stride(-2),
            _LARGEST, _LEAST, fixed=(min(4 * _WIDE, triton.next_power_of_2(width)),),
        )  # fmt: skip
    return eight, scales


def narrowed_turned(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """The same of matrices by column, which are turned: units for eight bits read both factors
    along what is added up."""
    slots, height, width = matrices.shape
    matrices = matrices if matrices.stride(-1) == 1 else matrices.contiguous()
    scales = torch.empty((slots, width), dtype=torch.float32, device=matrices.device)
    eight = _eight(slots, width, height, device=matrices.device)
    high, wide = 128, 64
    if eight.numel():
        _TURNED(
            (slots, triton.cdiv(width, wide)),
            matrices, eight, scales, height, width, matrices.stride(0), matrices.stride(1),
            eight.stride(1), _LARGEST, _LEAST, fixed=(high, wide), warps=8,
        )  # fmt: skip
    return eight, scales


def sort(slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """How many are of each slot; whose each row is, rows being sorted by slot and in the order of
    `slots` there; and the row of each, 0 for what is of none."""
    length, device = len(slots), slots.device
    counts = torch.empty(num_slots, dtype=torch.int64, device=device)
    order, rows = (torch.empty(length, dtype=torch.int64, device=device) for _ in range(2))
    blocks = triton.cdiv(length, _BLOCK)
    numbers = torch.empty((blocks, num_slots), dtype=torch.int32, device=device)
    if blocks:
        _COUNT((blocks,), slots, numbers, length, num_slots, fixed=(_BLOCK, _SLOTS))
    _PILE((num_slots,), numbers, counts, blocks, num_slots, fixed=(1024,))
    if blocks:
        fixed = triton.next_power_of_2(num_slots), _BLOCK
        _SORT((blocks,), slots, numbers, counts, order, rows, length, num_slots, fixed=fixed)
    return counts, order, rows


def _eight(*extents: int, device: torch.device) -> Tensor:
    """Room for numbers in eight bits, which lie as `serve` wants them."""
    *outer, width = extents
    whole = -(-width // _WHOLE_BYTES) * _WHOLE_BYTES
    return torch.empty((*outer, whole), dtype=EIGHT, device=device)[..., :width]
