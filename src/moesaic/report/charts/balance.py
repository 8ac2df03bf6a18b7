"""Balance charts: load of the busiest rank, replicas, time saved, and layers."""

from __future__ import annotations

import numpy as np

from moesaic.report.balance_stats import BalanceStats
from moesaic.report.charts.figure import SERIES, Figure, column, curve, layout, time_unit
from moesaic.report.log import Steps
from moesaic.report.run_stats import RunStats
from moesaic.report.series import average, keep_extremes, known_mean, smooth
from moesaic.report.wording import digits, duration, plural, size

_WITHOUT, _WITH = "without replicas", "with replicas"
_SOFT = "var(--ink-soft)"
_HEIGHT = 250


def figures(run: RunStats) -> list[Figure]:
    """Return the balance charts; none if no balance policy ran."""
    if not np.isfinite(run.steps.replicas).any():
        return []
    charts = [_busiest_rank(run.steps), _replicas(run)]
    if run.balance is not None:
        charts += [_time_saved(run.balance), _layers(run.balance)]
    return charts


def _busiest_rank(steps: Steps) -> Figure:
    data = []
    for name, values, colour in (
        (_WITHOUT, steps.imbalance_before, _SOFT),
        (_WITH, steps.imbalance_after, SERIES[1]),
    ):
        x, y = keep_extremes(steps.step, smooth(values, 0.01))
        data.append(curve(x, y, name, colour, hovertemplate=f"{name}: %{{y:.2f}}x<extra></extra>"))
    return Figure(
        "busiest-rank",
        "Busiest rank over the mean",
        "Least even layer; 1 is even. Curves that touch mean replicas gain nothing.",
        "Tokens of the busiest rank over the mean, by step: "
        f"{digits(known_mean(steps.imbalance_before))} on average without replicas, "
        f"{digits(known_mean(steps.imbalance_after))} with them.",
        data,
        layout(hovermode="x", yaxis={"rangemode": "normal"}),
        height=_HEIGHT,
    )


def _replicas(run: RunStats) -> Figure:
    steps, traffic = run.steps, ""
    if run.balance is not None:
        traffic = f", {size(run.balance.mean('replica_bytes'))} moved on average"
    x, y = keep_extremes(steps.step, steps.replicas)
    return Figure(
        "expert-replicas",
        "Expert replicas",
        f"Made per step{traffic}. Look for growth without gain.",
        f"Expert replicas by step: {digits(known_mean(steps.replicas))} on average{traffic}.",
        [curve(x, y, "replicas", SERIES[1], hovertemplate="replicas: %{y:.0f}<extra></extra>")],
        layout(hovermode="x", yaxis={"rangemode": "tozero", "nticks": 5}),
        height=_HEIGHT,
    )


def _time_saved(balance: BalanceStats) -> Figure:
    """Return the predicted saving beside the one with measured waiting and planning."""
    by_step = balance.by_step
    predicted = by_step["predicted_unbalanced_s"] - by_step["predicted_s"]
    measured, costs = predicted - by_step["planning_s"], "planning"
    waiting_s = by_step["replica_wait_s"] + by_step["gradient_wait_s"]
    if np.isfinite(waiting_s).any():
        measured, costs = (
            measured + by_step["predicted_exposed_s"] - waiting_s,
            "waiting and planning",
        )
    scale, unit = time_unit(float(np.nanmax(np.abs([predicted, measured]))))
    data = []
    for name, values, colour, dash in (
        ("predicted", predicted, _SOFT, "dot"),
        (f"with measured {costs}", measured, SERIES[2], "solid"),
    ):
        x, y = average(balance.steps.astype(np.float64), values / scale)
        hover = f"{name}: %{{y:.3g}} {unit}<extra></extra>"
        trace = curve(x, y, name, colour, hovertemplate=hover)
        trace["line"]["dash"] = dash
        data.append(trace)
    return Figure(
        "balance-saved",
        "Time saved by replicas",
        f"{unit} per step on rank 0. Below 0 replicas cost more than they save.",
        f"Time that replicas save in a step: {duration(known_mean(predicted))} predicted, "
        f"{duration(known_mean(measured))} with measured {costs}.",
        data,
        layout(hovermode="x", yaxis={"rangemode": "tozero", "zerolinewidth": 2, "nticks": 6}),
        height=_HEIGHT,
    )


def _layers(balance: BalanceStats) -> Figure:
    """Return the busiest rank of each layer, averaged over the recorded steps."""
    without, with_replicas = (
        balance.by_layer[name] for name in ("imbalance_before", "imbalance_after")
    )
    worst = int(np.argmax(with_replicas))
    data = [
        {
            "type": "bar", "name": name, "x": balance.layers.tolist(), "y": column(values),
            "marker": {"color": colour},
            "hovertemplate": f"layer %{{x}}, {name}: %{{y:.2f}}x<extra></extra>",
        }
        for name, values, colour in (
            (_WITHOUT, without, "var(--series-7)"), (_WITH, with_replicas, SERIES[1]),
        )
    ]  # fmt: skip
    return Figure(
        "balance-layers",
        "Busiest rank by layer",
        "1 is even. A layer that stays high with replicas needs a higher balance.max_replicas.",
        f"Tokens of the busiest rank over the mean in each of "
        f"{plural(len(balance.layers), 'layer')}: the least even with replicas is layer "
        f"{int(balance.layers[worst])}, {digits(float(without[worst]))} without and "
        f"{digits(float(with_replicas[worst]))} with them.",
        data,
        layout(
            barmode="group", hovermode="closest",
            xaxis={"title": {"text": "layer", "standoff": 6}, "tickformat": "d", "showgrid": False},
            yaxis={"rangemode": "tozero"},
        ),
        height=_HEIGHT,
    )  # fmt: skip
