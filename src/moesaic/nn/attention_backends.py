"""Attention backends: softmax(q k^T * scale) v over the keys that frozen metadata names.

No backend makes a mask of all queries by all keys, or copies keys and values for the query heads
that share them. Memory is linear in the sequence, forward and backward.

The private operations of torch's flash kernel on CPUs are called here alone (`CpuFlashKernel`).
They were tested with torch 2.13.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import groupby, pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from moesaic.facts.workload.sizes import ATTENTION_QUERY_BLOCK
from moesaic.kernels import cpu_attention
from moesaic.kernels import device as devices

VARLEN_CAPABILITY, MAX_VARLEN_WIDTH = (8, 0), 256
"""Lowest compute capability and widest head of torch's flash kernel for packed sequences."""


class Segment(NamedTuple):
    """Consecutive queries, and the keys that they attend to, in each of several rows.

    Attention is causal: the last query attends to the last key, the one before to all but the last
    key, and so on.
    """

    rows: range
    """Rows of the batch."""
    queries: range
    """Indices along the queries' sequence."""
    keys: range
    """Indices along the keys' sequence."""


@dataclass(frozen=True)
class AttentionMetadata:
    """Keys that each query of a micro-batch attends to.

    A query outside of all segments attends to nothing; its result is 0.
    """

    segments: tuple[Segment, ...]
    window: int | None = None
    """Number of keys that a query attends to at most, the last ones; None: no limit."""
    offsets: Tensor | None = field(default=None, compare=False)
    """Start of each document among the tokens of the batch, and the number of tokens, int32
    [documents + 1]; None unless segments are documents that cover all tokens."""

    @cached_property
    def blocks(self) -> tuple[QueryBlock, ...]:
        """Kernel calls, the same in every layer."""
        return tuple(_blocks(self))

    @cached_property
    def single_ranges(self) -> NDArray[np.int64]:
        """Bounds of the keys of the blocks before the first with several queries, [blocks, 2]."""
        singles = takewhile(lambda block: len(block.queries) == 1, self.blocks)
        bounds = [(block.keys.start, block.keys.stop) for block in singles]
        return np.array(bounds, np.int64).reshape(-1, 2)

    @cached_property
    def _masks(self) -> dict[QueryBlock, Tensor | None]:
        return {}

    def banded_blocks(self, size: int) -> Iterator[list[QueryBlock]]:
        """Yield the blocks of each segment, of at most `size` queries with their bands."""
        for rows, queries, keys in self.segments:
            window = min(self.window or len(keys), len(keys))
            if rows and queries:
                yield list(_banded_blocks(rows, queries, keys, window, size))

    def mask(self, block: QueryBlock, like: Tensor) -> Tensor | None:
        """Return the mask of a block, made once for all layers."""
        if block not in self._masks:
            self._masks[block] = block.mask(like)
        return self._masks[block]

    @classmethod
    def causal(
        cls, rows: int, queries: int, keys: int | None = None, window: int | None = None
    ) -> AttentionMetadata:
        """Return the metadata of `queries` new tokens per row; `keys` counts cached ones too."""
        keys = queries if keys is None else keys
        return cls((Segment(range(rows), range(queries), range(keys)),), window=window)

    @classmethod
    def packed(
        cls, documents: Tensor, window: int | None = None, device: torch.device | None = None
    ) -> AttentionMetadata:
        """Return the metadata of causal attention inside documents.

        Args:
            documents: document number of each token, [rows, sequence], on the host.
            window: keys that a query attends to at most.
            device: device of the computation; None: the host.
        """
        rows, length = documents.shape
        row_ids, starts = torch.nonzero(documents[:, 1:] != documents[:, :-1], as_tuple=True)
        inner: list[list[int]] = [[] for _ in range(rows)]
        for row, start in zip(row_ids.tolist(), starts.tolist(), strict=True):
            inner[row].append(start + 1)
        bounds = [[0, *one, length] for one in inner]
        segments = tuple(
            Segment(same_rows, range(start, stop), range(start, stop))
            for same_rows in _runs(bounds)
            for start, stop in pairwise(bounds[same_rows.start])
        )
        offsets = [row * length + start for row in range(rows) for start in bounds[row][:-1]]
        offsets.append(rows * length)
        return cls(
            segments,
            window=window,
            offsets=torch.tensor(offsets, dtype=torch.int32).to(device, non_blocking=True),
        )


def _runs(values: Sequence[Any]) -> Iterator[range]:
    """Yield the ranges of consecutive equal values."""
    for _, group in groupby(range(len(values)), key=values.__getitem__):
        indices = list(group)
        yield range(indices[0], indices[-1] + 1)


AttentionBackend = Callable[[Tensor, Tensor, Tensor, AttentionMetadata, float], Tensor]
"""Function of q, k, v, metadata and scale that returns softmax(q k^T * scale) v, [rows, heads,
queries, channels].

`k` and `v` are [rows, KV heads, keys, channels], as wide as `q`. Consecutive query heads share a KV
head.
"""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    metadata: AttentionMetadata | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return the result of the backend for this device and dtype; see `AttentionBackend`.

    `scale` defaults to 1 / sqrt(channels), `metadata` to causal attention.
    """
    if metadata is None:
        metadata = AttentionMetadata.causal(len(q), q.shape[2], k.shape[2])
    q, k = q.to(v.dtype), k.to(v.dtype)
    backend = choose_backend(q, k, metadata)
    return backend(q, k, v, metadata, q.shape[-1] ** -0.5 if scale is None else scale)


def choose_backend(q: Tensor, k: Tensor, metadata: AttentionMetadata) -> AttentionBackend:
    """Return the fastest backend that supports these tensors."""
    if len(q) == 1 and q.shape[2] != k.shape[2]:
        return attend_pool
    if metadata.offsets is not None and _supports_varlen(q):
        return attend_varlen
    return attend_blocks


def _supports_varlen(q: Tensor) -> bool:
    width = q.shape[-1]
    return (
        devices.compute_capability(q.device) >= VARLEN_CAPABILITY
        and q.dtype in (torch.bfloat16, torch.float16)
        and width <= MAX_VARLEN_WIDTH
        and width % 8 == 0
    )


def attend_pool(
    q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """Attend with the tokens of many requests in one row; their keys are ranges of a pool.

    Segments cover all queries, in order. Query heads that share a KV head are rows of one matrix
    where a segment has one query, so that its keys are read once.
    """
    kernel, kv_heads, blocks, results = _block_kernel(q), k.shape[1], metadata.blocks, []
    grouped = q[0].transpose(0, 1).unflatten(1, (kv_heads, -1))
    pool, ranges = (k[0].transpose(0, 1), v[0].transpose(0, 1)), metadata.single_ranges
    if len(ranges) and not torch.is_grad_enabled() and cpu_attention.is_supported(grouped, *pool):
        blocks, singles = blocks[len(ranges) :], grouped[: len(ranges)]
        results.append(cpu_attention.attend_ranges(singles, *pool, ranges, scale))
    for block in blocks:
        first, number = block.queries.start, len(block.queries)
        keys, values = (x.narrow(2, block.keys.start, len(block.keys)) for x in (k, v))
        if number == 1:
            one = grouped.narrow(0, first, 1)
            results.append(F.scaled_dot_product_attention(one, keys, values, scale=scale))
        else:
            part, mask = q.narrow(2, first, number), metadata.mask(block, q)
            several, _ = kernel.forward(part, keys, values, mask, scale, is_causal=block.is_causal)
            results.append(several[0].transpose(0, 1).unflatten(1, (kv_heads, -1)))
    return torch.cat(results).flatten(1, 2).transpose(0, 1)[None]


def attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """Attend inside documents with torch's flash kernel for packed sequences, on GPUs."""
    from torch.nn.attention.varlen import varlen_attn

    longest = max((len(segment.queries) for segment in metadata.segments), default=0)
    before = -1 if metadata.window is None else metadata.window - 1
    packed = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    kernel: Callable[..., Any] = varlen_attn  # Its arguments differ between versions of torch.
    result: Tensor = kernel(
        *packed, metadata.offsets, metadata.offsets, longest, longest,
        scale=scale, window_size=(before, 0), **_shared_heads_argument(),
    )  # fmt: skip
    rows: Tensor = result.unflatten(0, (q.shape[0], q.shape[2]))
    return rows.transpose(1, 2)


@cache
def _shared_heads_argument() -> dict[str, bool]:
    """Return the argument for shared KV heads; before torch 2.12 there is none, nor a check."""
    from torch.nn.attention.varlen import varlen_attn

    name = "enable_gqa"
    return {name: True} if name in inspect.signature(varlen_attn).parameters else {}


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata, scale: float
) -> Tensor:
    """Attend segment by segment, and by blocks of queries where a kernel needs a mask."""
    result: Tensor = _BlockAttention.apply(q, k, v, metadata.blocks, scale)
    return result


class QueryBlock(NamedTuple):
    """Part of a segment for one kernel call."""

    rows: range
    queries: range
    keys: range
    is_causal: bool = False
    """True if the kernel skips later keys; there are as many queries as keys."""
    band: tuple[int, int] | None = None
    """Keys that the first query attends to, as first and last index among `keys`; both move on by
    one with each query. None: every query attends to all keys, or as `is_causal` says."""

    def mask(self, like: Tensor, score: float = -torch.inf) -> Tensor | None:
        """Return the mask to add to the scores, [queries, keys]: `score` for keys that a query does
        not attend to."""
        if self.band is None:
            return None
        first, last = self.band
        sizes = (len(self.queries), len(self.keys))
        hidden = like.new_ones(sizes, dtype=torch.bool).tril_(last).triu_(first).logical_not_()
        return like.new_zeros(sizes).masked_fill_(hidden, score)


def _blocks(metadata: AttentionMetadata) -> Iterator[QueryBlock]:
    """Yield the kernel calls of `metadata`; each query is in at most one."""
    for rows, queries, keys in metadata.segments:
        if not (rows and queries):
            continue
        window = min(metadata.window or len(keys), len(keys))
        if len(queries) == 1:
            yield QueryBlock(rows, queries, keys[-window:])
        elif len(queries) == len(keys) == window:
            yield QueryBlock(rows, queries, keys, is_causal=True)
        else:
            yield from _banded_blocks(rows, queries, keys, window, ATTENTION_QUERY_BLOCK)


def _banded_blocks(
    rows: range, queries: range, keys: range, window: int, size: int
) -> Iterator[QueryBlock]:
    shift = keys.stop - queries.stop
    for start in range(queries.start, queries.stop, size):
        stop = min(start + size, queries.stop)
        last = start + shift
        seen = range(max(keys.start, last + 1 - window), stop + shift)
        band = (last + 1 - window - seen.start, last - seen.start)
        yield QueryBlock(rows, range(start, stop), seen, band=band)


class CpuFlashKernel:
    """Attention over a dense block by torch's flash kernel on CPUs, in any float dtype."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the result, and the logarithm of the softmax's denominator."""
        out, denominators = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        return out, denominators

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, denominators: Tensor,
        block: QueryBlock, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients of q, k and v."""
        grads: tuple[Tensor, Tensor, Tensor]
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, denominators, 0.0, block.is_causal,
            attn_mask=block.mask(q), scale=scale,
        )  # fmt: skip
        return grads


class RecomputingKernel:
    """Attention over a dense block by the kernel that torch chooses on any device; backward runs
    its forward again."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the result, and nothing in place of the denominators."""
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=True
        )
        return out, out.new_zeros(()).expand(out.shape[:3])

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, denominators: Tensor,
        block: QueryBlock, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients of q, k and v."""
        del out, denominators
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            again, _ = RecomputingKernel.forward(
                q, k, v, block.mask(q), scale, is_causal=block.is_causal
            )
        grad_q, grad_k, grad_v = torch.autograd.grad(again, (q, k, v), grad)
        return grad_q, grad_k, grad_v


def _block_kernel(x: Tensor) -> type[CpuFlashKernel | RecomputingKernel]:
    return CpuFlashKernel if devices.kind(x.device) == "cpu" else RecomputingKernel


class _BlockAttention(torch.autograd.Function):
    """Attention by blocks, in one autograd node: slices of a tensor would each have a gradient as
    large as the tensor."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: tuple[QueryBlock, ...], scale: float
    ) -> Tensor:
        """Return the result in token order in memory, as [rows, heads, queries, channels]."""
        kernel = _block_kernel(q)
        if _is_whole(blocks, q, k):
            out, denominators = kernel.forward(
                q, k, v, blocks[0].mask(q), scale, is_causal=blocks[0].is_causal
            )
        else:
            out = torch.zeros_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
            out = out.transpose(1, 2)
            denominators = out.new_zeros(out.shape[0], out.shape[2], out.shape[1], dtype=_wide(q))
            denominators = denominators.transpose(1, 2)
            for block in blocks:
                part = _cut(q, block.rows, block.queries)
                part_k, part_v = (_cut(x, block.rows, block.keys) for x in (k, v))
                results = kernel.forward(
                    part, part_k, part_v, block.mask(part), scale, is_causal=block.is_causal
                )
                for whole, result in zip((out, denominators), results, strict=True):
                    _cut(whole, block.rows, block.queries).copy_(result)
        ctx.save_for_backward(q, k, v, out, denominators)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v, in token order in memory."""
        (grad,), (q, k, v, out, denominators) = grads, ctx.saved_tensors
        kernel, blocks = _block_kernel(q), ctx.blocks
        if _is_whole(blocks, q, k):
            own = kernel.backward(grad, q, k, v, out, denominators, blocks[0], ctx.scale)
            return (*own, None, None)
        # Blocks overlap in keys, so their gradients add up, in a wide type.
        grad_q, grad_k, grad_v = (
            torch.zeros_like(
                x.transpose(1, 2), dtype=dtype, memory_format=torch.contiguous_format
            ).transpose(1, 2)
            for x, dtype in ((q, q.dtype), (k, _wide(k)), (v, _wide(v)))
        )
        for block in blocks:
            part_grad, part_q, part_out, part_denominators = (
                _cut(x, block.rows, block.queries) for x in (grad, q, out, denominators)
            )
            part_k, part_v = (_cut(x, block.rows, block.keys) for x in (k, v))
            parts = kernel.backward(
                part_grad, part_q, part_k, part_v, part_out, part_denominators, block, ctx.scale
            )
            _cut(grad_q, block.rows, block.queries).copy_(parts[0])
            _cut(grad_k, block.rows, block.keys).add_(parts[1])
            _cut(grad_v, block.rows, block.keys).add_(parts[2])
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


def _is_whole(blocks: Sequence[QueryBlock], q: Tensor, k: Tensor) -> bool:
    """Return whether there is one block, with all rows, queries and keys."""
    sizes = (len(q), q.shape[2], k.shape[2])
    return len(blocks) == 1 and tuple(map(len, blocks[0][:3])) == sizes and len(q) > 0


def _cut(x: Tensor, rows: range, indices: range | None = None) -> Tensor:
    """Return a view of some rows, and of some indices along the third dimension."""
    part = x[rows.start : rows.stop]
    return part if indices is None else part[:, :, indices.start : indices.stop]


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype in which kernels add up."""
    return torch.promote_types(x.dtype, torch.float32)
