"""Speed charts: units per second, phases by step, and phases by rank."""

from __future__ import annotations

import numpy as np

from moesaic.report.charts.figure import (
    SERIES,
    Figure,
    column,
    curve,
    label,
    phase_colour,
    raw_and_smooth,
    resumes,
    time_unit,
)
from moesaic.report.log import RankStats, Steps
from moesaic.report.run_stats import RunStats
from moesaic.report.series import edges
from moesaic.report.wording import size

MAX_BARS = 32
"""Ranks that get a bar."""
_PHASE_COLUMNS = 300


def figures(run: RunStats) -> list[Figure]:
    """Return the speed charts."""
    charts = [_units_per_second(run)]
    if run.steps.phases:
        charts.append(_phases_by_step(run.steps))
    if run.ranks:
        charts.append(_phases_by_rank(run.ranks))
    return charts


def _units_per_second(run: RunStats) -> Figure:
    unit = run.unit
    return Figure(
        "units-per-second",
        f"{unit.capitalize()} per second",
        "All ranks together. Dips at saves and validations are normal; look for a lasting decline.",
        raw_and_smooth(run.steps.step, run.steps.tokens_per_s, f"{unit}/s", SERIES[2]),
        {"showlegend": False, "shapes": resumes(run),
         "yaxis": {"rangemode": "tozero", "tickformat": "~s"}},
        span=12,
    )  # fmt: skip


def _phases_by_step(steps: Steps) -> Figure:
    """Chart the share of each phase in the steps of rank 0."""
    stacked = np.nan_to_num(np.stack(list(steps.phases.values()), axis=1))
    bounds = edges(len(steps), min(len(steps), _PHASE_COLUMNS))
    x = np.add.reduceat(steps.step, bounds[:-1]) / np.diff(bounds)
    seconds = np.add.reduceat(stacked, bounds[:-1], axis=0)
    whole = seconds.sum(axis=1, keepdims=True)
    shares = np.divide(seconds, whole, out=np.zeros_like(seconds), where=whole > 0)
    return Figure(
        "phases",
        "Time by phase",
        "Share of a step on rank 0. Look for data, reduce or clip growing: the rank waits there.",
        [
            curve(x, 100 * share, name, "var(--card)", "%{y:.1f}%", width=0.5, stackgroup="phases",
                  fillcolor=phase_colour(name), mode="lines" if len(x) > 1 else "lines+markers")
            for name, share in zip(steps.phases, shares.T, strict=True)
        ],
        {
            "yaxis": {"range": [0, 100], "ticksuffix": "%", "fixedrange": True},
            "legend": {"x": 1.01, "xanchor": "left", "y": 1, "yanchor": "top",
                       "traceorder": "reversed"},
            "margin": {"l": 52, "r": 8, "t": 10, "b": 40},
        },
        span=7,
        height=280,
    )  # fmt: skip


def _phases_by_rank(ranks: list[RankStats]) -> Figure:
    """Chart the mean time of each phase, one bar per rank, with the rank's peak memory."""
    slowest = sorted(ranks, key=lambda rank: -sum(rank.phases_s.values()))[:MAX_BARS]
    shown = sorted(slowest, key=lambda rank: rank.rank)
    scale, unit = time_unit(sum(slowest[0].phases_s.values()))
    labels = [f"rank {rank.rank}, {size(rank.peak_bytes)}" for rank in shown]
    data = [
        {
            "type": "bar", "orientation": "h", "name": label(name), "y": labels,
            "x": column(np.array([rank.phases_s.get(name, np.nan) / scale for rank in shown])),
            "marker": {"color": phase_colour(name), "line": {"color": "var(--card)", "width": 1}},
            "hovertemplate": f"%{{y}}, {label(name)}: %{{x:.3~g}} {unit}<extra></extra>",
        }
        for name in dict.fromkeys(name for rank in shown for name in rank.phases_s)
    ]  # fmt: skip
    some = f", the {MAX_BARS} slowest of {len(ranks)} ranks" if len(ranks) > MAX_BARS else ""
    return Figure(
        "phases-by-rank",
        "Phases by rank",
        f"Mean {unit} of a step{some}, with peak memory. Look for a rank with long forward and "
        "backward.",
        data,
        {
            "barmode": "stack", "hovermode": "closest", "showlegend": False,
            "bargap": 0.6 if len(shown) < 4 else 0.3,
            "margin": {"l": 58, "r": 16, "t": 8, "b": 40}, "xaxis": {"title": {"text": unit}},
            "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
        },
        span=5,
        height=max(280, 60 + 22 * len(shown)),
    )  # fmt: skip
