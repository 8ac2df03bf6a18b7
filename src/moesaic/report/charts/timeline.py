"""Timeline chart: the predicted step above the measured one, on the same axis.

A lane is a rank. In a predicted lane tall bars are computation, half as tall ones collectives, and
thin ones waiting. A measured lane has phases alone, because a run logs nothing finer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from moesaic.facts.plan import ALL_BLOCKS, RankSpan, RankTimeline
from moesaic.report.charts.figure import Figure, column, label, layout, phase_colour
from moesaic.report.prediction import Prediction
from moesaic.report.wording import listing, time_unit, timing

_TALL = 0.72
_HEIGHTS = {"computation": _TALL, "waiting": 0.08, "collectives": _TALL / 2}
"""Height of a bar in its lane, by kind of work."""


class _Bar(NamedTuple):
    lane: int
    phase: str
    start_s: float
    seconds: float
    height: float
    hover: str
    """Text of the tooltip."""


class _Lane(NamedTuple):
    name: str
    bars: list[_Bar]
    step_s: float
    """End of the step."""


def step(found: Prediction) -> Figure | None:
    """Chart the predicted lanes above the measured one; None if no timeline was predicted."""
    timeline = found.predicted.timeline
    if not timeline:
        return None
    lanes = [_predicted(at, rank) for at, rank in enumerate(timeline)]
    lanes.append(_measured(len(timeline), found))
    scale, unit = time_unit(max(lane.step_s for lane in lanes))
    return Figure(
        "step-timeline",
        "Timeline of a step",
        "Tall bars compute, half bars communicate, thin bars wait. Compare the lengths of the "
        "predicted and the measured lane.",
        f"Timeline of a step. {_alt(lanes)}.",
        _traces(lanes, found.phases(), scale),
        layout(
            barmode="overlay", hovermode="closest", bargap=0,
            margin={"l": 116, "r": 14, "t": 34, "b": 40},
            xaxis={"title": {"text": unit, "standoff": 6}, "rangemode": "tozero"},
            yaxis={"tickvals": list(range(len(lanes))),
                   "ticktext": [f"{one.name}<br><b>{timing(one.step_s)}</b>" for one in lanes],
                   "range": [len(lanes) - 0.5, -0.5], "fixedrange": True, "showgrid": False,
                   "zeroline": False},
        ),
        span=12,
        height=100 + 62 * len(lanes),
    )  # fmt: skip


def _predicted(at: int, rank: RankTimeline) -> _Lane:
    now, bars = 0.0, []
    for span in rank.spans:
        for kind, seconds in _kinds(span):
            hover = f"{_block(span)}, {span.phase}: {kind}"
            bars.append(_Bar(at, span.phase, now, seconds, _HEIGHTS[kind], hover))
            now += seconds
    return _Lane(f"predicted, rank {rank.rank}", bars, rank.seconds)


def _kinds(span: RankSpan) -> Iterator[tuple[str, float]]:
    """Yield the kinds of work in a span, in order, with their seconds."""
    kinds = zip(_HEIGHTS, (span.computing_s, span.waiting_s, span.collectives_s), strict=True)
    return ((kind, seconds) for kind, seconds in kinds if seconds)


def _block(span: RankSpan) -> str:
    words = "all blocks" if span.block in (ALL_BLOCKS, "step") else span.block
    return words + (f" of {span.micro_batches:,} micro-batches" if span.micro_batches > 1 else "")


def _measured(at: int, found: Prediction) -> _Lane:
    now, bars = 0.0, []
    for phase, seconds in found.measured.phases_s.items():
        bars.append(_Bar(at, phase, now, seconds, _TALL, f"{phase}: median, waiting included"))
        now += seconds
    rest = found.measured.step_s - now
    if rest > 0:  # Time between phases; also, medians do not add up.
        bars.append(_Bar(at, "other", now, rest, _HEIGHTS["waiting"], "other: outside of phases"))
    return _Lane("measured, rank 0", bars, found.measured.step_s)


def _traces(lanes: list[_Lane], phases: list[str], scale: float) -> list[dict[str, Any]]:
    """Return one trace per phase, through all lanes."""
    bars = [bar for lane in lanes for bar in lane.bars]
    names = dict.fromkeys([*phases, *(bar.phase for bar in bars)])
    return [
        _trace(name, phase_colour(name, at), [bar for bar in bars if bar.phase == name], scale)
        for at, name in enumerate(names)
    ]


def _trace(name: str, colour: str, bars: list[_Bar], scale: float) -> dict[str, Any]:
    return {
        "type": "bar", "orientation": "h", "name": label(name),
        "y": [bar.lane for bar in bars], "width": [bar.height for bar in bars],
        "base": column(np.array([bar.start_s / scale for bar in bars])),
        "x": column(np.array([bar.seconds / scale for bar in bars])),
        "text": [
            f"{label(bar.hover)}<br><b>{timing(bar.seconds)}</b> from {timing(bar.start_s)}"
            for bar in bars
        ],
        "textposition": "none", "hovertemplate": "%{text}<extra></extra>",
        "marker": {"color": colour, "line": {"color": "var(--card)", "width": 0.5}},
    }  # fmt: skip


def _alt(lanes: list[_Lane]) -> str:
    parts = []
    for lane in lanes:
        spent: dict[str, float] = {}
        for bar in lane.bars:
            spent[bar.phase] = spent.get(bar.phase, 0.0) + bar.seconds
        phases = listing([f"{name} {timing(seconds)}" for name, seconds in spent.items()], 9)
        parts.append(f"{lane.name}: {timing(lane.step_s)}, of which {phases}")
    return "; ".join(parts)
