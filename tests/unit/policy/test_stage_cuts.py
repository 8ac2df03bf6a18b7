"""Stage cuts: equal to all cuts tried, inside each device's memory, better than even ones."""

from __future__ import annotations

import itertools
import random

import pytest

from moesaic.policy.plan.cuts import best_cuts, cuts_seconds
from moesaic.policy.plan.cuts_milp import solve_cuts


def all_cuts(blocks: int, stages: int) -> list[tuple[int, ...]]:
    return [(0, *rest) for rest in itertools.combinations(range(1, blocks), stages - 1)]


@pytest.mark.parametrize("seed", range(60))
def test_cuts_equal_the_best_of_all(seed: int) -> None:
    draw = random.Random(seed)
    stages, blocks = draw.randint(2, 4), draw.randint(4, 9)
    slowness = [draw.choice([1.0, 1.0, 2.5]) for _ in range(stages)]
    costs = [draw.uniform(0.1, 3.0) for _ in range(blocks)]
    sizes = [draw.uniform(1.0, 3.0) for _ in range(blocks)]
    room = [draw.uniform(0.9, 2.5) * sum(sizes) / stages for _ in range(stages)]
    seconds = [[slow * cost for cost in costs] for slow in slowness]
    micro_batches = draw.choice([1, 2, 8])

    def fits(stage: int, start: int, end: int) -> bool:
        return sum(sizes[start:end]) <= room[stage]

    found = best_cuts(seconds, micro_batches, fits)
    fitting = [
        cuts_seconds(seconds, micro_batches, starts)
        for starts in all_cuts(blocks, stages)
        if all(
            fits(stage, start, end)
            for stage, (start, end) in enumerate(itertools.pairwise((*starts, blocks)))
        )
    ]
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert found.seconds == pytest.approx(min(fitting), rel=1e-12)
    assert cuts_seconds(seconds, micro_batches, found.starts) == pytest.approx(found.seconds)
    if seed < 10:
        solved = solve_cuts(seconds, micro_batches, fits)
        assert solved is not None
        assert solved.seconds == pytest.approx(found.seconds, rel=1e-6)


def test_cuts_beat_even_ones_on_skewed_costs() -> None:
    costs = [1.0] * 8 + [6.0]
    found = best_cuts([costs, costs], 8)
    assert found is not None
    assert cuts_seconds([costs, costs], 8, (0, 4)) > 1.25 * found.seconds
    assert found.starts == (0, 7)


def test_slow_device_gets_fewer_blocks() -> None:
    found = best_cuts([[1.0] * 9, [2.0] * 9], 16)
    assert found is not None
    assert found.starts == (0, 6)
