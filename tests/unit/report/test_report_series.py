"""Thinning, smoothing and wording."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.report.series import keep_extremes, median, smooth


@given(st.integers(1, 500), st.integers(2, 60), st.randoms())
def test_extremes_survive_in_order_and_within_the_limit(size: int, limit: int, random) -> None:
    y = np.array([random.random() for _ in range(size)])
    x = np.arange(size, dtype=float)
    thin_x, thin_y = keep_extremes(x, y, limit)
    assert len(thin_x) <= max(limit, 2)
    assert (np.diff(thin_x) > 0).all()
    assert thin_y.max() == y.max()
    assert thin_y.min() == y.min()
    assert (y[thin_x.astype(int)] == thin_y).all()


def test_extremes_pass_over_what_is_not_known() -> None:
    y = np.array([np.nan, 3.0, 1.0, np.nan, 5.0, 4.0])
    _, thin = keep_extremes(np.arange(6.0), y, 2)
    assert thin.tolist() == [1.0, 5.0]


@pytest.mark.parametrize("size", [0, 1, 2, 300])
def test_smooth_leaves_constants_and_lines_alone(size: int) -> None:
    assert smooth(np.full(size, 2.5)) == pytest.approx(np.full(size, 2.5))
    line = np.arange(float(size))
    assert smooth(line)[:200] == pytest.approx(line[:200], abs=1)


def test_smooth_calms_noise_and_passes_over_nan() -> None:
    noise = np.random.default_rng(0).normal(size=2000)
    noise[100] = np.nan
    calm = smooth(noise)
    assert np.isfinite(calm).all()
    assert calm.std() < 0.35 * np.nanstd(noise)


def test_median_leaves_the_first_step_out() -> None:
    assert median(np.array([100.0, 1.0, 2.0, np.nan, 3.0])) == 2.0
    assert median(np.array([5.0])) == 5.0
    assert math.isnan(median(np.array([])))
