"""Expert charts: load by layer, expert and step, and its imbalance."""

from __future__ import annotations

from typing import Any

import numpy as np

from moesaic.report.charts.figure import Figure, column, curve, layout
from moesaic.report.findings.experts import DEAD, HOT, dead_experts, hot_experts
from moesaic.report.loads import Loads
from moesaic.report.series import MAX_POINTS, sample, smooth
from moesaic.report.wording import plural, stretch, three

MAX_UTILISATION = 4.0
"""End of the colour scale; 1 is an even load."""
SCALE = [
    [0.0, "var(--load-0)"], [0.125, "var(--load-half)"], [0.25, "var(--load-1)"],
    [0.5, "var(--load-2)"], [1.0, "var(--load-4)"],
]  # fmt: skip
"""Colours of load 0, 0.5, 1, 2 and 4 over the even share."""
_CURVE_POINTS = 5_000
"""Most points of the curves of all layers together."""


def heat_by_step(loads: Loads) -> Figure:
    """Chart the experts of one layer by step; `page.js` fills in the chosen layer."""
    average = -(-len(loads.steps) // len(loads.first_step))
    trace = _heat()
    trace["x"] = column((loads.first_step + loads.last_step) / 2)
    trace["y"] = list(range(loads.num_experts))
    trace["hovertemplate"] = (
        "expert %{y}, step %{x}<br><b>%{z:.2f}</b>x an even share"
        + (f"<br>mean of about {average} steps" if average > 1 else "")
        + "<extra></extra>"
    )
    return Figure(
        "expert-load",
        "Load by step",
        "Tokens of each expert over an even share. Look for rows that stay dark blue (dead) or red "
        "(hot).",
        f"Heat map of expert load over {stretch(int(loads.steps[0]), int(loads.steps[-1]))}, "
        f"{plural(loads.num_experts, 'expert')} in each of {plural(len(loads.layers), 'layer')}. "
        f"{_extremes(loads)}",
        [trace],
        layout(
            hovermode="closest",
            showlegend=False,
            margin={"l": 52, "r": 44, "t": 8, "b": 40},
            xaxis={"showgrid": False},
            yaxis=_expert_axis(loads.num_experts) | {"autorange": "reversed"},
        ),
        span=8,
        height=min(max(14 * loads.num_experts + 60, 300), 560),
    )


def overview(loads: Loads) -> Figure:
    """Chart layers by experts over the last quarter of recorded steps, with marks."""
    trace = _heat()
    trace["x"] = list(range(loads.num_experts))
    trace["y"] = loads.layers.tolist()
    trace["z"] = [column(row) for row in np.round(loads.recent_utilisation(), 3)]
    trace["xgap"] = trace["ygap"] = 1
    trace["hovertemplate"] = (
        "layer %{y}, expert %{x}<br><b>%{z:.2f}</b>x an even share<extra></extra>"
    )
    span = stretch(int(loads.recent_steps[0]), int(loads.recent_steps[-1]))
    return Figure(
        "expert-overview",
        "All layers, last quarter",
        f"{span[0].upper()}{span[1:]}. Look for marks; click a layer.",
        f"Heat map of layers by experts over the last quarter recorded. {_extremes(loads)}",
        [trace, *_flags(loads)],
        layout(
            hovermode="closest",
            showlegend=False,
            margin={"l": 46, "r": 12, "t": 8, "b": 40},
            # Explicit ranges: marks at the edge would extend them.
            xaxis=_expert_axis(loads.num_experts)
            | {"showgrid": False, "range": [-0.5, loads.num_experts - 0.5]},
            yaxis={"title": {"text": "layer", "standoff": 6},
                   "range": [int(loads.layers[-1]) + 0.5, int(loads.layers[0]) - 0.5],
                   "tickformat": "d", "showgrid": False, "zeroline": False,
                   **_whole_ticks(len(loads.layers))},
        ),
        span=4,
        height=min(max(14 * loads.num_experts + 60, 300), 560),
    )  # fmt: skip


def imbalance(loads: Loads) -> Figure:
    """Chart the busiest expert over the mean, one line per layer."""
    limit = min(MAX_POINTS, max(_CURVE_POINTS // len(loads.layers), 50))
    steps = loads.steps.astype(np.float64)
    data = []
    for at, layer in enumerate(loads.layers.tolist()):
        x, y = sample(steps, smooth(loads.imbalance[:, at], 0.01), limit)
        trace = curve(x, y, f"layer {layer}", "var(--ink-soft)", width=1, opacity=0.3)
        data.append(trace | {"hovertemplate": f"layer {layer}: %{{y:.2f}}x<extra></extra>"})
    recent = loads.imbalance[-len(loads.recent_steps) :]
    mean = float(np.nanmean(recent)) if np.isfinite(recent).any() else float("nan")
    return Figure(
        "imbalance",
        "Busiest expert over the mean",
        "1 is even. Look for layers that stay high or rise.",
        f"Load of the busiest expert over the mean, by step and layer: {three(mean)} on average in "
        "the last quarter recorded.",
        data,
        layout(showlegend=False, hovermode="closest", yaxis={"rangemode": "normal"}),
        span=4,
        height=230,
    )


def page_data(loads: Loads) -> dict[str, Any]:
    """Return what `page.js` draws layers from: load in hundredths, and the marks."""
    cells = np.round(loads.utilisation() * 100)
    extremes = [(extreme, "dead") for extreme in dead_experts(loads)]
    extremes += [(extreme, "hot") for extreme in hot_experts(loads)]
    flags: dict[int, list[dict[str, Any]]] = {}
    for extreme, kind in extremes:
        flags.setdefault(extreme.layer, []).append({"expert": extreme.expert, "kind": kind})
    return {
        "layers": loads.layers.tolist(),
        "chosen": _worst_layer(loads),
        "hundredths": [
            [column(row) for row in cells[:, at, :].T] for at in range(len(loads.layers))
        ],
        "flags": flags,
    }


def _worst_layer(loads: Loads) -> int:
    """Return the index of the layer with most dead and hot experts, then least even."""
    utilisation = loads.recent_utilisation()
    extreme = ((utilisation < DEAD) | (utilisation > HOT)).sum(axis=1)
    return int(np.lexsort((np.nan_to_num(utilisation).max(axis=1), extreme))[-1])


def _heat() -> dict[str, Any]:
    return {
        "type": "heatmap", "zmin": 0, "zmax": MAX_UTILISATION, "colorscale": SCALE,
        "showscale": False, "hoverongaps": False,
    }  # fmt: skip


def _flags(loads: Loads) -> list[dict[str, Any]]:
    found = []
    for kind, symbol, extremes in (
        ("dead", "x", dead_experts(loads)),
        ("hot", "triangle-up", hot_experts(loads)),
    ):
        if extremes:
            found.append(
                {
                    "type": "scatter", "mode": "markers", "name": kind, "hoverinfo": "skip",
                    "x": [extreme.expert for extreme in extremes],
                    "y": [extreme.layer for extreme in extremes],
                    "marker": {"symbol": symbol, "size": 10 if loads.num_experts <= 32 else 6,
                               "color": "#ffffff", "line": {"width": 1, "color": "#14171c"}},
                }
            )  # fmt: skip
    return found


def _expert_axis(num_experts: int) -> dict[str, Any]:
    return {
        "title": {"text": "expert", "standoff": 6}, "zeroline": False, "tickformat": "d",
        **_whole_ticks(num_experts),
    }  # fmt: skip


def _whole_ticks(number: int) -> dict[str, Any]:
    if number <= 16:
        return {"dtick": 1}
    return {"dtick": next((tick for tick in (2, 4, 8, 16, 32) if number / tick <= 9), 64)}


def _extremes(loads: Loads) -> str:
    dead, hot = len(dead_experts(loads)), len(hot_experts(loads))
    return f"In the last quarter {dead} dead and {hot} hot experts."
