"""Balance charts: load of the busiest rank, replicas and their traffic, time saved, and layers."""

from __future__ import annotations

import numpy as np

from moesaic.report.balance_stats import BalanceStats
from moesaic.report.charts.figure import SERIES, Figure, Floats, column, curve, layout
from moesaic.report.facts import RunFacts
from moesaic.report.series import MAX_POINTS, sample, smooth
from moesaic.report.wording import byte_unit, plural, size, three, time_unit, timing

_WITHOUT, _WITH = "without replicas", "with replicas"
_HEIGHT = 250


def figures(run: RunFacts) -> list[Figure]:
    """Return the balance charts; none if no balance policy ran."""
    if not np.isfinite(run.steps.replicas).any():
        return []
    found = [_busiest_rank(run), _replicas(run)]
    if run.balance is not None:
        found += [_time_saved(run.balance), _layers(run.balance)]
    return found


def _busiest_rank(run: RunFacts) -> Figure:
    steps, data = run.steps, []
    named = (
        (_WITHOUT, steps.imbalance_before, "var(--ink-soft)"),
        (_WITH, steps.imbalance_after, SERIES[1]),
    )
    for name, values, colour in named:
        x, y = sample(steps.step, smooth(values, 0.01), MAX_POINTS)
        data.append(curve(x, y, name, colour, hovertemplate=f"{name}: %{{y:.2f}}x<extra></extra>"))
    before, after = (three(float(np.nanmean(values))) for _, values, _ in named)
    return Figure(
        "busiest-rank",
        "Busiest rank over the mean",
        "Least even layer; 1 is even. Curves that touch mean replicas gain nothing.",
        f"Tokens of the busiest rank over the mean, by step: {before} on average without replicas, "
        f"{after} with them.",
        data,
        layout(hovermode="x", yaxis={"rangemode": "normal"}),
        height=_HEIGHT,
    )


def _replicas(run: RunFacts) -> Figure:
    """Return replicas per step and, where layers are recorded, the bytes they moved."""
    steps, balance = run.steps, run.balance
    x, y = sample(steps.step, steps.replicas, MAX_POINTS)
    mean, planning_s = (float(np.nanmean(values)) for values in (steps.replicas, steps.planning_s))
    data = [curve(x, y, "replicas", SERIES[1], hovertemplate="replicas: %{y:.0f}<extra></extra>")]
    guide, traffic, axes = "Made per step.", "", {}
    if balance is not None:
        num_bytes = balance.by_step("replica_bytes")
        scale, unit = byte_unit(_most(num_bytes))
        hover = f"moved: %{{y:.3g}} {unit}<extra></extra>"
        moved = curve(_middle(balance), num_bytes / scale, f"{unit} moved", SERIES[0],
                      yaxis="y2", hovertemplate=hover)  # fmt: skip
        moved["line"]["dash"] = "dot"
        data.append(moved)
        guide = f"Per step, and {unit} moved (dotted, right axis)."
        traffic = f", {size(float(np.nanmean(num_bytes)))} moved"
        axes = {"yaxis2": {"overlaying": "y", "side": "right", "rangemode": "tozero",
                           "showgrid": False, "tickfont": {"size": 11.5}, "automargin": True,
                           "nticks": 5}}  # fmt: skip
    return Figure(
        "expert-replicas",
        "Expert replicas",
        f"{guide} Look for growth without gain.",
        f"Expert replicas by step: {three(mean)} on average{traffic}, planned in "
        f"{timing(planning_s)} a step.",
        data,
        layout(hovermode="x", yaxis={"rangemode": "tozero", "nticks": 5}, **axes),
        height=_HEIGHT,
    )


def _time_saved(balance: BalanceStats) -> Figure:
    """Return the predicted saving beside the one with measured waiting and planning."""
    without_s, with_s = balance.by_step("predicted_unbalanced_s"), balance.by_step("predicted_s")
    predicted = without_s - with_s
    measured, what = predicted - balance.by_step("planning_s"), "planning"
    waiting_s = balance.by_step("replica_wait_s", "gradient_wait_s")
    if np.isfinite(waiting_s).any():
        measured += balance.by_step("predicted_exposed_s") - waiting_s
        what = "waiting and planning"
    scale, unit = time_unit(max(_most(np.abs(predicted)), _most(np.abs(measured))))
    x, data = _middle(balance), []
    for name, values, colour, dash in (
        ("predicted", predicted, "var(--ink-soft)", "dot"),
        (f"with measured {what}", measured, SERIES[2], "solid"),
    ):
        hover = f"{name}: %{{y:.3g}} {unit}<extra></extra>"
        trace = curve(x, values / scale, name, colour, hovertemplate=hover)
        trace["line"]["dash"] = dash
        data.append(trace)
    means = [timing(float(np.nanmean(values))) for values in (predicted, measured)]
    return Figure(
        "balance-saved",
        "Time saved by replicas",
        f"{unit} per step on rank 0. Below 0 replicas cost more than they save.",
        f"Time that replicas save in a step: {means[0]} predicted, {means[1]} with measured "
        f"{what}.",
        data,
        layout(hovermode="x", yaxis={"rangemode": "tozero", "zerolinewidth": 2, "nticks": 6}),
        height=_HEIGHT,
    )


def _layers(balance: BalanceStats) -> Figure:
    """Return the busiest rank of each layer, averaged over the recorded steps."""
    both = [balance.by_layer(name) for name in ("imbalance_before", "imbalance_after")]
    worst = int(np.nanargmax(both[1]))
    num_layers = len(balance.layers)
    ticks = {"dtick": 1} if num_layers <= 24 else {"nticks": 12}
    data = [
        {
            "type": "bar", "name": name, "x": balance.layers.tolist(), "y": column(values),
            "marker": {"color": colour},
            "hovertemplate": f"layer %{{x}}, {name}: %{{y:.2f}}x<extra></extra>",
        }
        for name, values, colour in zip(
            (_WITHOUT, _WITH), both, ("var(--series-7)", SERIES[1]), strict=True
        )
    ]  # fmt: skip
    return Figure(
        "balance-layers",
        "Busiest rank by layer",
        "1 is even. A layer that stays high with replicas needs a higher balance.max_replicas.",
        f"Tokens of the busiest rank over the mean in each of {plural(num_layers, 'layer')}: "
        f"the least even with replicas is layer {int(balance.layers[worst])}, "
        f"{three(float(both[0][worst]))} without and {three(float(both[1][worst]))} with them.",
        data,
        layout(
            barmode="group", hovermode="closest",
            xaxis={"title": {"text": "layer", "standoff": 6}, "tickformat": "d", "showgrid": False,
                   **ticks},
            yaxis={"rangemode": "tozero"},
        ),
        height=_HEIGHT,
    )  # fmt: skip


def _middle(balance: BalanceStats) -> Floats:
    return (balance.first_step + balance.last_step) / 2


def _most(values: Floats) -> float:
    """Return the largest known value; 0 where none is known."""
    return float(values[np.isfinite(values)].max(initial=0.0))
