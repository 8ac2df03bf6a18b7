"""Grouped matrix-vector products on a CPU, at memory bandwidth, for slots with few rows.

With few rows, reading the matrix is the bottleneck. torch's libraries use half of a thread's
bandwidth in fp32 and a third in bf16, because they widen bf16 outside of registers. numba compiles
these kernels on first use, which takes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.kernels import threads

_MIN_ELEMENTS = 1 << 19
"""Elements per matrix below which the call overhead dominates; most caches hold such a matrix."""
_MAX_ROWS = {torch.float32: 4, torch.bfloat16: 3}
"""Rows per slot up to which these kernels beat the libraries, which reuse what they have read."""

Kernel = Callable[..., None]


def is_memory_bound(rows: Tensor, matrices: Tensor, max_rows: int) -> bool:
    """Return whether reading `matrices`, [slots, outputs, inputs], takes most of the time at up to
    `max_rows` rows per slot. These kernels are then the fastest."""
    kinds = {(tensor.dtype, tensor.device.type) for tensor in (rows, matrices)}
    outputs, inputs = matrices.shape[1:]
    return (
        kinds == {(rows.dtype, "cpu")}
        and 0 < max_rows <= _MAX_ROWS.get(rows.dtype, 0)
        and outputs * inputs >= _MIN_ELEMENTS
        and matrices.stride()[1:] == (inputs, 1)
    )


def prepare(dtype: torch.dtype, num_elements: int) -> None:
    """Compile the kernel for matrices of `num_elements`, if one is ever used for them."""
    if dtype in _MAX_ROWS and num_elements >= _MIN_ELEMENTS:
        _compile_kernel(dtype)


def grouped_gemv(rows: Tensor, matrices: Tensor, counts: Sequence[int], out: Tensor) -> None:
    """Write rows[s] @ matrices[s].T to `out` for every slot s, accumulated in fp32.

    All threads take part, each with a range of the outputs of all slots."""
    slots = np.flatnonzero(counts)
    ends = np.cumsum(np.append(0, np.asarray(counts)[slots]))
    rows_fp32 = rows.detach().to(torch.float32).contiguous().view(-1).numpy()
    direct = out.dtype == torch.float32 and out.is_contiguous()
    buffer = out.detach() if direct else out.new_empty(out.shape, dtype=torch.float32)
    kernel, values, results = _compile_kernel(matrices.dtype), _as_numpy(matrices), buffer.numpy()
    starts, outputs, inputs = slots * matrices.stride(0), *matrices.shape[1:]
    pool = threads.thread_pool()
    if pool is None:
        kernel(values, starts, inputs, rows_fp32, ends, results, 0, outputs)
    else:
        bounds = np.linspace(0, outputs, pool.size + 1).astype(int)

        def run_part(index: int) -> None:
            first, stop = bounds[index], bounds[index + 1]
            kernel(values, starts, inputs, rows_fp32, ends, results, first, stop)

        pool.run_with_caller(run_part)
    if not direct:
        out.copy_(buffer)


def _as_numpy(matrices: Tensor) -> Any:
    """Return the memory from the first slot to the last as a flat numpy array; bf16 as int16 bits,
    because numpy has no bf16."""
    slots, outputs, inputs = matrices.shape
    size = (slots - 1) * matrices.stride(0) + outputs * inputs
    flat = matrices.detach().as_strided((size,), (1,))
    return (flat.view(torch.int16) if flat.dtype == torch.bfloat16 else flat).numpy()


@cache
def _compile_kernel(dtype: torch.dtype) -> Kernel:
    import numba  # Importing takes a second, so only callers that need it pay.

    read = numba.njit(_identity) if dtype == torch.float32 else make_bf16_to_fp32()
    # Allow reordered sums, so that they vectorize; NaN and infinity still propagate.
    relaxed = {"reassoc", "contract", "nsz"}

    @numba.njit(nogil=True, fastmath=relaxed)
    def dots(matrix: Any, rows: Any, out: Any) -> None:
        # Four distant outputs at once: reading several streams raises the memory bandwidth.
        quarter = matrix.shape[0] // 4
        for first in range(quarter):
            second, third, fourth = first + quarter, first + 2 * quarter, first + 3 * quarter
            for index in range(rows.shape[0]):
                row = rows[index]
                a = b = c = d = np.float32(0)
                for k in range(matrix.shape[1]):
                    value = row[k]
                    a += read(matrix[first, k]) * value
                    b += read(matrix[second, k]) * value
                    c += read(matrix[third, k]) * value
                    d += read(matrix[fourth, k]) * value
                out[index, first], out[index, second] = a, b
                out[index, third], out[index, fourth] = c, d
        for rest in range(4 * quarter, matrix.shape[0]):
            for index in range(rows.shape[0]):
                total = np.float32(0)
                for k in range(matrix.shape[1]):
                    total += read(matrix[rest, k]) * rows[index, k]
                out[index, rest] = total

    def all_slots(
        values: Any, starts: Any, inputs: Any, rows: Any, ends: Any, out: Any, first: Any,
        stop: Any,
    ) -> None:  # fmt: skip
        outputs = stop - first
        for index in range(len(starts)):
            begin, row, end = starts[index] + first * inputs, ends[index], ends[index + 1]
            matrix = values[begin : begin + outputs * inputs].reshape((outputs, inputs))
            own = rows[row * inputs : end * inputs].reshape((end - row, inputs))
            dots(matrix, own, out[row:end, first:stop])

    element, int64 = (numba.float32 if dtype == torch.float32 else numba.int16), numba.int64
    indices, results = int64[::1], numba.float32[:, :]
    signature = numba.void(
        element[::1], indices, int64, numba.float32[::1], indices, results, int64, int64
    )
    kernel: Kernel = numba.njit(signature, nogil=True)(all_slots)
    return kernel


def _identity(number: Any) -> Any:
    return number


def make_bf16_to_fp32() -> Any:
    """Return a numba intrinsic from bf16 bits to fp32: the same bits, followed by 16 zeros."""
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    @intrinsic
    def widen(context: Any, bits: Any) -> Any:
        del context, bits

        def build(_: Any, builder: Any, __: Any, given: Any) -> Any:
            word = ir.IntType(32)
            upper = builder.shl(builder.zext(given[0], word), ir.Constant(word, 16))
            return builder.bitcast(upper, ir.FloatType())

        return types.float32(types.int16), build

    return widen
