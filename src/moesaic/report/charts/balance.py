"""Balance charts: load of the busiest rank, replicas, time saved, and layers."""

from __future__ import annotations

import numpy as np

from moesaic.report.charts.figure import SERIES, SOFT, Figure, column, curve, time_unit
from moesaic.report.loads import BalanceStats
from moesaic.report.run_stats import RunStats
from moesaic.report.series import smooth
from moesaic.report.wording import size

_WITHOUT, _WITH = "without replicas", "with replicas"
_HEIGHT = 250


def figures(run: RunStats) -> list[Figure]:
    """Return the balance charts; none if no balance policy ran."""
    if not np.isfinite(run.steps.replicas).any():
        return []
    charts = [_busiest_rank(run), _replicas(run)]
    if run.balance is not None:
        charts += [_time_saved(run.balance), _layers(run.balance)]
    return charts


def _busiest_rank(run: RunStats) -> Figure:
    steps = run.steps
    return Figure(
        "busiest-rank",
        "Busiest rank over the mean",
        "Least even layer; 1 is even. Curves that touch mean replicas gain nothing.",
        [
            curve(steps.step, smooth(values, 0.01), name, colour, "%{y:.2f}x")
            for name, values, colour in (
                (_WITHOUT, steps.imbalance_before, SOFT),
                (_WITH, steps.imbalance_after, SERIES[1]),
            )
        ],
        height=_HEIGHT,
    )


def _replicas(run: RunStats) -> Figure:
    traffic = ""
    if run.balance is not None:
        traffic = f", {size(run.balance.mean('replica_bytes'))} moved on average"
    return Figure(
        "expert-replicas",
        "Expert replicas",
        f"Made per step{traffic}. Look for growth without gain.",
        [curve(run.steps.step, run.steps.replicas, "replicas", SERIES[1], "%{y:.0f}")],
        {"yaxis": {"rangemode": "tozero", "nticks": 5}},
        height=_HEIGHT,
    )


def _time_saved(balance: BalanceStats) -> Figure:
    """Chart the predicted saving beside the one with measured waiting and planning."""
    by_step = balance.by_step
    predicted_s = by_step["predicted_unbalanced_s"] - by_step["predicted_s"]
    measured_s, costs = predicted_s - by_step["planning_s"], "planning"
    waiting_s = by_step["replica_wait_s"] + by_step["gradient_wait_s"]
    if np.isfinite(waiting_s).any():
        measured_s = measured_s + by_step["predicted_exposed_s"] - waiting_s
        costs = "waiting and planning"
    scale, unit = time_unit(float(np.nanmax(np.abs([predicted_s, measured_s]))))
    predicted, measured = (
        curve(balance.steps.astype(np.float64), smooth(seconds / scale), name, colour,
              f"%{{y:.3g}} {unit}")
        for name, seconds, colour in (
            ("predicted", predicted_s, SOFT),
            (f"with measured {costs}", measured_s, SERIES[2]),
        )
    )  # fmt: skip
    predicted["line"]["dash"] = "dot"
    return Figure(
        "balance-saved",
        "Time saved by replicas",
        f"{unit} per step on rank 0. Below 0 replicas cost more than they save.",
        [predicted, measured],
        {"yaxis": {"rangemode": "tozero", "zerolinewidth": 2, "nticks": 6}},
        height=_HEIGHT,
    )


def _layers(balance: BalanceStats) -> Figure:
    """Chart the busiest rank of each layer, averaged over the recorded steps."""
    return Figure(
        "balance-layers",
        "Busiest rank by layer",
        "1 is even. A layer that stays high with replicas needs a higher balance.max_replicas.",
        [
            {
                "type": "bar", "name": name, "x": balance.layers.tolist(),
                "y": column(balance.by_layer[value]), "marker": {"color": colour},
                "hovertemplate": f"layer %{{x}}, {name}: %{{y:.2f}}x<extra></extra>",
            }
            for name, value, colour in (
                (_WITHOUT, "imbalance_before", SERIES[7]), (_WITH, "imbalance_after", SERIES[1]),
            )
        ],
        {
            "barmode": "group", "hovermode": "closest", "yaxis": {"rangemode": "tozero"},
            "xaxis": {"title": {"text": "layer"}, "tickformat": "d", "showgrid": False},
        },
        height=_HEIGHT,
    )  # fmt: skip
