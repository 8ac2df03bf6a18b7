"""Summary of a timeline for plans: a few dozen spans per rank instead of thousands of events.

The size depends neither on depth nor on micro-batches. The sum of seconds by phase stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from moesaic.facts.plan import ALL_BLOCKS, RankSpan, RankTimeline, round_digits
from moesaic.policy.cost.event import PIPELINE
from moesaic.policy.cost.timeline import Timeline

PASS_PHASES = ("forward", "backward")
"""Phases that pass through the blocks in each micro-batch; a pipeline has one phase instead."""
MAX_SPANS = 16
"""Spans per pass, at most; blocks in its middle share one."""


def summarize_timeline(timeline: Timeline) -> list[RankTimeline]:
    """Return the summary of the critical rank, and of rank 0 if it differs."""
    slowest, first = (_rank_spans(timeline, rank) for rank in (timeline.critical_rank, 0))
    kept = [RankTimeline(rank=timeline.critical_rank, spans=slowest)]
    return kept if first in ([], slowest) else [*kept, RankTimeline(rank=0, spans=first)]


def _rank_spans(timeline: Timeline, rank: int) -> list[RankSpan]:
    """Return one rank's spans: the first micro-batch by block, the rest of the step by phase.

    For a pipeline, the first spans and the last ones stay apart: there ranks wait for each other.
    """
    passes = [list(run) for _, run in groupby(_block_spans(timeline, rank), lambda one: one.phase)]
    kept = (*PASS_PHASES, PIPELINE)
    first = {phase: next((run for run in passes if run[0].phase == phase), None) for phase in kept}
    start = next((place for place, run in enumerate(passes) if run[0].phase in kept), 0)
    rest: dict[str, list[list[RankSpan]]] = {}
    for run in passes[start:]:
        if run is not first.get(run[0].phase):
            rest.setdefault(run[0].phase, []).append(run)
    spans = [one for run in passes[:start] for one in run]
    spans += [one for run in first.values() if run is not None for one in _merge_middle(run)]
    for runs in rest.values():
        every = [one for run in runs for one in run]
        spans.append(
            _merge_spans(every, ALL_BLOCKS if len(every) > 1 else every[0].block, len(runs))
        )
    return [_round_span(span) for span in spans if span.seconds]


def _block_spans(timeline: Timeline, rank: int) -> list[RankSpan]:
    """Return one rank's spans, block by block."""
    found = []
    # Most events of a pipeline belong to other ranks.
    own = (
        span
        for span in timeline.spans
        if span.event.phase != PIPELINE or span.end_s[rank] > span.arrive_s[rank]
    )
    for (phase, block), run in groupby(own, lambda span: (span.event.phase, span.event.block)):
        computing = collectives = waiting = 0.0
        for span in run:
            duration = float(span.end_s[rank] - span.begin_s[rank])
            waiting += float(span.begin_s[rank] - span.arrive_s[rank])
            if span.event.is_communication:
                collectives += duration
            else:
                computing += duration
        found.append(
            RankSpan(
                phase=phase, block=block, computing_s=computing, collectives_s=collectives,
                waiting_s=waiting,
            )
        )  # fmt: skip
    return found


def _merge_middle(run: list[RankSpan]) -> list[RankSpan]:
    """Return the spans of a pass, with those in its middle merged if it is long."""
    if len(run) <= MAX_SPANS:
        return run
    head, tail = MAX_SPANS // 2, len(run) - (MAX_SPANS - 1) // 2
    middle = run[head:tail]
    between = f"{middle[0].block} to {middle[-1].block}"
    # The middle covers many micro-batches.
    name = ALL_BLOCKS if run[0].phase == PIPELINE else between
    return [*run[:head], _merge_spans(middle, name), *run[tail:]]


def _merge_spans(run: Sequence[RankSpan], block: str, micro_batches: int = 1) -> RankSpan:
    return RankSpan(
        phase=run[0].phase, block=block, micro_batches=micro_batches,
        computing_s=sum(one.computing_s for one in run),
        collectives_s=sum(one.collectives_s for one in run),
        waiting_s=sum(one.waiting_s for one in run),
    )  # fmt: skip


def _round_span(span: RankSpan) -> RankSpan:
    seconds = ("computing_s", "collectives_s", "waiting_s")
    return span.model_copy(update={name: round_digits(getattr(span, name)) for name in seconds})
