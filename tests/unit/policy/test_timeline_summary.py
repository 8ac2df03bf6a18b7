"""Timeline summaries: seconds stay exact, however much is merged."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipelines import SCHEDULES, simulate

from moesaic.facts.job.train import PipelineSchedule
from moesaic.facts.plan import RankSpan, RankTimeline
from moesaic.policy.cost.event import PIPELINE, Event
from moesaic.policy.cost.timeline import Timeline, simulate_events
from moesaic.policy.plan.timeline_summary import MAX_SPANS, summarize_timeline

SECONDS = st.floats(0, 10).filter(lambda value: value == 0 or value > 1e-9)


@st.composite
def steps(draw: st.DrawFn) -> Timeline:
    """Draw steps: passes through blocks, micro-batch by micro-batch, then the update."""
    ranks = draw(st.integers(1, 4))
    blocks = [f"b{number}" for number in range(draw(st.integers(1, 2 * MAX_SPANS)))]
    everyone = (list(range(ranks)),)

    def event(phase: str, block: str) -> Event:
        seconds = np.array(draw(st.lists(SECONDS, min_size=ranks, max_size=ranks)))
        return Event("op", phase, block, seconds, everyone if draw(st.booleans()) else ())

    once = [event("forward", block) for block in blocks for _ in (0, 1)]
    once += [event("backward", block) for block in reversed(blocks)]
    times = draw(st.integers(1, 5))
    last = [event("backward", block) for block in blocks if times > 1]
    last += [event("reduce", "step")]
    last += [event("optimizer", block) for block in blocks]
    return simulate_events(once * times + last, ranks)


def total(summary: RankTimeline, phase: str) -> float:
    return sum(span.seconds for span in summary.spans if span.phase == phase)


@given(steps().filter(lambda timeline: timeline.step_s > 0))
def test_summaries_keep_all_seconds(timeline: Timeline) -> None:
    summary = summarize_timeline(timeline)
    assert summary[0].rank == timeline.critical_rank
    assert [one.rank for one in summary[1:]] in ([], [0])
    for one in summary:
        assert one.seconds == pytest.approx(float(timeline.end_s[one.rank]), rel=1e-4)
        for phase, seconds in timeline.seconds_by_phase(one.rank).items():
            assert total(one, phase) == pytest.approx(seconds, rel=1e-4, abs=1e-12)
        waiting = sum(span.waiting_s for span in one.spans)
        assert waiting == pytest.approx(timeline.waiting_s(one.rank), rel=1e-4, abs=1e-12)
        messages = sum(
            float(span.end_s[one.rank] - span.begin_s[one.rank])
            for span in timeline.spans
            if span.event.groups
        )
        assert sum(s.collectives_s for s in one.spans) == pytest.approx(
            messages, rel=1e-4, abs=1e-12
        )
        assert len(one.spans) <= 2 * MAX_SPANS + 4


def event(phase: str, block: str, *seconds: float, together: bool = False) -> Event:
    groups = (list(range(len(seconds))),) if together else ()
    return Event("op", phase, block, np.array(seconds), groups)


def test_summaries_cover_the_critical_rank_and_rank_0() -> None:
    events = [
        event("forward", "a", 1.0, 3.0),
        event("forward", "a", 0.5, 0.5, together=True),
        event("backward", "a", 1.0, 2.0),
        event("optimizer", "a", 0.25, 0.25),
    ]
    last, first = summarize_timeline(simulate_events(events, 2))
    rest = RankSpan(phase="optimizer", block="a", computing_s=0.25)
    assert last == RankTimeline(
        rank=1,
        spans=[
            RankSpan(phase="forward", block="a", computing_s=3.0, collectives_s=0.5),
            RankSpan(phase="backward", block="a", computing_s=2.0),
            rest,
        ],
    )
    assert first == RankTimeline(
        rank=0,
        spans=[
            RankSpan(phase="forward", block="a", computing_s=1.0, collectives_s=0.5, waiting_s=2.0),
            RankSpan(phase="backward", block="a", computing_s=1.0),
            rest,
        ],
    )
    alike = [event("forward", "a", 1.0, 1.0), event("reduce", "step", 0.5, 0.5, together=True)]
    (only,) = summarize_timeline(simulate_events(alike, 2))
    assert [(span.phase, span.block) for span in only.spans] == [
        ("forward", "a"),
        ("reduce", "step"),
    ]


def test_deep_models_and_many_micro_batches_are_merged() -> None:
    blocks = [f"b{number}" for number in range(100)]
    once = [event("forward", block, 1.0) for block in blocks]
    once += [event("backward", block, 2.0) for block in reversed(blocks)]
    last = [event("clip", block, 0.5) for block in blocks]
    (summary,) = summarize_timeline(simulate_events(once * 8 + last, 1))
    forward, backward = summary.spans[:MAX_SPANS], summary.spans[MAX_SPANS : 2 * MAX_SPANS]
    assert [span.block for span in forward[:8]] == blocks[:8]
    assert forward[8] == RankSpan(phase="forward", block="b8 to b92", computing_s=85.0)
    assert [span.block for span in forward[9:]] == blocks[93:]
    assert backward[8] == RankSpan(phase="backward", block="b91 to b7", computing_s=170.0)
    assert summary.spans[2 * MAX_SPANS :] == [
        RankSpan(phase="forward", block="all", micro_batches=7, computing_s=700.0),
        RankSpan(phase="backward", block="all", micro_batches=7, computing_s=1400.0),
        RankSpan(phase="clip", block="all", computing_s=50.0),
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipeline_summaries_keep_the_start_and_the_end(schedule: PipelineSchedule) -> None:
    found = simulate(schedule, 3, 24, 0.5)
    for summary in summarize_timeline(found):
        spans = [span for span in summary.spans if span.phase == PIPELINE]
        # All transfers arrive in time there, and spans run together.
        folded = schedule != "zero-bubble"
        assert len(spans) == MAX_SPANS or (not folded and len(spans) < MAX_SPANS)
        assert [span.block for span in spans].count("all") == folded
        assert spans[0].block == ("step" if summary.rank else "layers.0.ffn")
        computing = sum(span.computing_s for span in spans)
        assert computing == pytest.approx(24 * 3 * (2 if schedule == "interleaved" else 1))
        waiting = sum(span.waiting_s for span in spans)
        assert waiting == pytest.approx(found.waiting_s(summary.rank), rel=1e-4)
        assert summary.seconds == pytest.approx(float(found.end_s[summary.rank]), rel=1e-4)
