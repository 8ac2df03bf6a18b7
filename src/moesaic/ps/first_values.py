"""First values of rows: normal numbers that are a function of seed, table, key and column.

A number in a hash chooses one of many equally likely cells of the normal distribution, and a place
in it. So values need no transcendental function, and are equal on all machines.
"""

from __future__ import annotations

import hashlib
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from moesaic.base.compiled import cached_loop
from moesaic.ps.index import Int64s
from moesaic.ps.records import Floats

_CELLS = 2048
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_STEP = np.uint64(0x9E3779B97F4A7C15)
_HALF, _CELL_SHIFT, _MASK = np.uint64(32), np.uint64(21), np.uint64(2**21 - 1)
_FRACTION = 2.0**-21


class FirstValues:
    """First values of one table's rows."""

    def __init__(self, seed: int, name: str, std: float) -> None:
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        self._salt = np.uint64(int.from_bytes(digest, "little"))
        self._edges = cell_edges() * std

    def fill(self, keys: Int64s, rows: Int64s, values: Floats, dim: int) -> None:
        """Write the first values of `keys` to columns 0 to `dim` of `values` at `rows`."""
        _fill(self._salt, self._edges, keys, rows, values, dim)


@cache
def cell_edges() -> NDArray[np.float64]:
    """Return edges of the cells: quantiles of the normal distribution, scaled to variance 1.

    The outermost edges stand near four standard deviations."""
    half = [NormalDist().inv_cdf(cell / _CELLS) for cell in range(1, _CELLS // 2)]
    lowest = NormalDist().inv_cdf(1 / (16 * _CELLS))
    edges = np.array([lowest, *half, 0.0, *(-edge for edge in half[::-1]), -lowest])
    low, high = edges[:-1], edges[1:]
    edges /= np.sqrt(np.mean((low * low + low * high + high * high) / 3))
    edges.flags.writeable = False
    return edges


@cached_loop
def _mix(number: np.uint64) -> np.uint64:
    mixed = (number ^ (number >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    return mixed ^ (mixed >> np.uint64(31))


@cached_loop
def _fill(
    salt: int,
    edges: NDArray[np.float64],
    keys: Int64s,
    rows: Int64s,
    values: Floats,
    dim: int,
) -> None:
    for index in range(len(keys)):
        start = _mix(_mix(np.uint64(keys[index]) ^ salt) + salt)
        row = values[rows[index]]
        for column in range(dim):
            bits = _mix(start + np.uint64(column + 1) * _STEP) >> _HALF
            cell = np.int64(bits >> _CELL_SHIFT)
            low, high = edges[cell], edges[cell + 1]
            row[column] = low + (high - low) * (np.float64(bits & _MASK) * _FRACTION)
