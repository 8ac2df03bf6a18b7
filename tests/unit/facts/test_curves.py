from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.facts.cluster import AttentionTimes, Curve, Grid

sizes = st.floats(min_value=1.0, max_value=1e12)
times = st.floats(min_value=1e-7, max_value=1e3)
axes = st.lists(st.integers(1, 10**6).map(float), min_size=1, max_size=4, unique=True).map(sorted)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    points = draw(axes)
    seconds = draw(st.lists(times, min_size=len(points), max_size=len(points)))
    return Curve(num_bytes=points, seconds=seconds)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    rows, columns, inner = draw(axes), draw(axes), draw(axes)
    count = len(rows) * len(columns) * len(inner)
    seconds = draw(st.lists(times, min_size=count, max_size=count))
    return Grid(rows=rows, columns=columns, inner=inner, seconds=seconds)


def test_attention_is_interpolated_in_time_per_token() -> None:
    def law(length: float) -> float:
        return 1e-7 * length + 2e-9 * length**2

    lengths = [64.0, 256.0, 1024.0]
    times = [law(length) for length in lengths]
    heads = AttentionTimes(head_dim=64, lengths=lengths, forward=times, backward=times)
    for length in (64, 100, 300, 1000):
        assert heads.at(length, 64, backward=False) == pytest.approx(law(length), rel=1e-12)
    assert heads.at(4096, 64, backward=False) == pytest.approx(4**2 * times[-1], rel=1e-12)
    assert heads.at(16, 64, backward=False) == pytest.approx(times[0] / 4, rel=1e-12)


def straight(points: list[float], seconds: list[float], size: float) -> float:
    """Return the value of a curve by a slow reference: find the segment, interpolate."""
    if size <= points[0]:
        return seconds[0]
    if size >= points[-1]:
        return seconds[-1] * size / points[-1]
    for (x0, y0), (x1, y1) in itertools.pairwise(zip(points, seconds, strict=True)):
        if x0 <= size <= x1:
            return y0 + (y1 - y0) / (x1 - x0) * (size - x0)
    raise AssertionError("the segments leave no gap")


def nested(grid: Grid, rows: float, columns: float, inner: float) -> float:
    """Return the value of a grid by reference: curves along inner, then columns, then rows."""
    flat = iter(grid.seconds)
    by_rows = []
    for _ in grid.rows:
        by_columns = []
        for _ in grid.columns:
            along = [next(flat) for _ in grid.inner]
            by_columns.append(straight(grid.inner, along, inner))
        by_rows.append(straight(grid.columns, by_columns, columns))
    return straight(grid.rows, by_rows, rows)


@given(curves(), sizes)
def test_curve_matches_reference(curve: Curve, size: float) -> None:
    assert curve.at(size) == pytest.approx(straight(curve.num_bytes, curve.seconds, size), rel=1e-9)


@given(grids(), st.tuples(sizes, sizes, sizes))
def test_grid_matches_reference(grid: Grid, product: tuple[float, float, float]) -> None:
    assert grid.at(*product) == pytest.approx(nested(grid, *product), rel=1e-9)


@pytest.mark.parametrize(
    ("kind", "raw", "sentence"),
    [
        (Curve, {"bytes": [2, 1], "seconds": [1, 2]},
         "bytes = [2.0, 1.0] does not rise from above 0: sort it"),
        (Curve, {"bytes": [1, 2], "seconds": [1]},
         "seconds holds 1 times for 2 points: give one for each"),
        (Curve, {"bytes": [1], "seconds": [0]}, "seconds holds 0.0: give times above 0"),
        (AttentionTimes, {"head_dim": 8, "lengths": [1, 2], "forward": [1], "backward": [1, 2]},
         "forward holds 1 times for 2 points: give one for each"),
        (Curve, {"num_bytes": [1], "seconds": [1]},
         "unknown key 'num_bytes': did you mean 'bytes'?"),
        (Grid, {"rows": [1, 2], "columns": [1, 2, 3], "inner": [4], "seconds": [1, 2]},
         "seconds holds 2 times for 6 points: give one for each"),
    ],
)  # fmt: skip
def test_impossible_curve_is_reported_in_one_sentence(
    kind: type[Curve | Grid | AttentionTimes], raw: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(kind, raw, "c.toml")
    assert str(caught.value).removesuffix(" (and 1 more mistake)") == f"c.toml: {sentence}"
