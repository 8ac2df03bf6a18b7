"""Where a copy begins to pay: a crossing among the rows tried, and what is said of one beyond."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.break_even import compared

HOT = np.array([100, 200, 400])
ROUNDS = 5


def gains(*each: float, noise: float = 0.0) -> np.ndarray:
    """[rows, rounds]"""
    spread = noise * np.linspace(-1, 1, ROUNDS)
    return np.array(each)[:, None] + spread


def test_a_crossing_is_on_a_line_between_rows() -> None:
    row = compared("rows", 150, HOT, gains(0.8, 0.9, 1.1, noise=0.01))
    assert row.value == pytest.approx(150 / 300)
    assert row.interval is not None
    assert row.interval == pytest.approx((150 / 310, 150 / 290), rel=1e-9)
    assert row.against == "150 rows of one expert on each rank foretold, 300 measured"


def test_the_last_crossing_counts() -> None:
    assert compared("rows", 150, HOT, gains(0.9, 0.8, 1.2)).value == 150 / 300
    assert compared("rows", 150, HOT, gains(0.9, 1.2, 0.9)).value is None


@pytest.mark.parametrize(
    ("each", "said"), [((0.7, 0.8, 0.9), "more than 400"), ((1.1, 1.2, 1.3), "fewer than 100")]
)
def test_one_beyond_the_shares_tried_is_no_figure(each: tuple[float, ...], said: str) -> None:
    row = compared("rows", 150, HOT, gains(*each))
    assert (row.value, row.interval, row.holds) == (None, None, None)
    assert f"{said} (beyond the shares tried) measured" in row.against


def test_an_interval_that_goes_beyond_them_is_none() -> None:
    row = compared("rows", 150, HOT, gains(0.8, 0.9, 1.01, noise=0.1))
    assert row.value is not None
    assert row.interval is None
    assert "to more than 400 (beyond the shares tried)" in row.against


def test_where_the_model_never_has_a_copy_pay_there_is_no_figure() -> None:
    row = compared("rows", None, HOT, gains(0.8, 0.9, 1.1))
    assert (row.value, row.interval) == (None, None)
    assert row.against == "more than 2048 rows of one expert on each rank foretold, 300 measured"
