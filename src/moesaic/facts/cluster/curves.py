"""Measured curves: seconds over sizes, read between their points.

Between two points time is a straight line over the size, which is exact of a machine that takes so
long to begin and so long for every byte, or number, or multiplication. Beyond the last point time
grows with the size; before the first it stays. Of attention all that is said of what a token takes.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence

from pydantic import Field, model_validator

from moesaic.base import keys
from moesaic.base.config import Section


class Curve(Section):
    """Seconds by number of bytes."""

    num_bytes: list[float] = Field(alias="bytes", min_length=1)
    """Sizes in bytes, rising; of a copy or a pass, what is read and what is written together."""
    seconds: list[float] = Field(min_length=1)
    """Seconds that each of them takes."""

    @model_validator(mode="after")
    def _consistent(self) -> Curve:
        _check_axis("bytes", self.num_bytes)
        _check_seconds("seconds", self.seconds, len(self.num_bytes))
        return self

    def at(self, num_bytes: float) -> float:
        """Seconds for `num_bytes`."""
        return _read([self.num_bytes], self.seconds, [num_bytes])


class Grid(Section):
    """Seconds of products (rows x inner) @ (inner x columns), over a grid of sizes."""

    rows: list[float] = Field(min_length=1)
    """Sizes of the first factor's first dimension, rising."""
    columns: list[float] = Field(min_length=1)
    """Sizes of the second factor's last dimension, rising."""
    inner: list[float] = Field(min_length=1)
    """Sizes of the dimension that is summed over, rising."""
    seconds: list[float] = Field(min_length=1)
    """Seconds of one product, the inner dimension counting fastest and the rows slowest; measured
    ones are the mean of the three ways in which a layer multiplies by such a weight."""

    @model_validator(mode="after")
    def _consistent(self) -> Grid:
        for name in ("rows", "columns", "inner"):
            _check_axis(name, getattr(self, name))
        _check_seconds(
            "seconds", self.seconds, len(self.rows) * len(self.columns) * len(self.inner)
        )
        return self

    def at(self, rows: float, columns: float, inner: float) -> float:
        """Seconds of one product."""
        return _read([self.rows, self.columns, self.inner], self.seconds, [rows, columns, inner])


class Heads(Section):
    """Seconds of attention, one head of one sequence, by the sequence's length."""

    head_dim: float = Field(gt=0)
    """Width of a head."""
    lengths: list[float] = Field(min_length=1)
    """Tokens of a sequence, rising."""
    forward: list[float] = Field(min_length=1)
    """Seconds of one head's forward pass over one such sequence, where attention is causal."""
    backward: list[float] = Field(min_length=1)
    """Seconds of its backward pass."""
    masked_forward: list[float] | None = None
    """Seconds of its forward pass with a mask, as documents in one sample need; unset: as much
    longer as there is more to multiply."""
    masked_backward: list[float] | None = None
    """Seconds of its backward pass with a mask."""

    @model_validator(mode="after")
    def _consistent(self) -> Heads:
        _check_axis("lengths", self.lengths)
        for name in ("forward", "backward", "masked_forward", "masked_backward"):
            seconds = getattr(self, name)
            if seconds is not None:
                _check_seconds(name, seconds, len(self.lengths))
        return self

    def at(self, length: float, head_dim: float, *, backward: bool, masked: bool = False) -> float:
        """Seconds for one head of `head_dim` over `length` tokens."""
        seconds = self.backward if backward else self.forward
        known = self.masked_backward if backward else self.masked_forward
        if masked and known is None:  # A causal pass leaves out all but this share.
            return self.at(length, head_dim, backward=backward) / (0.5 + 0.5 / length)
        if masked and known is not None:
            seconds = known
        each = [time / tokens for time, tokens in zip(seconds, self.lengths, strict=True)]
        return _read([self.lengths], each, [length]) * length * head_dim / self.head_dim


def _read(
    axes: Sequence[Sequence[float]], values: Sequence[float], sizes: Sequence[float]
) -> float:
    """`values` between the points of `axes`, linear in each size; at a point, exactly its value.

    Beyond an axis the value grows with the size, before it the value of its first point holds.
    """
    beyond = math.prod(max(size / axis[-1], 1.0) for axis, size in zip(axes, sizes, strict=True))
    places = [_place(axis, size) for axis, size in zip(axes, sizes, strict=True)]
    result = 0.0
    for corner in itertools.product((0, 1), repeat=len(axes)):
        weight, flat = 1.0, 0
        for side, (first, share), axis in zip(corner, places, axes, strict=True):
            weight *= share if side else 1.0 - share
            flat = flat * len(axis) + min(first + side, len(axis) - 1)
        result += values[flat] * weight
    return beyond * result


def _place(axis: Sequence[float], size: float) -> tuple[int, float]:
    """The point at or before `size`, and how far it is from there to the next, from 0 to 1."""
    size = min(max(size, axis[0]), axis[-1])
    first = bisect_right(axis, size) - 1
    if axis[first] == size:
        return first, 0.0
    return first, (size - axis[first]) / (axis[first + 1] - axis[first])


def _check_axis(name: str, axis: Sequence[float]) -> None:
    if axis[0] <= 0 or any(after <= before for before, after in itertools.pairwise(axis)):
        raise ValueError(f"{name} = {keys.show(axis)} does not rise from above 0: sort it")


def _check_seconds(name: str, seconds: Sequence[float], expected: int) -> None:
    if len(seconds) != expected:
        raise ValueError(
            f"{name} holds {len(seconds)} times for {expected} points: give one for each"
        )
    if min(seconds) <= 0:
        raise ValueError(f"{name} holds {min(seconds)}: give times above 0")
