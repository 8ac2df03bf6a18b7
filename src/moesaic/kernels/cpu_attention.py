"""Attention of single queries over cached bf16 keys on a CPU, at memory bandwidth.

With few queries per KV head, reading the cache is the bottleneck. torch's kernel takes ten times as
long in bf16 as in fp32, because it multiplies single rows by a general matmul. numba compiles this
kernel on first use, which takes a second.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.kernels import threads
from moesaic.kernels.cpu_gemv import make_bf16_to_fp32

_MAX_QUERIES = 8
"""Queries per KV head up to which this kernel beats torch's."""

Kernel = Callable[..., None]


def is_supported(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return whether `attend_ranges` is the fastest for `queries`, [requests, KV heads, queries,
    channels], and the `keys` and `values` of a pool, [positions, KV heads, channels]."""
    return (
        {(x.dtype, x.device.type) for x in (queries, keys, values)} == {(torch.bfloat16, "cpu")}
        and queries.shape[2] <= _MAX_QUERIES
        and keys.is_contiguous()
        and values.is_contiguous()
    )


def prepare(dtype: torch.dtype, device: torch.device) -> None:
    """Compile the kernel, if it is ever used for a pool of this dtype on this device."""
    if dtype == torch.bfloat16 and device.type == "cpu":
        _compile_kernel()


def attend_ranges(
    queries: Tensor, keys: Tensor, values: Tensor, ranges: NDArray[np.int64], scale: float
) -> Tensor:
    """Return softmax(q k^T * scale) v of each request over its positions, accumulated in fp32.

    All threads take part, each with a range of the KV heads of all requests.

    Args:
        queries: [requests, KV heads, queries, channels].
        keys: keys of the pool, [positions, KV heads, channels].
        values: values of the pool, in the shape of `keys`.
        ranges: first and last position of each request, the last one excluded, [requests, 2].
        scale: factor on the scores.
    """
    rows = queries.detach().to(torch.float32).contiguous()
    out = torch.zeros_like(rows)
    kernel, num_heads = _compile_kernel(), keys.shape[1]
    pool = (x.detach().view(torch.int16).numpy() for x in (keys, values))
    arguments = (rows.numpy(), *pool, ranges, np.float32(scale), out.numpy())
    workers = threads.thread_pool()
    if workers is None:
        kernel(*arguments, 0, num_heads)
    else:
        heads = np.linspace(0, num_heads, workers.size + 1).astype(int)
        workers.run_with_caller(lambda i: kernel(*arguments, heads[i], heads[i + 1]))
    return out.to(queries.dtype)


@cache
def _compile_kernel() -> Kernel:
    import numba  # Importing takes a second, so only callers that need it pay.

    # Allow reordered sums, so that they vectorize; NaN and infinity still propagate.
    compiled: Any = numba.njit(nogil=True, fastmath={"reassoc", "contract", "nsz"})
    read = make_bf16_to_fp32()
    score, normalise, add_values = (
        compiled(function) for function in (_make_score(read), _softmax, _make_add_values(read))
    )

    def all_requests(
        queries: Any, keys: Any, values: Any, ranges: Any, scale: Any, out: Any, first: Any,
        stop: Any,
    ) -> None:  # fmt: skip
        for index in range(len(ranges)):
            begin, end = ranges[index]
            weights = np.empty((end - begin, stop - first, queries.shape[2]), np.float32)
            # Slices of heads would not be contiguous, and the loops would not vectorize.
            score(queries[index], keys[begin:end], first, scale, weights)
            normalise(weights)
            add_values(weights, values[begin:end], first, out[index])

    rows, pool, int64 = numba.float32[:, :, :, ::1], numba.int16[:, :, ::1], numba.int64
    ranges = numba.int64[:, ::1]
    signature = numba.void(rows, pool, pool, ranges, numba.float32, rows, int64, int64)
    kernel: Kernel = numba.njit(signature, nogil=True)(all_requests)
    return kernel


def _make_score(read: Any) -> Kernel:
    def score(queries: Any, keys: Any, first: Any, scale: Any, scores: Any) -> None:
        for position in range(scores.shape[0]):
            for head in range(scores.shape[1]):
                key = keys[position, first + head]
                for row in range(scores.shape[2]):
                    query, total = queries[first + head, row], np.float32(0)
                    for channel in range(query.shape[0]):
                        total += read(key[channel]) * query[channel]
                    scores[position, head, row] = total * scale

    return score


def _softmax(scores: Any) -> None:
    """Normalise over positions, in place."""
    for head in range(scores.shape[1]):
        for row in range(scores.shape[2]):
            column = scores[:, head, row]
            highest, total = column.max(), np.float32(0)
            for position in range(column.shape[0]):
                column[position] = np.exp(column[position] - highest)
                total += column[position]
            for position in range(column.shape[0]):
                column[position] /= total


def _make_add_values(read: Any) -> Kernel:
    def add_values(weights: Any, values: Any, first: Any, out: Any) -> None:
        for position in range(weights.shape[0]):
            for head in range(weights.shape[1]):
                value = values[position, first + head]
                for row in range(weights.shape[2]):
                    weight, result = weights[position, head, row], out[first + head, row]
                    for channel in range(value.shape[0]):
                        result[channel] += weight * read(value[channel])

    return add_values
