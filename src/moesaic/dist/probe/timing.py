"""Medians, lines and spreads of measured times. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

Clock = Callable[[], float]
"""Seconds, all work that was asked for before being done."""
Figures = dict[str, list[float]]
"""What a rank measured: numbers by name, of the same names and lengths in every repeat."""

_SHORTEST_SAMPLE_S = 1e-4
"""Calls that take less are timed several at once: reading a clock takes time too."""
_MOST_CALLS = 1000
_LEAST_SAMPLES = 2


def seconds(work: Callable[[], object], clock: Clock, budget_s: float) -> float:
    """What one call of `work` takes: the median of as many samples as `budget_s` has room for."""
    work()  # The first call makes what later ones find: threads, caches, kernels.
    once = _sample(work, clock, 1)
    calls = max(1, min(_MOST_CALLS, math.ceil(_SHORTEST_SAMPLE_S / max(once, 1e-9))))
    samples = [once] if calls == 1 else []
    until = clock() + budget_s
    while len(samples) < _LEAST_SAMPLES or clock() < until:
        samples.append(_sample(work, clock, calls))
    return median(samples)


@dataclass(frozen=True)
class Meetings:
    """Calls of several ranks that meet in them, each after work of a rank's own."""

    own_s: list[float]
    """What its own work before each call took."""
    calls_s: list[float]
    """What each call took, waiting for who comes later included."""


def together(
    work: Callable[[], object], clock: Clock, agree: Callable[[int], int], budget_s: float,
    own: Callable[[], object] = lambda: None,
) -> Meetings:  # fmt: skip
    """What a call takes of several ranks that meet in it, after work of their `own`.

    Of such calls some are fast and others wait for a thread to be woken, or for a rank that comes
    late, so that their median is one or the other by chance, and a step pays for all: mean them.

    Args:
        work: what ranks do together.
        clock: reads the time.
        agree: turns one rank's number of calls into all's.
        budget_s: about how long to go on.
        own: what each does by itself.
    """

    def meet(times: int) -> Meetings:
        own_s, calls_s = [], []
        for _ in range(times):
            start = clock()
            own()
            came = clock()
            work()
            own_s.append(came - start)
            calls_s.append(clock() - came)
        return Meetings(own_s, calls_s)

    work()
    start = clock()
    meet(1)
    wanted = int(budget_s / max(clock() - start, 1e-9))
    return meet(agree(max(_LEAST_SAMPLES + 1, min(_MOST_CALLS, wanted))))


def _sample(work: Callable[[], object], clock: Clock, calls: int) -> float:
    start = clock()
    for _ in range(calls):
        work()
    return (clock() - start) / calls


def line(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """Latency and seconds a byte of the line that differs least from the points.

    Differences count relative to the times and none is squared, so that the best line goes through
    two of the points, and one bad point does not move it.
    """
    best = (times[0], times[-1] / sizes[-1])  # Of no line, as where times do not rise.
    least = math.inf
    for one, two in itertools.combinations(range(len(sizes)), 2):
        slope = (times[two] - times[one]) / (sizes[two] - sizes[one])
        start = times[one] - slope * sizes[one]
        if slope <= 0 or start <= 0:
            continue
        off = sum(
            abs(start + slope * size - time) / time for size, time in zip(sizes, times, strict=True)
        )
        if off < least:
            best, least = (start, slope), off
    return best


def medians(found: Sequence[Figures]) -> Figures:
    """Point by point the median of what several ranks, or repeats, found."""
    return {
        name: [median(values) for values in zip(*(one[name] for one in found), strict=True)]
        for name in found[0]
    }


def spread(values: Sequence[float]) -> float:
    """How far repeats of one figure lie apart, as a share of their median."""
    return (max(values) - min(values)) / median(values)


def powers(first: int, last: int, factor: int) -> list[int]:
    """From `first` by `factor` up to `last`, which is among them in any case."""
    return [*itertools.takewhile(lambda size: size < last, _geometric(first, factor)), last]


def _geometric(first: int, factor: int) -> Iterator[int]:
    return (first * factor**power for power in itertools.count())
