"""Rows, keys and gradients of the theme `tables`, by numpy alone: the peers' environment has no
moesaic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LR, EPSILON = 0.01, 1e-8
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Shape:
    """Rows of a table, all of which exist before anything is timed."""

    dim: int
    rows: int

    def chunks(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Yield numbers and first values of all rows."""
        for start in range(0, self.rows, _CHUNK):
            numbers = np.arange(start, min(start + _CHUNK, self.rows))
            draw = np.random.default_rng(start)
            yield numbers, draw.standard_normal((len(numbers), self.dim), np.float32)


def batches(
    shape: Shape, size: int, zipf: float, count: int, seed: int
) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Return `count` batches of `size` row numbers and gradients.

    Args:
        shape: the table.
        size: rows of a batch, with repeats.
        zipf: exponent of the rows' frequencies; 0: all are as frequent. Frequent rows are spread
            over the table.
        count: batches.
        seed: seed of all of them.
    """
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        numbers = draw.integers(0, shape.rows, size)
        if zipf:
            power = 1 - zipf
            ranks = ((shape.rows**power - 1) * draw.random(size) + 1) ** (1 / power) - 1
            numbers = ranks.astype(np.int64) * 0x9E3779B1 % shape.rows
        grads = draw.standard_normal((size, shape.dim), np.float32) * np.float32(0.01)
        found.append((numbers, grads))
    return found
