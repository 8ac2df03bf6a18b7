"""A few rows times a matrix, at the speed at which memory gives the matrix.

One row of a token meets every number of a matrix once, so that reading is all there is to wait for.
torch's libraries take longer than that here: half of a thread's bandwidth goes unused in fp32, two
thirds in bf16, whose numbers they widen in other places than registers. These kernels are compiled
by numba when they are first asked for, which takes a second.
"""

from __future__ import annotations

from collections.abc import Callable
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

Kernel = Callable[[Any, Any, Any], None]


def serves(rows: Tensor, matrix: Tensor) -> bool:
    """Whether this is the way to take `rows` through `matrix`, [outputs, inputs]."""
    kinds = {(one.dtype, one.device.type) for one in (rows, matrix)}
    return (
        kinds == {(rows.dtype, "cpu")}
        and 0 < len(rows) <= _MOST_ROWS.get(rows.dtype, 0)
        and matrix.numel() >= _LEAST
        and matrix.is_contiguous()
    )


def multiply(rows: Tensor, matrix: Tensor, out: Tensor) -> None:
    """Rows @ matrix.T into `out`; sums are of fp32. All threads of the caller take part."""
    wide = rows.detach().to(torch.float32).contiguous().numpy()
    direct = out.dtype == torch.float32 and out.is_contiguous()
    into = out.detach() if direct else out.new_empty(out.shape, dtype=torch.float32)
    kernel, numbers, results = _kernel(matrix.dtype), _bits(matrix), into.numpy()
    crew = threads.crew()
    if crew is None:
        kernel(numbers, wide, results)
    else:
        cuts = np.linspace(0, len(numbers), crew.size + 1).astype(int)

        def part(at: int) -> None:
            own = slice(cuts[at], cuts[at + 1])
            kernel(numbers[own], wide, results[:, own])

        crew.each(part, range(crew.size))
    if not direct:
        out.copy_(into)


def _bits(matrix: Tensor) -> Any:
    """The numbers of a matrix as numpy can have them: of bf16, which it does not know, the bits."""
    matrix = matrix.detach()
    return (matrix.view(torch.int16) if matrix.dtype == torch.bfloat16 else matrix).numpy()


@cache
def _kernel(dtype: torch.dtype) -> Kernel:
    """The kernel for matrices of `dtype`."""
    import numba  # Takes a second, once: where few rows meet a large matrix, and nowhere else.

    read = numba.njit(_itself) if dtype == torch.float32 else _widening()

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

    # Sums in any order, so that many of them go on side by side; what is no number stays none.
    numbers = numba.float32 if dtype == torch.float32 else numba.int16
    of = numba.void(numbers[:, ::1], numba.float32[:, ::1], numba.float32[:, :])
    kernel: Kernel = numba.njit(of, nogil=True, fastmath={"reassoc", "contract", "nsz"})(dots)
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
