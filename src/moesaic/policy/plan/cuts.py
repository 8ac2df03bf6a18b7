"""Stage boundaries of a pipeline: contiguous cuts of the blocks by dynamic programming.

A step of 1F1B with unequal stages takes about `(micro_batches - 1) * slowest stage + all stages`.
The cuts minimise that, with each stage on its own device and inside its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

Fits = Callable[[int, int, int], bool]
"""Function of a stage, its first block and its end: true if it fits, as all parts of it do then."""

_MAX_ROUNDS = 200


class StageCuts(NamedTuple):
    """Contiguous stages of a pipeline."""

    starts: tuple[int, ...]
    """First block of each stage."""
    seconds: float
    """Seconds of a step, without transfers: the minimised figure."""


class _Partial(NamedTuple):
    """Stages up to one boundary."""

    slowest_s: float
    total_s: float
    starts: tuple[int, ...]


def best_cuts(
    block_seconds: Sequence[Sequence[float]], micro_batches: int, fits: Fits | None = None
) -> StageCuts | None:
    """Return the fastest cuts whose stages fit, or None if there are none.

    Args:
        block_seconds: forward and backward of one micro-batch by stage and block,
            [stages][blocks]; equal rows for equal devices.
        micro_batches: micro-batches of a step.
        fits: whether a stage fits in memory; None: all do. It is asked about few stages, since a
            stage that does not fit rules out all stages that contain it.
    """
    too_large: list[tuple[int, int, int]] = []
    for _ in range(_MAX_ROUNDS):
        found = _search(block_seconds, micro_batches, too_large)
        if found is None or fits is None:
            return found
        bounds = pairwise((*found.starts, len(block_seconds[0])))
        refused = [
            (stage, start, end)
            for stage, (start, end) in enumerate(bounds)
            if not fits(stage, start, end)
        ]
        if not refused:
            return found
        too_large += refused
    return None


def cuts_seconds(
    block_seconds: Sequence[Sequence[float]], micro_batches: int, starts: Sequence[int]
) -> float:
    """Return the seconds of a step with given cuts, without transfers."""
    bounds = list(pairwise((*starts, len(block_seconds[0]))))
    stages = [sum(row[start:end]) for row, (start, end) in zip(block_seconds, bounds, strict=True)]
    return (micro_batches - 1) * max(stages) + sum(stages)


def _search(
    block_seconds: Sequence[Sequence[float]],
    micro_batches: int,
    too_large: Sequence[tuple[int, int, int]],
) -> StageCuts | None:
    """Return the fastest cuts without a stage that contains one of `too_large`."""
    num_stages, num_blocks = len(block_seconds), len(block_seconds[0])
    fronts: list[list[_Partial]] = [[] for _ in range(num_blocks + 1)]
    fronts[0] = [_Partial(0.0, 0.0, ())]
    for stage, row in enumerate(block_seconds):
        sums = [0.0, *accumulate(row)]
        refused = [one[1:] for one in too_large if one[0] == stage]
        last_end = num_blocks - (num_stages - 1 - stage)
        reached: list[list[_Partial]] = [[] for _ in range(num_blocks + 1)]
        for start, front in enumerate(fronts):
            limit = min((end - 1 for first, end in refused if first >= start), default=last_end)
            ends = range(start + 1, min(limit, last_end) + 1)
            for end in ends if stage < num_stages - 1 else ends[-1:]:
                own = sums[end] - sums[start]
                reached[end] += [
                    _Partial(max(one.slowest_s, own), one.total_s + own, (*one.starts, start))
                    for one in front
                ]
        fronts = [_best(front) for front in reached]
    if not fronts[num_blocks]:
        return None
    best = min(
        fronts[num_blocks], key=lambda one: (micro_batches - 1) * one.slowest_s + one.total_s
    )
    return StageCuts(best.starts, (micro_batches - 1) * best.slowest_s + best.total_s)


def _best(front: list[_Partial]) -> list[_Partial]:
    """Return the entries that no other one beats in both figures."""
    kept: list[_Partial] = []
    for one in sorted(front):
        if not kept or one.total_s < kept[-1].total_s * (1 - 1e-12):
            kept.append(one)
    return kept
