"""Series of values over steps: thinning, smoothing and averages of known values."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MAX_POINTS = 800
"""Most points of one curve."""


def keep_extremes(x: Floats, y: Floats, limit: int = MAX_POINTS) -> tuple[Floats, Floats]:
    """Keep at most `limit` points: lowest and highest of each interval, so no spike is lost."""
    if len(x) <= limit:
        return x, y
    kept: list[int] = []
    low, high = np.where(np.isnan(y), np.inf, y), np.where(np.isnan(y), -np.inf, y)
    for start, end in pairwise(edges(len(x), max(limit // 2, 1)).tolist()):
        pair = {int(start + low[start:end].argmin()), int(start + high[start:end].argmax())}
        kept += sorted(pair)
    return x[kept], y[kept]


def edges(size: int, intervals: int) -> Ints:
    """Return where each of `intervals` of a series begins, and where the last one ends."""
    return np.arange(intervals + 1) * size // intervals


def smooth(y: Floats, share: float = 0.02) -> Floats:
    """Apply a moving mean twice; its window is `share` of the series and ignores NaN.

    The window shrinks towards the start, so the steep fall of an early loss stays sharp.
    """
    half, at = max(2, round(len(y) * share / 2)), np.arange(len(y))
    start = at - np.minimum(half, at // 2)
    end = np.minimum(2 * at - start + 1, len(y))
    for _ in range(2):
        known = np.isfinite(y)
        total = np.concatenate([[0.0], np.cumsum(np.where(known, y, 0.0))])
        number = np.concatenate([[0], np.cumsum(known)])
        sums, count = total[end] - total[start], number[end] - number[start]
        y = np.divide(sums, count, out=np.full(len(y), np.nan), where=count > 0)
    return y


def median(values: Floats) -> float:
    """Return the median of known values; the first one is warmup and does not count."""
    rest = values[1:] if len(values) > 1 else values
    rest = rest[np.isfinite(rest)]
    return float(np.median(rest)) if len(rest) else math.nan


def known_mean(values: Floats) -> float:
    """Return the mean of known values; NaN if none is known."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan
