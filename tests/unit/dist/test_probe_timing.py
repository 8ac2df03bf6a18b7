"""Timing, medians, line fits and ranges, with a fake clock."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from moesaic.dist.probe.timing import (
    fit_line,
    time_call,
    time_collective,
)


class Machine:
    """Fake clock, and work that takes the given times; the last one repeats."""

    def __init__(self, *times: float) -> None:
        self.now = 0.0
        self.calls = 0
        self._times: Iterator[float] = itertools.chain(times, itertools.repeat(times[-1]))

    def work(self) -> None:
        self.now += next(self._times)
        self.calls += 1

    def clock(self) -> float:
        return self.now


def test_first_call_and_one_slow_sample_are_ignored() -> None:
    machine = Machine(100.0, 1.0, 1.0, 50.0, 1.0)
    assert time_call(machine.work, machine.clock, 60.0) == 1.0


def test_sampling_ends_with_the_budget_after_minimum_samples() -> None:
    machine = Machine(1.0)
    time_call(machine.work, machine.clock, 10.0)
    assert machine.now == pytest.approx(12.0)
    machine = Machine(9.0, 3.0, 5.0)
    assert time_call(machine.work, machine.clock, 0.0) == 4.0
    assert machine.calls == 3


def test_short_calls_are_timed_in_batches() -> None:
    machine = Machine(1e-6)
    readings = 0

    def clock() -> float:
        nonlocal readings
        readings += 1
        return machine.now

    assert time_call(machine.work, clock, 1e-2) == pytest.approx(1e-6)
    assert machine.calls > 10 * readings


def test_collective_runs_the_agreed_number_of_calls() -> None:
    machine = Machine(7.0, 1.0, 1.0, 9.0, 2.0)
    proposed: list[int] = []

    def agree(count: int) -> int:
        proposed.append(count)
        return 3

    assert time_collective(machine.work, machine.clock, agree, 10.0).calls_s == [1.0, 9.0, 2.0]
    assert (proposed, machine.calls) == ([10], 5)


def test_compute_time_is_separate_from_call_time() -> None:
    machine = Machine(3.0)

    def compute() -> None:
        machine.now += 100.0

    times = time_collective(machine.work, machine.clock, lambda count: 5, 10.0, compute)
    assert (times.compute_s, times.calls_s) == ([100.0] * 5, [3.0] * 5)


@pytest.mark.parametrize("bad", range(7))
def test_fit_line_ignores_one_outlier(bad: int) -> None:
    sizes = [8.0, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8]
    times = [2e-5 + size / 3e9 for size in sizes]
    times[bad] *= 5
    assert fit_line(sizes, times) == pytest.approx((2e-5, 1 / 3e9))


def test_fit_line_falls_back_for_falling_times() -> None:
    assert fit_line([10.0, 100.0], [3.0, 2.0]) == (3.0, 0.02)
