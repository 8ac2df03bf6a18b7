"""Speed and memory charts: tokens per second, memory by rank, phases by step and by rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from moesaic.report.charts.figure import (
    SERIES,
    Figure,
    Floats,
    column,
    columns,
    curve,
    label,
    layout,
    marks,
    phase_colour,
)
from moesaic.report.charts.learning import raw_and_smooth
from moesaic.report.facts import RankSteps, RunFacts
from moesaic.report.series import average, keep_extremes, middle
from moesaic.report.wording import (
    byte_unit,
    count,
    duration,
    listing,
    percent,
    plural,
    size,
    time_unit,
)

MAX_LINES = 8
"""Ranks that get a curve."""
MAX_BARS = 32
"""Ranks that get a bar."""
_PHASE_COLUMNS = 300
_MEMORY_POINTS = 250


def tokens_per_second(run: RunFacts) -> Figure:
    """Chart the throughput of all ranks together."""
    rate, unit = run.steps.tokens_per_s, run.unit
    resumed = [part.step for part in run.parts[1:]]
    return Figure(
        "tokens-per-second",
        f"{unit.capitalize()} per second",
        "All ranks together. Dips at saves and validations are normal; look for a lasting decline.",
        f"{unit.capitalize()} per second by step: median {count(middle(rate))}.",
        raw_and_smooth(run.steps.step, rate, f"{unit}/s", SERIES[2]),
        layout(showlegend=False, shapes=marks(resumed),
               yaxis={"rangemode": "tozero", "tickformat": "~s"}),
    )  # fmt: skip


def memory(run: RunFacts) -> Figure | None:
    """Chart the memory of each rank, and its peak if it was logged."""
    ranks = [rank for rank in run.ranks if np.isfinite(rank.memory_bytes).any()]
    if not ranks:
        return None
    fullest = sorted(ranks, key=lambda rank: -_highest(rank))[:MAX_LINES]
    top = _highest(fullest[0])
    scale, unit = byte_unit(top)
    data = []
    for number, rank in enumerate(sorted(fullest, key=lambda rank: rank.rank)):
        colour, form = SERIES[number % len(SERIES)], f"%{{y:.4~g}} {unit}"
        held = keep_extremes(rank.step, rank.memory_bytes / scale, _MEMORY_POINTS)
        data.append(curve(*held, f"rank {rank.rank}", colour, hovertemplate=form))
        if np.isfinite(rank.peak_bytes).any():
            peak = curve(
                *keep_extremes(rank.step, rank.peak_bytes / scale, _MEMORY_POINTS),
                f"rank {rank.rank}, peak",
                colour,
                width=1,
                hovertemplate=form,
            )
            peak["line"]["dash"] = "dot"
            data.append(peak | {"showlegend": False})
    some = f", the {MAX_LINES} fullest of {len(ranks)} ranks" if len(ranks) > MAX_LINES else ""
    dotted = ", peak dotted" if len(data) > len(fullest) else ""
    return Figure(
        "memory",
        "Memory by rank",
        f"{unit} per rank{dotted}{some}. Look for growth, and for a rank near its limit.",
        f"Memory by step of {plural(len(ranks), 'rank')}: "
        f"at most {size(top)} on rank {fullest[0].rank}.",
        data,
        layout(yaxis={"rangemode": "tozero", "nticks": 7}),
    )


def phases_over_steps(run: RunFacts) -> Figure | None:
    """Chart the share of each phase in the steps of rank 0."""
    steps = run.steps
    if not steps.phases:
        return None
    x, seconds = average(steps.step, np.nan_to_num(columns(steps.phases)), _PHASE_COLUMNS)
    whole = seconds.sum(axis=1, keepdims=True)
    shares = np.divide(seconds, whole, out=np.zeros_like(seconds), where=whole > 0)
    data = [
        curve(x, 100 * shares[:, at], name, phase_colour(name, at), width=0.5, stackgroup="phases",
              fillcolor=phase_colour(name, at), hovertemplate="%{y:.1f}%")
        for at, name in enumerate(steps.phases)
    ]  # fmt: skip
    for trace in data:
        trace["line"]["color"] = "var(--card)"
        trace["mode"] = "lines" if len(x) > 1 else "lines+markers"
    means = dict(zip(steps.phases, shares.mean(axis=0).tolist(), strict=True))
    means_text = listing(
        [f"{name} {percent(means[name])}" for name in sorted(means, key=means.__getitem__)[::-1]]
    )
    return Figure(
        "phases",
        "Time by phase",
        "Share of a step on rank 0. Look for data, reduce or clip growing: the rank waits there.",
        f"Share of each phase in a step: {means_text}.",
        data,
        layout(
            yaxis={"range": [0, 100], "ticksuffix": "%", "fixedrange": True},
            legend={
                "x": 1.01,
                "xanchor": "left",
                "y": 1,
                "yanchor": "top",
                "traceorder": "reversed",
            },
            margin={"l": 52, "r": 8, "t": 10, "b": 40},
        ),
        span=7,
        height=280,
    )


def phases_by_rank(run: RunFacts) -> Figure | None:
    """Chart the mean time of each phase, one bar per rank."""
    ranks = [rank for rank in run.ranks if rank.phases] or _rank_zero(run)
    if not ranks:
        return None
    totals = {rank.rank: sum(_means(rank).values()) for rank in ranks}
    slowest = sorted(ranks, key=lambda rank: -totals[rank.rank])[:MAX_BARS]
    shown = sorted(slowest, key=lambda rank: rank.rank)
    scale, unit = time_unit(max(totals.values()))
    names = list(dict.fromkeys(name for rank in shown for name in rank.phases))
    data = [_bar(name, at, shown, scale, unit) for at, name in enumerate(names)]
    some = f", the {MAX_BARS} slowest of {len(ranks)} ranks" if len(ranks) > MAX_BARS else ""
    return Figure(
        "phases-by-rank",
        "Phases by rank",
        f"Mean {unit} of a step{some}. Look for a rank with long forward and backward.",
        "Mean time of a step by rank: "
        + listing([f"rank {rank.rank} {duration(totals[rank.rank])}" for rank in shown])
        + ".",
        data,
        layout(
            barmode="stack", hovermode="closest", showlegend=False,
            bargap=0.6 if len(shown) < 4 else 0.3,
            margin={"l": 58, "r": 16, "t": 8, "b": 40},
            xaxis={"title": {"text": unit, "standoff": 6}},
            yaxis={"type": "category", "autorange": "reversed", "showgrid": False},
        ),
        span=5,
        height=max(280, 60 + 22 * len(shown)),
    )  # fmt: skip


def _bar(name: str, at: int, ranks: list[RankSteps], scale: float, unit: str) -> dict[str, Any]:
    means = np.array([_means(rank).get(name, np.nan) / scale for rank in ranks])
    return {
        "type": "bar", "orientation": "h", "name": label(name),
        "x": column(means), "y": [f"rank {rank.rank}" for rank in ranks],
        "marker": {"color": phase_colour(name, at), "line": {"color": "var(--card)", "width": 1}},
        "hovertemplate": f"%{{y}}, {label(name)}: %{{x:.3~g}} {unit}<extra></extra>",
    }  # fmt: skip


def _means(rank: RankSteps) -> dict[str, float]:
    return {
        name: float(np.nanmean(seconds))
        for name, seconds in rank.phases.items()
        if np.isfinite(seconds).any()
    }


def _rank_zero(run: RunFacts) -> list[RankSteps]:
    steps = run.steps
    if not steps.phases:
        return []
    return [RankSteps(0, steps.step, steps.memory_bytes, steps.memory_bytes, steps.phases)]


def _highest(rank: RankSteps) -> float:
    both: Floats = np.concatenate([rank.memory_bytes, rank.peak_bytes])
    return float(np.nanmax(both))
