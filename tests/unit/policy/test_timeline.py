"""Timelines: compared with a slow reference with a clock per rank, and simple cases by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_timeline import simulate_events

from moesaic.policy.cost.event import AsyncMessage, Event, StageTransfer
from moesaic.policy.cost.timeline import Timeline
from moesaic.sim.perfetto import perfetto_trace


def event(name: str, seconds: list[float], *groups: list[int], phase: str = "forward") -> Event:
    return Event(name, phase, "block", np.array(seconds, dtype=np.float64), groups)


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, list[Event]]:
    ranks = draw(st.integers(1, 6))
    events = []
    for number in range(draw(st.integers(0, 8))):
        seconds = draw(st.lists(st.floats(0, 10), min_size=ranks, max_size=ranks))
        order = draw(st.permutations(range(ranks)))
        cut = draw(st.integers(0, ranks))
        groups = [group for group in (order[:cut], order[cut:]) if len(group) > 1]
        if draw(st.booleans()):
            groups = groups[:1]
        one = event(str(number), seconds, *groups)
        events.append(replace(one, skew_s=draw(st.floats(0, 1))))
    return ranks, launch_some(draw, add_transfers(draw, ranks, events))


def launch_some(draw: st.DrawFn, events: list[Event]) -> list[Event]:
    """Make some collectives asynchronous; later events may wait for them."""
    launched: list[AsyncMessage] = []
    found = []
    for one in events:
        if one.receives is None and launched and draw(st.booleans()):
            one = replace(one, waits_for=draw(st.sampled_from(launched)))
        if one.groups and one.sends is None and draw(st.booleans()):
            # An AsyncMessage that is launched again ends at the later time.
            again = bool(launched) and draw(st.booleans())
            message = draw(st.sampled_from(launched)) if again else AsyncMessage()
            launched.append(message)
            one = replace(one, launches=message)
        found.append(one)
    return found


def add_transfers(draw: st.DrawFn, ranks: int, events: list[Event]) -> list[Event]:
    """Add transfers: some ranks send in one event, others receive in a later one."""
    pairs = min(draw(st.integers(0, 2)), ranks // 2, len(events))
    for _ in range(pairs):
        order = draw(st.permutations(range(ranks)))
        how_many = draw(st.integers(1, ranks // 2))
        over = StageTransfer(
            np.array(order[:how_many]), np.array(order[how_many : 2 * how_many]),
            draw(st.booleans()),
        )  # fmt: skip
        free = [at for at, one in enumerate(events) if one.sends is None]
        left = draw(st.sampled_from(free))
        taken = draw(st.integers(left + 1, len(events)))
        events[left] = replace(events[left], sends=over)
        seconds = draw(st.lists(st.floats(0, 10), min_size=ranks, max_size=ranks))
        events.insert(taken, replace(event(f"take {left}", seconds), receives=over))
    return events


def reference_timeline(ranks: int, events: list[Event]) -> tuple[list[float], list[float]]:
    """Return when each rank ends and how long it waits, rank by rank and event by event."""
    clock, waited, computed = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
    busy = [0.0] * ranks
    left: dict[StageTransfer, list[float]] = {}
    over: dict[AsyncMessage, list[float]] = {}
    for one in events:
        arrived, before, channel_free = list(clock), list(computed), list(busy)
        ready = list(arrived)
        if one.waits_for is not None:
            ready = [max(*both) for both in zip(arrived, over[one.waits_for], strict=True)]
        if one.launches is not None:
            over[one.launches] = [0.0] * ranks
        for rank in range(ranks) if one.receives is None else ():
            seconds = float(one.seconds[rank])
            group = next((g for g in one.groups if rank in g), [])
            begin = max(
                [ready[rank]]
                + [max(ready[g], channel_free[g]) + one.skew_s * before[g] ** 0.5 for g in group]
            )
            if one.launches is None:
                waited[rank] += begin - arrived[rank]
                clock[rank] = begin + seconds
            else:
                over[one.launches][rank] = begin + seconds
                busy[rank] = max(busy[rank], begin + seconds)
            computed[rank] = 0.0 if group else before[rank] + seconds * (not one.groups)
        if one.receives is not None:
            for sender, rank in zip(one.receives.senders, one.receives.receivers, strict=True):
                sent_at, seconds = left[one.receives][sender], float(one.seconds[rank])
                begin = max(arrived[rank], sent_at)
                waited[rank] += begin - arrived[rank]
                received_at = sent_at + seconds if one.receives.is_eager else begin + seconds
                clock[rank] = max(begin, received_at)
        if one.sends is not None:
            left[one.sends] = list(clock)
    return clock, waited


@given(programs())
def test_timelines_match_the_slow_reference(program: tuple[int, list[Event]]) -> None:
    ranks, events = program
    found = simulate_events(events, ranks)
    clock, waited = reference_timeline(ranks, events)
    assert found.end_s.tolist() == pytest.approx(clock)
    assert [found.waiting_s(rank) for rank in range(ranks)] == pytest.approx(waited)
    assert found.step_s == pytest.approx(max(clock))
    for rank in range(ranks):
        assert sum(found.seconds_by_phase(rank).values()) == pytest.approx(clock[rank])


def test_equal_ranks_take_the_sum_of_the_events() -> None:
    times = [0.1, 0.25, 0.5]
    found = simulate_events([event(str(t), [t] * 1000, list(range(1000))) for t in times], 1000)
    assert np.allclose(found.end_s, sum(times), rtol=1e-12)
    assert found.waiting_s(17) == 0.0


def test_skew_follows_computing_since_the_last_collective() -> None:
    ranks = list(range(4))
    work, reduction = event("work", [0.1] * 4), event("sum", [0.01] * 4, ranks)
    reduction = replace(reduction, skew_s=0.02)
    alone, twice = (
        simulate_events([work, reduction], 4),
        simulate_events([work, reduction, reduction], 4),
    )
    assert alone.step_s == pytest.approx(0.1 + 0.02 * 0.1**0.5 + 0.01)
    assert twice.step_s == pytest.approx(alone.step_s + 0.01)
    assert twice.waiting_s(2) == pytest.approx(0.02 * 0.1**0.5)


def straggler() -> Timeline:
    return simulate_events(
        [event("work", [1.0, 3.0]), event("sum", [0.5, 0.5], [0, 1], phase="reduce")], 2
    )


def test_the_slowest_rank_delays_the_others() -> None:
    found = straggler()
    assert found.end_s.tolist() == [3.5, 3.5]
    assert (found.waiting_s(0), found.waiting_s(1)) == (2.0, 0.0)
    assert (found.queueing_s(0), found.queueing_s(1)) == (0.0, 0.0)
    assert found.seconds_by_phase(0) == {"forward": 1.0, "reduce": 2.5}
    assert found.seconds_by_block(1) == {"block": 3.5}
    assert found.max_seconds_by_block() == {"block": 3.5}


def test_a_trace_shows_work_and_waiting() -> None:
    events = json.loads(json.dumps(perfetto_trace(straggler(), [0, 1])))["traceEvents"]
    names = [e["args"]["name"] for e in events if e["ph"] == "M"]
    rows = ["computing and collectives", "waiting", "overlapped collectives"]
    assert names == ["rank 0", "rank 1", *rows, *rows]
    spans = {(e["pid"], e["name"]): (e["ts"], e["dur"], e["tid"]) for e in events if e["ph"] == "X"}
    assert spans == {
        (0, "block work"): (0.0, 1e6, 0),
        (1, "block work"): (0.0, 3e6, 0),
        (0, "wait for sum"): (1e6, 2e6, 1),
        (0, "block sum"): (3e6, 5e5, 0),
        (1, "block sum"): (3e6, 5e5, 0),
    }


def test_asynchronous_collectives_delay_only_their_consumers() -> None:
    message, pair = AsyncMessage(), [0, 1]
    events = [
        replace(event("gather", [2.0, 2.0], pair), launches=message),
        event("work", [1.0, 0.5]),
        event("exchange", [1.0, 1.0], pair),
        replace(event("more", [4.0, 4.0]), waits_for=message),
        replace(event("sum", [1.0, 1.0], pair), launches=message),
        event("last", [0.25, 0.25]),
        replace(event("wait", [0.0, 0.0]), waits_for=message),
    ]
    found = simulate_events(events, 2)
    # The exchange starts when the gather ends; the sum ends a second after the rest started.
    assert found.end_s.tolist() == [2.0 + 1.0 + 4.0 + 1.0] * 2
    assert [found.waiting_s(rank) for rank in pair] == [1.0 + 0.75, 1.5 + 0.75]
    # All waiting is for their own collectives; no rank is first.
    assert [found.queueing_s(rank) for rank in pair] == [1.0 + 0.75, 1.5 + 0.75]
    assert sum(found.seconds_by_phase(0).values()) == 8.0
    rows = [
        (e["name"], e["ts"] / 1e6, e["dur"] / 1e6)
        for e in perfetto_trace(found, [0])["traceEvents"]
        if e["ph"] == "X" and e["tid"] == 2
    ]
    assert rows == [("block gather", 0.0, 2.0), ("block sum", 7.0, 1.0)]


def test_a_trace_shows_stage_transfers() -> None:
    over = StageTransfer(np.array([0]), np.array([1]), is_eager=False)
    events = [
        replace(event("forward 0", [2.0, 0.0]), sends=over),
        replace(event("activations 0", [0.0, 0.5]), receives=over),
        event("forward 0", [0.0, 1.0]),
    ]
    spans = perfetto_trace(simulate_events(events, 2), [0, 1])["traceEvents"]
    assert [(e["pid"], e["name"], e["ts"], e["dur"]) for e in spans if e["ph"] == "X"] == [
        (0, "block forward 0", 0.0, 2e6),
        (1, "wait for activations 0", 0.0, 2e6),
        (1, "block activations 0", 2e6, 5e5),
        (1, "block forward 0", 2.5e6, 1e6),
    ]


def test_the_critical_rank_waits_least_among_the_last() -> None:
    meeting = [[0, 1, 2]]
    events = [
        Event("work", "forward", "", np.array([1.0, 3.0, 2.0])),
        Event("sum", "reduce", "", np.array([1.0, 1.0, 1.0]), meeting),
    ]
    assert simulate_events(events, 3).critical_rank == 1
    assert (
        simulate_events(
            [*events, Event("more", "log", "", np.array([0.0, 0.0, 4.0]))], 3
        ).critical_rank
        == 2
    )
