"""Charts of click prediction: metrics by step, and rows of the embedding table."""

from __future__ import annotations

from typing import Any

import numpy as np

from moesaic.report.charts.figure import (
    SERIES,
    SOFT,
    Figure,
    column,
    curve,
    label,
    raw_and_smooth,
    resumes,
)
from moesaic.report.run_stats import RunStats
from moesaic.report.series import MAX_POINTS

ROWS = {"rows": "all", "rows_in_memory": "in memory", "rows_on_drive": "on the drive"}
"""Numbers of rows that a step logs, in words."""
_METRICS = (
    ("auc", "AUC", "1 ranks every click above the rest, 0.5 is chance. Look for validation "
     "that falls as training rises.", 6),
    ("normalized_entropy", "Normalised entropy",
     "Log-loss over that of predicting the mean. Look for values from 1 on: nothing was "
     "learned.", 6),
    ("calibration", "Calibration",
     "Predicted clicks over clicks; right is 1 (dashed). Look for a lasting distance.", 6),
    ("gauc", "GAUC", "Mean AUC of users, weighted by samples. Look for AUC that rises without "
     "it.", 6),
)  # fmt: skip
"""Names, titles, guides and widths."""


def figures(run: RunStats) -> list[Figure]:
    """Return the charts of metrics that the run logged."""
    charts = [_metric(run, *metric) for metric in _METRICS]
    return [chart for chart in charts if chart.data]


def table_figures(run: RunStats) -> list[Figure]:
    """Return the charts of the embedding table; none if the run logged no rows."""
    steps = run.steps
    data = [
        curve(steps.step, steps.figures[name], text, colour, "%{y:,.0f}")
        for (name, text), colour in zip(ROWS.items(), SERIES, strict=False)
        if name in steps.figures
    ]
    if not data:
        return []
    return [
        Figure(
            "rows",
            "Rows of the table",
            "Look for growth without an end: set table.max_rows, table.evict_days or "
            "table.admit_count.",
            data,
            {"shapes": resumes(run), "showlegend": len(data) > 1,
             "yaxis": {"rangemode": "tozero", "tickformat": "~s"}},
            span=12,
        )
    ]  # fmt: skip


def _metric(run: RunStats, name: str, title: str, guide: str, span: int) -> Figure:
    """Chart a metric of training steps and of validations."""
    data, steps = list[dict[str, Any]](), run.steps
    if name in steps.figures:
        data += raw_and_smooth(steps.step, steps.figures[name], "training", SERIES[0])
    shown = [one for one in run.validations if name in one.figures][-MAX_POINTS:]
    if shown:
        data.append(
            {
                "type": "scatter", "mode": "lines+markers", "name": label("validation"),
                "x": [one.step for one in shown],
                "y": column(np.array([one.figures[name] for one in shown])),
                "line": {"color": SERIES[1]}, "hovertemplate": "%{y:.4f} at step %{x}",
                "marker": {"size": 8, "symbol": "diamond", "color": SERIES[1]},
            }
        )  # fmt: skip
    shapes = resumes(run)
    if name == "calibration":
        shapes.append(
            {
                "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1,
                "line": {"color": SOFT, "width": 1, "dash": "dash"},
            }
        )  # fmt: skip
    return Figure(name.replace("_", "-"), title, guide, data, {"shapes": shapes}, span=span)
