"""Grouped matmul on a CPU, slot by slot, through oneDNN, MKL or `cpu_gemv`.

Any device takes these loops where no kernel covers all slots at once. This module chooses the
library, pads the row counts, and decides which factor stands on the left.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels import cpu_gemv
from moesaic.kernels import device as devices

_MIN_ONEDNN_MACS = 1 << 20
"""Multiply-accumulates per slot above which oneDNN outweighs its cost per call."""
_ROW_MULTIPLE = 8
_MIN_LEFT_ROWS, _MAX_LEFT_ROWS = 16, 64
_MAX_ROWS = 256
"""Rows per matmul; more do not make it faster, and oneDNN's result needs a temporary buffer of this
size."""
_MIN_COPY_COLUMNS = 768
"""Columns of the right factor above which AMX gains by a contiguous copy of a transposed left
factor."""


def grouped_mm(rows: Tensor, weight: Tensor, counts: Tensor, transposed: bool, out: Tensor) -> None:
    """Write rows[s] @ weight[s], or rows[s] @ weight[s].T if `transposed`, to `out` for every slot
    s."""
    start, sizes = 0, counts.tolist()
    if transposed and cpu_gemv.is_memory_bound(rows, weight, max(sizes, default=0)):
        cpu_gemv.grouped_gemv(rows, weight, sizes, out)
        return
    if rows.device.type != "cpu":
        weight = weight.to(rows.dtype)
    for slot, count in enumerate(sizes):
        if count:
            stop, matrix = start + count, weight[slot].to(rows.dtype)
            matrix_nk = matrix if transposed else matrix.T
            if transposed and cpu_gemv.is_memory_bound(rows, matrix[None], count):
                cpu_gemv.grouped_gemv(rows[start:stop], matrix[None], [count], out[start:stop])
            elif _uses_padded_onednn(rows, count, matrix, transposed=transposed):
                for first in range(start, stop, _MAX_ROWS):
                    _padded_mm(rows, slice(first, min(first + _MAX_ROWS, stop)), matrix_nk, out)
            else:
                torch.mm(rows[start:stop], matrix_nk.T, out=out[start:stop])
            start = stop


def grouped_wgrad(
    left: Tensor, right: Tensor, counts: Tensor, out: Tensor, accumulate: bool
) -> None:
    """Write left[s].T @ right[s] to out[s] for every slot s, or add it if `accumulate`."""
    start = 0
    for slot, count in enumerate(counts.tolist()):
        if count:
            stop = start + count
            _wgrad(left[start:stop], right[start:stop], out[slot], accumulate)
            start = stop
        elif not accumulate:
            out[slot].zero_()


def onednn_linear(rows: Tensor, weight: Tensor) -> Tensor:
    """Return rows @ weight.T, computed by oneDNN."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")
    return product


def inference_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T by the fastest library; any device and dtype.

    Inference repeats the sizes of decoding, so oneDNN's cost of a new size does not matter.
    """
    rows = x.reshape(-1, x.shape[-1])
    if cpu_gemv.is_memory_bound(rows, weight[None], len(rows)):
        product = rows.new_empty((len(rows), len(weight)))
        cpu_gemv.grouped_gemv(rows, weight[None], [len(rows)], product)
    elif uses_onednn(rows, weight):
        product = onednn_linear(rows, weight)
    else:
        return F.linear(x, weight)
    return product.view(*x.shape[:-1], len(weight))


def _padded_mm(rows: Tensor, own: slice, weight: Tensor, out: Tensor) -> None:
    """Write rows[own] @ weight.T to out[own], with a padded number of rows.

    The padding is rows of other slots, so this may overwrite rows of `out` after `own`, which the
    caller has yet to write."""
    rows, first = _padded_window(rows, own)
    size = len(rows)
    fits = first == own.start and first + size <= len(out)
    if _weight_on_left(rows.dtype, size, weight):
        is_fp32 = rows.dtype == torch.float32
        result = (onednn_linear(weight, rows) if is_fp32 else torch.mm(weight, rows.T)).T
    elif rows.dtype == torch.float32:
        result = onednn_linear(rows, weight)
    else:  # torch calls oneDNN for bf16 and can write to `out`.
        result = torch.mm(rows, weight.T, out=out[first : first + size] if fits else None)
        if fits:
            return
    out[own] = result[own.start - first : own.stop - first]


def _padded_window(rows: Tensor, own: slice) -> tuple[Tensor, int]:
    """Return a padded number of rows that include `own`, and the index of the first."""
    size, first = _round_up_rows(own.stop - own.start), own.start
    if size > len(rows):
        return _pad_rows(rows[own], size), first
    first = min(first, len(rows) - size)
    return rows[first : first + size], first


def _weight_on_left(dtype: torch.dtype, size: int, weight: Tensor) -> bool:
    """Return whether the weight should be the left factor of a transposed product.

    oneDNN reads the left factor in place and repacks the right one, and the weight is much larger
    than the rows."""
    if size > _MAX_LEFT_ROWS or not weight.is_contiguous():
        return False
    return size >= _MIN_LEFT_ROWS if dtype == torch.float32 else devices.has_amx()


def _round_up_rows(count: int) -> int:
    """Return `count` rounded up to one of a few sizes.

    oneDNN takes a millisecond or more to prepare for a new number of rows, and caches a few
    hundred."""
    if count < _ROW_MULTIPLE:
        return 1 << (count - 1).bit_length()
    step = max(_ROW_MULTIPLE, 1 << (count.bit_length() - 4))
    return -(-count // step) * step


def _pad_rows(rows: Tensor, size: int) -> Tensor:
    return rows if size == len(rows) else F.pad(rows, (0, 0, 0, size - len(rows)))


def _wgrad(left: Tensor, right: Tensor, out: Tensor, accumulate: bool) -> None:
    """Write left.T @ right to `out`, or add it; the zero rows of the padding add nothing."""
    padded = _uses_padded_onednn(left, len(left), out, transposed=False)
    if padded and left.dtype == torch.float32:
        right = _pad_rows(right, _round_up_rows(len(right)))
        for first in range(0, left.shape[1], _MAX_ROWS):
            columns = slice(first, first + _MAX_ROWS)
            block = _pad_rows(left[:, columns], len(right))
            _write(out[columns], onednn_linear(block.T, right.T), accumulate)
        return
    if padded:
        left, right = (_pad_rows(rows, _round_up_rows(len(rows))) for rows in (left, right))
    left_t = left.T
    if padded and right.shape[1] >= _MIN_COPY_COLUMNS and devices.has_amx():
        left_t = left_t.contiguous()  # Faster on AMX than a strided left factor.
    if out.dtype != left.dtype:
        _write(out, left_t @ right, accumulate)
    elif accumulate:
        out.addmm_(left_t, right)
    else:
        torch.mm(left_t, right, out=out)


def _write(out: Tensor, values: Tensor, accumulate: bool) -> None:
    if accumulate:
        out.add_(values)
    else:
        out.copy_(values)


def uses_onednn(rows: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN multiplies these."""
    kinds = {(tensor.dtype, tensor.device.type) for tensor in (rows, weight)}
    return kinds == {(torch.float32, "cpu")} and rows.numel() > 0 and devices.prefers_onednn()


def _uses_padded_onednn(rows: Tensor, count: int, matrix: Tensor, *, transposed: bool) -> bool:
    """Return whether oneDNN multiplies `count` rows of a slot by its matrix, in padded row counts.

    In bf16 torch calls it anyway."""
    single = count == 1 and not transposed  # MKL is faster at that.
    if rows.device.type != "cpu" or single or count * matrix.numel() < _MIN_ONEDNN_MACS:
        return False
    return onednn_supports(rows.dtype)


def onednn_supports(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies experts of this dtype on this CPU, unless they are small."""
    if dtype == torch.float32:
        return devices.prefers_onednn()
    return dtype == torch.bfloat16 and devices.supports_bf16_matmul()
