"""Memory charts: traffic of expert state between memory and drive, and waiting for it."""

from __future__ import annotations

import numpy as np

from moesaic.report.charts.figure import SERIES, Figure, curve, raw_and_smooth, resumes
from moesaic.report.run_stats import RunStats


def figures(run: RunStats) -> list[Figure]:
    """Return the memory charts; none for a run without a memory budget."""
    if not np.isfinite(run.steps.memory_hit_rate).any():
        return []
    return [_waiting(run), _bandwidth(run)]


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
