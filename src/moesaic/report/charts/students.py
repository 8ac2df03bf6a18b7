"""Charts of students: their losses on text, and their distances from their teachers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from moesaic.report.charts.figure import (
    SERIES,
    Figure,
    column,
    curve,
    label,
    resumes,
)
from moesaic.report.run_stats import STUDENT_TERMS, RunStats
from moesaic.report.series import MAX_POINTS, Floats, smooth

_DASHES = {"logits": "solid", "attention": "dash", "relations": "dot", "hidden": "dashdot"}
_FORM = "%{y:.4~g}"


def figures(run: RunStats) -> list[Figure]:
    """Return the charts of the students that the run has or had; none without students."""
    names = run.students
    charts = [_text_losses(run, names), _distances(run, names)]
    return [chart for chart in charts if names and chart.data]


def _text_losses(run: RunStats, names: Iterable[str]) -> Figure:
    """Chart the losses on text of the teacher and of all students, and their validations."""
    steps, data = run.steps, list[dict[str, Any]]()
    for index, name in enumerate(["", *names]):
        colour = SERIES[index % len(SERIES)]
        title = name or ("frozen teacher" if run.is_frozen else "teacher")
        values = steps.figures.get(f"{name}/loss") if name else steps.loss
        if values is not None:
            data.append(_smoothed(steps.step, values, title, colour))
        data += _validations(run, name, title, colour)
    return Figure(
        "student-losses",
        "Loss of all students",
        "Cross-entropy on text, smoothed; diamonds are validations. Look for students that stop "
        + ("far above their teacher." if run.is_frozen else "falling while their teacher learns."),
        data,
        {"shapes": resumes(run)},
        span=6,
        height=360,
    )


def _validations(run: RunStats, name: str, title: str, colour: str) -> list[dict[str, Any]]:
    """Return diamonds at the validations of a student, or of the teacher for an empty name."""
    pairs = [
        (one.step, one.figures.get(f"{name}/loss", np.nan) if name else one.loss)
        for one in run.validations[-MAX_POINTS:]
    ]
    pairs = [(step, value) for step, value in pairs if np.isfinite(value)]
    if not pairs:
        return []
    return [
        {
            "type": "scatter", "mode": "markers", "name": label(f"{title}, validation"),
            "x": [step for step, _ in pairs],
            "y": column(np.array([value for _, value in pairs])), "showlegend": False,
            "marker": {"size": 8, "symbol": "diamond", "color": colour},
            "hovertemplate": "%{y:.4f} at step %{x}",
        }
    ]  # fmt: skip


def _distances(run: RunStats, names: Iterable[str]) -> Figure:
    """Chart each distance of each student from its teacher."""
    data = []
    for index, name in enumerate(names, 1):
        for term in STUDENT_TERMS:
            values = run.steps.figures.get(f"{name}/{term}")
            if values is not None:
                one = _smoothed(
                    run.steps.step, values, f"{name}, {term}", SERIES[index % len(SERIES)]
                )
                one["line"]["dash"] = _DASHES[term]
                data.append(one)
    return Figure(
        "student-distances",
        "Distance of students from their teachers",
        "Losses without their weights, smoothed; near 0 while no model has learned. Look for one "
        "that still rises late: lower its student's lr, or give the loss more weight.",
        data,
        {"shapes": resumes(run), "yaxis": {"type": "log", "exponentformat": "e"}},
        span=6,
        height=360,
    )


def _smoothed(step: Floats, values: Floats, title: str, colour: str) -> dict[str, Any]:
    """Return a smoothed curve over the steps that have a value."""
    known = np.isfinite(values)  # `interval` leaves steps out.
    return curve(step[known], smooth(values[known]), title, colour, _FORM, width=2.25)
