"""Reports of recommenders: metrics by step and by day, rows, and passes over a drive."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_report_page import figures_of

from moesaic.base.events import EventLog
from moesaic.report import RunStats, page, summary

METRICS = {"auc": 0.7, "log_loss": 0.5, "normalized_entropy": 0.9, "calibration": 1.1}


@pytest.fixture
def run(tmp_path: Path) -> RunStats:
    """A run of six steps that was resumed after the fourth, of two days and three passes."""
    (tmp_path / "events").mkdir()
    for name, value in (
        ("job", {"kind": "ctr", "model": {"family": "dlrm", "dim": 4}}),
        ("plan", {"ranks": 1}), ("versions", {}),
    ):  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    log = EventLog(tmp_path / "events" / "rank-0.jsonl")
    for first, last in ((1, 6), (5, 6)):
        log.emit("run_start", step=first, ranks=1, device="cpu", unit="samples")
        for step in range(first, last + 1):
            figures = METRICS if step % 2 else {}  # Some steps are not measured.
            log.emit(
                "step", step=step, loss=0.5, samples=8, samples_per_s=4.0, step_s=2.0,
                phases={"data": 0.5}, rows=10 * step, **figures,
            )  # fmt: skip
            if step in (1, 3, 5):
                log.emit(
                    "pass", step=step, number=step, keys=9, hits=step, raised=5 - step,
                    stall_s=0.2 * step, memory_rows=step, drive_rows=5 * step,
                    memory_bytes=100, drive_bytes=200 * step,
                )  # fmt: skip
            if step % 3 == 0:
                log.emit("day", step=step, day=step // 3 - 1, samples=24, rows=10 * step, auc=0.6)
        log.emit("validation", step=last, loss=0.4, samples=40, seconds=0.1, **METRICS)
    log.emit("run_end", step=6, reason="finished")
    log.close()
    return RunStats.read(tmp_path)


def test_a_resume_voids_days_and_passes(run: RunStats) -> None:
    assert [(day.day, day.figures["samples"]) for day in run.days] == [(0, 24), (1, 24)]
    assert [*run.passes] == [1, 3, 5]
    np.testing.assert_array_equal(run.steps.figures["rows"], np.arange(10, 61, 10))
    np.testing.assert_array_equal(np.isfinite(run.steps.figures["auc"]), [True, False] * 3)
    assert "samples" not in run.steps.figures


def test_the_summary_of_a_recommender(run: RunStats) -> None:
    head = summary(run)
    assert head["clicks"]["validation"] == METRICS
    assert head["clicks"]["days"] == [
        {"day": day, "samples": 24, "rows": 30 * (day + 1), "auc": 0.6} for day in range(2)
    ]
    assert head["clicks"]["input_wait_s"] == 0.5
    passes = head["table"].pop("passes")
    assert head["table"] == {"rows": 60}
    assert passes == pytest.approx(
        {
            "number": 3, "hit_rate": 9 / 15, "stall_s": 1.8, "mean_stall_s": 0.6,
            "memory_rows": 5, "drive_rows": 25, "memory_bytes": 100, "drive_bytes": 1000,
        }
    )  # fmt: skip
    assert [one["kind"] for one in head["findings"]] == ["slow_passes"]
    assert "15% of the time waits" in head["findings"][0]["title"]


def test_the_page_of_a_recommender(run: RunStats) -> None:
    text = page.render(run)
    figures = figures_of(text)
    assert {"auc", "calibration", "rows", "pass-stall", "pass-hits"} <= figures.keys()
    assert not {"expert-load", "imbalance"} & figures.keys()
    assert figures["pass-hits"]["data"][0]["y"] == [20, 60, 100]
    training, validation = figures["auc"]["data"]
    assert (training["x"], training["y"]) == ([1, 3, 5], [0.7] * 3)
    assert validation["x"] == [6]
    assert "<td>0.6000</td>" in text
