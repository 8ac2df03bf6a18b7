"""Memory charts: traffic of expert state between memory and drive, and waiting for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from moesaic.report.charts.figure import (
    SERIES,
    Figure,
    curve,
    raw_and_smooth,
    resumes,
    time_unit,
)
from moesaic.report.run_stats import RunStats
from moesaic.report.series import Floats, edges

_COLUMNS = 300
"""Most points of a curve of means."""


def figures(run: RunStats) -> list[Figure]:
    """Return the memory charts; none for a run without a memory budget."""
    if not np.isfinite(run.steps.memory_hit_rate).any():
        return []
    return [_beside_computing(run), _waiting(run), _bandwidth(run)]


def _beside_computing(run: RunStats) -> Figure:
    """Chart a step as computing and waiting, beside the seconds with transfers in flight."""
    steps = run.steps
    scale, unit = time_unit(float(np.nanmax(steps.step_s)))
    bounds = edges(len(steps), min(len(steps), _COLUMNS))

    def mean_curve(seconds: Floats, name: str, colour: str, **extra: Any) -> dict[str, Any]:
        x, y = (
            np.add.reduceat(np.nan_to_num(values), bounds[:-1]) / np.diff(bounds)
            for values in (steps.step, seconds)
        )
        return curve(x, y / scale, name, colour, f"%{{y:.3~g}} {unit}", **extra)

    def area(seconds: Floats, name: str, colour: str) -> dict[str, Any]:
        return mean_curve(seconds, name, colour, width=0.5, stackgroup="step", fillcolor=colour)

    return Figure(
        "memory-step",
        "Drive beside computing",
        f"Mean {unit} of a step on rank 0, and of transfers in flight. Look for transfers as long "
        "as the step.",
        [
            area(steps.step_s - steps.memory_stall_s, "computing", SERIES[5]),
            area(steps.memory_stall_s, "waiting for the drive", SERIES[1]),
            mean_curve(steps.memory_read_s, "reads in flight", SERIES[0]),
            mean_curve(steps.memory_write_s, "writes in flight", SERIES[2]),
        ],
        {
            "shapes": resumes(run),
            "yaxis": {"rangemode": "tozero", "title": {"text": unit}},
        },
        span=12,
        height=280,
    )


def _waiting(run: RunStats) -> Figure:
    steps = run.steps
    return Figure(
        "memory-waiting",
        "Waiting for the drive",
        "Share of a step on rank 0, and of uses found in memory. Look for waiting over 10 percent.",
        [
            *raw_and_smooth(
                steps.step, 100 * steps.memory_stall_s / steps.step_s, "waiting", SERIES[1]
            ),
            curve(
                steps.step, 100 * steps.memory_hit_rate, "found in memory", SERIES[2], "%{y:.1f}%"
            ),
        ],
        {"shapes": resumes(run), "yaxis": {"range": [0, 100], "ticksuffix": "%"}},
        span=6,
        height=280,
    )


def _bandwidth(run: RunStats) -> Figure:
    steps = run.steps
    rates = {"read": steps.memory_read_bytes, "written": steps.memory_written_bytes}
    return Figure(
        "memory-bandwidth",
        "Traffic of the drive",
        "Bytes a second on rank 0. Compare with the speed of the drive in cluster.toml.",
        [
            curve(steps.step, values / steps.step_s, name, colour, "%{y:.3~s}B/s")
            for (name, values), colour in zip(rates.items(), SERIES, strict=False)
        ],
        {"shapes": resumes(run), "yaxis": {"rangemode": "tozero", "tickformat": "~s"}},
        span=6,
        height=280,
    )
