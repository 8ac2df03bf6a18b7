"""A timeline in short: what a plan keeps of it.

Of a thousand events a few dozen spans are left, however deep the model is and however many
micro-batches it takes. No second is lost, and none changes its phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from moesaic.facts.plan import ALL, RankSpan, RankTimeline, short
from moesaic.policy.cost.event import PIPELINE
from moesaic.sim.timeline import Timeline

WAYS = ("forward", "backward")
"""Phases that pass through the blocks, in each micro-batch; a pipeline does so in one phase."""
MOST = 16
"""Spans of such a pass, at most; blocks in its middle share one."""


def outline(timeline: Timeline) -> list[RankTimeline]:
    """The rank that others wait for, and the first one unless it does the same."""
    slowest, first = (_spans(timeline, rank) for rank in (timeline.slowest, 0))
    told = [RankTimeline(rank=timeline.slowest, spans=slowest)]
    return told if first in ([], slowest) else [*told, RankTimeline(rank=0, spans=first)]


def _spans(timeline: Timeline, rank: int) -> list[RankSpan]:
    """One rank: the first micro-batch block by block, the rest of the step phase by phase.

    Of a pipeline how it begins and how it ends: there ranks wait for each other.
    """
    passes = [list(run) for _, run in groupby(_pieces(timeline, rank), lambda one: one.phase)]
    told = (*WAYS, PIPELINE)
    first = {way: next((run for run in passes if run[0].phase == way), None) for way in told}
    start = next((place for place, run in enumerate(passes) if run[0].phase in told), 0)
    rest: dict[str, list[list[RankSpan]]] = {}
    for run in passes[start:]:
        if run is not first.get(run[0].phase):
            rest.setdefault(run[0].phase, []).append(run)
    spans = [one for run in passes[:start] for one in run]
    spans += [one for run in first.values() if run is not None for one in _fold(run)]
    for runs in rest.values():
        every = [one for run in runs for one in run]
        spans.append(_sum(every, ALL if len(every) > 1 else every[0].block, len(runs)))
    return [_rounded(span) for span in spans if span.seconds]


def _pieces(timeline: Timeline, rank: int) -> list[RankSpan]:
    """What one rank does, block by block."""
    found = []
    # In a pipeline most of what happens is none of this rank's.
    own = (
        span
        for span in timeline.spans
        if span.event.phase != PIPELINE or span.end_s[rank] > span.start_s[rank]
    )
    for (phase, block), run in groupby(own, lambda span: (span.event.phase, span.event.block)):
        computing = messages = waiting = 0.0
        for span in run:
            spent = float(span.end_s[rank] - span.begin_s[rank])
            waiting += float(span.begin_s[rank] - span.start_s[rank])
            if span.event.is_message:
                messages += spent
            else:
                computing += spent
        found.append(
            RankSpan(
                phase=phase, block=block, computing_s=computing, messages_s=messages,
                waiting_s=waiting,
            )
        )  # fmt: skip
    return found


def _fold(run: list[RankSpan]) -> list[RankSpan]:
    """A pass through the blocks, its middle in one span where it is long."""
    if len(run) <= MOST:
        return run
    head, tail = MOST // 2, len(run) - (MOST - 1) // 2
    middle = run[head:tail]
    between = f"{middle[0].block} to {middle[-1].block}"
    name = ALL if run[0].phase == PIPELINE else between  # There it is many micro-batches.
    return [*run[:head], _sum(middle, name), *run[tail:]]


def _sum(run: Sequence[RankSpan], block: str, micro_batches: int = 1) -> RankSpan:
    return RankSpan(
        phase=run[0].phase, block=block, micro_batches=micro_batches,
        computing_s=sum(one.computing_s for one in run),
        messages_s=sum(one.messages_s for one in run),
        waiting_s=sum(one.waiting_s for one in run),
    )  # fmt: skip


def _rounded(span: RankSpan) -> RankSpan:
    seconds = ("computing_s", "messages_s", "waiting_s")
    return span.model_copy(update={name: short(getattr(span, name)) for name in seconds})
