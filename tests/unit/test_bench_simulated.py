"""The published table: our job is its model, and calibrating finds what a table was made with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import pytest
from benchmarks import generate, measure, simulated
from benchmarks.measure import Row
from benchmarks.simulated import Calibration

from moesaic.facts.workload import count


@pytest.mark.parametrize("gpus", simulated.BILLIONS)
def test_the_job_has_the_table_s_parameters(gpus: int) -> None:
    total = count(simulated.published_job(gpus).model).total
    assert round(total / 1e9, 1) == simulated.BILLIONS[gpus]


def test_no_row_is_calibrated_on_and_foretold(monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[set[int]] = []
    foretold: list[int] = []

    def calibrate(seconds: dict[int, float]) -> Calibration:
        handed.append(set(seconds))
        return Calibration()

    def tell(_: str, __: Calibration, known: Sequence[int], wanted: Sequence[int]) -> list[Row]:
        assert handed[-1] == handed[-2] == set(known)
        foretold.extend(wanted)
        assert not handed[-1] & set(wanted)
        return []

    monkeypatch.setattr(simulated, "calibrate", calibrate)
    monkeypatch.setattr(simulated, "foretold", tell)
    for other in ("simulator", "uncalibrated", "ratios"):
        monkeypatch.setattr(simulated, other, lambda *_: [])
    monkeypatch.setattr(simulated, "LARGE", {})
    list(simulated.rows())
    assert sorted(set(foretold)) == [16, 64, 128]


def test_calibrating_finds_what_a_table_was_made_with() -> None:
    hidden = Calibration(device=0.8, links=0.6, turn_s=9e-6)
    made = {gpus: simulated.step_s(gpus, hidden) for gpus in (8, 16, 32)}
    found = simulated.calibrate(made)
    assert simulated.step_s(64, found) == pytest.approx(simulated.step_s(64, hidden), rel=1e-3)
    assert astuple(found) == pytest.approx(astuple(hidden), rel=0.05)


def test_a_parabola_goes_through_its_three_rows() -> None:
    rows = {8: 0.3, 16: 0.4, 32: 0.45}
    assert [simulated.parabola(rows, gpus) for gpus in rows] == pytest.approx(list(rows.values()))
    assert simulated.parabola(rows, 64) == pytest.approx(0.45)


def test_simulated_rows_say_so_and_keep_to_their_table() -> None:
    made = list(simulated.foretold(simulated.SE_MOE, Calibration(), (8, 16, 32), (64,)))
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
