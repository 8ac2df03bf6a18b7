"""Charts of classifiers, of clicks and of credibility: metrics by step, and rows of the embedding
table."""

from __future__ import annotations

from collections.abc import Sequence
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
    time_unit,
)
from moesaic.report.run_stats import RunStats
from moesaic.report.series import MAX_POINTS, Floats

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


_LABEL_METRICS = (
    ("credibility_loss", "Loss of the labels", "Cross-entropy; 0.69 is chance. Look for validation "
     "that rises as training falls.", 6),
    ("auc", "AUC", "1 ranks every original above all generated texts, 0.5 is chance. At 1 from the "
     "start, look for a give-away in the pairs.", 6),
    ("accuracy", "Accuracy", "Share of texts with the right label.", 6),
)  # fmt: skip
"""The same of a credibility head."""


def figures(run: RunStats) -> list[Figure]:
    """Return the charts of metrics that the run logged; none for a credibility head."""
    return [] if run.setting("credibility") is not None else _metrics(run, _METRICS)


def label_figures(run: RunStats) -> list[Figure]:
    """Return the charts of a credibility head; none if the run has none."""
    return [] if run.setting("credibility") is None else _metrics(run, _LABEL_METRICS)


def _metrics(run: RunStats, metrics: Sequence[tuple[str, str, str, int]]) -> list[Figure]:
    charts = [_metric(run, *metric) for metric in metrics]
    return [chart for chart in charts if chart.data]


def table_figures(run: RunStats) -> list[Figure]:
    """Return the charts of the embedding table; none if the run logged no rows."""
    rows = run.steps.figures.get("rows")
    if rows is None:
        return []
    tall = {"rangemode": "tozero"}
    charts = [
        Figure(
            "rows",
            "Rows of the table",
            "Look for growth without an end: set table.max_rows, table.evict_days or "
            "table.admit_count.",
            [curve(run.steps.step, rows, "rows", SERIES[2], "%{y:,.0f}")],
            {"shapes": resumes(run), "showlegend": False, "yaxis": {**tall, "tickformat": "~s"}},
            span=12,
        )
    ]
    if not run.passes:
        return charts
    stall_s, hits, raised = (_of_passes(run, name) for name in ("stall_s", "hits", "raised"))
    rows_read = np.where(hits + raised > 0, hits + raised, np.nan)
    steps = np.array([*run.passes], float)
    scale, unit = time_unit(float(np.nanmax(stall_s)))
    return [
        *charts,
        Figure(
            "pass-stall",
            "Waiting for the drive, by pass",
            "Time that rank 0 waited for the rows of a pass. If it grows, raise table.host or "
            "train.batch.",
            [curve(steps, stall_s / scale, "waiting", SERIES[1], f"%{{y:.3~g}} {unit}")],
            {"shapes": resumes(run), "showlegend": False,
             "yaxis": {**tall, "title": {"text": unit}}},
        ),
        Figure(
            "pass-hits",
            "Rows found in memory, by pass",
            "Share of the rows of a pass on rank 0; the others are read from the drive.",
            [curve(steps, 100 * hits / rows_read, "in memory", SERIES[2], "%{y:.1f}%")],
            {"shapes": resumes(run), "showlegend": False,
             "yaxis": {"range": [0, 100], "ticksuffix": "%"}},
        ),
    ]  # fmt: skip


def _of_passes(run: RunStats, name: str) -> Floats:
    return np.array([one.get(name, np.nan) for one in run.passes.values()])


def _metric(run: RunStats, name: str, title: str, guide: str, span: int) -> Figure:
    """Chart a metric of training steps and of validations."""
    data, steps = list[dict[str, Any]](), run.steps
    if name in steps.figures:
        known = np.isfinite(steps.figures[name])  # `log.loads_every` leaves steps out.
        values = steps.figures[name][known]
        data += raw_and_smooth(steps.step[known], values, "training", SERIES[0])
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
