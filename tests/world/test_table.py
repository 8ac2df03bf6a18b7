"""Equality of results in every family under every axis; any two axes together are soaks."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from layouts import Outcome, assert_same, outcome
from table import AXES, FAMILIES, Row, covering, job, pairs_of, rows, values_of

from moesaic.testing.ranks import RankPool

ROWS = rows()
LIMITED = [row for row in ROWS if max(row.ep, row.dp_shard, row.tp) <= 4]
FEW = covering(LIMITED)
"""Rows in which any two values meet."""
FEWEST = covering(LIMITED, values_of)
"""Rows of the default suite: each value of each axis, and each axis in each family."""
_references: dict[tuple[str, int, int], Outcome] = {}


def check_row(ranks: RankPool, row: Row, steps: int) -> None:
    """Compare a row with one rank."""
    key = row.family, row.micro_batches, steps
    if key not in _references:
        _references[key] = outcome(ranks, 1, job(row.family, row.micro_batches), steps)
    one = _references[key]
    several = outcome(ranks, row.ranks, row.job, steps)
    assert_same(several, one)
    for name, bias in one.state.items():
        if name.endswith("router.bias"):
            assert bias.any()
            assert np.array_equal(several.state[name], bias)
    if row.job.routing.capacity_factor:
        assert sum(step["dropped"] for step in one.steps) > 0


@pytest.mark.parametrize("row", FEWEST, ids=str)
def test_each_value(ranks: RankPool, row: Row) -> None:
    check_row(ranks, row, steps=1)


@pytest.mark.soak
@pytest.mark.parametrize("row", [row for row in FEW if row not in FEWEST], ids=str)
def test_any_two_values_together(ranks: RankPool, row: Row) -> None:
    check_row(ranks, row, steps=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_cover_every_pair_of_axes_for_each_family(family: str) -> None:
    met = set().union(*(pairs_of(row) for row in FEW))
    missing = {"ep", "etp"} if family == "tiny-dense" else set()
    axes = [axis for axis in (*AXES, "recompute") if axis not in missing]
    assert {(family, *pair) for pair in combinations(axes, 2)} <= met
    assert (family, "pp, tp, ep and dp_shard") in met


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("family", "size", "method"), dict.fromkeys((row.family, row.ranks, row.method) for row in ROWS)
)
def test_every_row(ranks: RankPool, family: str, size: int, method: str | None) -> None:
    for row in ROWS:
        if (row.family, row.ranks, row.method) == (family, size, method):
            check_row(ranks, row, steps=2)


def test_docs_state_the_number_of_rows() -> None:
    number = len(FEW)
    for page, words in (
        ("README.md", "layouts and model families"),
        ("docs/exactness.md", "rows of 1"),
    ):
        assert f" {number} {words}" in (Path(__file__).parents[2] / page).read_text()
