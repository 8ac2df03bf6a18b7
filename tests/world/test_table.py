"""The table of equal numbers: every family under every axis, and any two of them together."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from layouts import Outcome, assert_same, outcome
from table import AXES, FAMILIES, Row, covering, job, meetings, rows

from moesaic.testing.ranks import Ranks

ROWS = rows()
FEW = covering([row for row in ROWS if max(row.ep, row.shard, row.tp) <= 4])
"""Those of the default suite."""
_references: dict[tuple[str, int, int], Outcome] = {}


def hold(ranks: Ranks, row: Row, steps: int) -> None:
    """Hold a row against one rank that does everything by itself."""
    asked = row.family, row.micro_batches, steps
    if asked not in _references:
        _references[asked] = outcome(ranks, 1, job(row.family, row.micro_batches), steps)
    one = _references[asked]
    several = outcome(ranks, row.ranks, row.job, steps)
    assert_same(several, one)
    for key, bias in one.state.items():
        if key.endswith("router.bias"):
            assert bias.any()
            assert np.array_equal(several.state[key], bias)
    if row.job.routing.capacity:
        assert sum(step["dropped"] for step in one.steps) > 0


@pytest.mark.parametrize("row", FEW, ids=str)
def test_any_two_values_together(ranks: Ranks, row: Row) -> None:
    hold(ranks, row, steps=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_axes_of_a_family_all_meet(family: str) -> None:
    """In the rows that the default suite has."""
    met = set().union(*(meetings(row) for row in FEW))
    missing = {"ep", "etp"} if family == "tiny-dense" else set()
    axes = [axis for axis in (*AXES, "recompute") if axis not in missing]
    assert {(family, *pair) for pair in combinations(axes, 2)} <= met
    assert (family, "pp, tp, ep and shard") in met


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("family", "size", "way"), dict.fromkeys((row.family, row.ranks, row.way) for row in ROWS)
)
def test_all_of_it(ranks: Ranks, family: str, size: int, way: str | None) -> None:
    for row in ROWS:
        if (row.family, row.ranks, row.way) == (family, size, way):
            hold(ranks, row, steps=2)


def test_pages_say_how_many_rows_there_are() -> None:
    number = len(FEW)
    for page, words in (("README.md", "layouts and families"), ("docs/exactness.md", "rows of 1")):
        assert f" {number} {words}" in (Path(__file__).parents[2] / page).read_text()
