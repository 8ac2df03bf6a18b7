"""Bubbles: the simulated one is the closed form for equal stages, and never less for links."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipelines import SCHEDULES, simulate

from moesaic.facts.job.train import Schedule
from moesaic.policy.cost.event import PIPELINE, Event, Handover
from moesaic.sim.bubble import bubble, closed_form
from moesaic.sim.timeline import run


def form(schedule: Schedule, parts: int, micro_batches: int) -> float:
    return closed_form(schedule, parts, 2 if schedule == "interleaved" else 1, micro_batches)


def test_closed_forms() -> None:
    assert form("gpipe", 4, 8) == form("1f1b", 4, 8) == pytest.approx(3 / 11)
    assert form("interleaved", 4, 8) == pytest.approx(3 / 19)
    assert form("zero-bubble", 4, 8) == pytest.approx(3 / 27)
    assert form("1f1b", 1, 8) == 0.0


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("parts", [2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 2, 8, 40])
def test_equal_stages_and_free_links_have_the_closed_form(
    schedule: Schedule, parts: int, more: int
) -> None:
    micro_batches = parts + more
    if schedule in ("interleaved", "zero-bubble"):  # In equal rounds.
        micro_batches -= micro_batches % (micro_batches // parts)
    found = simulate(schedule, parts, micro_batches)
    assert bubble(found) == pytest.approx(form(schedule, parts, micro_batches))


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_fewer_micro_batches_than_parts(micro_batches: int) -> None:
    """gpipe has the closed form, and for the others it is too good."""
    found = {
        schedule: bubble(simulate(schedule, 4, micro_batches)) - form(schedule, 4, micro_batches)
        for schedule in SCHEDULES
        if schedule != "1f1b"
    }
    assert found.pop("gpipe") == pytest.approx(0.0, abs=1e-12)
    assert min(found.values()) > 0.05


def test_a_short_last_stage_can_make_it_smaller() -> None:
    """1f1b on two parts, two micro-batches: gpipe's would be larger."""
    even, short = (simulate("1f1b", 2, 2, seconds=each) for each in ([10, 10], [11, 9]))
    assert bubble(short) < bubble(even) == pytest.approx(1 / 3)


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(
    parts=st.integers(2, 4), rounds=st.integers(1, 3), latency_s=st.floats(0, 3),
    more=st.floats(0, 3),
)  # fmt: skip
def test_slower_links_never_make_it_smaller(
    schedule: Schedule, parts: int, rounds: int, latency_s: float, more: float
) -> None:
    near, far = (simulate(schedule, parts, parts * rounds, each) for each in (0.0, latency_s))
    further = simulate(schedule, parts, parts * rounds, latency_s + more)
    assert form(schedule, parts, parts * rounds) <= bubble(near) + 1e-12
    assert bubble(near) <= bubble(far) + 1e-12
    assert bubble(far) <= bubble(further) + 1e-12


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), st.integers(1, 8))
def test_unequal_stages_never_make_it_smaller(seconds: list[int], micro_batches: int) -> None:
    parts = len(seconds)
    found = bubble(simulate("gpipe", parts, micro_batches, seconds=seconds))
    assert found >= form("gpipe", parts, micro_batches) - 1e-12


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(data=st.data())
def test_all_wait_at_least_for_the_busiest_part(schedule: Schedule, data: st.DataObject) -> None:
    parts = data.draw(st.integers(2, 4))
    stages = parts * (2 if schedule == "interleaved" else 1)
    seconds = data.draw(st.lists(st.integers(1, 9), min_size=stages, max_size=stages))
    busy = [sum(seconds[part::parts]) for part in range(parts)]
    found = bubble(simulate(schedule, parts, 2 * parts, seconds=seconds))
    assert found >= 1 - sum(busy) / parts / max(busy) - 1e-12


def test_schedules_wait_as_little_as_they_are_for() -> None:
    """Of equal stages, 8 micro-batches on 4 parts."""
    found = {schedule: bubble(simulate(schedule, 4, 8)) for schedule in SCHEDULES}
    assert found["zero-bubble"] < found["interleaved"] < found["1f1b"]
    assert found["1f1b"] == pytest.approx(found["gpipe"])


def test_waiting_is_all_but_computing_and_speaking_within_a_part() -> None:
    """Rank 1 waits a second for rank 0, a half on the way; rank 0 three quarters for the end."""
    over = Handover(np.array([0]), np.array([1]), ahead=False)

    def event(seconds: list[float], phase: str = PIPELINE, **more: object) -> Event:
        return Event("some", phase, "block", np.array(seconds), **more)  # type: ignore[arg-type]

    events = [
        event([0.25, 0.25], "data"),
        event([1.0, 0.0], leaves=over),
        event([0.0, 0.5], takes=over),
        event([0.0, 0.25]),
        event([5.0, 5.0], "optimizer"),
    ]
    found = run(events, 2)
    assert found.end_s.tolist() == [6.25, 7.0]
    assert bubble(found) == pytest.approx((0.75 + 1.5) / 2 / 1.75)
    assert bubble(run([events[0], events[-1]], 2)) == 0.0
