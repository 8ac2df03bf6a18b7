"""Divergence of a model: a loss that is not finite, explodes, or loses what was learned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from moesaic.report.log import Steps
from moesaic.report.series import Floats

_FEWEST_STEPS = 10
"""Steps from which a finite loss is judged by its course; fewer steps tell an explosion only."""
_EXPLODED = 2.0
"""Multiple of the loss of the first steps that the last ones exceed if it exploded ..."""
_EXPLODED_AT_ONCE = 3.0
"""... or multiple of the very first loss, if the next ones are high too."""
_TAIL = 5
"""Most last losses whose median is the loss at the end, so that a short bad end of a long run
counts."""
_PEAK = 10.0
"""Multiple of the loss of the first steps above which a peak ruins a model that is no better
afterwards ..."""
_NO_BETTER = 0.95
"""... which is at least this part of the loss of the first steps."""
_ONSET = 1.5
"""Multiple of the loss at the start from which on an exploded loss is wrong."""
_HIGHER = 1.1
"""Multiple of the loss at the start that the last third exceeds if it stays high ..."""
_FEW = 0.1
"""... but for this part of it."""
_WINDOW = 9
"""Losses whose median is the usual loss."""
_LEARNED = 0.2
"""Share by which a loss must have fallen before it can be lost again."""
_NOISE = 8.0
"""The same in robust standard deviations of its noise."""


@dataclass(frozen=True)
class Divergence:
    """Divergence of a loss: its kind, first step and values."""

    kind: Literal["not finite", "exploded", "lost"]
    step: int
    """Step from which on the loss is wrong, or from which on it rose before it was not finite."""
    before: float
    """Loss at the start, or the lowest one if what was learned is lost; NaN if there is none."""
    after: float
    """Median of the last losses; NaN if they are not finite."""
    num_steps: int
    """Steps without a finite loss."""
    good_step: int
    """Last step whose update left good weights, as far as the losses tell: their own loss is that
    of the next step."""
    not_finite_step: int = 0
    """First step without a finite loss or gradient; 0 if all are finite."""
    peak: float = np.nan
    """Highest loss; NaN if it is not finite."""
    student: str = ""
    """Name of the student that diverged; empty for the job's own model."""


def find_divergence(
    steps: Steps, *, has_error: bool, is_frozen: bool = False, students: Iterable[str] = ()
) -> Divergence | None:
    """Return how a loss diverged; None if none did.

    With `has_error` an error ended the step after the last one, because a loss or gradient was not
    finite. The loss of a model that `is_frozen` follows from the text alone, and is not judged.
    Those of `students` are, on the text, in steps that have one.
    """
    loss, numbers = steps.loss, steps.step
    rows = np.flatnonzero(~np.isfinite(loss) & ~(steps.skipped > 0))
    if len(rows) and not is_frozen:
        return _not_finite(loss[: rows[0]], numbers[: rows[0]], int(numbers[rows[0]]), len(rows))
    if has_error:
        last = int(numbers[-1]) if len(numbers) else 0
        return _not_finite(loss, numbers, last + 1, 1)
    losses = {} if is_frozen else {"": loss}
    losses |= {name: steps.figures.get(f"{name}/loss", loss[:0]) for name in students}
    for name, values in losses.items():
        known = np.flatnonzero(np.isfinite(values))
        found = _find_rise(values[known], numbers[known])
        if found is not None:
            return replace(found, student=name)
    return None


def _not_finite(loss: Floats, numbers: Floats, step: int, num_steps: int) -> Divergence:
    """Return the divergence of `step`, whose loss or gradient is not finite; the losses before it
    may have risen already."""
    known = np.flatnonzero(np.isfinite(loss))
    rise = _find_rise(loss[known], numbers[known])
    # The weights before `step` are wrong too: from them, its samples fail at any learning rate.
    begin, good_step = (step, step - 2) if rise is None else (rise.step, rise.good_step)
    return Divergence("not finite", begin, np.nan, np.nan, num_steps, good_step, step)


def _find_rise(loss: Floats, numbers: Floats) -> Divergence | None:
    """Return how a finite loss rose at the end, if it did."""
    if len(loss) < _FEWEST_STEPS:
        return _find_explosion(loss, numbers)
    first, start = float(loss[0]), float(np.median(loss[:3]))
    end = float(np.median(loss[-_tail(loss) :]))
    usual = np.median(np.lib.stride_tricks.sliding_window_view(loss, _WINDOW), axis=1)
    is_high = end > _EXPLODED * start or end > _EXPLODED_AT_ONCE * first
    least = min(first, start)
    is_ruined = loss.max() > _PEAK * least and end > _NO_BETTER * least
    if is_high or is_ruined or _stays_high(loss):
        limit = _ONSET * least
        onset = _onset(loss, usual, limit) if is_high else int((loss > limit).argmax())
        found = _risen("exploded", int(numbers[onset]), first, end)
        return replace(found, peak=float(loss.max()))
    low, lowest = float(usual.min()), int(usual.argmin())
    fallen = start - low
    noise = float(np.median(np.abs(np.diff(loss)))) * 1.4826 / np.sqrt(2)
    if fallen > max(_LEARNED * abs(start), _NOISE * noise) and end > low + fallen / 2:
        onset = lowest + _onset(loss[lowest:], usual[lowest:], low + fallen / 2)
        return _risen("lost", int(numbers[onset]), low, end)
    return None


def _risen(kind: Literal["exploded", "lost"], step: int, before: float, after: float) -> Divergence:
    """Return the divergence of a loss that is wrong from `step` on: the weights of the step before
    were wrong already."""
    return Divergence(kind, step, before, after, 0, step - 2)


def _find_explosion(loss: Floats, numbers: Floats) -> Divergence | None:
    """Return how the loss of a few steps exploded: their second half is far above the first one, or
    three and more of them all are."""
    if len(loss) < 2:
        return None
    last = loss[-(len(loss) // 2) :]
    end, stays = float(np.median(last)), len(last) >= 3 and last.min() > _ONSET * loss[0]
    if not 0 < loss[0] < end or not (stays or end > _EXPLODED_AT_ONCE * loss[0]):
        return None
    onset = int(np.flatnonzero(loss > _ONSET * loss[0])[0])
    return _risen("exploded", int(numbers[onset]), float(loss[0]), end)


def _stays_high(loss: Floats) -> bool:
    """Return whether the last third is above the start, such as a loss that exploded and sinks
    again with the learning rate."""
    at_once = loss[1:3].min() > _EXPLODED_AT_ONCE * loss[0]
    start = loss[0] if at_once else loss[:3].max()
    return bool(np.quantile(loss[-len(loss) // 3 :], _FEW) > _HIGHER * start)


def _onset(loss: Floats, usual: Floats, limit: float) -> int:
    """Return the index of the first loss above `limit` that is followed by more of them; `usual` is
    the median of each window of losses."""
    above = np.flatnonzero((loss[: len(usual)] > limit) & (usual > limit))
    if len(above):
        return int(above[0])
    first = len(loss) - _tail(loss) + int((loss[-_tail(loss) :] > limit).argmax())
    while first > 0 and loss[first - 1] > limit:
        first -= 1
    return first


def _tail(loss: Floats) -> int:
    """Return the number of losses at the end."""
    return min(_TAIL, max(3, len(loss) // 10))
