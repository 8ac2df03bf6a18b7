"""Learning charts: loss, learning rate and gradient norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moesaic.report.charts.figure import (
    SERIES,
    Figure,
    curve,
    diamonds,
    layout,
    raw_and_smooth,
    resumes,
)
from moesaic.report.log import Checkpoint
from moesaic.report.run_stats import RunStats
from moesaic.report.series import MAX_POINTS, keep_extremes
from moesaic.report.wording import digits, loss, step_range

_MAX_TICKS = 200
_STATES = {"done": "saved", "writing": "not committed", "failed": "failed"}


def figures(run: RunStats) -> list[Figure]:
    """Return the learning charts."""
    return [_loss(run), _learning_rate(run), _gradient_norm(run)]


def _loss(run: RunStats) -> Figure:
    """Chart the training loss, raw and smoothed, with validations, checkpoints and resumes."""
    steps = run.steps
    data = raw_and_smooth(steps.step, steps.loss, "training", SERIES[0])
    if run.validations:
        data.append(diamonds(run.validations[-MAX_POINTS:], "validation", SERIES[1]))
    if run.checkpoints:
        data.append(_ticks(run.checkpoints[-_MAX_TICKS:]))
    span = step_range(int(steps.step[0]), run.last_step)
    return Figure(
        "loss",
        "Loss",
        "Cross-entropy per token. Look for jumps, and for validation that rises as training falls."
        + (" Dotted lines are resumes." if len(run.launches) > 1 else ""),
        f"Training loss over {span}: from {loss(float(steps.loss[0]))} to "
        f"{loss(float(steps.loss[-1]))}, with {len(run.validations)} validation losses.",
        data,
        layout(
            yaxis2={"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
            shapes=resumes(run),
        ),
        span=8,
        height=430,
    )


def _learning_rate(run: RunStats) -> Figure:
    x, y = keep_extremes(run.steps.step, run.steps.lr)
    return Figure(
        "learning-rate",
        "Learning rate",
        "Rate of each step. Look for warmup and decay.",
        f"Learning rate by step: last {digits(float(run.steps.lr[-1]))}.",
        [curve(x, y, "learning rate", SERIES[2], hovertemplate="%{y:.3g}")],
        layout(showlegend=False, yaxis={"rangemode": "tozero", "exponentformat": "e", "nticks": 5}),
        span=4,
        height=160,
    )


def _gradient_norm(run: RunStats) -> Figure:
    """Chart the global gradient norm before clipping."""
    steps, clip = run.steps, run.setting("train.clip")
    shapes: list[dict[str, Any]] = []
    guide = "Before clipping. Look for peaks where the loss jumps."
    if clip:
        line = {"color": "var(--ink-soft)", "width": 1, "dash": "dash"}
        shapes.append({"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": clip, "y1": clip,
                       "line": line})  # fmt: skip
        guide = f"Before clipping. Look for steps over {clip:g} (dashed)."
    finite = steps.grad_norm[np.isfinite(steps.grad_norm)]
    is_wide = len(finite) > 0 and 0 < 30 * finite.min() < finite.max()
    log_axis = {"type": "log", "dtick": 1, "exponentformat": "power"}
    return Figure(
        "gradient-norm",
        "Gradient norm",
        guide,
        f"Global gradient norm by step: last {digits(float(steps.grad_norm[-1]))}.",
        raw_and_smooth(steps.step, steps.grad_norm, "gradient norm", SERIES[3]),
        layout(
            showlegend=False,
            shapes=shapes,
            yaxis=log_axis if is_wide else {"rangemode": "tozero", "nticks": 5},
        ),
        span=4,
        height=160,
    )


def _ticks(checkpoints: Sequence[Checkpoint]) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "markers", "name": "checkpoint", "yaxis": "y2",
        "x": [checkpoint.step for checkpoint in checkpoints],
        "y": [0.012] * len(checkpoints),
        "text": [_STATES[checkpoint.state] for checkpoint in checkpoints],
        "marker": {"size": 9, "color": "var(--ink-soft)", "symbol": "triangle-up"},
        "hovertemplate": "%{text} at step %{x}",
    }  # fmt: skip
