"""Sum of squares of large tensors."""

from __future__ import annotations

import math

import pytest
import torch

from moesaic.kernels.norms import sum_of_squares


@pytest.mark.parametrize("size", [1, 1 << 16, 20_000_001])
def test_accuracy_does_not_depend_on_size(size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 1e-3
    exact = math.fsum(float(block.double().square().sum()) for block in values.split(1 << 20))
    found = sum_of_squares([values, values[:3]]) - values[:3].double().square().sum()
    assert found.dtype == torch.float64
    assert math.isclose(float(found), exact, rel_tol=1e-6)


def test_strided_and_empty_tensors() -> None:
    values = torch.arange(12.0).view(3, 4)
    found = sum_of_squares([values[:, 1:3], values[:0]])
    assert float(found) == pytest.approx(1 + 4 + 25 + 36 + 81 + 100)


@pytest.mark.parametrize("odd", [math.inf, math.nan])
def test_nan_and_infinity_propagate(odd: float) -> None:
    assert not math.isfinite(float(sum_of_squares([torch.tensor([1.0, odd])])))
