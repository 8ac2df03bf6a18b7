"""Learning charts: loss, learning rate and gradient norm."""

from __future__ import annotations

from moesaic.report.charts.figure import (
    SERIES,
    SOFT,
    Figure,
    curve,
    diamonds,
    raw_and_smooth,
    resumes,
)
from moesaic.report.run_stats import RunStats


def figures(run: RunStats) -> list[Figure]:
    """Return the learning charts; none of a frozen teacher, which learns nothing."""
    if run.is_frozen:
        return []
    return [_loss(run), _learning_rate(run), _gradient_norm(run)]


def _loss(run: RunStats) -> Figure:
    data = raw_and_smooth(run.steps.step, run.steps.loss, "training", SERIES[0])
    if run.validations:
        data.append(diamonds(run.validations, "validation", SERIES[1]))
    return Figure(
        "loss",
        "Loss",
        "Look for jumps, and for validation that rises as training falls."
        + (" Dotted lines are resumes." if len(run.launches) > 1 else ""),
        data,
        {"shapes": resumes(run)},
        span=8,
        height=430,
    )


def _learning_rate(run: RunStats) -> Figure:
    return Figure(
        "learning-rate",
        "Learning rate",
        "Rate of each step. Look for warmup and decay.",
        [curve(run.steps.step, run.steps.lr, "learning rate", SERIES[2], "%{y:.3g}")],
        {"showlegend": False,
         "yaxis": {"rangemode": "tozero", "exponentformat": "e", "nticks": 5}},
        span=4,
        height=160,
    )  # fmt: skip


def _gradient_norm(run: RunStats) -> Figure:
    """Chart the global gradient norm before clipping."""
    clip = run.setting("train.clip")
    at_clip = {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": clip, "y1": clip,
        "line": {"color": SOFT, "width": 1, "dash": "dash"},
    }  # fmt: skip
    return Figure(
        "gradient-norm",
        "Gradient norm",
        f"Before clipping. Look for steps over {clip:g} (dashed)."
        if clip
        else "Before clipping. Look for peaks where the loss jumps.",
        raw_and_smooth(run.steps.step, run.steps.grad_norm, "gradient norm", SERIES[3]),
        {"showlegend": False, "shapes": [at_clip] if clip else [],
         "yaxis": {"rangemode": "tozero", "nticks": 5}},
        span=4,
        height=160,
    )  # fmt: skip
