"""Timelines: against a slow twin that keeps a clock a rank, and against what is plain to see."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.policy.cost.event import Event, Handover, Trip
from moesaic.sim.timeline import Timeline, run
from moesaic.sim.trace import trace


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
    return ranks, sent(draw, handed(draw, ranks, events))


def sent(draw: st.DrawFn, events: list[Event]) -> list[Event]:
    """Some messages travel beside, and something that comes later may wait for them."""
    trips: list[Trip] = []
    found = []
    for one in events:
        if one.takes is None and trips and draw(st.booleans()):
            one = replace(one, awaits=draw(st.sampled_from(trips)))
        if one.groups and one.leaves is None and draw(st.booleans()):
            # Of one that is met again, the later time counts.
            again = bool(trips) and draw(st.booleans())
            trip = draw(st.sampled_from(trips)) if again else Trip()
            trips.append(trip)
            one = replace(one, beside=trip)
        found.append(one)
    return found


def handed(draw: st.DrawFn, ranks: int, events: list[Event]) -> list[Event]:
    """Some ranks leave something with one of the events, and others take it over later."""
    pairs = min(draw(st.integers(0, 2)), ranks // 2, len(events))
    for _ in range(pairs):
        order = draw(st.permutations(range(ranks)))
        how_many = draw(st.integers(1, ranks // 2))
        over = Handover(
            np.array(order[:how_many]), np.array(order[how_many : 2 * how_many]),
            draw(st.booleans()),
        )  # fmt: skip
        free = [at for at, one in enumerate(events) if one.leaves is None]
        left = draw(st.sampled_from(free))
        taken = draw(st.integers(left + 1, len(events)))
        events[left] = replace(events[left], leaves=over)
        seconds = draw(st.lists(st.floats(0, 10), min_size=ranks, max_size=ranks))
        events.insert(taken, replace(event(f"take {left}", seconds), takes=over))
    return events


def slowly(ranks: int, events: list[Event]) -> tuple[list[float], list[float]]:
    """When each rank ends, and how long it waited: rank by rank, event by event."""
    clock, waited, computed = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
    busy = [0.0] * ranks
    left: dict[Handover, list[float]] = {}
    over: dict[Trip, list[float]] = {}
    for one in events:
        arrived, before, spoken = list(clock), list(computed), list(busy)
        ready = list(arrived)
        if one.awaits is not None:
            ready = [max(*both) for both in zip(arrived, over[one.awaits], strict=True)]
        if one.beside is not None:
            over[one.beside] = [0.0] * ranks
        for rank in range(ranks) if one.takes is None else ():
            seconds = float(one.seconds[rank])
            group = next((g for g in one.groups if rank in g), [])
            begin = max(
                [ready[rank]]
                + [max(ready[g], spoken[g]) + one.skew_s * before[g] ** 0.5 for g in group]
            )
            if one.beside is None:
                waited[rank] += begin - arrived[rank]
                clock[rank] = begin + seconds
            else:
                over[one.beside][rank] = begin + seconds
                busy[rank] = max(busy[rank], begin + seconds)
            computed[rank] = 0.0 if group else before[rank] + seconds * (not one.groups)
        if one.takes is not None:
            for sender, rank in zip(one.takes.senders, one.takes.receivers, strict=True):
                gone, seconds = left[one.takes][sender], float(one.seconds[rank])
                begin = max(arrived[rank], gone)
                waited[rank] += begin - arrived[rank]
                there = gone + seconds if one.takes.ahead else begin + seconds
                clock[rank] = max(begin, there)
        if one.leaves is not None:
            left[one.leaves] = list(clock)
    return clock, waited


@given(programs())
def test_a_timeline_is_what_the_slow_twin_says(program: tuple[int, list[Event]]) -> None:
    ranks, events = program
    found = run(events, ranks)
    clock, waited = slowly(ranks, events)
    assert found.end_s.tolist() == pytest.approx(clock)
    assert [found.waiting_s(rank) for rank in range(ranks)] == pytest.approx(waited)
    assert found.step_s == pytest.approx(max(clock))
    for rank in range(ranks):
        assert sum(found.by_phase(rank).values()) == pytest.approx(clock[rank])


def test_equal_ranks_take_the_sum_of_the_events() -> None:
    times = [0.1, 0.25, 0.5]
    found = run([event(str(t), [t] * 1000, list(range(1000))) for t in times], 1000)
    assert np.allclose(found.end_s, sum(times), rtol=1e-12)
    assert found.waiting_s(17) == 0.0


def test_who_has_computed_is_late_and_who_has_just_met_is_not() -> None:
    ranks = list(range(4))
    work, said = event("work", [0.1] * 4), event("sum", [0.01] * 4, ranks)
    said = replace(said, skew_s=0.02)
    alone, twice = run([work, said], 4), run([work, said, said], 4)
    assert alone.step_s == pytest.approx(0.1 + 0.02 * 0.1**0.5 + 0.01)
    assert twice.step_s == pytest.approx(alone.step_s + 0.01)
    assert twice.waiting_s(2) == pytest.approx(0.02 * 0.1**0.5)


def straggling() -> Timeline:
    return run([event("work", [1.0, 3.0]), event("sum", [0.5, 0.5], [0, 1], phase="reduce")], 2)


def test_the_slowest_holds_up_the_others() -> None:
    found = straggling()
    assert found.end_s.tolist() == [3.5, 3.5]
    assert (found.waiting_s(0), found.waiting_s(1)) == (2.0, 0.0)
    assert (found.queueing_s(0), found.queueing_s(1)) == (0.0, 0.0)
    assert found.by_phase(0) == {"forward": 1.0, "reduce": 2.5}
    assert found.by_block(1) == {"block": 3.5}
    assert found.longest_by_block() == {"block": 3.5}


def test_a_trace_shows_work_and_waiting() -> None:
    events = json.loads(json.dumps(trace(straggling(), [0, 1])))["traceEvents"]
    names = [e["args"]["name"] for e in events if e["ph"] == "M"]
    rows = ["computing and messages", "waiting", "messages beside"]
    assert names == ["rank 0", "rank 1", *rows, *rows]
    spans = {(e["pid"], e["name"]): (e["ts"], e["dur"], e["tid"]) for e in events if e["ph"] == "X"}
    assert spans == {
        (0, "block work"): (0.0, 1e6, 0),
        (1, "block work"): (0.0, 3e6, 0),
        (0, "wait for sum"): (1e6, 2e6, 1),
        (0, "block sum"): (3e6, 5e5, 0),
        (1, "block sum"): (3e6, 5e5, 0),
    }


def test_what_travels_beside_is_waited_for_where_it_is_needed_alone() -> None:
    trip, pair = Trip(), [0, 1]
    events = [
        replace(event("gather", [2.0, 2.0], pair), beside=trip),
        event("work", [1.0, 0.5]),
        event("exchange", [1.0, 1.0], pair),
        replace(event("more", [4.0, 4.0]), awaits=trip),
        replace(event("sum", [1.0, 1.0], pair), beside=trip),
        event("last", [0.25, 0.25]),
        replace(event("wait", [0.0, 0.0]), awaits=trip),
    ]
    found = run(events, 2)
    # The exchange begins when the gather is over; the sum is over a second after the rest began.
    assert found.end_s.tolist() == [2.0 + 1.0 + 4.0 + 1.0] * 2
    assert [found.waiting_s(rank) for rank in pair] == [1.0 + 0.75, 1.5 + 0.75]
    # All of it is for their own messages: the one that is first has nobody to wait for.
    assert [found.queueing_s(rank) for rank in pair] == [1.0 + 0.75, 1.5 + 0.75]
    assert sum(found.by_phase(0).values()) == 8.0
    rows = [
        (e["name"], e["ts"] / 1e6, e["dur"] / 1e6)
        for e in trace(found, [0])["traceEvents"]
        if e["ph"] == "X" and e["tid"] == 2
    ]
    assert rows == [("block gather", 0.0, 2.0), ("block sum", 7.0, 1.0)]


def test_a_trace_shows_what_is_handed_on() -> None:
    over = Handover(np.array([0]), np.array([1]), ahead=False)
    events = [
        replace(event("forward 0", [2.0, 0.0]), leaves=over),
        replace(event("activations 0", [0.0, 0.5]), takes=over),
        event("forward 0", [0.0, 1.0]),
    ]
    spans = trace(run(events, 2), [0, 1])["traceEvents"]
    assert [(e["pid"], e["name"], e["ts"], e["dur"]) for e in spans if e["ph"] == "X"] == [
        (0, "block forward 0", 0.0, 2e6),
        (1, "wait for activations 0", 0.0, 2e6),
        (1, "block activations 0", 2e6, 5e5),
        (1, "block forward 0", 2.5e6, 1e6),
    ]


def test_who_waits_least_of_those_done_last_is_the_slowest() -> None:
    meeting = [[0, 1, 2]]
    events = [
        Event("work", "forward", "", np.array([1.0, 3.0, 2.0])),
        Event("sum", "reduce", "", np.array([1.0, 1.0, 1.0]), meeting),
    ]
    assert run(events, 3).slowest == 1
    assert run([*events, Event("more", "log", "", np.array([0.0, 0.0, 4.0]))], 3).slowest == 2
