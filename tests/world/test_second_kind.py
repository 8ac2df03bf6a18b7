"""A second kind of job, regression on vectors by two parts in a row, trained by the same trainer.

Each part may be on some of the ranks, also on other ones than the part before it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from pydantic import Field
from torch import Tensor, nn

from moesaic.base.config import Section, parse
from moesaic.base.decisions import Decision
from moesaic.base.errors import StoreError
from moesaic.base.events import read_events
from moesaic.dist.checkpoint import Checkpoint, resume_candidates
from moesaic.dist.collectives import AllReduce, all_reduce_
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
from moesaic.testing.states import read_checkpoint, whole_shard
from moesaic.train.job_file import LoadedJob
from moesaic.train.kinds import Recorder
from moesaic.train.objectives.objective import StepContext, StepResult
from moesaic.train.parts import Part, PartPlacement, make_part, parts_source
from moesaic.train.phases import PhaseTimer
from moesaic.train.run import Run
from moesaic.train.trainer import Resume, RunStart, train
from moesaic.train.walk import MicroBatchWalk

WIDTH = 6


class VectorsJob(Section):
    """Job of the kind "vectors"."""

    kind: Literal["vectors"] = "vectors"
    parts: str = "encoder. head."
    """Prefixes of the parts, separated by spaces."""
    ranks: dict[str, list[int]] = Field(default_factory=dict)
    """Ranks of a part by its prefix; unset: all."""
    overflow_step: int = -1
    """Finished steps after which the gradient is infinite on the ranks of the last part."""
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
    """Micro-batch of a rank."""

    size: int
    """Samples of the global micro-batch."""
    shares: Mapping[str, slice]
    """Samples of each part on this rank, within the global micro-batch."""
    inputs: Tensor
    """Inputs of the first part."""
    targets: Tensor
    """Targets of the last part."""


class VectorSamples:
    """Random vectors, each a function of its index."""

    def __len__(self) -> int:
        return 40

    def inputs(self, indices: range) -> Tensor:
        """Return the vectors of `indices`."""
        rows = [
            torch.randn(WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(index))
            for index in indices
        ]
        return torch.stack(rows) if rows else torch.zeros(0, WIDTH, dtype=torch.float64)

    def targets(self, indices: range) -> Tensor:
        """Return the targets of `indices`."""
        return 0.5 + 0.2 * self.inputs(indices).mean(-1, keepdim=True)


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
    is_skipped: bool

    def figures(self, step_s: float) -> dict[str, float]:
        """Return scalars of the step."""
        return {
            "loss": self.loss, "grad_norm": self.grad_norm, "lr": self.lr,
            "samples": self.samples, "samples_per_s": self.samples / max(step_s, 1e-9),
            "skipped": float(self.is_skipped),
        }  # fmt: skip

    def rank_figures(self) -> dict[str, float]:
        """Return scalars of this rank alone."""
        return {}

    def write(self, record: Recorder) -> None:
        """Write nothing more."""

    def messages(self) -> Iterator[str]:
        """Yield nothing."""
        yield from ()


class SquaredError:
    """Objective: squared error of all parts in a row, whose samples each divides over its ranks."""

    unit = "samples"

    def __init__(
        self,
        world: World,
        placements: Sequence[PartPlacement],
        parts: Sequence[Part[Any]],
        overflow_step: int,
    ) -> None:
        self._world, self._placements, self._overflow_step = world, placements, overflow_step
        self._parts = {part.prefix: part for part in parts}

    def load(self, samples: VectorSamples, indices: range, *, shuffled: bool) -> Vectors:
        """Return inputs and targets of this rank's shares of a global micro-batch."""
        del shuffled
        shares = {one.prefix: indices[:0] for one in self._placements}
        shares |= {prefix: part.local_samples(indices) for prefix, part in self._parts.items()}
        return Vectors(
            len(indices),
            {
                prefix: slice(share.start - indices.start, share.stop - indices.start)
                for prefix, share in shares.items()
            },
            samples.inputs(shares[self._placements[0].prefix]),
            samples.targets(shares[self._placements[-1].prefix]),
        )

    def num_units(self, batch: Vectors) -> int:
        """Return the samples of the last part."""
        return len(batch.targets)

    def compute_loss(self, batch: Vectors, context: StepContext) -> tuple[Tensor, Tensor]:
        """Return the loss to backpropagate, and the loss to report."""
        loss = self.evaluate(batch) / context.units
        is_infinite = context.step == self._overflow_step and len(batch.targets) > 0
        return loss * (torch.inf if is_infinite else context.scale), loss.detach()

    def evaluate(self, batch: Vectors) -> Tensor:
        """Return the sum of squared errors."""
        x, before = batch.inputs, self._placements[0]
        for one in self._placements:
            if one.ranks != before.ranks:
                x = self._send(x, batch, before.prefix, one.prefix)
            if one.prefix in self._parts:
                x = self._parts[one.prefix].model(x)
            before = one
        return (x.mean(-1, keepdim=True) - batch.targets).square().sum()

    def _send(self, x: Tensor, batch: Vectors, source: str, target: str) -> Tensor:
        """Send each activation to the ranks of the next part; backward sends gradients back."""
        share = batch.shares[source]
        after = batch.size - share.start - len(x)
        rows = [x.new_zeros(share.start, WIDTH), x, x.new_zeros(after, WIDTH)]
        whole = torch.cat(rows)
        if not whole.requires_grad:
            whole.requires_grad_(torch.is_grad_enabled())  # Each rank takes part in backward.
        assert self._world.group is not None
        received: Tensor = AllReduce.apply(whole, self._world.group)
        return received[batch.shares[target]]

    def validation_loss(self, batch: Vectors, losses: Tensor) -> tuple[Tensor, int]:
        """Return the loss and samples of a validation batch."""
        return losses, len(batch.targets)

    def validation_figures(self, losses: Sequence[Tensor]) -> dict[str, float]:
        """Return the number of batches of this rank."""
        return {"batches": float(len(losses))}

    def total_loss(self, losses: Sequence[Tensor]) -> float:
        """Return the loss over all ranks."""
        return float(all_reduce_(torch.stack(list(losses)).sum(), self._world.group))

    def after_update(self, losses: Sequence[Tensor]) -> None:
        """Change nothing."""

    def finish_step(self, result: StepResult, phases: PhaseTimer) -> VectorStats:
        """Return the statistics of a step."""
        return VectorStats(
            result.step, self.total_loss(result.losses), result.units, result.grad_norm, result.lr,
            phases.seconds, result.is_skipped,
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
    restarts_data = False
    data_change = "the vectors have changed"
    new_run = "start a new run"

    def units_per_step(self, job: VectorsJob) -> int:
        """Return the samples of a step."""
        return job.train.batch

    def plan(
        self, loaded: LoadedJob[VectorsJob], world: World, decisions: list[Decision[Any, Any]]
    ) -> Plan:
        """Return data parallelism over all ranks."""
        del loaded, decisions
        return Plan(ranks=world.size, ep=1, dp_shard=1, experts=0)

    def open_data(self, job: VectorsJob, world: World, log: Callable[[str], None]) -> VectorData:
        """Return the data."""
        del job, world, log
        return VectorData()

    def assemble(self, start: RunStart[VectorsJob]) -> Run[SquaredError, VectorStats]:
        """Return the run."""
        job, parts = start.loaded.job, []
        plan, world, checkpoint = start.plan, start.world, start.checkpoint
        placements = [
            place_part(prefix, job.ranks.get(prefix, range(plan.ranks)))
            for prefix in job.parts.split()
        ]
        for placement in placements:
            own = placement.subset(world)
            if own is None:
                continue
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
            params = [
                LocalParam("block", name, one, None, tuple(one.shape), tuple(range(own.size)))
                for name, one in model.named_parameters()
            ]
            parts.append(make_part(model, placement, own, params, job))
        if job.snapshot != "none" and world.rank in placements[0].ranks:
            parts[0].external_snapshot = ExternalTable(world, job.snapshot == "fails")
        run = Run(
            job, world, placements, parts,
            SquaredError(world, placements, parts, job.overflow_step),
            MicroBatchWalk(job.train.precision, world.device), world.group,
            dict(checkpoint.counters) if checkpoint else {},
        )  # fmt: skip
        source: Source = InitialSource(job.seed, 0.5)
        if checkpoint is not None:
            source = parts_source(checkpoint, source, placements, run.counters, start.log)
        source.fill(run.state().shards)
        return run

    def details(self, run: Any) -> Iterator[str]:
        return iter(())

    def describe(self, run: Any) -> Iterator[str]:
        """Yield the parts."""
        yield f"{len(run.placements)} parts"

    def start_fields(self, run: Any) -> dict[str, Any]:
        """Return nothing."""
        return {}


def place_part(prefix: str, ranks: Sequence[int]) -> PartPlacement:
    """Return a part that splits its samples over `ranks`."""
    return PartPlacement(prefix, Plan(ranks=len(ranks), ep=1, dp_shard=1, experts=0), list(ranks))


def train_vectors(
    world: World, out: str, steps: int, resume: str | None = None, keys: Mapping[str, Any] = {}
) -> tuple[list[dict[str, float]], list[str]]:
    """Train on this rank; return figures and messages."""
    raw = {
        "train": {
            "steps": steps, "batch": 8, "micro_batches": 2, "precision": "fp64", "device": "cpu",
            "clip": 0.02, **keys.get("train", {}),
        },
        "optimizer": {"lr": 0.05}, "schedule": {"kind": "constant", "warmup": 1},
        **{key: value for key, value in keys.items() if key != "train"},
    }  # fmt: skip
    job, watch = parse(VectorsJob, raw, "vectors"), RecordingProgress()
    start = None if resume is None else Resume(resume)
    train(LoadedJob(job, "", []), Path(out), start, world, watch, VectorsKind())
    return watch.figures, watch.messages


def read_tensors(out: Path) -> dict[str, Any]:
    """Return every tensor of the newest checkpoint."""
    return read_checkpoint(resume_candidates(out / "checkpoints")[0])


def assert_close(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, values in found.items():
        np.testing.assert_allclose(values, expected[key], rtol=1e-9, atol=1e-12, err_msg=key)


DISJOINT = {"encoder.": [0, 1], "head.": [2]}
OVERLAPPING = {"encoder.": [1, 2], "head.": [0, 1]}
HEAD_ALONE = {"encoder.": [0, 1, 2], "head.": [2]}
REST_IDLE = {"encoder.": [1], "head.": [2]}
OF_FOUR = {"encoder.": [0, 2, 3], "head.": [1]}


@pytest.fixture(scope="module")
def whole(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with all parts on one rank."""
    out = tmp_path_factory.mktemp("whole") / "run"
    ranks.run(1, train_vectors, str(out), 6)
    return out


def assert_same_steps(found: Path, expected: Path) -> None:
    """Check that both runs made the same steps, updates and counts."""
    names = ("step", "loss", "grad_norm", "lr", "samples", "skipped")
    steps = [
        [[event[name] for name in names] for event in events_of(out, "step")]
        for out in (found, expected)
    ]
    np.testing.assert_allclose(*steps, rtol=1e-9)
    losses = [events_of(out, "validation")[-1]["loss"] for out in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert_close(read_tensors(found), read_tensors(expected))
    counters = [
        Checkpoint.open(resume_candidates(out / "checkpoints")[0]).counters
        for out in (found, expected)
    ]
    assert counters[0] == counters[1]


def events_of(out: Path, name: str) -> list[dict[str, Any]]:
    """Return the events of a name that rank 0 wrote."""
    events = read_events(out / "events" / "rank-0.jsonl")
    return [event for event in events if event["event"] == name]


@pytest.mark.parametrize("placed", [DISJOINT, OVERLAPPING, HEAD_ALONE, REST_IDLE, OF_FOUR])
def test_parts_on_some_ranks_equal_one_rank(
    ranks: RankPool, tmp_path: Path, whole: Path, placed: dict[str, list[int]]
) -> None:
    out = tmp_path / "run"
    size = 1 + max(rank for some in placed.values() for rank in some)
    (_, messages), *_ = ranks.run(size, train_vectors, str(out), 6, None, {"ranks": placed})
    assert_same_steps(out, whole)
    (start,) = events_of(out, "run_start")
    assert [(part["prefix"], part["ranks"]) for part in start["parts"]] == [*placed.items()]
    assert [part["plan"]["ranks"] for part in start["parts"]] == [*map(len, placed.values())]
    assert any('plan of part "encoder."' in message for message in messages)
    assert events_of(out, "run_end")[0]["peak_bytes"] > 0
    newest = resume_candidates(out / "checkpoints")[0]
    for key, record in Checkpoint.open(newest).tensors.items():
        holders = placed[key.split("/")[1].split(".")[0] + "."]
        assert {shard.file for shard in record.shards} <= {
            f"rank-{rank}.safetensors" for rank in holders
        }
    write_report(out, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "Samples per second" in text
    assert "; ".join(f"{key} on {','.join(map(str, placed[key]))}" for key in placed) in text


def test_a_resume_moves_parts_to_other_ranks(ranks: RankPool, tmp_path: Path, whole: Path) -> None:
    out = tmp_path / "run"
    ranks.run(3, train_vectors, str(out), 2, None, {"ranks": REST_IDLE})
    single = {"micro_batches": 8}  # One sample each, so ranks of a part have none.
    ranks.run(3, train_vectors, str(out), 3, "auto", {"ranks": OVERLAPPING, "train": single})
    ranks.run(2, train_vectors, str(out), 5, "auto", {"ranks": {"encoder.": [1], "head.": [0]}})
    ranks.run(1, train_vectors, str(out), 6, "auto")
    assert_same_steps(out, whole)


def test_an_overflow_skips_the_update_of_all_parts(ranks: RankPool, tmp_path: Path) -> None:
    one, three, keys = tmp_path / "one", tmp_path / "three", {"overflow_step": 1}
    keys |= {"train": {"precision": "fp16"}}
    ranks.run(1, train_vectors, str(one), 4, None, keys)
    ranks.run(3, train_vectors, str(three), 4, None, keys | {"ranks": DISJOINT})
    assert [event["skipped"] for event in events_of(three, "step")] == [0, 1, 0, 0]
    assert_same_steps(three, one)


def refuse_placements(world: World) -> None:
    with pytest.raises(ValueError, match=r"ranks = \[1, 0\].*ascending"):
        world.subset([1, 0], [])
    with pytest.raises(ValueError, match=r"ranks = \[3\].*0 to 2"):
        world.subset([3], [])
    with pytest.raises(ValueError, match=r"ranks = \[\]"):
        world.subset([], [])
    with pytest.raises(ValueError, match=r"ranks \[.*\] make another subset than rank"):
        world.subset([0, 1] if world.rank else [1, 2], [])
    own = world.subset([0, 2], [])
    assert (own is None) == (world.rank == 1)
    if own is not None:
        with pytest.raises(ValueError, match=r"no group \[0, 1\].*\"gradients\""):
            own.partition([[0, 1]], "gradients")
        assert own.subset([0, 1], []) is own
        with pytest.raises(ValueError, match="a subset has no subsets"):
            own.subset([0], [])
    with pytest.raises(ValueError, match=r'part "head." has 1 ranks, and ranks = \[0, 2\] are 2'):
        replace(place_part("head.", [0]), ranks=[0, 2])
    placement = place_part("head.", [0, 2])
    objective = SquaredError(world, [placement], [], -1)
    job = parse(VectorsJob, {"train": {"steps": 1, "batch": 8}}, "vectors")
    walk = MicroBatchWalk("fp64", world.device)
    if world.rank != 1:
        with pytest.raises(ValueError, match=r"rank \d holds the parts \[\], not \['head.'\]"):
            Run(job, world, [placement], [], objective, walk, world.group)
    else:
        run = Run(job, world, [placement], [], objective, walk, world.group)
        with pytest.raises(ValueError, match=r"rank 1 does not hold the part, ranks \[0, 2\] do"):
            _ = run.part
    for prefix in ("head.", "head.new."):
        placements = [placement, place_part(prefix, [0])]
        with pytest.raises(
            ValueError, match=r'the prefix "head\..*" of a part starts with that of'
        ):
            Run(job, world, placements, [], objective, walk, world.group)


def test_placements_that_do_not_fit_are_refused(ranks: RankPool) -> None:
    ranks.run(3, refuse_placements)


def test_parts_round_moments_by_random_bits_of_their_own() -> None:
    job = parse(
        VectorsJob, {"train": {"steps": 1, "batch": 8}, "optimizer": {"moments": "bf16"}}, "vectors"
    )
    moments = []
    for prefix in ("teacher.", "student."):
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        params = [LocalParam("block", "weight", model.weight, None, (WIDTH, WIDTH), (0,))]
        part = make_part(model, place_part(prefix, [0]), World.solo(), params, job)
        model.weight.grad = torch.linspace(0.1, 0.9, WIDTH * WIDTH).view(WIDTH, WIDTH)
        part.update(1, lr=0.1, clip=1.0, counters={"step": 0})
        moments.append(part.optimizer.moments["weight"][0])
    teacher, student = moments
    assert not torch.equal(teacher, student)
    torch.testing.assert_close(teacher, student, rtol=2**-7, atol=0.0)


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
    (validation,) = events_of(tmp_path / "run", "validation")
    assert (validation["samples"], validation["batches"]) == (40, 10)
    write_report(tmp_path / "run", tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "Samples per second" in text
    for line in text.splitlines():  # Plotly is one long line.
        assert len(line) > 100_000 or "token" not in line.lower()


def test_a_resume_adds_and_removes_parts(ranks: RankPool, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ranks.run(2, train_vectors, str(out), 2, None, {"parts": "encoder."})
    before = read_tensors(out)
    keys = {"ranks": {"head.": [1]}}
    (figures, messages), *_ = ranks.run(2, train_vectors, str(out), 4, "auto", keys)
    assert len(figures) == 2
    assert any('the checkpoint has no part "head."' in message for message in messages)
    newest = resume_candidates(out / "checkpoints")[0]
    assert Checkpoint.open(newest).counters["head.updates_before"] == 2
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
    InitialSource(3, 0.5).fill([whole_shard(name, initial)])
    decayed = initial * (1 - 0.05 * OptimizerConfig().weight_decay)
    assert (changed - decayed).abs().max() == pytest.approx(0.05, rel=1e-3)


def test_a_snapshot_is_durable_before_its_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, train_vectors, str(tmp_path / "run"), 3, None, {"snapshot": "works"})
    newest = resume_candidates(tmp_path / "run" / "checkpoints")[0]
    manifest = json.loads((newest / "manifest.json").read_text())
    expected = {str(rank): {"step": 3, "rank": rank} for rank in range(2)}
    assert manifest["snapshots"] == {"encoder.": expected}
    assert Checkpoint.open(newest).snapshots == manifest["snapshots"]
    keys = {"snapshot": "works", "ranks": {"encoder.": [1]}}
    ranks.run(2, train_vectors, str(tmp_path / "placed"), 3, None, keys)
    newest = resume_candidates(tmp_path / "placed" / "checkpoints")[0]
    assert Checkpoint.open(newest).snapshots == {"encoder.": {"1": {"step": 3, "rank": 1}}}


def fail_to_save(world: World, out: str) -> str:
    with pytest.raises(StoreError) as caught:
        train_vectors(world, out, 3, None, {"snapshot": "fails"})
    return str(caught.value)


def test_a_failed_snapshot_fails_its_save(ranks: RankPool, tmp_path: Path) -> None:
    messages = ranks.run(2, fail_to_save, str(tmp_path / "run"))
    assert all("the table server is gone" in message for message in messages)
    assert not resume_candidates(tmp_path / "run" / "checkpoints")
