"""Batches of the expert benchmark under limits of time and memory."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest

from moesaic.models.expert_benchmark import (
    DeviceLimit,
    ExpertLayerBenchmark,
    MeasuredSpeed,
    Roofline,
    SkippedBatch,
    measure_speeds,
)

LIMIT = DeviceLimit("fp32", 1e9, 1e9)


class Paced:
    """A layer that takes 1 ms per token, and at best half of that."""

    free_bytes = 1000

    def __init__(self) -> None:
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def batch_bytes(self, tokens: int) -> int:
        return tokens

    def roofline(self, limit: DeviceLimit, tokens: int) -> Roofline:
        return Roofline(limit.dtype, tokens, tokens, tokens * 5e-4, tokens * 1.5e-3, "matmul")

    def passes(self, dtype: str, tokens: int) -> SimpleNamespace:
        def advance(pass_s: float) -> None:
            self.now_s += pass_s

        return SimpleNamespace(
            forward=partial(advance, tokens * 1e-3), step=partial(advance, tokens * 3e-3)
        )


def in_time(sizes: list[int], budget_s: float) -> tuple[list[MeasuredSpeed | SkippedBatch], float]:
    layer = Paced()
    return list(
        measure_speeds(cast(ExpertLayerBenchmark, layer), LIMIT, sizes, budget_s)
    ), layer.now_s


@pytest.mark.parametrize("budget_s", [0.1, 1.0, 4.0, 20.0])
def test_batches_stay_within_the_time_budget(budget_s: float) -> None:
    found, took_s = in_time([1, 10, 100, 1000], budget_s)
    longest_s = 1.0  # The first pass of a batch that turns out too slow.
    assert took_s <= budget_s + longest_s + 0.01
    measured_sizes = [one.roofline.tokens for one in found if isinstance(one, MeasuredSpeed)]
    assert measured_sizes == [size for size in (1, 10, 100, 1000) if 13e-3 * size <= budget_s / 1.2]


def test_batches_beyond_memory_are_skipped() -> None:
    (small, large), took_s = in_time([1, 1001], 50.0)
    assert isinstance(small, MeasuredSpeed)
    assert large == SkippedBatch(Paced().roofline(LIMIT, 1001), "memory", 1001)
    assert took_s < 1
