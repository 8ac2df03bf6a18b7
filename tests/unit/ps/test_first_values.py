"""First values of rows."""

from __future__ import annotations

import numpy as np

from moesaic.ps.first_values import FirstValues


def values(first: FirstValues, keys: np.ndarray, dim: int = 16) -> np.ndarray:
    found = np.full((len(keys), dim + 3), np.nan)
    first.fill(keys, np.arange(len(keys)), found, dim)
    assert np.isnan(found[:, dim:]).all()
    return found[:, :dim]


def test_values_depend_on_seed_table_key_and_column_alone() -> None:
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 1000)
    first = FirstValues(3, "ads", 0.1)
    found = values(first, keys)
    assert (values(first, keys[::-1])[::-1] == found).all()
    assert (values(first, keys, 5) == found[:, :5]).all()
    assert (values(FirstValues(3, "ads", 0.1), keys[7:8]) == found[7:8]).all()
    assert len(np.unique(found)) > 0.999 * found.size
    for other in (FirstValues(4, "ads", 0.1), FirstValues(3, "users", 0.1)):
        assert (values(other, keys) != found).mean() > 0.999


def test_values_are_normal() -> None:
    found = values(FirstValues(0, "table", 0.5), np.arange(40_000)) / 0.5
    for power, expected in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert abs((found**power).mean() - expected) < 0.03
    for quantile, at in ((0.025, -1.95996), (0.5, 0.0), (0.8413447, 1.0), (0.999, 3.0902)):
        assert abs(np.quantile(found, quantile) - at) < 0.03
    close = np.corrcoef(found[:, 0], found[:, 1])[0, 1], np.corrcoef(found[1:, 0], found[:-1, 0])
    assert abs(close[0]) < 0.02
    assert abs(close[1][0, 1]) < 0.02


def test_without_deviation_values_are_zero() -> None:
    assert not values(FirstValues(0, "table", 0.0), np.arange(10)).any()
