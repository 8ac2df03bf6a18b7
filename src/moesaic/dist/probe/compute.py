"""How fast a device multiplies, reads and writes, and how long the least operation takes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.dist import device as devices
from moesaic.dist.probe.timing import Figures, powers, seconds

_TYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16,
    "fp16": torch.float16,
}  # fmt: skip
_SMALLEST_COPY_BYTES = 4096


_SMALLEST_SIDE = 64
_CUBES = 9
"""All products take about 2.3 times the largest one, and each is done four times."""


@dataclass(frozen=True)
class Sizes:
    """What is multiplied and copied; the same on every rank."""

    sides: dict[str, int]
    """Side of the largest matrices, by type of number."""
    copies: list[int]
    """Bytes that are copied."""

    def rows(self, dtype: str) -> list[int]:
        """Rows of the products, rising."""
        side = self.sides[dtype]
        return sorted({1, *powers(side // 64, side, 4)})

    def columns(self, dtype: str) -> list[int]:
        """Columns of the products, and sizes of their inner dimension, rising."""
        side = self.sides[dtype]
        return powers(side // 16, side, 4)

    def products(self, dtype: str) -> list[tuple[int, int, int]]:
        """Rows, columns and inner size of every product, the inner size counting fastest."""
        columns = self.columns(dtype)
        return list(itertools.product(self.rows(dtype), columns, columns))


def suitable(
    device: torch.device, dtypes: Sequence[str] | None, largest: int | None,
    copy_bytes: int | None, budget_s: float,
) -> Sizes:  # fmt: skip
    """Sizes whose products, as many as there are, take about `budget_s` at most."""
    types = dtypes or devices.number_types(device)
    most = largest or devices.largest_product(device)
    sides = {dtype: _largest_side(device, dtype, most, budget_s / len(types)) for dtype in types}
    return Sizes(sides, powers(_SMALLEST_COPY_BYTES, copy_bytes or devices.largest_copy(device), 4))


def _largest_side(device: torch.device, dtype: str, most: int, budget_s: float) -> int:
    """The largest side that there is time for: some types crawl on devices not made for them."""
    side = _SMALLEST_SIDE
    with _precision(dtype):
        while 2 * side <= most:
            product = _product(device, _TYPES[dtype], side, side, side)
            if 8 * _CUBES * seconds(product, lambda: devices.now(device), 0.0) > budget_s:
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
    one = torch.zeros(1, device=device)
    yield "call", 1, iter([lambda: one.add_(1.0)])
    yield "copies", len(sizes.copies), (_copy(device, size) for size in sizes.copies)
    for dtype in sizes.sides:
        products = sizes.products(dtype)
        yield f"products {dtype}", len(products), _products(device, dtype, products)


def _copy(device: torch.device, num_bytes: int) -> _Work:
    source = torch.zeros(num_bytes // 4, device=device)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)


def _products(
    device: torch.device, dtype: str, products: Sequence[tuple[int, int, int]]
) -> Iterator[_Work]:
    with _precision(dtype):
        for rows, columns, inner in products:
            yield _product(device, _TYPES[dtype], rows, columns, inner)


def _product(
    device: torch.device, dtype: torch.dtype, rows: int, columns: int, inner: int
) -> _Work:
    def factor(*shape: int) -> Tensor:
        return torch.full(shape, 0.5, dtype=dtype, device=device)

    left, right, result = factor(rows, inner), factor(inner, columns), factor(rows, columns)
    return lambda: torch.mm(left, right, out=result)


@contextmanager
def _precision(dtype: str) -> Iterator[None]:
    """Have fp32 products rounded to tf32, or not."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
