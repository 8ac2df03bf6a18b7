"""Expert charts: load by layer, expert and step, and its imbalance."""

from __future__ import annotations

from typing import Any

import numpy as np

from moesaic.report.charts.figure import SERIES, Figure, column, curve
from moesaic.report.loads import DEAD, HOT, Loads
from moesaic.report.series import smooth
from moesaic.report.wording import step_range

MAX_UTILISATION = 4.0
"""End of the colour scale; 1 is an even load."""
SCALE = [
    [0.0, "var(--load-0)"], [0.125, "var(--load-half)"], [0.25, "var(--load-1)"],
    [0.5, "var(--load-2)"], [1.0, "var(--load-4)"],
]  # fmt: skip
"""Colours of load 0, 0.5, 1, 2 and 4 over the even share."""


def figures(loads: Loads) -> list[Figure]:
    """Return the expert charts."""
    return [_load_by_step(loads), _all_layers(loads), _imbalance(loads)]


def page_data(loads: Loads) -> dict[str, Any]:
    """Return the data from which `page.js` draws layers: load in hundredths."""
    cells = np.round(loads.utilisation() * 100)
    return {
        "layers": loads.layers.tolist(),
        "chosen": _worst_layer(loads),
        "hundredths": [[column(row) for row in layer] for layer in cells.transpose(1, 2, 0)],
    }


def _load_by_step(loads: Loads) -> Figure:
    """Chart the experts of one layer by step; `page.js` fills in the chosen layer."""
    trace = _heat("expert %{y}, step %{x}")
    trace["x"] = column(loads.column_steps)
    trace["y"] = list(range(loads.num_experts))
    return Figure(
        "expert-load",
        "Load by step",
        "Tokens of each expert over an even share. Look for rows that stay dark blue (dead) or red "
        "(hot).",
        [trace],
        {
            "hovermode": "closest", "showlegend": False, "xaxis": {"showgrid": False},
            "yaxis": _whole_axis("expert", loads.num_experts) | {"autorange": "reversed"},
            "margin": {"l": 52, "r": 44, "t": 8, "b": 40},
        },
        span=8,
        height=_height(loads),
    )  # fmt: skip


def _all_layers(loads: Loads) -> Figure:
    """Chart layers by experts over the last quarter of recorded steps, with marks."""
    trace = _heat("layer %{y}, expert %{x}")
    trace["x"] = list(range(loads.num_experts))
    trace["y"] = loads.layers.tolist()
    trace["z"] = [column(row) for row in np.round(loads.recent_utilisation, 3)]
    trace["xgap"] = trace["ygap"] = 1
    # Explicit ranges: marks at the edge would extend them.
    experts = [-0.5, loads.num_experts - 0.5]
    layers = [int(loads.layers[-1]) + 0.5, int(loads.layers[0]) - 0.5]
    return Figure(
        "expert-overview",
        "All layers, last quarter",
        f"{step_range(*loads.recent_steps[[0, -1]].tolist()).capitalize()}. Look for marks; click "
        "a layer.",
        [trace, *_flags(loads)],
        {
            "hovermode": "closest", "showlegend": False,
            "xaxis": _whole_axis("expert", loads.num_experts) | {"range": experts},
            "yaxis": _whole_axis("layer", len(loads.layers)) | {"range": layers},
            "margin": {"l": 46, "r": 12, "t": 8, "b": 40},
        },
        span=4,
        height=_height(loads),
    )  # fmt: skip


def _imbalance(loads: Loads) -> Figure:
    """Chart the busiest expert over the mean, in the mean and in the least even layer."""
    by_layer = np.nan_to_num(loads.utilisation().max(axis=2), nan=1.0)
    return Figure(
        "imbalance",
        "Busiest expert over the mean",
        "1 is even. Look for curves that stay high or rise.",
        [
            curve(loads.column_steps, smooth(values, 0.01), name, colour, "%{y:.2f}x")
            for name, values, colour in (
                ("mean of the layers", by_layer.mean(axis=1), SERIES[0]),
                ("least even layer", by_layer.max(axis=1), SERIES[1]),
            )
        ],
        span=12,
        height=230,
    )


def _worst_layer(loads: Loads) -> int:
    """Return the index of the layer with most dead and hot experts, then least even."""
    utilisation = loads.recent_utilisation
    num_extremes = ((utilisation < DEAD) | (utilisation > HOT)).sum(axis=1)
    return int(np.lexsort((np.nan_to_num(utilisation).max(axis=1), num_extremes))[-1])


def _heat(place: str) -> dict[str, Any]:
    return {
        "type": "heatmap", "zmin": 0, "zmax": MAX_UTILISATION, "colorscale": SCALE,
        "showscale": False, "hoverongaps": False,
        "hovertemplate": f"{place}<br><b>%{{z:.2f}}</b>x an even share<extra></extra>",
    }  # fmt: skip


def _flags(loads: Loads) -> list[dict[str, Any]]:
    size = 10 if loads.num_experts <= 32 else 6
    line = {"width": 1, "color": "#14171c"}
    return [
        {
            "type": "scatter", "mode": "markers", "name": kind, "hoverinfo": "skip",
            "x": [extreme.expert for extreme in extremes],
            "y": [extreme.layer for extreme in extremes],
            "marker": {"symbol": symbol, "size": size, "color": "#ffffff", "line": line},
        }
        for kind, symbol, extremes in (
            ("dead", "x", loads.dead), ("hot", "triangle-up", loads.hot),
        )
        if extremes
    ]  # fmt: skip


def _whole_axis(title: str, count: int) -> dict[str, Any]:
    """Return an axis of experts or layers, with at most eight ticks at whole numbers."""
    return {
        "title": {"text": title}, "zeroline": False, "showgrid": False, "tickformat": "d",
        "tick0": 0, "dtick": -(-count // 8),
    }  # fmt: skip


def _height(loads: Loads) -> int:
    return min(max(14 * loads.num_experts + 60, 300), 560)
