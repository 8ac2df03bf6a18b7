"""Series of values over steps: thinning, smoothing and medians."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MAX_POINTS = 800
"""Most points of one curve."""


def keep_extremes(x: Floats, y: Floats, limit: int = MAX_POINTS) -> tuple[Floats, Floats]:
    """Keep at most `limit` points: lowest and highest of each interval, so no spike is lost."""
    if len(x) <= limit:
        return x, y
    edges = _edges(len(x), max(limit // 2, 1))
    kept: list[int] = []
    low, high = np.where(np.isnan(y), np.inf, y), np.where(np.isnan(y), -np.inf, y)
    for start, end in pairwise(edges.tolist()):
        pair = {int(start + low[start:end].argmin()), int(start + high[start:end].argmax())}
        kept += sorted(pair)
    return x[kept], y[kept]


def sample(x: Floats, y: Floats, limit: int = MAX_POINTS) -> tuple[Floats, Floats]:
    """Keep at most `limit` points, evenly spaced, with the first and the last."""
    if len(x) <= limit:
        return x, y
    kept = np.linspace(0, len(x) - 1, limit).round().astype(np.int64)
    return x[kept], y[kept]


def average(x: Floats, y: Floats, limit: int = MAX_POINTS) -> tuple[Floats, Floats]:
    """Average `limit` intervals along the first axis of `y`; NaN is ignored."""
    if len(x) <= limit:
        return x, y
    edges = _edges(len(x), limit)
    shape = (-1,) + (1,) * (y.ndim - 1)
    known = ~np.isnan(y)
    total = np.add.reduceat(np.where(known, y, 0.0), edges[:-1], axis=0)
    number = np.add.reduceat(known.astype(np.float64), edges[:-1], axis=0)
    mean = np.divide(total, number, out=np.full_like(total, np.nan), where=number > 0)
    width = np.diff(edges).reshape(shape)
    return np.add.reduceat(x, edges[:-1]) / width.reshape(-1), mean


def smooth(y: Floats, share: float = 0.02) -> Floats:
    """Apply a moving mean twice; its window is `share` of the series and ignores NaN.

    The window shrinks towards the start, so the steep fall of an early loss stays sharp.
    """
    half = max(2, round(len(y) * share / 2))
    return _moving_mean(_moving_mean(y, half), half)


def _moving_mean(y: Floats, half: int) -> Floats:
    size = len(y)
    known = np.isfinite(y)
    total = np.concatenate([[0.0], np.cumsum(np.where(known, y, 0.0))])
    number = np.concatenate([[0], np.cumsum(known)])
    at = np.arange(size)
    start = at - np.minimum(half, at // 2)
    end = np.minimum(at + np.minimum(half, at // 2) + 1, size)
    count = number[end] - number[start]
    sums = total[end] - total[start]
    mean: Floats = np.divide(sums, count, out=np.full(size, np.nan), where=count > 0)
    return mean


def middle(values: Floats) -> float:
    """Return the median of known values; the first one is warmup and does not count."""
    rest = values[1:] if len(values) > 1 else values
    rest = rest[np.isfinite(rest)]
    return float(np.median(rest)) if len(rest) else math.nan


def _edges(size: int, intervals: int) -> npt.NDArray[np.int64]:
    return np.arange(intervals + 1) * size // intervals
