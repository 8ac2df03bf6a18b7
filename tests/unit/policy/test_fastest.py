"""Which of what may multiply experts is taken, by what each takes."""

from __future__ import annotations

import pytest

from moesaic.facts.job.train import Products
from moesaic.policy.products import fastest


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [
        ({"torch": 1.0}, "torch"),
        ({"triton": 1.0}, "triton"),
        ({"torch": 1.0, "triton": 0.5}, "triton"),
        ({"torch": 1.0, "triton": 1.02}, "triton"),
        ({"torch": 1.0, "triton": 1.04}, "torch"),
        ({"torch": 0.98, "triton": 1.0}, "triton"),
        ({"torch": 3e-4, "triton": 2e-3}, "torch"),
        ({"torch": 1.0, "triton": 2.0, "fp8": 0.1}, "torch"),
    ],
)
def test_the_fastest_is_taken(seconds: dict[Products, float], taken: Products) -> None:
    """Kernels of our own as well if they are hardly slower; never eight bits."""
    assert fastest(seconds) == taken
