"""A few rows times a matrix each, at the speed at which memory gives the matrices.

One row of a token meets every number of a matrix once, so that reading is all there is to wait for.
torch's libraries take longer than that here: half of a thread's bandwidth goes unused in fp32, two
thirds in bf16, whose numbers they widen in other places than registers. These kernels are compiled
by numba when they are first asked for, which takes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.dist import threads

_LEAST = 1 << 19
"""Numbers of a matrix below which calls take longer than what they do, and most caches hold it."""
_MOST_ROWS = {torch.float32: 4, torch.bfloat16: 3}
"""With more rows the libraries' products are quicker, for they use numbers that they have read more
than once."""

Kernel = Callable[..., None]


def serves(rows: Tensor, matrices: Tensor, most: int) -> bool:
    """Whether this is the way to take `rows`, so many at most each, through `matrices`, [slots,
    outputs, inputs]."""
    kinds = {(one.dtype, one.device.type) for one in (rows, matrices)}
    outputs, inputs = matrices.shape[1:]
    return (
        kinds == {(rows.dtype, "cpu")}
        and 0 < most <= _MOST_ROWS.get(rows.dtype, 0)
        and outputs * inputs >= _LEAST
        and matrices.stride()[1:] == (inputs, 1)
    )


def multiply(rows: Tensor, matrices: Tensor, counts: Sequence[int], out: Tensor) -> None:
    """Rows of each slot @ its matrix.T into `out`; sums are of fp32. All threads of the caller take
    part, each with outputs of its own of all slots."""
    slots = np.flatnonzero(counts)
    ends = np.cumsum(np.append(0, np.asarray(counts)[slots]))
    wide = rows.detach().to(torch.float32).contiguous().view(-1).numpy()
    direct = out.dtype == torch.float32 and out.is_contiguous()
    into = out.detach() if direct else out.new_empty(out.shape, dtype=torch.float32)
    kernel, numbers, results = _kernel(matrices.dtype), _bits(matrices), into.numpy()
    starts, outputs, inputs = slots * matrices.stride(0), *matrices.shape[1:]
    crew = threads.crew()
    if crew is None:
        kernel(numbers, starts, inputs, wide, ends, results, 0, outputs)
    else:
        cuts = np.linspace(0, outputs, crew.size + 1).astype(int)

        def part(at: int) -> None:
            first, stop = cuts[at], cuts[at + 1]
            kernel(numbers, starts, inputs, wide, ends, results, first, stop)

        crew.with_caller(part)
    if not direct:
        out.copy_(into)


def _bits(matrices: Tensor) -> Any:
    """All numbers from the first of a slot to the last of another as numpy can have them: of bf16,
    which it does not know, the bits."""
    slots, outputs, inputs = matrices.shape
    size = (slots - 1) * matrices.stride(0) + outputs * inputs
    flat = matrices.detach().as_strided((size,), (1,))
    return (flat.view(torch.int16) if flat.dtype == torch.bfloat16 else flat).numpy()


@cache
def _kernel(dtype: torch.dtype) -> Kernel:
    """The kernel for matrices of `dtype`."""
    import numba  # Takes a second, once: where few rows meet a large matrix, and nowhere else.

    read = numba.njit(_itself) if dtype == torch.float32 else _widening()
    # Sums in any order, so that many of them go on side by side; what is no number stays none.
    free = {"reassoc", "contract", "nsz"}

    @numba.njit(nogil=True, fastmath=free)
    def dots(matrix: Any, rows: Any, out: Any) -> None:
        # Four outputs far apart: memory gives more to whoever reads in several places.
        apart = matrix.shape[0] // 4
        for first in range(apart):
            second, third, fourth = first + apart, first + 2 * apart, first + 3 * apart
            for place in range(rows.shape[0]):
                row = rows[place]
                a = b = c = d = np.float32(0)
                for k in range(matrix.shape[1]):
                    number = row[k]
                    a += read(matrix[first, k]) * number
                    b += read(matrix[second, k]) * number
                    c += read(matrix[third, k]) * number
                    d += read(matrix[fourth, k]) * number
                out[place, first], out[place, second] = a, b
                out[place, third], out[place, fourth] = c, d
        for left in range(4 * apart, matrix.shape[0]):
            for place in range(rows.shape[0]):
                total = np.float32(0)
                for k in range(matrix.shape[1]):
                    total += read(matrix[left, k]) * rows[place, k]
                out[place, left] = total

    def each(
        numbers: Any, starts: Any, inputs: Any, rows: Any, ends: Any, out: Any, first: Any,
        stop: Any,
    ) -> None:  # fmt: skip
        outputs = stop - first
        for place in range(len(starts)):
            begin, row, end = starts[place] + first * inputs, ends[place], ends[place + 1]
            matrix = numbers[begin : begin + outputs * inputs].reshape((outputs, inputs))
            own = rows[row * inputs : end * inputs].reshape((end - row, inputs))
            dots(matrix, own, out[row:end, first:stop])

    kind, whole = (numba.float32 if dtype == torch.float32 else numba.int16), numba.int64
    places, results = whole[::1], numba.float32[:, :]
    of = numba.void(kind[::1], places, whole, numba.float32[::1], places, results, whole, whole)
    kernel: Kernel = numba.njit(of, nogil=True)(each)
    return kernel


def _itself(number: Any) -> Any:
    return number


def _widening() -> Any:
    """What makes the number of its bits in bf16: those of the same number in fp32, but for the
    second half, which is zero."""
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
