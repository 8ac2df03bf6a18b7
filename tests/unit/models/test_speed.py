"""Which batches of an expert layer are measured in the time and memory there is."""

from __future__ import annotations

import pytest
import torch

from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.models.speed import (
    Batch,
    ExpertLayer,
    Least,
    LeftOut,
    Limit,
    Speed,
    better,
    enough_s,
    measured,
)

LIMIT = Limit("fp32", 1e9, 1e9)


class _Through:
    def __init__(self, layer: Paced, pass_s: float) -> None:
        self._layer, self.first_s = layer, pass_s
        layer.now_s += pass_s

    def measured(self, budget_s: float) -> tuple[float, float]:
        self._layer.now_s += 12 * self.first_s + budget_s
        return self.first_s, 3 * self.first_s


class Paced:
    """A layer that takes a millisecond for each token, and half of that at best."""

    room_bytes = 1000

    def __init__(self) -> None:
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def batch_bytes(self, tokens: int) -> int:
        return tokens

    def least(self, limit: Limit, tokens: int) -> Least:
        return Least(limit.dtype, tokens, tokens, tokens * 5e-4, tokens * 1.5e-3, "products")

    def batch(self, dtype: str, tokens: int, most_s: float) -> Batch:
        return _Through(self, tokens * 1e-3)


def in_time(sizes: list[int], budget_s: float) -> tuple[list[Speed | LeftOut], float]:
    layer = Paced()
    return list(measured(layer, LIMIT, sizes, budget_s)), layer.now_s


@pytest.mark.parametrize("budget_s", [0.1, 1.0, 4.0, 20.0])
def test_batches_take_no_more_than_their_time(budget_s: float) -> None:
    found, took_s = in_time([1, 10, 100, 1000], budget_s)
    longest_s = 1.0  # A first pass, after which it is known that there is no time.
    assert took_s <= budget_s + longest_s + 0.01
    measured_sizes = [one.least.tokens for one in found if isinstance(one, Speed)]
    assert measured_sizes == [size for size in (1, 10, 100, 1000) if 13e-3 * size <= budget_s / 1.2]


@pytest.mark.parametrize("sizes", [[1, 10, 100, 1000], [1000, 1], [300, 300]])
def test_the_time_that_is_named_is_enough(sizes: list[int]) -> None:
    found, _ = in_time(sizes, 0.05)
    assert any(isinstance(one, LeftOut) for one in found)
    found, _ = in_time(sizes, enough_s(found))
    assert all(isinstance(one, Speed) for one in found)


def test_what_has_no_room_is_not_tried() -> None:
    (small, large), took_s = in_time([1, 1001], 50.0)
    assert isinstance(small, Speed)
    assert large == LeftOut(Paced().least(LIMIT, 1001), "memory", 1001)
    assert took_s < 1


def test_the_higher_of_two_limits_holds() -> None:
    one, two = [Limit("fp32", 1.0, 5.0), Limit("bf16", 4.0, 5.0)], [
        Limit("fp32", 2.0, 3.0), Limit("bf16", 3.0, 3.0),
    ]  # fmt: skip
    assert better(one, two) == [Limit("fp32", 2.0, 5.0), Limit("bf16", 4.0, 5.0)]


def test_a_limit_is_taken_of_many_rows_however_little_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = []

    def product(some: torch.Tensor, weight: torch.Tensor, *, transposed: bool) -> None:
        rows.append(len(some))

    layer = ExpertLayer(ModelConfig(**PRESETS["tiny-mixtral"]), torch.device("cpu"))
    monkeypatch.setattr("moesaic.models.speed.product", product)
    layer.limits(["fp32"], 0.0)
    assert {64, 4096} == set(rows)
