"""Timing of calls, and medians, line fits and ranges of measured times. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

Clock = Callable[[], float]
"""Clock in seconds that first waits for all launched work."""
Figures = dict[str, list[float]]
"""Measurements of a rank: numbers by name, with the same names and lengths in every repeat."""

_SHORTEST_SAMPLE_S = 1e-4
"""Shorter calls are timed several at once, because reading the clock takes time."""
_MAX_CALLS = 1000
_MIN_SAMPLES = 2


def time_call(work: Callable[[], object], clock: Clock, budget_s: float) -> float:
    """Return the seconds of one call of `work`: the median of all samples within `budget_s`."""
    work()  # Warm up threads, caches and compiled kernels.
    once = _sample(work, clock, 1)
    calls = max(1, min(_MAX_CALLS, math.ceil(_SHORTEST_SAMPLE_S / max(once, 1e-9))))
    samples = [once] if calls == 1 else []
    deadline = clock() + budget_s
    while len(samples) < _MIN_SAMPLES or clock() < deadline:
        samples.append(_sample(work, clock, calls))
    return median(samples)


@dataclass(frozen=True)
class CollectiveTimes:
    """Times of collective calls, each after computation on the rank."""

    compute_s: list[float]
    """Seconds of the computation before each call."""
    calls_s: list[float]
    """Seconds of each call, including the wait for later ranks."""


def time_collective(
    work: Callable[[], object], clock: Clock, agree: Callable[[int], int], budget_s: float,
    compute: Callable[[], object] = lambda: None,
) -> CollectiveTimes:  # fmt: skip
    """Time a collective call after each rank's `compute`.

    Some calls are fast, others wait for a thread to wake or for a late rank. A median would pick
    one of the two by chance, but a training step pays for both, so callers take the mean.

    Args:
        work: collective call.
        clock: clock in seconds.
        agree: returns one rank's number of calls on all ranks.
        budget_s: approximate duration in seconds.
        compute: computation of each rank before the call.
    """

    def call(times: int) -> CollectiveTimes:
        compute_s, calls_s = [], []
        for _ in range(times):
            start = clock()
            compute()
            ready = clock()
            work()
            compute_s.append(ready - start)
            calls_s.append(clock() - ready)
        return CollectiveTimes(compute_s, calls_s)

    work()
    start = clock()
    call(1)
    wanted = int(budget_s / max(clock() - start, 1e-9))
    return call(agree(max(_MIN_SAMPLES + 1, min(_MAX_CALLS, wanted))))


def _sample(work: Callable[[], object], clock: Clock, calls: int) -> float:
    start = clock()
    for _ in range(calls):
        work()
    return (clock() - start) / calls


def fit_line(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """Return latency and seconds per byte of the line with the smallest sum of relative errors.

    Errors are not squared, so the best line passes through two of the points, and one outlier does
    not move it.
    """
    best = (times[0], times[-1] / sizes[-1])  # Fallback, for times that do not rise.
    least = math.inf
    for first, second in itertools.combinations(range(len(sizes)), 2):
        slope = (times[second] - times[first]) / (sizes[second] - sizes[first])
        start = times[first] - slope * sizes[first]
        if slope <= 0 or start <= 0:
            continue
        error = sum(
            abs(start + slope * size - time) / time for size, time in zip(sizes, times, strict=True)
        )
        if error < least:
            best, least = (start, slope), error
    return best


def medians(measured: Sequence[Figures]) -> Figures:
    """Return the medians over several ranks or repeats, number by number."""
    return {
        name: [
            median(values) for values in zip(*(figures[name] for figures in measured), strict=True)
        ]
        for name in measured[0]
    }


def relative_range(values: Sequence[float]) -> float:
    """Return the range of repeated measurements relative to their median."""
    return (max(values) - min(values)) / median(values)


def geometric_sizes(first: int, last: int, factor: int) -> list[int]:
    """Return `first`, `first * factor`, ... below `last`, and `last`."""
    return [*itertools.takewhile(lambda size: size < last, _geometric(first, factor)), last]


def _geometric(first: int, factor: int) -> Iterator[int]:
    return (first * factor**power for power in itertools.count())
