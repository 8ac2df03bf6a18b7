"""Predicted against measured step: how far off, and how much of it is the machine's speed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from fabricated import PREDICTED, fabricate, predict

from moesaic.facts.plan import Predictions
from moesaic.report.log import read_rank
from moesaic.report.prediction import Measurements, Prediction


def prediction(
    measured_s: float,
    reference_s: float | None,
    probed_s: float | None = 2e-3,
    cpu_wait_share: float | None = None,
) -> Prediction:
    """Return a prediction of 40 ms forward and 60 ms backward."""
    predicted = Predictions.model_validate({**PREDICTED, "reference_s": probed_s})
    phases = {"forward": 0.05, "backward": measured_s - 0.05}
    return Prediction(
        predicted,
        Measurements(10, measured_s, phases, 1.0, None, reference_s, cpu_wait_share, "resident"),
    )


def test_a_slower_machine_and_the_model_share_the_error() -> None:
    found = prediction(0.15, 2.4e-3)
    assert found.ratio == pytest.approx(1.5)
    assert found.machine_ratio == pytest.approx(1.2)
    assert found.model_ratio == pytest.approx(1.25)
    assert found.describe() == (
        "predicted 100 ms a step, measured 150 ms (1.50x): the machine was 1.20x slower "
        "during the run than in the probe; the rest, 1.25x, is the error of the model, mostly in "
        "backward"
    )


def test_waits_for_a_processor_are_named_first() -> None:
    busy = prediction(0.2, 2.4e-3, cpu_wait_share=0.25)
    assert (busy.ratio, busy.wait_ratio) == (pytest.approx(2.0), pytest.approx(4 / 3))
    assert busy.model_ratio == pytest.approx(2.0 / (1.2 * 4 / 3))
    assert busy.describe() == (
        "predicted 100 ms a step, measured 200 ms (2.00x): ranks waited 25% of a step for a "
        "busy processor (1.33x), the machine was 1.20x slower during the run than in the probe; "
        "the rest, 1.25x, is the error of the model, mostly in backward"
    )
    untimed = prediction(0.2, None, cpu_wait_share=0.25).describe()
    assert "busy processor (1.33x), the rest mostly in backward; how fast" in untimed
    few = prediction(0.15, 2.4e-3, cpu_wait_share=0.04)
    assert (few.wait_ratio, few.describe()) == (1.0, prediction(0.15, 2.4e-3).describe())


@pytest.mark.parametrize(
    ("measured_s", "reference_s", "words"),
    [
        (0.1, 1.6e-3, "was 1.25x faster during the run than in the probe; the rest, 1.25x,"),
        (0.1, 2.01e-3, "was as fast during the run as in the probe; the rest, 1.00x,"),
        (
            0.08,
            2e-3,
            "error of the model, mostly in backward",
        ),  # Backward took 30 ms instead of 60.
        (0.12, 3e-3, "the rest, 0.80x, is the error of the model, mostly in backward"),
    ],
)
def test_words_say_the_direction(measured_s: float, reference_s: float, words: str) -> None:
    assert words in prediction(measured_s, reference_s).describe()


def test_without_a_reference_the_machine_is_unknown() -> None:
    short, unprobed = prediction(0.2, None), prediction(0.2, 1e-3, None)
    assert short.describe().endswith("because the run was too short to time the reference work")
    assert "because the plan has no reference_s: probe the cluster" in unprobed.describe()
    for found in (short, unprobed):
        assert found.machine_ratio is None
        assert found.model_ratio is None
        assert "(2.00x), mostly in backward; how fast the machine was is unknown" in (
            found.describe()
        )


def test_the_reference_is_a_mean_over_steps(tmp_path: Path) -> None:
    """The first steps after a start do not count."""
    directory = fabricate(tmp_path / "run", steps=20)
    for path in (directory / "events").iterdir():
        rank, lines = int(path.stem.split("-")[1]), list[str]()
        for event in map(json.loads, path.read_text().splitlines()):
            if event["event"] == "rank_step":
                event["cpu_wait_s"] = (rank + 1) * (5.0 if event["step"] == 6 else 0.01)
            if event["event"] == "rank_step" and event["step"] % 2 == 0:
                event["reference_s"] = (rank + 1) * (2.0 if event["step"] == 6 else 1.0)
            lines.append(json.dumps(event))
        path.write_text("\n".join(lines) + "\n")
    run = predict(directory, {**PREDICTED, "reference_s": 2.0})
    assert run.prediction is not None
    mean, middle_rank = 10 / 9, (len(run.ranks) + 1) / 2
    assert run.prediction.measured.reference_s == pytest.approx(mean * middle_rank)
    assert run.prediction.machine_ratio == pytest.approx(mean * middle_rank / 2.0)
    most_s = 0.01 * len(run.ranks)
    expected = most_s / float(np.median(run.steps.step_s[3:]))
    assert run.prediction.measured.cpu_wait_share == pytest.approx(expected, rel=0.05)


def test_a_resume_drops_the_reference_of_later_steps(tmp_path: Path) -> None:
    events = [
        {"event": "rank_step", "time": 0, "step": step, "phases": {}, "peak_bytes": 1, **more}
        for step, more in (
            (1, {"reference_s": 1.0}), (2, {}), (3, {"reference_s": 3.0, "cpu_wait_s": 1.0}),
            (2, {}), (3, {"cpu_wait_s": 2.0}),
        )
    ]  # fmt: skip
    path = tmp_path / "rank-1.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in events))
    found = read_rank(path, 1)
    assert found is not None
    assert found.reference_s == {1: 1.0}
    assert found.cpu_wait_s == {3: 2.0}
