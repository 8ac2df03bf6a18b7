"""Export of a timeline as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from moesaic.policy.cost.timeline import EventSpan, Timeline

_MICROSECONDS = 1e6
_TRACKS = ("computing and collectives", "waiting", "overlapped collectives")


def perfetto_trace(timeline: Timeline, ranks: Sequence[int]) -> dict[str, Any]:
    """Return the trace as JSON: one process per rank of `ranks`.

    Each has a track of computing and collectives, one of waiting, and one of overlapped
    collectives.
    """
    names = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in ranks
    ]
    names += [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}}
        for rank in ranks
        for row, name in enumerate(_TRACKS)
    ]
    events = [
        event for span in timeline.spans for rank in ranks for event in _span_events(span, rank)
    ]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def _span_events(span: EventSpan, rank: int) -> Iterator[dict[str, Any]]:
    start, begin, end = (float(t[rank]) for t in (span.arrive_s, span.begin_s, span.end_s))
    event = span.event
    kind = "collective" if event.is_communication else "computing"
    common = {"ph": "X", "pid": rank, "cat": f"{event.phase},{kind}"}
    name = f"{event.block} {event.name}".strip()
    spans = [(1, f"wait for {event.name}", start, begin), (0, name, begin, end)]
    if span.async_interval is not None:
        spans.append(
            (2, name, float(span.async_interval[0][rank]), float(span.async_interval[1][rank]))
        )
    for row, label, first, last in spans:
        if last > first:
            interval = {"ts": first * _MICROSECONDS, "dur": (last - first) * _MICROSECONDS}
            yield {**common, "name": label, "tid": row, **interval}
