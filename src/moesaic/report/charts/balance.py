"""What copies of experts made of uneven loads: rows of the busiest rank and of each one, how many
copies, what they took of each layer, and what was expected of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moesaic.report.charts.experts import MAX_UTILISATION, SCALE
from moesaic.report.charts.figure import SERIES, Figure, Floats, column, curve, layout
from moesaic.report.facts import RunFacts
from moesaic.report.series import MAX_POINTS, sample, smooth
from moesaic.report.spreads import BY_RANK, Ints, Spreads
from moesaic.report.wording import byte_unit, plural, size, stretch, three, time_unit, timing

COMPUTED, WAITED = ("forward_s", "backward_s"), ("landing_s", "return_s")
"""Seconds of rank 0: of its experts, and of waiting because of copies."""
UPWARDS = [[0.0, "var(--load-1)"], [0.5, "var(--load-2)"], [1.0, "var(--load-4)"]]
"""From nothing to the most."""
AROUND_ONE = {"zmin": 0, "zmax": MAX_UTILISATION, "colorscale": SCALE}
RATIOS = {"zmin": 0, "zmax": 12, "colorscale": UPWARDS}
"""Of RB: 11 is the most that is published, and where ranks are all but even it has no end."""
MAX_ROWS = 64
"""Ranks of layers in one heat map."""
_LABELS = 16
"""Ranks of layers that can be told by name."""


def figures(run: RunFacts) -> list[Figure]:
    """All that is known, if a policy was asked in any step."""
    if not np.isfinite(run.steps.copies).any():
        return []
    found = [_busiest(run), _copies(run)]
    if run.spreads is not None:
        found += [_expected(run.spreads), *_over_steps(run.spreads, run.plan.get("ep"))]
    return found


def by_layer(spreads: Spreads) -> tuple[list[str], list[list[str]]]:
    """Means over recorded steps as a table: its header, and a row for each layer."""
    header = [
        "layer", "busiest at home", "with copies", "RB", "copies", "moved", "deciding", "waiting",
        "experts, expected", "measured", "layer at home, modelled", "with copies",
    ]  # fmt: skip

    def told(words: Any, *names: str) -> list[str]:
        return [words(value) for value in spreads.by_layer(*names).tolist()]

    columns = [
        [str(layer) for layer in spreads.layers.tolist()],
        told(three, "busiest_before"), told(three, "busiest_after"),
        [three(value) for value in spreads.ratio(("std_before",), ("std_after",), 0).tolist()],
        told(three, "copies"), told(size, "bytes_moved"), told(timing, "planning_s"),
        told(timing, *WAITED), told(timing, "modelled_experts_s"), told(timing, *COMPUTED),
        told(timing, "modelled_home_s"), told(timing, "modelled_s"),
    ]  # fmt: skip
    return header, [list(row) for row in zip(*columns, strict=True)]


def _busiest(run: RunFacts) -> Figure:
    steps, data = run.steps, []
    named = (
        ("at home", steps.busiest_before, "var(--ink-soft)"),
        ("with copies", steps.busiest_after, SERIES[1]),
    )
    for name, values, colour in named:
        x, y = sample(steps.step, smooth(values, 0.01), MAX_POINTS)
        data.append(curve(x, y, name, colour, hovertemplate=f"{name}: %{{y:.2f}}x<extra></extra>"))
    before, after = (three(float(np.nanmean(values))) for _, values, _ in named)
    return Figure(
        "busiest-rank",
        "Busiest rank over the mean",
        "rows of the least even layer, smoothed; 1 is even",
        f"Rows of the busiest rank over the mean, by step: {before} on average if all experts were "
        f"computed at home, {after} with copies.",
        data,
        layout(hovermode="x", yaxis={"rangemode": "normal"}),
        span=4,
        height=230,
    )


def _copies(run: RunFacts) -> Figure:
    steps = run.steps
    x, y = sample(steps.step, steps.copies, MAX_POINTS)
    mean, planning_s = (float(np.nanmean(one)) for one in (steps.copies, steps.planning_s))
    return Figure(
        "expert-copies",
        "Copies of experts",
        "made in each step, over all layers",
        f"Copies of experts by step: {three(mean)} on average, decided on in "
        f"{three(1e3 * planning_s)} ms a step.",
        [curve(x, y, "copies", SERIES[1], hovertemplate="%{y:.0f} copies<extra></extra>")],
        layout(showlegend=False, yaxis={"rangemode": "tozero"}),
        span=4,
        height=230,
    )


def _expected(spreads: Spreads) -> Figure:
    """Seconds that the model of a layer foretells beside those that were measured, on rank 0."""
    named = (
        ("experts", "modelled_experts_s", COMPUTED, SERIES[0]),
        ("waiting for copies", "modelled_exposed_s", WAITED, SERIES[1]),
    )
    lines, words = list[tuple[str, Floats, str, str]](), []
    for name, modelled, measured, colour in named:
        pair = spreads.by_step(modelled), spreads.by_step(*measured)
        one, other = (float(np.mean(values)) for values in pair)
        words.append(f"{name} {timing(one)} expected and {timing(other)} measured")
        lines += [(f"{name}, expected", pair[0], colour, "dot"), (name, pair[1], colour, "solid")]
    scale, unit = time_unit(max(_most(values) for _, values, _, _ in lines))
    x, data = (spreads.first_step + spreads.last_step) / 2, []
    for name, values, colour, dash in lines:
        if np.isfinite(values).any():
            hover = f"{name}: %{{y:.3g}} {unit}<extra></extra>"
            trace = curve(x, values / scale, name, colour, hovertemplate=hover)
            trace["line"]["dash"] = dash
            trace["showlegend"] = dash == "solid"
            data.append(trace)
    return Figure(
        "balance-expected",
        "Expected and measured",
        f"{unit} a step on rank 0, all layers; dotted: expected",
        f"Time of each step on rank 0, over all layers: {', '.join(words)}.",
        data,
        layout(hovermode="x", yaxis={"rangemode": "tozero"}),
        span=4,
        height=230,
    )


def busiest_scale(most: float, ranks: Any = None) -> dict[str, Any]:
    """Of a busiest rank that has `most` times the mean at the most: up to what is possible of so
    many `ranks`, or, of many or if that is not known, to 4 or to the most, whichever is more. Up to
    an even load colours are those of `SCALE`; above they are spread over what is left."""
    known = isinstance(ranks, int) and ranks > 1
    end = max(most, min(float(ranks), MAX_UTILISATION) if known else MAX_UTILISATION)
    above = (1.0, min(2.0, end**0.5), end)
    colours = [colour for _, colour in SCALE]
    stops = zip((0.0, 0.5, *above), colours, strict=True)
    return {"zmin": 0, "zmax": end, "colorscale": [[at / end, colour] for at, colour in stops]}


@dataclass(frozen=True)
class _Rows:
    """What the rows of a heat map are."""

    names: list[Any]
    told: str
    """All of them, in words."""
    hover: str
    """One of them, in a template."""
    axis: dict[str, Any]


def _over_steps(spreads: Spreads, ranks: Any) -> list[Figure]:
    """Heat maps of layers and of their ranks, `ranks` in each, by steps; without those that nothing
    is known of."""
    layer, rank, left = _least_even(spreads)
    busiest = [spreads.over(name) for name in ("busiest_before", "busiest_after")]
    by_rank = [spreads.by_rank(name, layer, rank) for name in BY_RANK]
    every = np.concatenate((*busiest, *by_rank), axis=1)
    scale = busiest_scale(_most(every), ranks)
    rows, even = _ranks(spreads, layer, rank), "rows over the mean of the layer; 1 is even"
    found = [
        _heat(spreads, "balance-ranks-home", "Load by rank, at home", even + left, by_rank[0],
              "x the mean", scale, rows),
        _heat(spreads, "balance-ranks-copies", "Load by rank, with copies",
              f"on the same scale{left}", by_rank[1], "x the mean", scale, rows),
        _heat(spreads, "balance-home", "Busiest rank, at home", "rows over the mean; 1 is even",
              busiest[0], "x the mean", scale),
        _heat(spreads, "balance-copies", "Busiest rank, with copies", "on the same scale",
              busiest[1], "x the mean", scale),
        *_of_copies(spreads),
    ]  # fmt: skip
    return [figure for figure in found if figure is not None]


def _of_copies(spreads: Spreads) -> list[Figure | None]:
    """What copies came to and what they took, by layers and steps."""
    num_bytes = spreads.over("bytes_moved")
    unit_bytes, unit = byte_unit(_most(num_bytes))
    timed = [
        _heat(spreads, "balance-waiting", "Waiting for copies", "ms of each step on rank 0",
              1e3 * spreads.over(*WAITED), " ms"),
        _heat(spreads, "balance-model", "Experts, measured over expected",
              "seconds of rank 0; 1 is as expected",
              spreads.ratio(COMPUTED, ("modelled_experts_s",)), "x", AROUND_ONE),
    ]  # fmt: skip
    return [
        _heat(spreads, "balance-ratio", "RB", "deviation at home over with copies; blank: even",
              spreads.ratio(("std_before",), ("std_after",)), " times as even", RATIOS),
        _heat(spreads, "balance-made", "Copies by layer", "made in each step",
              spreads.over("copies"), " copies"),
        _heat(spreads, "balance-bytes", "Bytes moved",
              f"{unit} of each step, both ways", num_bytes / unit_bytes,
              f" {unit}"),
        _heat(spreads, "balance-deciding", "Deciding on copies", "ms of each step on rank 0",
              1e3 * spreads.over("planning_s"), " ms"),
        *(replace(figure, span=6) for figure in timed if figure is not None),
    ]  # fmt: skip


def _least_even(spreads: Spreads) -> tuple[Ints, Ints, str]:
    """The places among layers and ranks of what `MAX_ROWS` rows can show, the least even layers and
    of more ranks than that the busiest, and what is to be said of it."""
    rows = spreads.rows[BY_RANK[0]].sum(axis=0)
    layers, ranks = rows.shape
    uneven = np.argsort(-spreads.by_layer("busiest_before"), kind="stable")
    layer = np.sort(uneven[: max(MAX_ROWS // ranks, 1)])
    rank, left = np.arange(ranks), ""
    if len(layer) < layers:
        number = f"{len(layer)} " if len(layer) > 1 else ""
        left = f"; the {number}least even of {plural(layers, 'layer')}"
    if ranks > MAX_ROWS:
        rank = np.sort(np.argsort(-rows[layer[0]], kind="stable")[:MAX_ROWS])
        left += f"; the {MAX_ROWS} busiest of {ranks:,} ranks"
    return np.repeat(layer, len(rank)), np.tile(rank, len(layer)), left


def _most(values: Floats) -> float:
    """Of what is known; 0 where nothing is."""
    return float(values[np.isfinite(values)].max(initial=0.0))


def _layers(spreads: Spreads) -> _Rows:
    number = len(spreads.layers)
    axis = {"title": {"text": "layer", "standoff": 6}, "tickformat": "d"}
    ticks = {"dtick": 1} if number <= 12 else {"nticks": 8}
    return _Rows(spreads.layers.tolist(), plural(number, "layer"), "layer %{y}", axis | ticks)


def _ranks(spreads: Spreads, layer: Ints, rank: Ints) -> _Rows:
    """Ranks that have these places; of many, the first one of a layer is named."""
    names = [
        f"layer {one}, rank {other}"
        for one, other in zip(spreads.layers[layer].tolist(), rank.tolist(), strict=True)
    ]
    layers = len(np.unique(layer))
    block = len(names) // layers if layers > 1 else 1
    every = 1 if len(names) <= _LABELS else block * -(-len(names) // (block * _LABELS))
    told = f"{plural(len(names) // layers, 'rank')} of {plural(layers, 'layer')}"
    return _Rows(names, told, "%{y}", {"type": "category", "tick0": 0, "dtick": every})


def _heat(
    spreads: Spreads,
    name: str,
    title: str,
    subtitle: str,
    values: Floats,
    unit: str,
    scale: dict[str, Any] | None = None,
    rows: _Rows | None = None,
) -> Figure | None:
    """Of [columns, rows], of layers unless other `rows` are said."""
    known, wide = values[np.isfinite(values)], rows is not None
    if not len(known):
        return None
    rows = rows or _layers(spreads)
    upwards = {"zmin": 0, "zmax": float(known.max()) or 1.0, "colorscale": UPWARDS}
    trace = {
        "type": "heatmap", "hoverongaps": False, **(scale or upwards),
        "x": column((spreads.first_step + spreads.last_step) / 2),
        "y": rows.names,
        "z": [column(row) for row in values.T],
        "hovertemplate": f"{rows.hover}, step %{{x}}<br><b>%{{z:.3g}}</b>{unit}<extra></extra>",
        "colorbar": {"thickness": 8, "outlinewidth": 0, "nticks": 5, "x": 1.01},
    }  # fmt: skip
    steps = stretch(int(spreads.steps[0]), int(spreads.steps[-1]))
    return Figure(
        name,
        title,
        subtitle,
        f"Heat map of {rows.told} over {steps}: {title.lower()}, "
        f"{three(float(known.mean()))}{unit} on average, {three(float(known.max()))} at the most.",
        [trace],
        layout(
            hovermode="closest",
            showlegend=False,
            margin={"l": 46, "r": 12, "t": 8, "b": 40},
            xaxis={"showgrid": False},
            yaxis={"showgrid": False, "zeroline": False, "autorange": "reversed", **rows.axis},
        ),
        span=6 if wide else 4,
        height=min(max(12 * len(rows.names) + 90, 200), 420),
    )
