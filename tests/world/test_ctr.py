"""Jobs of kind ctr: runs equal a plain PyTorch loop, on any number of ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moesaic.api.inspection import inspect_path
from moesaic.base.config import parse
from moesaic.base.errors import ConfigError, DivergedError
from moesaic.base.events import read_events
from moesaic.dist.checkpoint import Checkpoint, resume_candidates
from moesaic.dist.state import PARAMETER, TensorShard
from moesaic.dist.world import World
from moesaic.facts.job import CtrJob, TableConfig
from moesaic.facts.plan import Plan
from moesaic.models.init import InitialSource
from moesaic.models.recommender import Recommender
from moesaic.ps.sharded import ShardedTable
from moesaic.ps.stored_rows import StoredRows
from moesaic.ps.table import Table
from moesaic.testing.progress import RecordingProgress
from moesaic.testing.ranks import RankPool
from moesaic.testing.states import read_checkpoint
from moesaic.train.ctr import TABLE, CtrKind
from moesaic.train.data.clicks import ClickData
from moesaic.train.job_file import LoadedJob
from moesaic.train.optim import learning_rate
from moesaic.train.table_passes import open_tiers
from moesaic.train.trainer import Resume, RunStart, train

STREAM = {
    "days": 2, "samples_per_day": 500, "slots": 4, "dense": 3, "keys": 60, "multi_hot": 3,
    "users": 7,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "ctr-dnn": {},
    "dlrm": {"dense_hidden": [6]},
    "dcn-v2": {"cross_layers": 2},
}
OPTIMIZERS = {"ctr-dnn": "rowwise-adagrad", "dlrm": "adagrad", "dcn-v2": "sgd"}


def make_job(family: str = "ctr-dnn", steps: int = 100, **tables: dict[str, Any]) -> CtrJob:
    """Return a job in fp64 over the built-in stream, with the given keys of its tables changed."""
    raw: dict[str, Any] = {
        "kind": "ctr", "seed": 11,
        "model": {"family": family, "dim": 4, "hidden": [8, 6], **MODELS[family]},
        "table": {"optimizer": OPTIMIZERS[family], "lr": 0.1, "init_std": 0.3},
        "data": {"stream": STREAM},
        "train": {
            "steps": steps, "batch": 14, "micro_batches": 2, "precision": "fp64", "device": "cpu",
            "clip": 0.2, "validation_samples": 50,
        },
        "optimizer": {"lr": 0.02}, "schedule": {"warmup": 10},
        "log": {"tensorboard": False, "loads_every": 50},
    }  # fmt: skip
    for table, changes in tables.items():
        raw[table] = {**raw.get(table, {}), **changes}
    return parse(CtrJob, raw, "ctr")


def open_data(job: CtrJob, world: World | None = None) -> ClickData:
    return ClickData.open(job.data, job.seed, world or World.solo())


def run_steps(
    world: World, job: CtrJob, out: str, keys: np.ndarray
) -> tuple[list[float], dict[str, np.ndarray], np.ndarray]:
    """Take all steps; return losses, the network's parameters, and the rows of `keys`."""
    data, plan = open_data(job, world), Plan.data_parallel(world.size)
    start = RunStart(LoadedJob(job, "", []), plan, world, Path(out), None, data, print, [])
    run = CtrKind().assemble(start)
    losses = [run.step(data.train).loss for _ in range(job.train.steps)]
    network = {name: one.detach().numpy().copy() for name, one in run.part.model.named_parameters()}
    singles = np.arange(len(keys) + 1)
    rows = run.objective.rows.look_up(keys, singles, training=False).sums
    run.close()
    return losses, network, rows


def adamw_groups(network: nn.Module, job: CtrJob) -> list[dict[str, Any]]:
    """Return matrices with weight decay, and biases without."""
    matrices = [one for one in network.parameters() if one.dim() > 1]
    biases = [one for one in network.parameters() if one.dim() == 1]
    decay = job.optimizer.weight_decay
    return [{"params": matrices, "weight_decay": decay}, {"params": biases, "weight_decay": 0.0}]


class RowwiseAdagrad:
    """fbgemm's EXACT_ROWWISE_ADAGRAD on a dense weight with a sparse gradient."""

    def __init__(self, weight: nn.Parameter, lr: float, epsilon: float) -> None:
        self.weight, self.lr, self.epsilon = weight, lr, epsilon
        self.sums = torch.zeros(len(weight), dtype=weight.dtype)

    @torch.no_grad()
    def step(self) -> None:
        """Update each row that has a gradient."""
        assert self.weight.grad is not None
        grad = self.weight.grad.coalesce()
        rows, values = grad.indices()[0], grad.values()
        self.sums[rows] += (values**2).mean(1)
        self.weight[rows] -= self.lr * values / (self.sums[rows].sqrt() + self.epsilon)[:, None]


def plain_loop(job: CtrJob) -> tuple[list[float], dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Train by plain PyTorch on one process, over a dense space of ids; return losses, the
    network's parameters, keys and their rows."""
    samples, train = open_data(job).train, job.train
    keys = np.unique(samples.load(range(train.steps * train.batch), shuffled=True).keys)
    table = Table(job.table, job.model.dim, seed=job.seed, dtype="float64")
    bag = nn.EmbeddingBag(
        len(keys), job.model.dim, mode="sum", sparse=True, include_last_offset=True,
        _weight=torch.from_numpy(table.pull(keys)),
    )  # fmt: skip
    network = Recommender(job.model, job.data.num_slots, job.data.num_dense, dtype=torch.float64)
    shards = [
        TensorShard.of_tensor(
            PARAMETER, name, tuple(one.shape), (0,) * one.dim(), one.detach(), (0,)
        )
        for name, one in network.named_parameters()
    ]
    InitialSource(job.seed, None).fill(shards)
    dense = torch.optim.AdamW(
        adamw_groups(network, job), betas=(0.9, 0.95), eps=job.optimizer.epsilon
    )
    lr, losses = job.table.lr, list[float]()
    sparse: Any = {
        "rowwise-adagrad": lambda: RowwiseAdagrad(bag.weight, lr, job.table.epsilon),
        "adagrad": lambda: torch.optim.Adagrad([bag.weight], lr=lr, eps=job.table.epsilon),
        "sgd": lambda: torch.optim.SGD([bag.weight], lr=lr),
    }[job.table.optimizer]()
    for step in range(train.steps):
        batch = samples.load(range(step * train.batch, (step + 1) * train.batch), shuffled=True)
        ids = torch.from_numpy(np.searchsorted(keys, batch.keys))
        pooled = bag(ids, torch.from_numpy(batch.offsets)).view(job.data.num_slots, -1, 4)
        logits = network(pooled.transpose(0, 1), torch.from_numpy(batch.dense).double())
        labels = torch.from_numpy(batch.labels).double()
        loss = F.binary_cross_entropy_with_logits(logits, labels)
        bag.weight.grad = None
        dense.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), train.clip)
        for group in dense.param_groups:
            group["lr"] = learning_rate(step + 1, train.steps, job.optimizer.lr, job.schedule)
        dense.step()
        with torch.sparse.check_sparse_tensor_invariants(False):
            sparse.step()
        losses.append(float(loss.detach()))
    found = {name: one.detach().numpy() for name, one in network.named_parameters()}
    return losses, found, keys, bag.weight.detach().numpy()


@pytest.mark.parametrize("family", MODELS)
def test_runs_equal_a_plain_loop(ranks: RankPool, tmp_path: Path, family: str) -> None:
    """Bags are of none, one or several keys, and ranks have unlike numbers of samples."""
    job = make_job(family, train={"micro_batches": 2 if family == "ctr-dnn" else 1})
    losses, network, keys, rows = plain_loop(job)
    assert np.mean(losses[-30:]) < np.mean(losses[:30])
    for size in (1, 2, 4):
        out = str(tmp_path / f"{size}")
        for found_losses, found_network, found_rows in ranks.run(size, run_steps, job, out, keys):
            np.testing.assert_allclose(found_losses, losses, rtol=1e-9)
            for name, values in network.items():
                np.testing.assert_allclose(found_network[name], values, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(found_rows, rows, rtol=1e-9, atol=1e-12)


RESUMED: dict[str, Any] = {
    "data": {"stream": {**STREAM, "days": 3, "samples_per_day": 44, "keys": 30}},
    "table": {"max_rows": 60, "evict_days": 2},
    "train": {"batch": 8, "micro_batches": 4},
    "checkpoint": {"every": 5, "keep": 9},
}
"""A job whose days end, and whose rows are evicted, on both sides of a checkpoint."""


class CrashedError(RuntimeError):
    """Error of a callback that ends a run without a last checkpoint."""


class Crash:
    """Callback that raises after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def __call__(self, figures: dict[str, float]) -> None:
        if figures["step"] == self._step:
            raise CrashedError


def train_clicks(
    world: World, job: CtrJob, out: str, resume: str | None = None, crash_at: int = 0
) -> RecordingProgress:
    """Train on this rank, up to a crash if a step is given."""
    progress, loaded = RecordingProgress(), LoadedJob(job, "", [])
    callback = Crash(crash_at) if crash_at else None
    try:
        start = None if resume is None else Resume(resume)
        train(loaded, Path(out), start, world, progress, CtrKind(), callback)
    except (CrashedError, RuntimeError):
        if not crash_at:
            raise
    return progress


def read_state(out: Path) -> tuple[dict[str, Any], dict[int, np.ndarray]]:
    """Return the network's tensors and the rows of the newest checkpoint."""
    newest = resume_candidates(out / "checkpoints")[0]
    stored = StoredRows.open_snapshot(out / TABLE, Checkpoint.open(newest).snapshots[""])
    rows = {
        key: record.copy()
        for keys, records in stored.live_rows()
        for key, record in zip(keys.tolist(), records, strict=True)
    }
    return read_checkpoint(newest), rows


def events_of(out: Path, name: str) -> list[dict[str, Any]]:
    events = read_events(out / "events" / "rank-0.jsonl")
    return [event for event in events if event["event"] == name]


@pytest.fixture(scope="module")
def whole(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of 20 steps on two ranks."""
    out = tmp_path_factory.mktemp("ctr") / "whole"
    ranks.run(2, train_clicks, make_job(steps=20, **RESUMED), str(out))
    return out


@pytest.fixture(scope="module")
def crashed(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, which crashed after step 13 and so left a checkpoint of step 10."""
    out = tmp_path_factory.mktemp("ctr") / "crashed"
    saved = {**RESUMED, "checkpoint": {**RESUMED["checkpoint"], "asynchronous": False}}
    ranks.run(2, train_clicks, make_job(steps=20, **saved), str(out), None, 13)
    return out


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_crashed_run_resumes(
    ranks: RankPool, tmp_path: Path, whole: Path, crashed: Path, size: int
) -> None:
    """Any number of ranks resumes; of four ranks, some have no sample of a micro-batch."""
    job, out = make_job(steps=20, **RESUMED), tmp_path / "run"
    shutil.copytree(crashed, out)
    resumed = ranks.run(size, train_clicks, job, str(out), "auto")[0]
    assert [figures["step"] for figures in resumed.figures] == [*range(11, 21)]
    (tensors, rows), (expected_tensors, expected_rows) = read_state(out), read_state(whole)
    assert rows.keys() == expected_rows.keys()
    assert len(rows) > 40
    for key, values in tensors.items():
        if size == 2:
            assert np.array_equal(values, expected_tensors[key]), key
        np.testing.assert_allclose(values, expected_tensors[key], rtol=1e-9, atol=1e-12)
    for key, record in rows.items():
        if size == 2:
            assert np.array_equal(record, expected_rows[key]), key
        found, values = (one[:40].view(np.float64) for one in (record, expected_rows[key]))
        np.testing.assert_allclose(found, values, rtol=1e-9, atol=1e-12)
        assert np.array_equal(record[40:], expected_rows[key][40:])  # Show, click and last day.
    days, expected = events_of(out, "day"), events_of(whole, "day")
    names = ("step", "day", "rows", "evicted")
    assert [[day[name] for name in names] for day in days[-2:]] == [
        [day[name] for name in names] for day in expected[-2:]
    ]


def test_days_end_with_their_metrics(whole: Path) -> None:
    """Step 6 has the last samples of day 0 and the first ones of day 1."""
    days = events_of(whole, "day")
    assert [(day["step"], day["day"], day["samples"]) for day in days] == [
        (6, 0, 44), (11, 1, 44), (17, 2, 44),
    ]  # fmt: skip
    assert all(day["rows"] <= 60 for day in days)
    assert sum(day["evicted"] for day in days) > 0
    names = {"auc", "log_loss", "normalized_entropy", "calibration", "gauc"}
    (validation,) = events_of(whole, "validation")
    assert all(names <= event.keys() for event in (*days, validation))
    assert validation["samples"] == 44
    assert validation["log_loss"] == pytest.approx(validation["loss"], rel=1e-12)


def test_an_overflow_ends_the_run_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    job = make_job(steps=20, table={"optimizer": "sgd", "lr": 1e300})
    messages = ranks.run(2, diverge, job, str(tmp_path / "run"))
    for message in messages:
        assert "gradient's norm is " in message


def diverge(world: World, job: CtrJob, out: str) -> str:
    with pytest.raises(DivergedError) as caught:
        train(LoadedJob(job, "", []), Path(out), None, world, RecordingProgress(), CtrKind())
    return str(caught.value)


def test_a_drive_changes_no_bit(ranks: RankPool, tmp_path: Path) -> None:
    """Validations, days and a resume happen between passes, whose rows come from the drive."""
    tables: dict[str, Any] = {
        "data": {"stream": {**STREAM, "samples_per_day": 200, "keys": 1500, "zipf": 0.3}},
        "train": {"batch": 32, "validate_every": 3}, "table": {"evict_days": 1},
        "checkpoint": {"every": 4, "asynchronous": False},
    }  # fmt: skip
    ssd = {"evict_days": 1, "ssd": str(tmp_path / "drive"), "host": "2.35MB", "pass_steps": 1}
    job = make_job(steps=12, **tables)
    on_drive = make_job(steps=12, **tables | {"table": ssd})
    expected = ranks.run(2, train_clicks, job, str(tmp_path / "memory"))[0].losses
    ranks.run(2, train_clicks, on_drive, str(tmp_path / "run"), None, 10)
    found = ranks.run(2, train_clicks, on_drive, str(tmp_path / "run"), "auto")[0].losses
    assert found == expected[8:]
    (tensors, rows), (expected_tensors, expected_rows) = (
        read_state(tmp_path / name) for name in ("run", "memory")
    )
    assert all(np.array_equal(values, expected_tensors[key]) for key, values in tensors.items())
    assert rows.keys() == expected_rows.keys()
    assert all(np.array_equal(record, expected_rows[key]) for key, record in rows.items())
    passes = events_of(tmp_path / "run", "pass")
    assert sum(one["raised"] for one in passes) > 30
    shown = inspect_path(tmp_path / "run")["table"]["passes"]
    assert shown["memory_rows"] > 0
    assert shown["drive_rows"] > 0
    (decisions,) = events_of(tmp_path / "run", "decisions")[-1]["passes"]
    assert decisions["steps"] == decisions["pass_steps"] == 1


def test_a_budget_beyond_the_memory_is_refused() -> None:
    table = Table(TableConfig(), 4)
    config = TableConfig(ssd="drive", host="1000000GB")
    with pytest.raises(ConfigError, match=r'table\.host = "1000000GB" is more than the .* free'):
        open_tiers(config, ShardedTable(table, World.solo()), World.solo())
