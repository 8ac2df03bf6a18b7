"""Export of a timeline as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from moesaic.policy.cost.class_segment import EventSpan
from moesaic.policy.cost.timeline import Timeline

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
        event
        for rank in ranks
        for span in timeline.spans(rank)
        for event in _span_events(span, rank)
    ]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def _span_events(span: EventSpan, rank: int) -> Iterator[dict[str, Any]]:
    event = span.event
    kind = "collective" if event.is_communication else "computing"
    common = {"ph": "X", "pid": rank, "cat": f"{event.phase},{kind}"}
    name = f"{event.block} {event.name}".strip()
    number = "" if span.micro_batch is None else f" {span.micro_batch}"
    spans = [
        (1, f"wait for {event.name}", span.arrive_s, span.begin_s),
        (0, name, span.begin_s, span.end_s),
    ]
    if span.async_interval is not None:
        spans.append((2, name, *span.async_interval))
    for row, label, first, last in spans:
        if last > first:
            interval = {"ts": first * _MICROSECONDS, "dur": (last - first) * _MICROSECONDS}
            yield {**common, "name": f"{label}{number}", "tid": row, **interval}
