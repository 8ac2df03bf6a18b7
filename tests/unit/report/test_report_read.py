"""Reading run directories: resumes, kills, what is missing, runs of every length."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fabricated import LOADS, START_S, fabricate

from moesaic.base.errors import StoreError
from moesaic.base.events import EventLog
from moesaic.base.records import RecordWriter
from moesaic.report import RunStats
from moesaic.report.loads import read_balance_stats, read_loads
from moesaic.report.summary import summary
from moesaic.train.run_directory import record_run_end


def step_event(log: EventLog, step: int, loss: float, at: float) -> None:
    log.emit("step", time=at, step=step, loss=loss, tokens=10, step_s=1.0, phases={"data": 1.0})


def start_event(log: EventLog, step: int, at: float, **fields: Any) -> None:
    log.emit("run_start", time=at, step=step, ranks=2, device="cpu", **fields)


def bare_run(directory: Path) -> Path:
    """A run directory with its three files and no events."""
    (directory / "events").mkdir(parents=True)
    (directory / "job.json").write_text(json.dumps({"train": {"steps": 9}}))
    (directory / "plan.json").write_text(json.dumps({"ranks": 2}))
    (directory / "versions.json").write_text("{}")
    return directory


def write_loads(directory: Path, rows: dict[tuple[int, int], list[int]]) -> None:
    writer = RecordWriter(directory, LOADS)
    writer.add(
        {"step": step, "layer": layer, "counts": counts, "dropped": 0}
        for (step, layer), counts in rows.items()
    )
    writer.flush()


def test_whole_run(tmp_path: Path) -> None:
    run = RunStats.read(fabricate(tmp_path / "run", steps=40))
    assert run.steps.step.tolist() == list(range(1, 41))
    assert run.status == "finished"
    assert run.last_step == run.planned_steps == 40
    assert [validation.step for validation in run.validations] == [20, 40]
    assert [checkpoint.state for checkpoint in run.checkpoints] == ["done", "done"]
    assert [rank.rank for rank in run.ranks] == [0, 1]
    for rank in run.ranks:
        assert sum(rank.phases_s.values()) == pytest.approx(0.21, rel=0.1)
        assert rank.peak_bytes > 500e6
    assert list(run.steps.phases) == [
        "data", "forward", "backward", "reduce", "clip", "optimizer", "log",
    ]  # fmt: skip
    assert run.loads is not None
    assert run.loads.counts.shape == (40, 3, 8)
    assert run.launches[0].parameters_active == 5_120_256
    assert run.setting("routing.balance_loss") == 0.01
    assert run.setting("routing.nothing.here") is None


def test_resume_voids_what_the_killed_part_wrote_after_it(tmp_path: Path) -> None:
    directory = bare_run(tmp_path / "run")
    log = EventLog(directory / "events" / "rank-0.jsonl")
    start_event(log, 1, 100.0)
    for step in range(1, 8):
        step_event(log, step, 1.0, 100.0 + step)
    log.emit("validation", time=104.5, step=4, loss=1.0, tokens=5, seconds=0.1)
    log.emit("validation", time=105.5, step=5, loss=1.0, tokens=5, seconds=0.1)
    log.emit("checkpoint_done", time=106.6, step=6, path="late", bytes=1, seconds=0.1)
    start_event(log, 5, 200.0, resumed_from="checkpoints/step-00000004")
    assert RunStats.read(directory).steps.step.tolist() == [1, 2, 3, 4]
    step_event(log, 5, 2.0, 201.0)
    log.close()
    run = RunStats.read(directory, now_s=201.0)
    assert run.steps.step.tolist() == [1, 2, 3, 4, 5]
    assert run.steps.loss.tolist() == [1, 1, 1, 1, 2]
    assert [validation.step for validation in run.validations] == [4]
    assert run.checkpoints == []
    assert [launch.step for launch in run.launches] == [0, 4]
    assert run.launches[1].resumed_from == "checkpoints/step-00000004"
    assert run.seconds == pytest.approx(7.0 + 1.0)


def test_a_speed_is_that_of_the_last_launch(tmp_path: Path) -> None:
    directory = bare_run(tmp_path / "run")
    log, speeds = EventLog(directory / "events" / "rank-0.jsonl"), []
    for first, step_s in ((1, 1.0), (5, 10.0)):
        start_event(log, first, 100.0 * first)
        for step in range(first, first + 4):
            log.emit("step", time=100.0 * first + step, step=step, loss=1.0, step_s=step_s)
        speeds.append(summary(RunStats.read(directory))["step_s"])
    log.close()
    assert speeds == [1.0, 10.0]


def test_status_of_a_run(tmp_path: Path) -> None:
    """Silence stops a run after two minutes and twenty steps."""
    directory = fabricate(tmp_path / "run", steps=30, finished=False)
    last = RunStats.read(directory).last_event_s
    assert RunStats.read(directory, now_s=last + 60).status == "running"
    assert RunStats.read(directory, now_s=last + 600).status == "stopped"
    slow = fabricate(tmp_path / "slow", steps=10, finished=False, step_s=300.0)
    last = RunStats.read(slow).last_event_s
    assert RunStats.read(slow, now_s=last + 1800).status == "running"
    record_run_end(directory, "ended by SIGTERM")
    run = RunStats.read(directory)
    assert (run.status, run.ended) == ("stopped", "ended by SIGTERM")
    peak = summary(run)["peak_memory_bytes"]
    log = EventLog(directory / "events" / "rank-0.jsonl")
    start_event(log, 31, START_S + 1000)
    assert RunStats.read(directory, now_s=START_S + 1001).status == "running"
    # The last save may take more memory than the last step.
    log.emit("run_end", time=START_S + 1002, step=30, reason="finished", peak_bytes=peak + 1)
    log.close()
    run = RunStats.read(directory)
    assert (run.status, summary(run)["peak_memory_bytes"]) == ("finished", peak + 1)


def test_damaged_lines_are_skipped(tmp_path: Path) -> None:
    directory = fabricate(tmp_path / "run", steps=5, finished=False)
    before = RunStats.read(directory)
    with (directory / "events" / "rank-0.jsonl").open("a") as file:
        file.write(
            '[1]\n{"event": "step", "step": "six"}\n{"event": "later", "step": 5}\n'
            '{"event": "step", "time": 9.0, "step": 6, "phases": 3}\n'
            '{"event": "run_start", "time": 9.0, "step": 3, "rank_hosts": [{}]}\n'
            '{"time": 1760000099.0, "event": "step", "step": 6, "lo'
        )
    after = RunStats.read(directory)
    assert (after.last_step, after.launches) == (5, before.launches)


def test_figures_that_are_missing_or_no_numbers_are_nan(tmp_path: Path) -> None:
    directory = bare_run(tmp_path / "run")
    log = EventLog(directory / "events" / "rank-0.jsonl")
    start_event(log, 1, 1.0)
    log.emit("step", time=2.0, step=1, loss=None)
    log.emit("step", time=3.0, step=2, loss=float("nan"), grad_norm=0.5)
    log.close()
    steps = RunStats.read(directory).steps
    assert np.isnan(steps.loss).all()
    assert math.isnan(steps.grad_norm[0])
    assert steps.grad_norm[1] == 0.5
    assert np.isnan(steps.lr).all()


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("job.json", None, r"job\.json"),
        ("plan.json", "[]", r"plan\.json.*restore"),
        ("versions.json", "\xff", r"versions\.json.*restore"),
        ("events/rank-0.jsonl", None, r"rank-0\.jsonl.*moesaic train"),
    ],
)
def test_missing_or_broken_file_is_named(
    name: str, text: str | None, told: str, tmp_path: Path
) -> None:
    file = fabricate(tmp_path / "run", steps=2) / name
    file.unlink()
    if text is not None:
        file.write_text(text, encoding="latin-1")
    with pytest.raises(StoreError, match=told):
        RunStats.read(tmp_path / "run")


def test_loads_that_were_recorded_again_count_once_as_in_the_later_part(tmp_path: Path) -> None:
    write_loads(tmp_path, {(step, 0): [8, 0] for step in range(1, 7)})
    write_loads(tmp_path, {(step, 0): [2, 6] for step in range(4, 6)})
    loads = read_loads(tmp_path, last_step=5)
    assert loads is not None
    assert loads.steps.tolist() == [1, 2, 3, 4, 5]
    assert loads.counts[:, 0].tolist() == [[8, 0], [8, 0], [8, 0], [2, 6], [2, 6]]
    assert loads.recent.tolist() == [[4, 12]]
    assert loads.recent_utilisation.tolist() == [[0.5, 1.5]]
    assert loads.recent_imbalance == 1.5


def test_many_steps_share_columns(tmp_path: Path) -> None:
    rows = {(step, layer): [step, 1] for step in range(1, 11) for layer in (0, 3)}
    write_loads(tmp_path, rows)
    loads = read_loads(tmp_path, last_step=10, max_columns=4)
    assert loads is not None
    assert loads.layers.tolist() == [0, 3]
    assert loads.column_steps.tolist() == [1.5, 4, 6.5, 9]
    assert loads.counts[:, 1].tolist() == [[3, 2], [12, 3], [13, 2], [27, 3]]
    assert loads.recent_steps.tolist() == [8, 9, 10]


def test_layer_without_tokens_has_no_utilisation(tmp_path: Path) -> None:
    write_loads(tmp_path, {(1, 0): [0, 0], (1, 1): [3, 1]})
    loads = read_loads(tmp_path, last_step=1)
    assert loads is not None
    assert np.isnan(loads.utilisation()[0, 0]).all()
    assert loads.utilisation()[0, 1].tolist() == [1.5, 0.5]


def test_loads_after_the_last_step_are_void(tmp_path: Path) -> None:
    write_loads(tmp_path, {(9, 0): [1, 1]})
    assert read_loads(tmp_path, last_step=8) is None
    assert read_loads(tmp_path / "none", last_step=8) is None


def test_balance_stats_by_step_and_layer(tmp_path: Path) -> None:
    directory = fabricate(
        tmp_path / "run", steps=25, layers=2, balanced=True, killed_at=21, resumed_at=10
    )
    stats = read_balance_stats(directory / "balance", 22)  # Steps 11 to 21 were written twice.
    assert stats is not None
    assert stats.steps.tolist() == list(range(1, 23))
    assert stats.by_step["replicas"].tolist() == [4] * 22
    assert stats.by_step["replica_wait_s"][8] == pytest.approx(2 * 9e-4)
    assert stats.mean("replica_wait_s", "gradient_wait_s") == pytest.approx(6e-4 * 11.5)
    assert stats.by_layer["imbalance_before"][1] == pytest.approx(1.6 + 0.02 * 11.5)
    assert read_balance_stats(directory / "balance", 0) is None
    assert read_balance_stats(directory / "nowhere", 22) is None
