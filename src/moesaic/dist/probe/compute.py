"""How fast a device multiplies, reads and writes, and how long the least operation takes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.adamw import adamw

from moesaic.dist import device as devices
from moesaic.dist import threads
from moesaic.dist.probe.timing import Figures, powers, seconds
from moesaic.dist.products import choose, grouped_mm, grouped_outer, product
from moesaic.dist.squares import sum_of_squares

_TYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16,
    "fp16": torch.float16,
}  # fmt: skip
_SMALLEST_COPY_BYTES = 4096
_LARGEST_PASS = 4
"""By what the largest tensor of an update is smaller than the largest copy: there are four."""
_MOST_TENSORS = 64
_MOST_WEIGHTS = 1024
CHAIN = 16
FUNCTION_ELEMENTS = 1 << 18
WAYS = 3
"""Products that are timed together."""
ATTENTIONS = ("forward", "backward", "masked_forward", "masked_backward")
HEADS, HEAD_DIM = 8, 64
"""Of the attention that is measured."""
_LENGTHS = (64, 1024)
"""Least and most tokens of it."""

_LEAST_SLOTS = 8
_MORE_SLOTS = 8
"""As many times more of the smallest products are done together."""
_SMALLEST_SIDE = 64
_CUBES = 7
"""All products take about 2.3 times the largest one, and each is done three times."""
_CUBES_OF_SLOTS = 24
"""Likewise those of the least slots: more come with more threads, which are as much faster."""


@dataclass(frozen=True)
class Sizes:
    """What is multiplied and copied; the same on every rank."""

    sides: dict[str, int]
    """Side of the largest matrices, by type of number."""
    copies: list[int]
    """Bytes that are copied."""
    slots: int
    """Of the largest products that are done together: enough that no part of the device is idle."""

    @property
    def passed(self) -> list[int]:
        """Bytes of the tensors that other kernels pass over."""
        return [size for size in self.copies if size * _LARGEST_PASS <= self.copies[-1]]

    def rows(self, dtype: str) -> list[int]:
        """Rows of the products, rising."""
        side = self.sides[dtype]
        return sorted({1, *powers(side // 64, side, 4)})

    def columns(self, dtype: str) -> list[int]:
        """Columns of the products, and sizes of their inner dimension, rising."""
        side = self.sides[dtype]
        return powers(side // 16, side, 4)

    def lengths(self, dtype: str) -> list[int]:
        """Tokens of the sequences that are attended to, rising."""
        least, most = _LENGTHS
        return powers(least, max(least, min(most, self.sides[dtype])), 4)

    def products(self, dtype: str) -> list[tuple[int, int, int]]:
        """Rows, columns and inner size of every product, the inner size counting fastest."""
        columns = self.columns(dtype)
        return list(itertools.product(self.rows(dtype), columns, columns))

    def rows_of_slots(self, dtype: str) -> list[int]:
        """Rows of each of the products that are done together: experts do not have the most."""
        return self.rows(dtype)[:-1]

    def slots_of(self, dtype: str, columns: int, inner: int) -> int:
        """Products of such weights that are done together: small ones are of models that have many
        experts, among which what it takes to begin is shared out."""
        return self.slots * min(_MORE_SLOTS, self.columns(dtype)[-1] // isqrt(columns * inner))

    def products_of_slots(self, dtype: str) -> list[tuple[int, int, int]]:
        """The same of each of those."""
        columns = self.columns(dtype)
        return list(itertools.product(self.rows_of_slots(dtype), columns, columns))


def suitable(
    device: torch.device, dtypes: Sequence[str] | None, largest: int | None,
    copy_bytes: int | None, budget_s: float, threads_each: int,
) -> Sizes:  # fmt: skip
    """Sizes whose products, as many as there are, take about `budget_s` at most, of ranks that have
    so many threads each."""
    types = dtypes or devices.number_types(device)
    most = largest or devices.largest_product(device)
    sides = {dtype: _largest_side(device, dtype, most, budget_s / len(types)) for dtype in types}
    copies = powers(_SMALLEST_COPY_BYTES, copy_bytes or devices.largest_copy(device), 4)
    return Sizes(sides, copies, slots_for(threads_each))


def slots_for(threads_each: int) -> int:
    """Products that are done together: enough for a rank that has so many threads."""
    return max(_LEAST_SLOTS, 4 * threads_each)


def _largest_side(device: torch.device, dtype: str, most: int, budget_s: float) -> int:
    """The largest side that there is time for: some types crawl on devices not made for them."""
    side, cubes = _SMALLEST_SIDE, _CUBES + _CUBES_OF_SLOTS
    with _precision(dtype):
        while 2 * side <= most:
            weight = torch.full((side * side,), 0.5, dtype=_TYPES[dtype], device=device)
            product = _product(weight, side, side, side)
            if 8 * cubes * seconds(product, lambda: devices.now(device), 0.0) > budget_s:
                break
            side *= 2
    return side


def measure(
    device: torch.device, sizes: Sizes, budget_s: float, meet: Callable[[], None]
) -> Figures:
    """Seconds of every product, copy and of the least operation; `meet` comes before each."""
    works = list(_works(device, sizes))
    share_s = budget_s / sum(count for _, count, _ in works)
    found: Figures = {}
    for name, _, prepared in works:
        found[name] = []
        for work in prepared:
            meet()
            found[name].append(seconds(work, lambda: devices.now(device), share_s))
    return found


_Work = Callable[[], object]


def _works(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, int, Iterator[_Work]]]:
    """Name, number of points, and the points, each prepared as it is asked for."""
    yield "calls", 1, iter([_calls(device)])
    yield "functions", 2, iter(_functions(device))
    yield "copies", len(sizes.copies), map(partial(_copy, device, sizes), sizes.copies)
    for kind, make in KINDS.items():
        made = partial(make, device, sizes)
        yield f"passes {kind}", len(sizes.passed), map(made, sizes.passed)
    for dtype in sizes.sides:
        lengths = sizes.lengths(dtype)
        for way in ATTENTIONS:
            attending = _attention(device, dtype, way, lengths)
            yield f"attention {way} {dtype}", len(lengths), attending
        products = sizes.products(dtype)
        yield f"products {dtype}", len(products), _products(device, dtype, sizes, products)
        products = sizes.products_of_slots(dtype)
        yield f"slots {dtype}", len(products), _slots(device, dtype, sizes, products)


def _calls(device: torch.device) -> _Work:
    """`CHAIN` multiplications of one number, and as many in their backward pass."""
    start = torch.ones(1, device=device, requires_grad=True)
    factor = torch.ones(1, device=device)

    def chain() -> None:
        result = start
        for _ in range(CHAIN):
            result = result * factor
        torch.autograd.grad(result, start)

    return chain


def _functions(device: torch.device) -> list[_Work]:
    """A function of `FUNCTION_ELEMENTS` numbers, and a pass over as many."""
    numbers = torch.zeros(FUNCTION_ELEMENTS, device=device)
    result = torch.empty_like(numbers)
    return [
        lambda: torch.exp(numbers, out=result),
        lambda: torch.mul(numbers, 1.0, out=result),
    ]


def _pool(device: torch.device, sizes: Sizes, num_bytes: int) -> list[Tensor]:
    """Tensors of `num_bytes`, more than a cache holds, or as many as make no difference."""
    number = max(2, min(_MOST_TENSORS, sizes.copies[-1] // num_bytes))
    return [torch.ones(num_bytes // 4, device=device) for _ in range(number)]


def _copy(device: torch.device, sizes: Sizes, num_bytes: int) -> _Work:
    """From one tensor to the next, and on from there: what is read was just written."""
    pool = _pool(device, sizes, num_bytes)
    pairs = itertools.cycle([*itertools.pairwise(pool), (pool[-1], pool[0])])

    def copy() -> None:
        source, target = next(pairs)
        target.copy_(source)

    return copy


def _norm(device: torch.device, sizes: Sizes, num_bytes: int) -> _Work:
    pool = itertools.cycle([[one] for one in _pool(device, sizes, num_bytes)])
    return lambda: sum_of_squares(next(pool))


def _scale(device: torch.device, sizes: Sizes, num_bytes: int) -> _Work:
    pool = itertools.cycle(_pool(device, sizes, num_bytes))
    return lambda: next(pool).mul_(1.0)


def _adamw(device: torch.device, sizes: Sizes, num_bytes: int) -> _Work:
    """The fused update of parameters whose gradients are all one."""
    pool = _pool(device, sizes, num_bytes)
    states = [
        ([one], [torch.ones_like(one)], [torch.zeros_like(one)], [torch.zeros_like(one)])
        for one in pool[: max(2, len(pool) // 4)]
    ]
    following, step = itertools.cycle(states), torch.ones((), device=device)

    def update() -> None:
        adamw(
            *next(following), [], [step], fused=True, amsgrad=False, maximize=False, beta1=0.9,
            beta2=0.99, eps=1e-8, lr=1e-6, weight_decay=0.0,
        )  # fmt: skip

    return update


KINDS: dict[str, Callable[[torch.device, Sizes, int], _Work]] = {
    "norm": _norm, "scale": _scale, "adamw": _adamw,
}  # fmt: skip
"""Kernels that are unlike most, by their kind in a cluster's file."""


def _attention(
    device: torch.device, dtype: str, way: str, lengths: Sequence[int]
) -> Iterator[_Work]:
    """Attention of `HEADS` heads of `HEAD_DIM`, causal or masked, or its backward pass alone."""
    with _precision(dtype):
        for length in lengths:
            shape = (1, HEADS, length, HEAD_DIM)
            q, k, v = (
                torch.full(shape, 0.5, dtype=_TYPES[dtype], device=device, requires_grad=True)
                for _ in range(3)
            )
            mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
            how = {"attn_mask": mask} if "masked" in way else {"is_causal": True}
            forward = partial(F.scaled_dot_product_attention, q, k, v, **how)
            mixed = forward()
            given = (mixed, (q, k, v), torch.ones_like(mixed))
            backward = partial(torch.autograd.grad, *given, retain_graph=True)
            yield forward if way.endswith("forward") else backward


def _products(
    device: torch.device, dtype: str, sizes: Sizes, products: Sequence[tuple[int, int, int]]
) -> Iterator[_Work]:
    with _precision(dtype):
        largest = sizes.columns(dtype)[-1] ** 2
        weights = max(largest, sizes.copies[-1] // 2 // _TYPES[dtype].itemsize)
        arena = torch.full((weights,), 0.5, dtype=_TYPES[dtype], device=device)
        for rows, columns, inner in products:
            yield _product(arena, rows, columns, inner)


def _product(arena: Tensor, rows: int, columns: int, inner: int) -> _Work:
    """The `WAYS` in which layers ask for a product: for a result, for the gradients of its input
    and of its weight.

    Weights and their gradients come one after another of `arena`: a model's are in no cache when it
    needs them.
    """
    weights = itertools.cycle(_cut(arena, inner, columns))
    gradients = itertools.cycle(_cut(arena, rows, columns))
    left, right = arena.new_full((rows, inner), 0.5), arena.new_full((inner, columns), 0.5)
    turned = arena.new_full((inner, rows), 1 / inner)

    def multiply() -> None:
        product(left, next(weights).view(columns, inner), transposed=True)
        product(left, next(weights), transposed=False)
        torch.mm(turned.T, right, out=next(gradients))

    return multiply


def _slots(
    device: torch.device, dtype: str, sizes: Sizes, products: Sequence[tuple[int, int, int]]
) -> Iterator[_Work]:
    with _precision(dtype):
        largest = sizes.slots * sizes.columns(dtype)[-1] ** 2
        weights = max(largest, sizes.copies[-1] // 2 // _TYPES[dtype].itemsize)
        arena = torch.full((weights,), 0.5, dtype=_TYPES[dtype], device=device)
        for rows, columns, inner in products:
            slots = sizes.slots_of(dtype, columns, inner)
            yield _of_slots(arena, slots, rows, columns, inner)


def _of_slots(arena: Tensor, slots: int, rows: int, columns: int, inner: int) -> _Work:
    """The `WAYS` of `_product`, of as many experts' weights; of a CPU each thread has some."""
    weights = itertools.cycle(_cut(arena, slots, inner * columns))
    counts = torch.full((slots,), rows)
    left = arena.new_full((slots * rows, inner), 1 / inner)
    right = arena.new_full((slots * rows, columns), 0.5)
    by, crew = choose("auto", arena.device, arena.dtype), None
    if arena.device.type == "cpu":
        crew = threads.crew()
    step = slots if crew is None else max(1, slots // (2 * crew.size))

    def multiply() -> None:
        one, other, gradient = (next(weights) for _ in range(WAYS))

        def some(first: int) -> None:
            some_slots = slice(first, first + step)
            places = slice(first * rows, (first + step) * rows)
            own, each = left[places], counts[some_slots]
            into = gradient.view(slots, inner, columns)[some_slots]
            grouped_mm(own, one.view(slots, columns, inner)[some_slots], each, True, by=by)
            grouped_mm(own, other.view(slots, inner, columns)[some_slots], each, False, by=by)
            grouped_outer(own, right[places], each, into, by=by)

        if crew is None:
            some(0)
        else:
            crew.each(some, range(0, slots, step))

    return multiply


def _cut(arena: Tensor, rows: int, columns: int) -> list[Tensor]:
    """Matrices that lie in `arena` one after another."""
    size = rows * columns
    number = max(1, min(_MOST_WEIGHTS, arena.numel() // size))
    return [arena[i * size : (i + 1) * size].view(rows, columns) for i in range(number)]


@contextmanager
def _precision(dtype: str) -> Iterator[None]:
    """Have fp32 products rounded to tf32, or not."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
