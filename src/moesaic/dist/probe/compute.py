"""Speed of a device: matmuls, grouped matmuls, attention, copies, elementwise kernels, kernel
launch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import isqrt
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.adamw import adamw

from moesaic.dist.probe.reference import Reference
from moesaic.dist.probe.timing import Figures, geometric_sizes, time_call
from moesaic.kernels import device as devices
from moesaic.kernels import threads
from moesaic.kernels.grouped_mm import choose_backend, grouped_mm, grouped_wgrad, matmul
from moesaic.kernels.norms import sum_of_squares

_TYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16,
    "fp16": torch.float16,
}  # fmt: skip
_SMALLEST_COPY_BYTES = 4096
_ADAMW_TENSORS = 4
"""Ratio of the largest copy to the largest AdamW tensor, because an update touches four tensors."""
_MAX_TENSORS = 64
_MAX_WEIGHTS = 1024
CHAIN_LENGTH = 16
FUNCTION_ELEMENTS = 1 << 18
MATMULS_PER_LAYER = 3
"""Matmuls that are timed together: forward, input gradient, weight gradient."""
ATTENTION_KINDS = ("forward", "backward", "masked_forward", "masked_backward")
HEADS, HEAD_DIM = 8, 64
"""Shape of the measured attention, if no job says another."""
_LENGTHS = (64, 1024)
"""Shortest and longest measured sequence, in tokens."""

_REFERENCE_EVERY = 8
"""Measurements between two of the reference work."""
_MIN_GROUPS = 8
_MAX_GROUP_FACTOR = 8
"""Maximum factor by which groups of small matmuls are larger."""
_SMALLEST_SIDE = 64
_MATMUL_COST = 7
"""Cost of all matmuls in units of the largest: their sum is about 2.3, and each is run three times.
"""
_GROUPED_MATMUL_COST, _NUM_ROW_COUNTS = 9, 4
"""Cost of all grouped matmuls with equally many rows, in units of the one with the largest
matrices: their sum is about 3, and each is run three times."""


@dataclass(frozen=True)
class Axes:
    """Sizes of matmuls and attention, each ascending."""

    rows: list[int]
    """Rows of matmuls."""
    columns: list[int]
    """Columns and inner sizes of all matmuls."""
    grouped_rows: list[int]
    """Rows of each group of grouped matmuls."""
    lengths: list[int]
    """Sequence lengths for attention."""
    head_dim: int = HEAD_DIM
    """Width of an attention head."""

    @classmethod
    def up_to(cls, side: int) -> Axes:
        """Return a grid of sizes up to `side`."""
        rows, (shortest, longest) = sorted({1, *geometric_sizes(side // 64, side, 4)}), _LENGTHS
        # Groups have fewer rows than the largest matmul.
        lengths = geometric_sizes(shortest, max(shortest, min(longest, side)), 4)
        return cls(rows, geometric_sizes(side // 16, side, 4), rows[:-1], lengths)

    def within(self, grid: Axes) -> Axes:
        """Return these axes, cut so that all matmuls together have no more flops than `grid`."""
        limit = max(self.rows[-1], self.columns[-1], self.grouped_rows[-1])
        found = self._cut(limit)
        while found._volume() > grid._volume() and limit > grid.columns[-1]:
            limit = max(limit // 2, grid.columns[-1])
            found = self._cut(limit)
        return found

    def _cut(self, limit: int) -> Axes:
        rows, columns, grouped_rows, lengths = (
            sorted({min(one, limit) for one in axis})
            for axis in (self.rows, self.columns, self.grouped_rows, self.lengths)
        )
        return Axes(rows, columns, grouped_rows, lengths, self.head_dim)

    def _volume(self) -> int:
        """Return about the multiplications of all matmuls."""
        return (sum(self.rows) + _MIN_GROUPS * sum(self.grouped_rows)) * sum(self.columns) ** 2


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements, the same on every rank."""

    matrix_sides: dict[str, int]
    """Side of the largest matrices, by dtype."""
    copy_bytes: list[int]
    """Bytes of the measured copies, ascending."""
    min_groups: int
    """Groups of the largest grouped matmul, enough to keep the whole device busy."""
    job: Axes | None = None
    """Sizes that a job has, to measure as far as time permits; None: a grid of sizes."""

    @classmethod
    def from_plain(cls, fields: dict[str, Any]) -> Sizes:
        """Return the sizes of a plain dictionary."""
        job = fields["job"]
        return cls(**{**fields, "job": None if job is None else Axes(**job)})

    @property
    def elementwise_bytes(self) -> list[int]:
        """Bytes of the tensors for elementwise kernels, ascending."""
        return [size for size in self.copy_bytes if size * _ADAMW_TENSORS <= self.copy_bytes[-1]]

    def axes(self, dtype: str) -> Axes:
        """Return the sizes of matmuls and attention."""
        grid = Axes.up_to(self.matrix_sides[dtype])
        return grid if self.job is None else self.job.within(grid)

    def matmul_shapes(self, dtype: str) -> list[tuple[int, int, int]]:
        """Return rows, columns and inner size of every matmul; the inner size varies fastest."""
        axes = self.axes(dtype)
        return list(itertools.product(axes.rows, axes.columns, axes.columns))

    def num_groups(self, dtype: str, columns: int, inner: int) -> int:
        """Return the number of groups for weights of this size. Small experts come in larger
        numbers, which amortizes the launch."""
        largest = self.axes(dtype).columns[-1]
        return self.min_groups * min(_MAX_GROUP_FACTOR, largest // isqrt(columns * inner))

    def grouped_matmul_shapes(self, dtype: str) -> list[tuple[int, int, int]]:
        """Return rows per group, columns and inner size of every grouped matmul; the inner size
        varies fastest."""
        axes = self.axes(dtype)
        return list(itertools.product(axes.grouped_rows, axes.columns, axes.columns))


def choose_sizes(
    device: torch.device, dtypes: Sequence[str] | None, largest: int | None,
    copy_bytes: int | None, budget_s: float, threads_per_rank: int,
) -> Sizes:  # fmt: skip
    """Return sizes for which all matmuls together take at most about `budget_s`, on ranks with
    `threads_per_rank` threads."""
    types = dtypes or devices.matmul_dtypes(device)
    max_side = largest or devices.max_matmul_size(device)
    min_groups = num_groups_for(threads_per_rank)
    sides = {
        dtype: _largest_side(device, dtype, max_side, budget_s / len(types), min_groups)
        for dtype in types
    }
    copies = geometric_sizes(
        _SMALLEST_COPY_BYTES, copy_bytes or devices.uncached_copy_bytes(device), 4
    )
    return Sizes(sides, copies, min_groups)


def num_groups_for(threads_per_rank: int) -> int:
    """Return a number of groups that keeps `threads_per_rank` threads busy."""
    return max(_MIN_GROUPS, 4 * threads_per_rank)


def _largest_side(
    device: torch.device, dtype: str, max_side: int, budget_s: float, min_groups: int
) -> int:
    """Return the largest side within the time budget; some dtypes are very slow on some devices."""
    side = _SMALLEST_SIDE
    with _precision(dtype):
        while 2 * side <= max_side:
            shape = (min_groups * side * side,)
            arena = torch.full(shape, 0.5, dtype=_TYPES[dtype], device=device)
            if 8 * _all_matmuls_s(arena, min_groups, side) > budget_s:
                break
            side *= 2
    return side


def _all_matmuls_s(arena: Tensor, min_groups: int, side: int) -> float:
    """Return about the seconds of all single and grouped matmuls up to matrices of `side`."""
    most_s, least_s, single_s = (
        time_call(call, lambda: devices.synchronized_time_s(arena.device), 0.0)
        for call in (
            _grouped_matmul(arena, min_groups, side // 4, side, side),
            _grouped_matmul(arena, min_groups, 1, side, side),
            _matmul(arena[: side * side], side, side, side),
        )
    )
    # With few rows, reading the weights takes as long for any number of rows.
    grouped_s = 4 / 3 * most_s + (_NUM_ROW_COUNTS - 1) * least_s
    return _MATMUL_COST * single_s + _GROUPED_MATMUL_COST * grouped_s


def measure(
    device: torch.device, sizes: Sizes, budget_s: float, barrier: Callable[[], None]
) -> Figures:
    """Return the seconds of every benchmark; `barrier` runs before each measurement."""
    benchmarks = list(_benchmarks(device, sizes))
    share_s = budget_s / sum(count for _, count, _ in benchmarks)
    figures: Figures = {}
    reference, reference_s, num_calls = Reference(device), list[float](), itertools.count()
    for name, _, calls in benchmarks:
        figures[name] = []
        for call in calls:
            if next(num_calls) % _REFERENCE_EVERY == 0:
                barrier()
                reference_s.append(reference.time_s())
            barrier()
            figures[name].append(
                time_call(call, lambda: devices.synchronized_time_s(device), share_s)
            )
    return figures | {"reference": [fmean(reference_s)]}


_Call = Callable[[], object]


def _benchmarks(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, int, Iterator[_Call]]]:
    """Yield name, number of calls, and lazily prepared calls of each benchmark."""
    yield "calls", 1, iter([_small_op_chain(device)])
    yield "functions", 2, iter(_special_functions(device))
    yield "copies", len(sizes.copy_bytes), map(partial(_copy, device, sizes), sizes.copy_bytes)
    for kind, make in ELEMENTWISE_KINDS.items():
        make_call = partial(make, device, sizes)
        yield (
            f"elementwise {kind}",
            len(sizes.elementwise_bytes),
            map(make_call, sizes.elementwise_bytes),
        )
    for dtype in sizes.matrix_sides:
        axes = sizes.axes(dtype)
        for kind in ATTENTION_KINDS:
            calls = _attention(device, dtype, kind, axes)
            yield f"attention {kind} {dtype}", len(axes.lengths), calls
        shapes = sizes.matmul_shapes(dtype)
        yield f"matmul {dtype}", len(shapes), _matmuls(device, dtype, sizes, shapes)
        shapes = sizes.grouped_matmul_shapes(dtype)
        yield f"grouped matmul {dtype}", len(shapes), _grouped_matmuls(device, dtype, sizes, shapes)


def _small_op_chain(device: torch.device) -> _Call:
    """Return a chain of `CHAIN_LENGTH` one-element multiplications and their backward, for the
    launch time."""
    start = torch.ones(1, device=device, requires_grad=True)
    factor = torch.ones(1, device=device)

    def chain() -> None:
        result = start
        for _ in range(CHAIN_LENGTH):
            result = result * factor
        torch.autograd.grad(result, start)

    return chain


def _special_functions(device: torch.device) -> list[_Call]:
    """Return exponentials of `FUNCTION_ELEMENTS` elements, and a multiplication of as many."""
    values = torch.zeros(FUNCTION_ELEMENTS, device=device)
    result = torch.empty_like(values)
    return [
        lambda: torch.exp(values, out=result),
        lambda: torch.mul(values, 1.0, out=result),
    ]


def _tensor_pool(device: torch.device, sizes: Sizes, num_bytes: int) -> list[Tensor]:
    """Return tensors of `num_bytes` that together exceed the caches, up to `_MAX_TENSORS`."""
    count = max(2, min(_MAX_TENSORS, sizes.copy_bytes[-1] // num_bytes))
    return [torch.ones(num_bytes // 4, device=device) for _ in range(count)]


def _copy(device: torch.device, sizes: Sizes, num_bytes: int) -> _Call:
    """Return a copy from one tensor of the pool to the next; each reads what the previous one
    wrote."""
    pool = _tensor_pool(device, sizes, num_bytes)
    pairs = itertools.cycle([*itertools.pairwise(pool), (pool[-1], pool[0])])

    def copy() -> None:
        source, target = next(pairs)
        target.copy_(source)

    return copy


def _norm(device: torch.device, sizes: Sizes, num_bytes: int) -> _Call:
    pool = itertools.cycle([[tensor] for tensor in _tensor_pool(device, sizes, num_bytes)])
    return lambda: sum_of_squares(next(pool))


def _scale(device: torch.device, sizes: Sizes, num_bytes: int) -> _Call:
    pool = itertools.cycle(_tensor_pool(device, sizes, num_bytes))
    return lambda: next(pool).mul_(1.0)


def _adamw(device: torch.device, sizes: Sizes, num_bytes: int) -> _Call:
    """Return a fused AdamW update of tensors in the pool."""
    pool = _tensor_pool(device, sizes, num_bytes)
    states = [
        ([value], [torch.ones_like(value)], [torch.zeros_like(value)], [torch.zeros_like(value)])
        for value in pool[: max(2, len(pool) // 4)]
    ]
    next_states, step = itertools.cycle(states), torch.ones((), device=device)

    def update() -> None:
        adamw(
            *next(next_states), [], [step], fused=True, amsgrad=False, maximize=False, beta1=0.9,
            beta2=0.99, eps=1e-8, lr=1e-6, weight_decay=0.0,
        )  # fmt: skip

    return update


ELEMENTWISE_KINDS: dict[str, Callable[[torch.device, Sizes, int], _Call]] = {
    "norm": _norm, "scale": _scale, "adamw": _adamw,
}  # fmt: skip
"""Elementwise kernels with their own times, by kind in cluster.toml."""


def _attention(device: torch.device, dtype: str, kind: str, axes: Axes) -> Iterator[_Call]:
    """Yield attention of `HEADS` heads, causal or masked; forward, or backward alone."""
    with _precision(dtype):
        for length in axes.lengths:
            shape = (1, HEADS, length, axes.head_dim)
            q, k, v = (
                torch.full(shape, 0.5, dtype=_TYPES[dtype], device=device, requires_grad=True)
                for _ in range(3)
            )
            mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
            mask_args = {"attn_mask": mask} if "masked" in kind else {"is_causal": True}
            forward = partial(F.scaled_dot_product_attention, q, k, v, **mask_args)
            output = forward()
            grad_args = (output, (q, k, v), torch.ones_like(output))
            backward = partial(torch.autograd.grad, *grad_args, retain_graph=True)
            yield forward if kind.endswith("forward") else backward


def _matmuls(
    device: torch.device, dtype: str, sizes: Sizes, shapes: Sequence[tuple[int, int, int]]
) -> Iterator[_Call]:
    with _precision(dtype):
        largest = sizes.axes(dtype).columns[-1] ** 2
        weights = max(largest, sizes.copy_bytes[-1] // 2 // _TYPES[dtype].itemsize)
        arena = torch.full((weights,), 0.5, dtype=_TYPES[dtype], device=device)
        for rows, columns, inner in shapes:
            yield _matmul(arena, rows, columns, inner)


def _matmul(arena: Tensor, rows: int, columns: int, inner: int) -> _Call:
    """Return the three matmuls of a layer: forward, input gradient and weight gradient.

    Weights and their gradients cycle through `arena`, because those of a model are in no cache when
    it needs them.
    """
    weights = itertools.cycle(_split_arena(arena, inner, columns))
    gradients = itertools.cycle(_split_arena(arena, rows, columns))
    left, right = arena.new_full((rows, inner), 0.5), arena.new_full((inner, columns), 0.5)
    left_t = arena.new_full((inner, rows), 1 / inner)

    def multiply() -> None:
        matmul(left, next(weights).view(columns, inner), transposed=True)
        matmul(left, next(weights), transposed=False)
        torch.mm(left_t.T, right, out=next(gradients))

    return multiply


def _grouped_matmuls(
    device: torch.device, dtype: str, sizes: Sizes, shapes: Sequence[tuple[int, int, int]]
) -> Iterator[_Call]:
    with _precision(dtype):
        largest = sizes.min_groups * sizes.axes(dtype).columns[-1] ** 2
        weights = max(largest, sizes.copy_bytes[-1] // 2 // _TYPES[dtype].itemsize)
        arena = torch.full((weights,), 0.5, dtype=_TYPES[dtype], device=device)
        for rows, columns, inner in shapes:
            slots = sizes.num_groups(dtype, columns, inner)
            yield _grouped_matmul(arena, slots, rows, columns, inner)


def _grouped_matmul(arena: Tensor, num_groups: int, rows: int, columns: int, inner: int) -> _Call:
    """Return the three grouped matmuls of `num_groups` experts; on a CPU each thread takes some of
    the experts."""
    weights = itertools.cycle(_split_arena(arena, num_groups, inner * columns))
    counts = torch.full((num_groups,), rows)
    left = arena.new_full((num_groups * rows, inner), 1 / inner)
    right = arena.new_full((num_groups * rows, columns), 0.5)
    backend, pool = choose_backend("auto", arena.device, arena.dtype), None
    if arena.device.type == "cpu":
        pool = threads.thread_pool()
    step = num_groups if pool is None else max(1, num_groups // (2 * pool.size))

    def multiply() -> None:
        up, down, gradient = (next(weights) for _ in range(MATMULS_PER_LAYER))

        def multiply_slots(first: int) -> None:
            slots = slice(first, first + step)
            row_range = slice(first * rows, (first + step) * rows)
            own, own_counts = left[row_range], counts[slots]
            out = gradient.view(num_groups, inner, columns)[slots]
            grouped_mm(
                own, up.view(num_groups, columns, inner)[slots], own_counts, True, backend=backend
            )
            grouped_mm(
                own,
                down.view(num_groups, inner, columns)[slots],
                own_counts,
                False,
                backend=backend,
            )
            grouped_wgrad(own, right[row_range], own_counts, out, backend=backend)

        if pool is None:
            multiply_slots(0)
        else:
            pool.run_each(multiply_slots, range(0, num_groups, step))

    return multiply


def _split_arena(arena: Tensor, rows: int, columns: int) -> list[Tensor]:
    """Return consecutive matrices in `arena`."""
    size = rows * columns
    count = max(1, min(_MAX_WEIGHTS, arena.numel() // size))
    return [arena[i * size : (i + 1) * size].view(rows, columns) for i in range(count)]


@contextmanager
def _precision(dtype: str) -> Iterator[None]:
    """Allow TF32 for fp32 matmuls if `dtype` is "tf32", else forbid it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
