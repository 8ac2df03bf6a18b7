"""Record of a run besides its checkpoints, read back by the usual tools."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moesaic.base.decisions import Decision
from moesaic.base.errors import ConfigError
from moesaic.base.events import read_events
from moesaic.base.records import read_records
from moesaic.dist.world import World
from moesaic.facts.balance import BalanceDecision, BalanceFacts, BalanceProblem
from moesaic.policy.balance import balance_stats
from moesaic.testing.jobs import tiny_job
from moesaic.train.balancing import LayerBalance
from moesaic.train.lm_stats import LMStepStats
from moesaic.train.record import MlflowSink, RunRecord, WandbSink, open_sinks


def step_stats(step: int) -> LMStepStats:
    return LMStepStats(
        step=step, loss=5.0 - step, total_loss=5.5 - step, balance_loss=1.0, z_loss=2.0,
        grad_norm=0.5, lr=1e-3, tokens=96, num_replay_mismatches=0, dropped={0: 1, 1: 2},
        counts={0: torch.tensor([3, 4]), 1: torch.tensor([7, 0])},
        counts_by_rank={0: torch.tensor([[3, 0], [0, 4]])}, phases={"forward": 0.1},
    )  # fmt: skip


def test_events_loads_and_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job = tiny_job(log={"loads_every": 2})
    record = RunRecord(tmp_path, job, World.solo())
    for step in (1, 2, 3, 4):
        figures = record.write_step(step_stats(step), 0.5, {})
    record.write_validation(4, {"loss": 1.25, "tokens": 200}, 0.1)
    record.close()
    assert (figures["tokens_per_s"], figures["dropped"]) == (192.0, 3)
    events = list(read_events(tmp_path / "events" / "rank-0.jsonl"))
    assert [e["loss"] for e in events if e["event"] == "step"] == [4.0, 3.0, 2.0, 1.0]
    assert [e["phases"] for e in events if e["event"] == "rank_step"] == [{"forward": 0.1}] * 4
    rows = [row for part in read_records(tmp_path / "loads") for row in part.to_pylist()]
    assert [r["counts_by_rank"] for r in rows[:2]] == [[3, 0, 0, 4], []]
    assert [(r["step"], r["layer"], r["counts"], r["dropped"]) for r in rows] == [
        (2, 0, [3, 4], 1), (2, 1, [7, 0], 2), (4, 0, [3, 4], 1), (4, 1, [7, 0], 2),
    ]  # fmt: skip
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [s.value for s in board.Scalars("train/loss")] == [4.0, 3.0, 2.0, 1.0]
    assert [(s.step, s.value) for s in board.Scalars("validation/loss")] == [(4, 1.25)]


@pytest.mark.parametrize("clock", [False, True])
def test_waiting_is_recorded_with_a_clock(tmp_path: Path, clock: bool) -> None:
    """Sinks get no unknown figure; rows hold NaN for it."""
    counts, replicas = np.array([[3, 1], [2, 0]]), np.array([[0, 1]])
    problem = BalanceProblem(
        np.array([0, 1]), 2, 1.0, 1.0, 1.0, expert_bytes=2.0, gradient_bytes=3.0
    )
    outcome = BalanceDecision(replicas, np.array([[0, 1, 1, 2]]))
    decisions = [Decision(BalanceFacts(problem, counts), outcome, 0.125)]
    stats = balance_stats(decisions, 2, 0)
    if clock:
        stats.replica_wait_s, stats.gradient_wait_s = 0.5, 0.25
    balance = LayerBalance(decisions, stats)
    record = RunRecord(tmp_path, tiny_job(log={"tensorboard": False}), World.solo())
    figures = record.write_step(replace(step_stats(1), balance={0: balance, 1: balance}), 0.5, {})
    record.close()
    recorded = {
        name: figures.get(name) for name in ("replicas", "replica_bytes", "replica_exposed_s")
    }
    assert recorded == {
        "replicas": 2,
        "replica_bytes": 10,
        "replica_exposed_s": 1.5 if clock else None,
    }
    [part] = read_records(tmp_path / "balance")
    assert part.column("layer").to_pylist() == [0, 1]
    assert part.column("tokens_before").to_pylist() == [[5, 1]] * 2
    [event] = [
        e for e in read_events(tmp_path / "events" / "rank-0.jsonl") if e["event"] == "decisions"
    ]
    assert event["step"] == 1
    assert event["balance"] == [
        {"layer": layer, "is_ahead": False, "replicas": [[0, 1, 2]], "planning_s": 0.125}
        for layer in (0, 1)
    ]
    assert np.isnan(part.column("replica_wait_s").to_numpy()).tolist() == [not clock] * 2


def test_the_loss_scale_is_recorded_if_there_is_one(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, tiny_job(log={"tensorboard": False}), World.solo())
    assert "loss_scale" not in record.write_step(step_stats(1), 0.5, {})
    record.write_step(
        replace(step_stats(2), loss_scale=512.0, is_skipped=True, grad_norm=float("inf")), 0.5, {}
    )
    record.close()
    events = [e for e in read_events(tmp_path / "events" / "rank-0.jsonl") if e["event"] == "step"]
    assert [(e.get("loss_scale"), e.get("skipped")) for e in events] == [(None, None), (512.0, 1.0)]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for extra in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, extra, None)
        job = tiny_job(log={extra: "somewhere", "tensorboard": False})
        with pytest.raises(ConfigError, match=rf"log\.{extra} = 'somewhere'.*moesaic\[{extra}\]"):
            open_sinks(job, tmp_path)


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the wandb extra is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    sink = WandbSink("project", tiny_job(), "name")
    sink.write_scalars(1, {"train/loss": 2.0})
    sink.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_mlflow_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the mlflow extra is not installed")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    sink = MlflowSink("experiment", "name")
    sink.write_scalars(3, {"train/loss": 2.0})
    sink.close()
    runs = mlflow.search_runs(experiment_names=["experiment"], output_format="list")
    assert runs[0].data.metrics["train/loss"] == 2.0
