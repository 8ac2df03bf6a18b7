"""The predicted step on a clock, and under it what was measured, on the same axis.

A lane is a rank. In a predicted one tall bars are computing, half as tall ones messages, and thin
ones waiting; a measured one has the phases alone, as a run does not say more of itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from moesaic.facts.plan import ALL, RankSpan, RankTimeline
from moesaic.report.charts.figure import Figure, column, label, layout, phase_colour
from moesaic.report.prediction import Prediction
from moesaic.report.wording import listing, time_unit, timing

_TALL = 0.72
_HEIGHTS = {"computing": _TALL, "waiting": 0.08, "messages": _TALL / 2}
"""Of a lane, by what the time goes to."""


class _Bar(NamedTuple):
    lane: int
    phase: str
    start_s: float
    seconds: float
    height: float
    what: str
    """What it is, for who points at it."""


class _Lane(NamedTuple):
    name: str
    bars: list[_Bar]
    step_s: float
    """When it is over."""


def step(found: Prediction) -> Figure | None:
    """The lanes of the prediction above that of the run; None where no timeline was predicted."""
    told = found.predicted.timeline
    if not told:
        return None
    lanes = [_predicted(at, one) for at, one in enumerate(told)]
    lanes.append(_measured(len(told), found))
    scale, unit = time_unit(max(lane.step_s for lane in lanes))
    return Figure(
        "step-timeline",
        "A step on a clock",
        "predicted, that is computed: tall computing, half as tall messages, thin waiting, and "
        "what follows the first micro-batch added up by phase; measured: medians of phases",
        f"Timeline of a step. {_told(lanes)}.",
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


def _predicted(at: int, told: RankTimeline) -> _Lane:
    now, bars = 0.0, []
    for span in told.spans:
        for what, seconds in _parts(span):
            words = f"{_block(span)}, {span.phase}: {what}"
            bars.append(_Bar(at, span.phase, now, seconds, _HEIGHTS[what], words))
            now += seconds
    return _Lane(f"predicted, rank {told.rank}", bars, told.seconds)


def _parts(span: RankSpan) -> Iterator[tuple[str, float]]:
    """What a span consists of, in the order in which it comes."""
    parts = zip(_HEIGHTS, (span.computing_s, span.waiting_s, span.messages_s), strict=True)
    return ((what, seconds) for what, seconds in parts if seconds)


def _block(span: RankSpan) -> str:
    words = "all blocks" if span.block in (ALL, "step") else span.block
    return words + (f" of {span.micro_batches:,} micro-batches" if span.micro_batches > 1 else "")


def _measured(at: int, found: Prediction) -> _Lane:
    now, bars = 0.0, []
    for phase, seconds in found.measured.phases_s.items():
        bars.append(_Bar(at, phase, now, seconds, _TALL, f"{phase}: median, waiting included"))
        now += seconds
    rest = found.measured.step_s - now
    if rest > 0:  # Between the phases; and medians need not add up.
        bars.append(_Bar(at, "other", now, rest, _HEIGHTS["waiting"], "other: in no phase"))
    return _Lane("measured, rank 0", bars, found.measured.step_s)


def _traces(lanes: list[_Lane], phases: list[str], scale: float) -> list[dict[str, Any]]:
    """One for each phase, through all lanes."""
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
            f"{label(bar.what)}<br><b>{timing(bar.seconds)}</b> from {timing(bar.start_s)} on"
            for bar in bars
        ],
        "textposition": "none", "hovertemplate": "%{text}<extra></extra>",
        "marker": {"color": colour, "line": {"color": "var(--card)", "width": 0.5}},
    }  # fmt: skip


def _told(lanes: list[_Lane]) -> str:
    parts = []
    for lane in lanes:
        spent: dict[str, float] = {}
        for bar in lane.bars:
            spent[bar.phase] = spent.get(bar.phase, 0.0) + bar.seconds
        phases = listing([f"{name} {timing(seconds)}" for name, seconds in spent.items()], 9)
        parts.append(f"{lane.name}: {timing(lane.step_s)}, of which {phases}")
    return "; ".join(parts)
