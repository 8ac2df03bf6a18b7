"""Norms of tensors that are as large as the experts of a layer."""

from __future__ import annotations

import math

import pytest
import torch

from moesaic.dist.squares import sum_of_squares


@pytest.mark.parametrize("number", [1, 1 << 16, 20_000_001])
def test_many_numbers_are_added_up_as_exactly_as_few(number: int) -> None:
    values = torch.randn(number, generator=torch.Generator().manual_seed(0)) * 1e-3
    exact = math.fsum(float(part.double().square().sum()) for part in values.split(1 << 20))
    found = sum_of_squares([values, values[:3]]) - values[:3].double().square().sum()
    assert found.dtype == torch.float64
    assert math.isclose(float(found), exact, rel_tol=1e-6)


def test_parts_of_rows_and_tensors_without_any_count_too() -> None:
    values = torch.arange(12.0).view(3, 4)
    found = sum_of_squares([values[:, 1:3], values[:0]])
    assert float(found) == pytest.approx(1 + 4 + 25 + 36 + 81 + 100)


@pytest.mark.parametrize("odd", [math.inf, math.nan])
def test_what_is_not_finite_stays_so(odd: float) -> None:
    assert not math.isfinite(float(sum_of_squares([torch.tensor([1.0, odd])])))
