"""The published table: our job is its model, and calibrating finds what a table was made with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import pytest
from benchmarks import generate, measure, simulated
from benchmarks.measure import Row
from benchmarks.simulated import Calibration

from moesaic.facts.workload import count_parameters


@pytest.mark.parametrize("gpus", simulated.BILLIONS)
def test_the_job_has_the_table_s_parameters(gpus: int) -> None:
    total = count_parameters(simulated.published_job(gpus).model).total
    assert round(total / 1e9, 1) == simulated.BILLIONS[gpus]


def test_no_row_is_calibrated_on_and_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[set[int]] = []
    wanted: list[int] = []

    def calibrate(seconds: dict[int, float]) -> Calibration:
        handed.append(set(seconds))
        return Calibration()

    def tell(_: str, __: Calibration, known: Sequence[int], others: Sequence[int]) -> list[Row]:
        assert handed[-1] == handed[-2] == set(known)
        wanted.extend(others)
        assert not handed[-1] & set(others)
        return [measure.row("error", 0.0, "ratio", bar="", against="table", repeats=1)]

    monkeypatch.setattr(simulated, "calibrate", calibrate)
    monkeypatch.setattr(simulated, "predicted", tell)
    monkeypatch.setattr(simulated, "LARGE", {})
    list(simulated.rows(1))
    assert sorted(set(wanted)) == [16, 64, 128]


def test_calibrating_finds_what_a_table_was_made_with() -> None:
    hidden = Calibration(device=0.8, links=0.6, turn_s=9e-6)
    made = {gpus: simulated.step_s(gpus, hidden) for gpus in (8, 16, 32)}
    found = simulated.calibrate(made)
    assert simulated.step_s(64, found) == pytest.approx(simulated.step_s(64, hidden), rel=1e-3)
    assert astuple(found) == pytest.approx(astuple(hidden), rel=0.05)


def test_simulated_rows_say_so_and_keep_to_their_table() -> None:
    made = list(simulated.predicted(simulated.SE_MOE, Calibration(), (8, 16, 32), (64,)))
    assert all(row.simulated and row.against == simulated.TABLE for row in made)
    measured = measure.row("speed", 1.0, "s", bar="<= 1.0", against="limit", repeats=1)
    page = generate.page("facts", [measured, *made])
    above, below = page.split("## Simulated")
    for row in made:
        assert row.name not in above
        assert row.name in below
    assert "| speed |" in above
    assert "| speed |" not in below
    table = generate.table({"facts": [measured, *made]})
    assert table.endswith("| 1 | 0 | 0 |")
