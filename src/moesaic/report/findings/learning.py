"""Findings on learning: NaN losses, skipped steps, spikes, overfitting, and how a run ended."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from moesaic.report.findings.finding import Finding
from moesaic.report.log import Checkpoint, Steps, Validation
from moesaic.report.run_stats import RunStats
from moesaic.report.series import median
from moesaic.report.wording import digits, listing, loss, percent, plural

Floats = npt.NDArray[np.float64]

_WINDOW = 24
"""Earlier steps that estimate the noise of the loss."""
_NEAR = 9
"""Last steps of that window, whose median is the expected loss."""
_SPIKE_SIGMAS = 8.0
"""A spike exceeds the expected loss by this many robust standard deviations ..."""
_SPIKE_RISE = 0.1
"""... and by this share."""
_OVERFIT_RISE = 0.01
"""Overfitting raises the validation loss by this share ..."""
_OVERFIT_SIGMAS = 5.0
"""... and by this many standard deviations of its noise."""
_OFTEN = 0.05
"""Share of skipped steps above which a note becomes a warning."""


def no_steps(run: RunStats) -> Finding:
    """Report a run without a finished step."""
    text = "The run ended before its first step. Read its terminal output for the cause."
    if run.status == "running":
        text = "The run is starting. Write the report again after its first step."
    return Finding("no_steps", "note", "No step has finished yet", text)


def not_a_number(steps: Steps) -> Finding | None:
    """Report losses that are NaN or infinite."""
    rows = np.flatnonzero(~np.isfinite(steps.loss) & ~(steps.skipped > 0))
    if not len(rows):
        return None
    step = int(steps.step[rows[0]])
    text = (
        f"{len(rows):,} of {len(steps):,} steps from step {step:,} on have no finite loss, and "
        "the weights after it are useless. Resume from an earlier checkpoint with a lower "
        "optimizer.lr, a longer schedule.warmup or a smaller train.clip. If train.precision is "
        '"bf16", try "fp32".'
    )
    return Finding(
        "not_a_number", "problem", f"The loss diverged (NaN or infinite) at step {step:,}", text
    )


def skipped(steps: Steps) -> Finding | None:
    """Report fp16 steps that were skipped for an overflow."""
    rows = np.flatnonzero(steps.skipped > 0)
    if not len(rows):
        return None
    often = len(rows) > _OFTEN * len(steps)
    text = (
        f"The last was step {int(steps.step[rows[-1]]):,}. Gradients overflowed fp16, the "
        "optimizer did not run, and the loss scale halved each time; it is now "
        f"{steps.loss_scale[-1]:g}. A few skips at the start are normal."
    )
    if often:
        text += (
            ' These are too many: lower optimizer.lr, or set train.precision = "bf16" or "fp32".'
        )
    title = f"{plural(len(rows), 'step')} of {len(steps):,} skipped for fp16 overflow"
    return Finding("skipped", "warning" if often else "note", title, text)


def spike_rows(values: Floats) -> list[tuple[int, float]]:
    """Return (row, expected value) of every spike; of neighbours, the highest."""
    if len(values) <= _WINDOW:
        return []
    windows = np.lib.stride_tricks.sliding_window_view(values, _WINDOW)[:-1]
    usual = np.median(windows[:, -_NEAR:], axis=1)
    over = values[_WINDOW:] - usual
    # Differences measure noise even while the loss falls. A window is short, so the noise of the
    # whole run is the lower bound.
    jumps = np.abs(np.diff(values))
    general = jumps[np.isfinite(jumps)]
    local = np.median(np.abs(np.diff(windows, axis=1)), axis=1)
    spread = np.maximum(local, np.median(general) if len(general) else 0.0)
    spread *= 1.4826 / math.sqrt(2)
    rows = np.flatnonzero((over > _SPIKE_SIGMAS * spread) & (over > _SPIKE_RISE * np.abs(usual)))
    spikes: list[tuple[int, float]] = []
    last = -_WINDOW
    for row in (rows + _WINDOW).tolist():
        if row - last > _WINDOW // 2:
            spikes.append((row, float(usual[row - _WINDOW])))
        elif values[row] > values[spikes[-1][0]]:
            spikes[-1] = (row, spikes[-1][1])
        last = row
    return spikes


def spikes(run: RunStats) -> Finding | None:
    """Report sudden rises of the training loss."""
    steps, rows = run.steps, spike_rows(run.steps.loss)
    if not rows:
        return None
    worst, usual = max(rows, key=lambda pair: float(steps.loss[pair[0]]) - pair[1])
    where = listing([f"{int(steps.step[row]):,}" for row, _ in rows], 8)
    clip, rate = run.setting("train.clip"), run.setting("optimizer.lr")
    text = (
        f"It rose from {loss(usual)} to {loss(float(steps.loss[worst]))} at step "
        f"{int(steps.step[worst]):,}, with gradient norm {digits(float(steps.grad_norm[worst]))} "
        f"(median {digits(median(steps.grad_norm))}). One spike that recovers is harmless. If "
        f"spikes recur, lower optimizer.lr (now {rate}), lengthen schedule.warmup, or "
        + (f"lower train.clip (now {clip:g})." if clip else "set train.clip = 1.0.")
    )
    title = f"The loss spiked at {'step' if len(rows) == 1 else 'steps'} {where}"
    return Finding("loss_spikes", "warning", title, text)


def overfitting(validations: list[Validation]) -> Finding | None:
    """Report a validation loss that rises by more than its noise, in medians of three."""
    losses = np.array([validation.loss for validation in validations])
    if len(losses) < 6 or not np.isfinite(losses).all():
        return None
    threes = np.lib.stride_tricks.sliding_window_view(losses, 3)
    level, noise = np.median(threes, axis=1), _noise(losses)
    best = int(level.argmin())
    rise = float(level[-1] - level[best])
    if len(level) - best < 3 or rise < max(_OVERFIT_RISE * level[best], _OVERFIT_SIGMAS * noise):
        return None
    lowest = validations[best + int(losses[best : best + 3].argmin())]
    at = lowest.step
    text = (
        f"Validation loss was {loss(lowest.loss)} at step {at:,} and rose by about {loss(rise)} "
        f"({percent(rise / float(level[best]))}) by step {validations[-1].step:,}. "
        f"Use the checkpoint nearest to step {at:,}. Train on more data, for fewer train.steps, or "
        "with a higher optimizer.weight_decay."
    )
    return Finding("overfitting", "warning", f"Overfitting since step {at:,}", text)


def _noise(values: Floats) -> float:
    """Return the standard deviation around a straight line, from second differences."""
    return float(1.4826 * np.median(np.abs(np.diff(values, 2))) / math.sqrt(6))


def stopped(run: RunStats) -> Finding | None:
    """Report a run that stopped before its end."""
    if run.status != "stopped":
        return None
    planned = run.planned_steps
    goal = f" of {planned:,}" if planned else ""
    checkpoint = run.newest_checkpoint
    text = "The log has no end event: the process was killed or crashed. "
    if run.ended:
        text = f"The run was {run.ended}. "
    if checkpoint is None:
        text += (
            "No checkpoint was committed, so the work is lost. Find the cause in the terminal or "
            "the scheduler's log, and set checkpoint.every for the next run."
        )
    else:
        lost = run.last_step - checkpoint.step
        text += (
            f"Resume from the newest checkpoint, step {checkpoint.step:,}; it repeats "
            f"{plural(lost, 'step')}."
        )
    return Finding("stopped", "problem", f"The run stopped at step {run.last_step:,}{goal}", text)


def failed_saves(checkpoints: list[Checkpoint]) -> Finding | None:
    """Report checkpoints that failed."""
    failed = [checkpoint for checkpoint in checkpoints if checkpoint.state == "failed"]
    if not failed:
        return None
    where = listing([f"{checkpoint.step:,}" for checkpoint in failed])
    noun = "step" if len(failed) == 1 else "steps"
    error = failed[-1].error or "not recorded"
    text = f"The last error was: {error}. Check free space and permissions on that disk."
    title = f"{plural(len(failed), 'checkpoint')} failed to write ({noun} {where})"
    return Finding("failed_saves", "problem", title, text)
