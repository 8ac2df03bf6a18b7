"""What copies of experts made of uneven loads: the busiest rank's rows, and how many copies."""

from __future__ import annotations

import numpy as np

from moesaic.report.charts.figure import SERIES, Figure, curve, layout
from moesaic.report.facts import RunFacts
from moesaic.report.series import MAX_POINTS, sample, smooth
from moesaic.report.wording import three


def figures(run: RunFacts) -> list[Figure]:
    """Both, if a policy was asked in any step."""
    if not np.isfinite(run.steps.copies).any():
        return []
    return [_busiest(run), _copies(run)]


def _busiest(run: RunFacts) -> Figure:
    steps, data = run.steps, []
    named = (
        ("at home", steps.busiest_before, "var(--ink-soft)"),
        ("with copies", steps.busiest_after, SERIES[1]),
    )
    for name, values, colour in named:
        x, y = sample(steps.step, smooth(values, 0.01), MAX_POINTS)
        data.append(curve(x, y, name, colour, hovertemplate=f"{name}: %{{y:.2f}}x<extra></extra>"))
    before, after = (three(float(np.nanmean(values))) for _, values, _ in named)
    return Figure(
        "busiest-rank",
        "Busiest rank over the mean",
        "rows of the least even layer, smoothed; 1 is even",
        f"Rows of the busiest rank over the mean, by step: {before} on average if all experts were "
        f"computed at home, {after} with copies.",
        data,
        layout(hovermode="x", yaxis={"rangemode": "normal"}),
        span=4,
        height=230,
    )


def _copies(run: RunFacts) -> Figure:
    steps = run.steps
    x, y = sample(steps.step, steps.copies, MAX_POINTS)
    mean, planning_s = (float(np.nanmean(one)) for one in (steps.copies, steps.planning_s))
    return Figure(
        "expert-copies",
        "Copies of experts",
        "made in each step, over all layers",
        f"Copies of experts by step: {three(mean)} on average, decided on in "
        f"{three(1e3 * planning_s)} ms a step.",
        [curve(x, y, "copies", SERIES[1], hovertemplate="%{y:.0f} copies<extra></extra>")],
        layout(showlegend=False, yaxis={"rangemode": "tozero"}),
        span=4,
        height=230,
    )
