"""A second kind of job, regression on vectors by two parts, trained by the same trainer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moesaic.base.config import Section, parse
from moesaic.base.decisions import Decision
from moesaic.base.errors import StoreError
from moesaic.base.events import read_events
from moesaic.dist.checkpoint import Checkpoint, resume_candidates
from moesaic.dist.collectives import all_reduce_
from moesaic.dist.state import Source, TensorShard
from moesaic.dist.world import World
from moesaic.facts.job import (
    CheckpointConfig,
    LogConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from moesaic.facts.plan import Plan
from moesaic.models.init import InitialSource
from moesaic.models.state import LocalParam
from moesaic.report import write_report
from moesaic.testing.progress import RecordingProgress
from moesaic.testing.ranks import RankPool
from moesaic.testing.states import read_checkpoint
from moesaic.train.job_file import LoadedJob
from moesaic.train.kinds import Recorder
from moesaic.train.objectives.objective import StepContext, StepResult
from moesaic.train.parts import Part, make_part, parts_source
from moesaic.train.phases import PhaseTimer
from moesaic.train.run import Run
from moesaic.train.trainer import train
from moesaic.train.walk import MicroBatchWalk

WIDTH = 6


class VectorsJob(Section):
    """Job of the kind "vectors"."""

    kind: Literal["vectors"] = "vectors"
    parts: str = "encoder. head."
    """Prefixes of the parts, separated by spaces."""
    seed: int = 3
    snapshot: Literal["none", "works", "fails"] = "none"
    """External snapshot of the first part."""
    train: TrainConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig(tensorboard=False)


@dataclass(frozen=True)
class Vectors:
    """Batch of samples."""

    inputs: Tensor
    targets: Tensor


class VectorSamples:
    """Random vectors, each a function of its index."""

    def __len__(self) -> int:
        return 40

    def batch(self, indices: range) -> Vectors:
        """Return the samples of `indices`."""
        rows = [
            torch.randn(WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(index))
            for index in indices
        ]
        whole = torch.stack(rows) if rows else torch.zeros(0, WIDTH, dtype=torch.float64)
        return Vectors(whole, 0.5 + 0.2 * whole.mean(-1, keepdim=True))


class VectorData:
    """Data of a run on vectors."""

    train = validation = VectorSamples()
    digest = "vectors"

    def files(self) -> dict[str, bytes]:
        """Return no files."""
        return {}


@dataclass(frozen=True)
class VectorStats:
    """Statistics of a step."""

    step: int
    loss: float
    samples: int
    grad_norm: float
    lr: float
    phases: Mapping[str, float]

    def figures(self, step_s: float) -> dict[str, float]:
        """Return scalars of the step."""
        return {
            "loss": self.loss, "grad_norm": self.grad_norm, "lr": self.lr,
            "samples": self.samples, "samples_per_s": self.samples / max(step_s, 1e-9),
        }  # fmt: skip

    def write(self, record: Recorder) -> None:
        """Write nothing more."""

    def messages(self) -> Iterator[str]:
        """Yield nothing."""
        yield from ()


class SquaredError:
    """Objective: squared error of all parts in a row."""

    unit = "samples"

    def __init__(self, world: World, parts: Sequence[Part[Any]]) -> None:
        self._world, self._parts = world, parts

    def load(self, samples: VectorSamples, indices: range, *, shuffled: bool) -> Vectors:
        """Return the batch of the given indices."""
        del shuffled
        return samples.batch(indices)

    def num_units(self, batch: Vectors) -> int:
        """Return the samples of a batch."""
        return len(batch.inputs)

    def compute_loss(self, batch: Vectors, context: StepContext) -> tuple[Tensor, Tensor]:
        """Return the loss to backpropagate, and the loss to report."""
        loss = self.evaluate(batch) / context.units
        return loss * context.scale, loss.detach()

    def evaluate(self, batch: Vectors) -> Tensor:
        """Return the sum of squared errors."""
        x = batch.inputs
        for part in self._parts:
            x = part.model(x)
        return (x.mean(-1, keepdim=True) - batch.targets).square().sum()

    def validation_loss(self, batch: Vectors, losses: Tensor) -> tuple[Tensor, int]:
        """Return the loss and samples of a validation batch."""
        return losses, len(batch.inputs)

    def total_loss(self, losses: Sequence[Tensor]) -> float:
        """Return the loss over all ranks."""
        return float(all_reduce_(torch.stack(list(losses)).sum(), self._world.group))

    def after_update(self, losses: Sequence[Tensor]) -> None:
        """Change nothing."""

    def finish_step(self, result: StepResult, phases: PhaseTimer) -> VectorStats:
        """Return the statistics of a step."""
        return VectorStats(
            result.step, self.total_loss(result.losses), result.units, result.grad_norm, result.lr,
            phases.seconds,
        )  # fmt: skip

    def state_shards(self) -> list[TensorShard]:
        """Return nothing more."""
        return []

    def flush(self) -> None:
        """Do nothing."""


class ExternalTable:
    """External snapshot that a rank writes by itself."""

    def __init__(self, world: World, fails: bool) -> None:
        self._rank, self._fails = world.rank, fails

    def begin(self, step: int) -> Callable[[], dict[str, Any]]:
        """Begin a snapshot."""

        def wait() -> dict[str, Any]:
            if self._fails and self._rank == 0 and step > 2:
                raise StoreError("the table server is gone")
            return {"step": step, "rank": self._rank}

        return wait


class VectorsKind:
    """Jobs of the kind "vectors"."""

    unit = "samples"

    def units_per_step(self, job: VectorsJob) -> int:
        """Return the samples of a step."""
        return job.train.batch

    def plan(
        self, loaded: LoadedJob[VectorsJob], world: World, decisions: list[Decision[Any, Any]]
    ) -> Plan:
        """Return data parallelism."""
        del loaded, decisions
        return Plan(ranks=world.size, ep=1, dp_shard=1, experts=0)

    def open_data(self, job: VectorsJob, world: World, log: Callable[[str], None]) -> VectorData:
        """Return the data."""
        del job, world, log
        return VectorData()

    def assemble(
        self,
        loaded: LoadedJob[VectorsJob],
        plan: Plan,
        world: World,
        checkpoint: Checkpoint | None,
        data: Any,
        log: Callable[[str], None],
        decisions: list[Decision[Any, Any]],
    ) -> Run[SquaredError, VectorStats]:
        """Return the run."""
        del decisions
        job, parts = loaded.job, []
        for prefix in job.parts.split():
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
            params = [
                LocalParam("block", name, one, None, tuple(one.shape), tuple(range(world.size)))
                for name, one in model.named_parameters()
            ]
            parts.append(make_part(model, plan, world, params, job, prefix=prefix))
        if job.snapshot != "none":
            parts[0].external_snapshot = ExternalTable(world, job.snapshot == "fails")
        run = Run(
            job, world, parts, SquaredError(world, parts),
            MicroBatchWalk(job.train.precision, world.device), world.group,
            dict(checkpoint.counters) if checkpoint else {},
        )  # fmt: skip
        source: Source = InitialSource(job.seed, 0.5)
        if checkpoint is not None:
            source = parts_source(checkpoint, source, parts, run.counters, log)
        source.fill(run.state().shards)
        return run

    def describe(self, run: Any) -> Iterator[str]:
        """Yield the parts."""
        yield f"{len(run.parts)} parts"

    def start_fields(self, run: Any) -> dict[str, Any]:
        """Return nothing."""
        return {}


def train_vectors(
    world: World, out: str, steps: int, resume: str | None = None, keys: Mapping[str, Any] = {}
) -> tuple[list[dict[str, float]], list[str]]:
    """Train on this rank; return figures and messages."""
    raw = {
        "train": {
            "steps": steps, "batch": 8, "micro_batches": 2, "precision": "fp64", "device": "cpu",
        },
        "optimizer": {"lr": 0.05}, "schedule": {"kind": "constant", "warmup": 1}, **keys,
    }  # fmt: skip
    job, watch = parse(VectorsJob, raw, "vectors"), RecordingProgress()
    train(LoadedJob(job, "", []), Path(out), resume, world, watch, VectorsKind())
    return watch.figures, watch.messages


def read_tensors(out: Path) -> dict[str, Any]:
    """Return every tensor of the newest checkpoint."""
    return read_checkpoint(resume_candidates(out / "checkpoints")[0])


def assert_close(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, values in found.items():
        np.testing.assert_allclose(values, expected[key], rtol=1e-9, atol=1e-12, err_msg=key)


def test_two_ranks_equal_one_also_after_a_resume(ranks: RankPool, tmp_path: Path) -> None:
    one, two, split = (tmp_path / name for name in ("one", "two", "split"))
    (figures, _), *_ = ranks.run(1, train_vectors, str(one), 6)
    (others, _), *_ = ranks.run(2, train_vectors, str(two), 6)
    losses = [step["loss"] for step in figures]
    assert losses == pytest.approx([step["loss"] for step in others], rel=1e-9)
    assert losses[-1] < losses[0]
    state = read_tensors(one)
    assert {key.split("/", 1)[1].split(".")[0] for key in state} == {"encoder", "head"}
    assert_close(read_tensors(two), state)
    ranks.run(2, train_vectors, str(split), 3)
    (rest, _), *_ = ranks.run(1, train_vectors, str(split), 6, "auto")
    assert losses[3:] == pytest.approx([step["loss"] for step in rest], rel=1e-9)
    assert_close(read_tensors(split), state)


def test_a_report_counts_samples(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, train_vectors, str(tmp_path / "run"), 4)
    started = next(read_events(tmp_path / "run" / "events" / "rank-0.jsonl"))
    assert (started["unit"], started["samples_per_step"]) == ("samples", 8)
    write_report([tmp_path / "run"], tmp_path / "report.html")
    write_report([tmp_path / "run", tmp_path / "run"], tmp_path / "both.html")
    for name, words in (("report", "Samples per second"), ("both", "samples/s</td>")):
        text = (tmp_path / f"{name}.html").read_text()
        assert words in text
        for line in text.splitlines():  # Plotly is one long line.
            assert len(line) > 100_000 or "token" not in line.lower()


def test_a_resume_adds_and_removes_parts(ranks: RankPool, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ranks.run(2, train_vectors, str(out), 2, None, {"parts": "encoder."})
    before = read_tensors(out)
    (figures, messages), *_ = ranks.run(2, train_vectors, str(out), 4, "auto")
    assert len(figures) == 2
    assert any('the checkpoint has no part "head."' in message for message in messages)
    state = read_tensors(out)
    assert {key for key in state if "head." not in key} == before.keys()
    (figures, messages), *_ = ranks.run(1, train_vectors, str(out), 5, "auto", {"parts": "head."})
    assert len(figures) == 1
    assert not any("no part" in message for message in messages)
    assert read_tensors(out).keys() == {key for key in state if "head." in key}


def test_an_added_part_starts_as_in_a_new_run(ranks: RankPool, tmp_path: Path) -> None:
    """Its moments are corrected for its own number of updates."""
    out = tmp_path / "run"
    ranks.run(1, train_vectors, str(out), 2, None, {"parts": "encoder."})
    ranks.run(1, train_vectors, str(out), 3, "auto")
    name = "head.0.weight"
    changed = torch.from_numpy(read_tensors(out)[f"parameter/{name}"])
    initial = torch.zeros(WIDTH, WIDTH).double()
    shard = TensorShard.of_tensor("parameter", name, (WIDTH, WIDTH), (0, 0), initial, (0,))
    InitialSource(3, 0.5).fill([shard])
    decayed = initial * (1 - 0.05 * OptimizerConfig().weight_decay)
    assert (changed - decayed).abs().max() == pytest.approx(0.05, rel=1e-3)


def test_a_snapshot_is_durable_before_its_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, train_vectors, str(tmp_path / "run"), 3, None, {"snapshot": "works"})
    newest = resume_candidates(tmp_path / "run" / "checkpoints")[0]
    manifest = json.loads((newest / "manifest.json").read_text())
    expected = {str(rank): {"step": 3, "rank": rank} for rank in range(2)}
    assert manifest["snapshots"] == {"encoder.": expected}
    assert Checkpoint.open(newest).snapshots == manifest["snapshots"]


def fail_to_save(world: World, out: str) -> str:
    with pytest.raises(StoreError) as caught:
        train_vectors(world, out, 3, None, {"snapshot": "fails"})
    return str(caught.value)


def test_a_failed_snapshot_fails_its_save(ranks: RankPool, tmp_path: Path) -> None:
    messages = ranks.run(2, fail_to_save, str(tmp_path / "run"))
    assert all("the table server is gone" in message for message in messages)
    assert not resume_candidates(tmp_path / "run" / "checkpoints")
