"""A timeline as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from moesaic.sim.timeline import Span, Timeline

_MICRO = 1e6
_ROWS = ("computing and messages", "waiting", "messages beside")


def trace(timeline: Timeline, ranks: Sequence[int]) -> dict[str, Any]:
    """The JSON of a trace: a process for each of `ranks`, events in one row, waiting in another,
    and in a third what travels beside."""
    names = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in ranks
    ]
    names += [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}}
        for rank in ranks
        for row, name in enumerate(_ROWS)
    ]
    events = [event for span in timeline.spans for rank in ranks for event in _events(span, rank)]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def _events(span: Span, rank: int) -> Iterator[dict[str, Any]]:
    start, begin, end = (float(t[rank]) for t in (span.start_s, span.begin_s, span.end_s))
    event = span.event
    kind = "message" if event.is_message else "computing"
    common = {"ph": "X", "pid": rank, "cat": f"{event.phase},{kind}"}
    name = f"{event.block} {event.name}".strip()
    drawn = [(1, f"wait for {event.name}", start, begin), (0, name, begin, end)]
    if span.away is not None:
        drawn.append((2, name, float(span.away[0][rank]), float(span.away[1][rank])))
    for row, said, first, last in drawn:
        if last > first:
            lasts = {"ts": first * _MICRO, "dur": (last - first) * _MICRO}
            yield {**common, "name": said, "tid": row, **lasts}
