"""Medians, lines and spreads, on a clock that does as it is told."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from moesaic.dist.probe.timing import line, medians, powers, seconds, spread, together


class Machine:
    """Work that takes the times it is given, the last of them for ever after, and a clock."""

    def __init__(self, *times: float) -> None:
        self.now = 0.0
        self.calls = 0
        self._times: Iterator[float] = itertools.chain(times, itertools.repeat(times[-1]))

    def work(self) -> None:
        self.now += next(self._times)
        self.calls += 1

    def clock(self) -> float:
        return self.now


def test_the_first_call_does_not_count_and_one_slow_sample_moves_nothing() -> None:
    machine = Machine(100.0, 1.0, 1.0, 50.0, 1.0)
    assert seconds(machine.work, machine.clock, 60.0) == 1.0


def test_it_ends_when_the_time_is_over_but_not_before_a_few_samples() -> None:
    machine = Machine(1.0)
    seconds(machine.work, machine.clock, 10.0)
    assert machine.now == pytest.approx(12.0)
    machine = Machine(9.0, 3.0, 5.0)
    assert seconds(machine.work, machine.clock, 0.0) == 4.0
    assert machine.calls == 3


def test_short_calls_are_timed_many_at_once() -> None:
    machine = Machine(1e-6)
    readings = 0

    def clock() -> float:
        nonlocal readings
        readings += 1
        return machine.now

    assert seconds(machine.work, clock, 1e-2) == pytest.approx(1e-6)
    assert machine.calls > 10 * readings


def test_work_of_several_ranks_is_done_as_often_as_they_agree_and_counts_on_average() -> None:
    machine = Machine(7.0, 1.0, 1.0, 9.0, 2.0)
    heard: list[int] = []

    def agree(count: int) -> int:
        heard.append(count)
        return 3

    assert together(machine.work, machine.clock, agree, 10.0).calls_s == [1.0, 9.0, 2.0]
    assert (heard, machine.calls) == ([10], 5)


def test_work_of_a_rank_s_own_does_not_count_as_work_together() -> None:
    machine = Machine(3.0)

    def own() -> None:
        machine.now += 100.0

    met = together(machine.work, machine.clock, lambda count: 5, 10.0, own)
    assert (met.own_s, met.calls_s) == ([100.0] * 5, [3.0] * 5)


def test_a_line_is_found_through_exact_points() -> None:
    sizes = [8.0, 1e3, 1e5, 1e7]
    found = line(sizes, [2e-5 + size / 3e9 for size in sizes])
    assert found == pytest.approx((2e-5, 1 / 3e9))


@pytest.mark.parametrize("bad", range(7))
def test_one_bad_point_moves_no_line(bad: int) -> None:
    sizes = [8.0, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8]
    times = [2e-5 + size / 3e9 for size in sizes]
    times[bad] *= 5
    assert line(sizes, times) == pytest.approx((2e-5, 1 / 3e9))


def test_times_that_do_not_rise_make_a_latency_and_a_speed_all_the_same() -> None:
    assert line([10.0, 100.0], [3.0, 2.0]) == (3.0, 0.02)


def test_medians_are_taken_point_by_point() -> None:
    found = [
        {"a": [1.0, 9.0], "b": [5.0]},
        {"a": [3.0, 1.0], "b": [6.0]},
        {"a": [2.0, 2.0], "b": [0.0]},
    ]
    assert medians(found) == {"a": [2.0, 2.0], "b": [5.0]}


def test_a_spread_is_a_share_of_the_median() -> None:
    assert spread([100.0, 104.0]) == pytest.approx(4 / 102)
    assert spread([5.0, 5.0, 5.0]) == 0.0


def test_powers_end_with_the_last() -> None:
    assert powers(4, 64, 4) == [4, 16, 64]
    assert powers(4, 65, 4) == [4, 16, 64, 65]
    assert powers(5, 5, 4) == [5]
