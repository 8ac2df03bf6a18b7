"""Measured curves: seconds by size, interpolated between the measured points.

Between two points time is linear in the size, which is exact for a fixed start-up time plus a time
per byte or operation. Beyond the last point time is proportional to the size; before the first it
is constant. Attention is interpolated in its time per token.
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
    """Sizes in bytes, ascending; bytes read and written are added up."""
    seconds: list[float] = Field(min_length=1)
    """Seconds at each size."""

    @model_validator(mode="after")
    def _consistent(self) -> Curve:
        _check_axis("bytes", self.num_bytes)
        _check_seconds("seconds", self.seconds, len(self.num_bytes))
        return self

    def at(self, num_bytes: float) -> float:
        """Return the seconds for `num_bytes`."""
        return _interpolate([self.num_bytes], self.seconds, [num_bytes])


class Grid(Section):
    """Seconds of matmuls (rows x inner) @ (inner x columns), over a grid of sizes."""

    rows: list[float] = Field(min_length=1)
    """Sizes of the first factor's first dimension, ascending."""
    columns: list[float] = Field(min_length=1)
    """Sizes of the second factor's last dimension, ascending."""
    inner: list[float] = Field(min_length=1)
    """Sizes of the contracted dimension, ascending."""
    seconds: list[float] = Field(min_length=1)
    """Seconds of one matmul, in the order [rows, columns, inner]. Measured values are means over
    the three matmuls of such a weight in forward and backward."""

    @model_validator(mode="after")
    def _consistent(self) -> Grid:
        for name in ("rows", "columns", "inner"):
            _check_axis(name, getattr(self, name))
        _check_seconds(
            "seconds", self.seconds, len(self.rows) * len(self.columns) * len(self.inner)
        )
        return self

    def at(self, rows: float, columns: float, inner: float) -> float:
        """Return the seconds of one matmul."""
        return _interpolate(
            [self.rows, self.columns, self.inner], self.seconds, [rows, columns, inner]
        )


class AttentionTimes(Section):
    """Seconds of attention for one head of one sequence, by sequence length."""

    head_dim: float = Field(gt=0)
    """Width of a head."""
    lengths: list[float] = Field(min_length=1)
    """Tokens of a sequence, ascending."""
    forward: list[float] = Field(min_length=1)
    """Seconds of one head's forward over one sequence, with causal attention."""
    backward: list[float] = Field(min_length=1)
    """Seconds of its backward."""
    masked_forward: list[float] | None = None
    """Seconds of its forward with a mask, for a sliding window; unset: longer by the additional
    multiplications."""
    masked_backward: list[float] | None = None
    """Seconds of its backward with a mask."""

    @model_validator(mode="after")
    def _consistent(self) -> AttentionTimes:
        _check_axis("lengths", self.lengths)
        for name in ("forward", "backward", "masked_forward", "masked_backward"):
            seconds = getattr(self, name)
            if seconds is not None:
                _check_seconds(name, seconds, len(self.lengths))
        return self

    def at(self, length: float, head_dim: float, *, backward: bool, masked: bool = False) -> float:
        """Return the seconds for one head of `head_dim` over `length` tokens."""
        seconds = self.backward if backward else self.forward
        known = self.masked_backward if backward else self.masked_forward
        if masked and known is None:  # Share of the scores that causal attention computes.
            return self.at(length, head_dim, backward=backward) / (0.5 + 0.5 / length)
        if masked and known is not None:
            seconds = known
        each = [time / tokens for time, tokens in zip(seconds, self.lengths, strict=True)]
        return _interpolate([self.lengths], each, [length]) * length * head_dim / self.head_dim


def _interpolate(
    axes: Sequence[Sequence[float]], values: Sequence[float], sizes: Sequence[float]
) -> float:
    """Interpolate `values` on the grid of `axes`, linear in each size and exact at grid points.

    Beyond an axis the value grows with the size; before it, the first point's value holds.
    """
    beyond = math.prod(max(size / axis[-1], 1.0) for axis, size in zip(axes, sizes, strict=True))
    places = [_bracket(axis, size) for axis, size in zip(axes, sizes, strict=True)]
    result = 0.0
    for corner in itertools.product((0, 1), repeat=len(axes)):
        weight, flat = 1.0, 0
        for side, (first, share), axis in zip(corner, places, axes, strict=True):
            weight *= share if side else 1.0 - share
            flat = flat * len(axis) + min(first + side, len(axis) - 1)
        result += values[flat] * weight
    return beyond * result


def _bracket(axis: Sequence[float], size: float) -> tuple[int, float]:
    """Return the index of the point at or before `size`, and the fraction towards the next."""
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
