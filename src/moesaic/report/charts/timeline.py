"""Timeline chart: the predicted step above the measured one, on the same axis.

A lane is a rank. In a predicted lane tall bars are computation, half as tall ones collectives, and
thin ones waiting. A measured lane has phases alone, because a run logs nothing finer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from moesaic.facts.plan import RankTimeline
from moesaic.report.charts.figure import Figure, column, label, phase_colour, time_unit
from moesaic.report.prediction import Prediction
from moesaic.report.wording import duration

_TALL = 0.72
_HEIGHTS = {"computation": _TALL, "waiting": 0.08, "collectives": _TALL / 2}
"""Height of a bar in its lane, by kind of work."""


class _Bar(NamedTuple):
    phase: str
    seconds: float
    height: float
    hover: str
    """Text of the tooltip."""


class _Lane(NamedTuple):
    name: str
    bars: list[_Bar]
    """Bars from left to right, without gaps."""
    step_s: float
    """End of the step."""


def figures(prediction: Prediction) -> list[Figure]:
    """Chart the predicted lanes above the measured one; none if no timeline was predicted."""
    timeline = prediction.predicted.timeline
    if not timeline:
        return []
    lanes = [*(_predicted(rank) for rank in timeline), _measured(prediction)]
    scale, unit = time_unit(max(lane.step_s for lane in lanes))
    names = [f"{lane.name}<br><b>{duration(lane.step_s)}</b>" for lane in lanes]
    figure = Figure(
        "step-timeline",
        "Timeline of a step",
        "Tall bars compute, half bars communicate, thin bars wait. Compare the lengths of the "
        "predicted and the measured lane.",
        _traces(lanes, scale),
        {
            "barmode": "overlay", "hovermode": "closest", "bargap": 0,
            "margin": {"l": 116, "r": 14, "t": 34, "b": 40},
            "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
            "yaxis": {"tickvals": list(range(len(lanes))), "ticktext": names,
                      "range": [len(lanes) - 0.5, -0.5], "fixedrange": True, "showgrid": False,
                      "zeroline": False},
        },
        span=12,
        height=100 + 62 * len(lanes),
    )  # fmt: skip
    return [figure]


def _predicted(rank: RankTimeline) -> _Lane:
    bars = []
    for one in rank.phases:
        seconds = (one.computing_s, one.waiting_s, one.collectives_s)
        for kind, kind_s in zip(_HEIGHTS, seconds, strict=True):
            if kind_s:
                bars.append(_Bar(one.phase, kind_s, _HEIGHTS[kind], f"{one.phase}: {kind}"))
    return _Lane(f"predicted, rank {rank.rank}", bars, rank.seconds)


def _measured(prediction: Prediction) -> _Lane:
    measured = prediction.measured
    bars = [
        _Bar(phase, seconds, _TALL, f"{phase}: median, waiting included")
        for phase, seconds in measured.phases_s.items()
    ]
    rest_s = measured.step_s - sum(measured.phases_s.values())
    if rest_s > 0:  # Time between phases; also, medians do not add up.
        bars.append(_Bar("other", rest_s, _HEIGHTS["waiting"], "other: outside of phases"))
    return _Lane("measured, rank 0", bars, measured.step_s)


def _traces(lanes: list[_Lane], scale: float) -> list[dict[str, Any]]:
    """Return one trace per phase, through all lanes."""
    edge = {"color": "var(--card)", "width": 0.5}
    placed: dict[str, list[tuple[int, float, _Bar]]] = {}
    for index, lane in enumerate(lanes):
        start_s = 0.0
        for bar in lane.bars:
            placed.setdefault(bar.phase, []).append((index, start_s, bar))
            start_s += bar.seconds
    return [
        {
            "type": "bar", "orientation": "h", "name": label(phase),
            "y": [index for index, _, _ in bars], "width": [bar.height for _, _, bar in bars],
            "base": column(np.array([start_s / scale for _, start_s, _ in bars])),
            "x": column(np.array([bar.seconds / scale for _, _, bar in bars])),
            "text": [
                f"{label(bar.hover)}<br><b>{duration(bar.seconds)}</b> from {duration(start_s)}"
                for _, start_s, bar in bars
            ],
            "textposition": "none", "hovertemplate": "%{text}<extra></extra>",
            "marker": {"color": phase_colour(phase), "line": edge},
        }
        for phase, bars in placed.items()
    ]  # fmt: skip
