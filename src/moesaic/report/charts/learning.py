"""Learning charts: loss, learning rate, gradient norm and auxiliary losses."""

from __future__ import annotations

from typing import Any

import numpy as np

from moesaic.report.charts.figure import (
    FAINT,
    FEW,
    SERIES,
    Figure,
    Floats,
    column,
    curve,
    layout,
    marks,
)
from moesaic.report.facts import RunFacts
from moesaic.report.log import Checkpoint
from moesaic.report.series import MAX_POINTS, keep_extremes, sample, smooth
from moesaic.report.wording import loss as loss_text
from moesaic.report.wording import stretch, three

_MAX_TICKS = 200
_STATES = {"done": "saved", "writing": "not committed", "failed": "failed"}


def loss(run: RunFacts) -> Figure:
    """Chart the training loss, raw and smoothed, with validations, checkpoints and resumes."""
    steps = run.steps
    data = raw_and_smooth(steps.step, steps.loss, "training", SERIES[0])
    validations = [v for v in run.validations if np.isfinite(v.loss)][-MAX_POINTS:]
    if validations:
        data.append(
            {
                "type": "scatter", "mode": "lines+markers", "name": "validation",
                "x": [validation.step for validation in validations],
                "y": column(np.array([validation.loss for validation in validations])),
                "line": {"color": SERIES[1], "width": 1, "dash": "dot"},
                "marker": {"size": 8, "symbol": "diamond", "color": SERIES[1],
                           "line": {"color": "var(--card)", "width": 1}},
                "hovertemplate": "%{y:.4f} at step %{x}",
            }
        )  # fmt: skip
    if run.checkpoints:
        data.append(_ticks(run.checkpoints[-_MAX_TICKS:]))
    resumed = [part.step for part in run.parts[1:]]
    return Figure(
        "loss",
        "Loss",
        "Cross-entropy per token. Look for jumps, and for validation that rises as training falls."
        + (" Dotted lines are resumes." if resumed else ""),
        _loss_alt(run, len(validations)),
        data,
        layout(
            yaxis2={"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
            shapes=marks(resumed),
        ),
        span=8,
        height=430,
    )


def learning_rate(run: RunFacts) -> Figure:
    """Chart the learning rate of each step."""
    rates = run.steps.lr
    peak = float(np.nanmax(rates)) if np.isfinite(rates).any() else np.nan
    return Figure(
        "learning-rate",
        "Learning rate",
        "Rate of each step. Look for warmup and decay.",
        f"Learning rate by step: highest {three(peak)}, last {three(float(rates[-1]))}.",
        [
            curve(
                *sample(run.steps.step, rates), "learning rate", SERIES[2], hovertemplate="%{y:.3g}"
            )
        ],
        layout(showlegend=False, yaxis={"rangemode": "tozero", "exponentformat": "e", "nticks": 5}),
        span=4,
        height=160,
    )


def gradient_norm(run: RunFacts) -> Figure:
    """Chart the global gradient norm before clipping."""
    steps, clip = run.steps, run.setting("train.clip")
    shapes: list[dict[str, Any]] = []
    guide = "Before clipping. Look for peaks where the loss jumps."
    if isinstance(clip, (int, float)) and clip > 0:
        line = {"color": "var(--ink-soft)", "width": 1, "dash": "dash"}
        shapes.append({"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": clip, "y1": clip,
                       "line": line})  # fmt: skip
        guide = f"Before clipping. Look for steps over {clip:g} (dashed)."
    finite = steps.grad_norm[np.isfinite(steps.grad_norm)]
    median = float(np.median(finite)) if len(finite) else np.nan
    wide = len(finite) > 0 and finite.min() > 0 and finite.max() / finite.min() > 30
    return Figure(
        "gradient-norm",
        "Gradient norm",
        guide,
        f"Global gradient norm by step: median {three(median)}.",
        raw_and_smooth(steps.step, steps.grad_norm, "gradient norm", SERIES[3]),
        layout(
            showlegend=False,
            shapes=shapes,
            yaxis=_log_axis() if wide else {"rangemode": "tozero", "nticks": 5},
        ),
        span=4,
        height=160,
    )


def auxiliary(run: RunFacts) -> list[Figure]:
    """Chart the unweighted balance and z loss, if the run has them."""
    figures = []
    for name, title, values, look_for in (
        (
            "balance-loss",
            "Balance loss",
            run.steps.balance_loss,
            "If it is flat and loads are uneven",
        ),
        ("z-loss", "Z loss", run.steps.z_loss, "If it grows"),
    ):
        finite = values[np.isfinite(values)]
        if not len(finite) or not finite.any():
            continue
        key = name.replace("-", "_")
        weight = run.setting(f"routing.{key}")
        now = f" (now {weight:g})" if isinstance(weight, (int, float)) else ""
        figures.append(
            Figure(
                name,
                title,
                f"Unweighted. {look_for}, raise routing.{key}{now}.",
                f"{title} by step: first {three(float(finite[0]))}, "
                f"last {three(float(finite[-1]))}.",
                raw_and_smooth(run.steps.step, values, title.lower(), SERIES[4]),
                layout(showlegend=False),
                span=4,
                height=230,
            )
        )
    return figures


def raw_and_smooth(step: Floats, values: Floats, name: str, colour: str) -> list[dict[str, Any]]:
    """Return a faint line through every value, and a strong one through the moving mean."""
    form = "%{y:.4~g}"
    raw = curve(
        *keep_extremes(step, values), name, colour, width=1, opacity=FAINT, hovertemplate=form,
    )  # fmt: skip
    if len(step) < FEW:
        return [raw | {"opacity": 1}]
    strong = curve(
        *sample(step, smooth(values)), f"{name}, smoothed", colour, width=2.25, hovertemplate=form
    )
    return [raw, strong]


def _log_axis() -> dict[str, Any]:
    return {"type": "log", "dtick": 1, "exponentformat": "power"}


def _ticks(checkpoints: list[Checkpoint]) -> dict[str, Any]:
    failed = [checkpoint.state != "done" for checkpoint in checkpoints]
    return {
        "type": "scatter", "mode": "markers", "name": "checkpoint", "yaxis": "y2",
        "x": [checkpoint.step for checkpoint in checkpoints],
        "y": [0.012] * len(checkpoints),
        "text": [_STATES[checkpoint.state] for checkpoint in checkpoints],
        "marker": {
            "size": 9, "color": "var(--ink-soft)",
            "symbol": ["x-thin-open" if bad else "triangle-up" for bad in failed],
        },
        "hovertemplate": "%{text} at step %{x}",
    }  # fmt: skip


def _loss_alt(run: RunFacts, num_validations: int) -> str:
    steps = run.steps
    span = stretch(int(steps.step[0]), int(steps.step[-1]))
    text = (
        f"Training loss over {span}: from {loss_text(float(steps.loss[0]))} "
        f"to {loss_text(float(steps.loss[-1]))}."
    )
    if num_validations:
        text += (
            f" {num_validations} validation losses, the last {loss_text(run.validations[-1].loss)}."
        )
    return text
