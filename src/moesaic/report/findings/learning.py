"""What stands out in how a run learned and ended: broken figures, spikes, overfitting, a stop."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from moesaic.report.facts import RunFacts
from moesaic.report.findings.experts import Settings
from moesaic.report.findings.finding import Finding
from moesaic.report.log import Checkpoint, Steps, Validation
from moesaic.report.series import middle
from moesaic.report.wording import listing, loss, percent, plural, three

Floats = npt.NDArray[np.float64]

_WINDOW = 24
"""Steps before a step that say how much its loss may vary ..."""
_NEAR = 9
"""... and the last of them that say what it should be."""
_SPREADS = 8.0
"""A spike is this many robust standard deviations over what it should be ..."""
_RISE = 0.1
"""... and this share of it."""
_WORSE = 0.01
"""Overfitting is a rise of the validation loss by this share ..."""
_SIGMAS = 5.0
"""... and by this many standard deviations of its noise."""
_OFTEN = 0.05
"""Share of skipped steps that is too large."""


def not_a_number(steps: Steps) -> Finding | None:
    """Losses that are infinite or no number."""
    rows = np.flatnonzero(~np.isfinite(steps.loss) & ~(steps.skipped > 0))
    if not len(rows):
        return None
    step = int(steps.step[rows[0]])
    text = (
        f"From step {step:,} on, {len(rows):,} of {len(steps):,} steps have no usable loss: the "
        "weights after that are worthless. Resume from a checkpoint before it with a lower "
        "optimizer.lr, a longer schedule.warmup or a smaller train.clip; where train.precision is "
        "bf16, try fp32."
    )
    return Finding("not_a_number", "problem", f"The loss is not a number at step {step:,}", text)


def skipped(steps: Steps) -> Finding | None:
    """Steps of fp16 whose gradient overflowed."""
    rows = np.flatnonzero(steps.skipped > 0)
    if not len(rows):
        return None
    often = len(rows) > _OFTEN * len(steps)
    text = (
        f"The last was step {int(steps.step[rows[-1]]):,}. Their gradients were beyond the range "
        "of fp16: nothing was updated, and the scale of the loss halved each time; now it is "
        f"{steps.loss_scale[-1]:g}. A few are how that scale is found, most of them at the start."
    )
    if often:
        text += ' So many are not: lower optimizer.lr, or set train.precision = "bf16" or "fp32".'
    title = f"{plural(len(rows), 'step')} of {len(steps):,} skipped for an overflow of fp16"
    return Finding("skipped", "warning" if often else "note", title, text)


def spike_rows(values: Floats) -> list[tuple[int, float]]:
    """(row, median before it) of every value that leaps out; of neighbours, the highest."""
    if len(values) <= _WINDOW:
        return []
    windows = np.lib.stride_tricks.sliding_window_view(values, _WINDOW)[:-1]
    usual = np.median(windows[:, -_NEAR:], axis=1)
    over = values[_WINDOW:] - usual
    # Differences see the noise of a loss that is still falling. A window is too short to be sure
    # of it: the whole run's is the least that is assumed.
    jumps = np.abs(np.diff(values))
    general = jumps[np.isfinite(jumps)]
    local = np.median(np.abs(np.diff(windows, axis=1)), axis=1)
    spread = np.maximum(local, np.median(general) if len(general) else 0.0)
    spread *= 1.4826 / math.sqrt(2)
    rows = np.flatnonzero((over > _SPREADS * spread) & (over > _RISE * np.abs(usual)))
    found: list[tuple[int, float]] = []
    last = -_WINDOW
    for row in rows.tolist():
        at = row + _WINDOW
        if at - last > _WINDOW // 2:
            found.append((at, float(usual[row])))
        elif values[at] > values[found[-1][0]]:
            found[-1] = (at, found[-1][1])
        last = at
    return found


def spikes(steps: Steps, setting: Settings) -> Finding | None:
    """Sudden rises of the training loss."""
    found = spike_rows(steps.loss)
    if not found:
        return None
    worst, usual = max(found, key=lambda pair: float(steps.loss[pair[0]]) - pair[1])
    where = listing([f"{int(steps.step[row]):,}" for row, _ in found], 8)
    text = (
        f"At step {int(steps.step[worst]):,} it was {loss(float(steps.loss[worst]))}, "
        f"just before {loss(usual)}"
    )
    norm, usual_norm = float(steps.grad_norm[worst]), middle(steps.grad_norm)
    if math.isfinite(norm):
        text += f"; the gradient norm was {three(norm)} (median {three(usual_norm)})"
    clip, rate = setting("train.clip"), setting("optimizer.lr")
    text += ". One spike that heals is harmless. If they recur, lower optimizer.lr"
    text += f" (now {rate:g})" if isinstance(rate, (int, float)) else ""
    text += ", lengthen schedule.warmup, or "
    text += f"lower train.clip (now {clip:g})" if clip else "set train.clip = 1.0"
    title = f"The loss leapt at {'step' if len(found) == 1 else 'steps'} {where}"
    return Finding("loss_spikes", "warning", title, text + ".")


def overfitting(validations: list[Validation]) -> Finding | None:
    """A validation loss that rises again, by more than its noise; medians of three passes count."""
    losses = np.array([validation.loss for validation in validations])
    if len(losses) < 6 or not np.isfinite(losses).all():
        return None
    threes = np.lib.stride_tricks.sliding_window_view(losses, 3)
    level, noise = np.median(threes, axis=1), _noise(losses)
    best = int(level.argmin())
    rise = float(level[-1] - level[best])
    if len(level) - best < 3 or rise < max(_WORSE * level[best], _SIGMAS * noise):
        return None
    lowest = validations[best + int(losses[best : best + 3].argmin())]
    at = lowest.step
    text = (
        f"Validation loss was {loss(lowest.loss)} at step {at:,} and rose by about {loss(rise)} "
        f"({percent(rise / float(level[best]))}) by step {validations[-1].step:,}. "
        f"Use the checkpoint nearest to step {at:,}; train on more text, for fewer steps, or with "
        "more optimizer.weight_decay."
    )
    return Finding("overfitting", "warning", f"Overfitting since step {at:,}", text)


def _noise(values: Floats) -> float:
    """The standard deviation around a straight course, from second differences."""
    return float(1.4826 * np.median(np.abs(np.diff(values, 2))) / math.sqrt(6))


def stopped(run: RunFacts) -> Finding | None:
    """A run that fell silent before its end."""
    if run.status != "stopped":
        return None
    planned = run.planned_steps
    goal = f" of {planned:,}" if planned else ""
    checkpoint = run.newest_checkpoint
    text = "Its log has no end: the process was killed or crashed. "
    if run.ended:
        text = f"It was {run.ended}. "
    if checkpoint is None:
        text += (
            "No checkpoint was committed, so the work is lost. Look at the terminal or the "
            "scheduler's log for the cause; set checkpoint.every for the next run."
        )
    else:
        lost = run.last_step - checkpoint.step
        text += (
            f"The newest committed checkpoint is of step {checkpoint.step:,}; resuming from it "
            f"repeats {plural(lost, 'step')}."
        )
    return Finding("stopped", "problem", f"The run stopped at step {run.last_step:,}{goal}", text)


def failed_saves(checkpoints: list[Checkpoint]) -> Finding | None:
    """Checkpoints that could not be written."""
    failed = [checkpoint for checkpoint in checkpoints if checkpoint.state == "failed"]
    if not failed:
        return None
    where = listing([f"{checkpoint.step:,}" for checkpoint in failed])
    noun = "step" if len(failed) == 1 else "steps"
    error = failed[-1].error or "not recorded"
    text = f"The last error was: {error}. Check space and rights on that disk."
    title = f"{plural(len(failed), 'checkpoint')} could not be written ({noun} {where})"
    return Finding("failed_saves", "problem", title, text)
