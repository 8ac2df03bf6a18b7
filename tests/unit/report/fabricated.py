"""Fabricated run directories, as a training run would write them.

Values follow a seeded random walk around those of a small mixture-of-experts model. `Story` selects
the events of the run: a dead expert, a kill, a spike.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from moesaic.base.events import EventLog
from moesaic.base.records import RecordWriter
from moesaic.report import RunStats
from moesaic.report.loads import BALANCE_COLUMNS

START_S = 1_760_000_000.0
LOADS = pa.schema(
    [
        ("step", pa.int32()),
        ("layer", pa.int16()),
        ("counts", pa.list_(pa.int64())),
        ("dropped", pa.int64()),
    ]
)
BALANCE = pa.schema(BALANCE_COLUMNS)
TOKENS = 2048
PREDICTED = {
    "cluster": "<here>", "step_s": 0.1, "phases_s": {"forward": 0.04, "backward": 0.06},
    "blocks_s": {"step": 0.1}, "tokens_per_s": 20480.0, "used_bytes_by_kind": {"peak": 1 << 20},
}  # fmt: skip
TIMELINE = [
    {"rank": 1, "phases": [
        {"phase": "forward", "computing_s": 0.04, "collectives_s": 0.004},
        {"phase": "backward", "computing_s": 0.03},
        {"phase": "reduce", "waiting_s": 0.006, "collectives_s": 0.02},
    ]},
    {"rank": 0, "phases": [{"phase": "forward", "computing_s": 0.02}]},
]  # fmt: skip


@dataclass(frozen=True)
class Story:
    """Events and sizes of a fabricated run."""

    steps: int = 80
    layers: int = 3
    experts: int = 8
    top_k: int = 2
    ranks: int = 2
    dead: dict[int, int] = field(default_factory=dict)
    """Layer to the expert that dies half-way."""
    hot: dict[int, int] = field(default_factory=dict)
    """Layer to the expert that takes 3.2 times its share from half-way on."""
    killed_at: int | None = None
    resumed_at: int | None = None
    """The killed run goes on after this step; unset: it does not."""
    spike_at: int | None = None
    checkpoint_every: int = 20
    validate_every: int = 20
    loads_every: int = 1
    dropped: int = 0
    flips: int = 0
    finished: bool = True
    step_s: float = 0.21
    stall: float | None = None
    """Part of a step that waits for the drive, in a run with a memory budget."""
    balanced: bool = False
    """A balance policy runs, and its times are measured."""
    students: tuple[str, ...] = ()
    """Names of students, whose losses and distances from their teacher are logged."""
    job: dict[str, Any] = field(default_factory=dict)
    """Further tables of the job."""
    labels: dict[str, float] = field(default_factory=dict)
    """Metrics of labels at each validation; the steps have their loss alone."""
    balance: dict[str, float] = field(default_factory=dict)
    """Overrides of the balance record of each layer."""


class Fabric:
    """Writer of one run directory, launch by launch."""

    def __init__(self, directory: Path, story: Story) -> None:
        self.directory, self.story = directory, story
        self.random = np.random.default_rng(7)
        self.now_s = START_S
        directory.mkdir(parents=True)
        self._write_facts()

    def write(self) -> None:
        story = self.story
        self.part(0, story.killed_at or story.steps, None)
        if story.killed_at and story.resumed_at is not None:
            self.now_s += 95
            origin = f"checkpoints/step-{story.resumed_at:08d}"
            self.part(story.resumed_at, story.steps, origin)
        complete = story.killed_at is None or story.resumed_at is not None
        if complete and story.finished:
            self.emit("run_end", step=story.steps, seconds=self.now_s - START_S, reason="finished")

    def emit(self, event: str, rank: int = 0, **fields: Any) -> None:
        log = EventLog(self.directory / "events" / f"rank-{rank}.jsonl")
        log.emit(event, **{"time": self.now_s, **fields})
        log.close()

    def part(self, done: int, last: int, origin: str | None) -> None:
        """Steps `done + 1` to `last`; the logs stay open, which matters for long runs."""
        story, ranks = self.story, range(self.story.ranks)
        logs = [EventLog(self.directory / "events" / f"rank-{rank}.jsonl") for rank in ranks]
        loads = RecordWriter(self.directory / "loads", LOADS) if story.experts else None
        logs[0].emit(
            "run_start", time=self.now_s, step=done + 1, resumed_from=origin, ranks=story.ranks,
            device="cpu", parameters_total=13_640_832, parameters_active=5_120_256,
            plan=self.plan(), tokens_per_step=TOKENS,
            students=[
                {"name": name, "teacher": "model", "parameters_total": 1000 * number}
                for number, name in enumerate(story.students, 1)
            ],
        )  # fmt: skip
        balance = RecordWriter(self.directory / "balance", BALANCE) if story.balanced else None
        self.now_s += 4
        for step in range(done + 1, last + 1):
            self._step(logs, step)
            if loads is not None and step % story.loads_every == 0:
                loads.add(self._loads(step))
            if balance is not None and step % story.loads_every == 0:
                balance.add(self._balance(step))
        if loads is not None:
            loads.flush()
        if balance is not None:
            balance.flush()
        for log in logs:
            log.close()

    def plan(self) -> dict[str, int]:
        story = self.story
        ep = story.ranks if story.experts else 1
        return {"ranks": story.ranks, "ep": ep, "dp_shard": story.ranks, "experts": story.experts}

    def _step(self, logs: list[EventLog], step: int) -> None:
        story, random = self.story, self.random
        all_phases = [self._phases(step, rank) for rank in range(story.ranks)]
        step_s = max(sum(phases.values()) for phases in all_phases)
        self.now_s += step_s
        loss = 1.35 + 4.2 * float(np.exp(-step / (0.16 * story.steps + 1))) + 0.07 * random.normal()
        norm = 0.7 + 2.4 * float(np.exp(-step / (0.06 * story.steps + 1))) + 0.12 * random.random()
        if step == story.spike_at:
            loss, norm = loss + 2.6, 14.2
        memory = int(412e6 + 6e6 * random.random())
        logs[0].emit(
            "step", time=self.now_s, step=step, loss=loss, grad_norm=norm,
            lr=3e-3 / step, tokens=TOKENS - 32, step_s=step_s,
            tokens_per_s=(TOKENS - 32) / step_s, dropped=story.dropped,
            num_replay_mismatches=story.flips, memory_bytes=memory, phases=all_phases[0],
            **({"replicas": story.balance.get("replicas", 2) * story.layers,
                "imbalance_before": 1.9, "imbalance_after": 1.1,
                "planning_s": 1e-3} if story.balanced else {}),
            **({"memory_hit_rate": 0.4, "memory_stall_s": story.stall * step_s,
                "memory_read_bytes": 3 << 30, "memory_written_bytes": 1 << 30,
                "memory_read_s": 0.7 * step_s, "memory_write_s": 0.2 * step_s}
               if story.stall is not None else {}),
            **self._student_figures(step, loss),
            **({"credibility_loss": 0.6} if story.labels else {}),
        )  # fmt: skip
        for rank, phases in enumerate(all_phases):
            held = memory + 37_000_000 * rank
            peak = held + int(118e6 + 9e6 * random.random())
            logs[rank].emit(
                "rank_step", time=self.now_s, step=step, phases=phases, memory_bytes=held,
                peak_bytes=peak,
            )  # fmt: skip
        self._milestones(logs[0], step, loss)

    def _milestones(self, log: EventLog, step: int, loss: float) -> None:
        story = self.story
        if step % story.validate_every == 0:
            self.now_s += 0.9
            log.emit(
                "validation", time=self.now_s, step=step, loss=loss + 0.11, tokens=16_384,
                seconds=0.9, **{f"{name}/loss": loss + 0.3 for name in story.students},
                **story.labels,
            )  # fmt: skip
        if step % story.checkpoint_every == 0:
            path = f"checkpoints/step-{step:08d}"
            log.emit("checkpoint", time=self.now_s, step=step, path=path, blocking_s=0.021)
            log.emit(
                "checkpoint_done", time=self.now_s + 0.8, step=step, path=path,
                bytes=163_900_000, seconds=0.8,
            )  # fmt: skip

    def _student_figures(self, step: int, loss: float) -> dict[str, float]:
        """Return figures of students; every third step has the loss on text alone."""
        found = dict[str, float]()
        for index, name in enumerate(self.story.students, 1):
            found |= {f"{name}/loss": loss + 0.2 * index, f"{name}/grad_norm": 1.0}
            if step % 3:
                found |= {f"{name}/attention": 0.1 * index, f"{name}/logits": index / step}
        return found

    def _phases(self, step: int, rank: int) -> dict[str, float]:
        noise = 1 + 0.05 * self.random.normal(size=7)
        share = np.array([0.03, 0.31, 0.47, 0.08, 0.02, 0.07, 0.02]) * noise
        share[1:3] *= 1 + 0.06 * rank
        names = ("data", "forward", "backward", "reduce", "clip", "optimizer", "log")
        return dict(zip(names, (self.story.step_s * share).tolist(), strict=True))

    def _loads(self, step: int) -> list[dict[str, Any]]:
        story, rows = self.story, []
        along = min(1.0, 2 * step / story.steps)
        for layer in range(story.layers):
            share = np.exp(0.07 * self.random.normal(size=story.experts))
            if layer in story.hot:
                share[story.hot[layer]] *= 1 + 3.2 * along**2
            if layer in story.dead:
                share[story.dead[layer]] *= (1 - along) ** 2
            counts = np.round(share / share.sum() * TOKENS * story.top_k).astype(int)
            rows.append(
                {"step": step, "layer": layer, "counts": counts.tolist(), "dropped": story.dropped}
            )
        return rows

    def _balance(self, step: int) -> list[dict[str, Any]]:
        """Return values that are functions of step and layer, so tests can predict them."""
        return [
            {
                "step": step, "layer": layer,
                "imbalance_before": 1.5 + 0.1 * layer + 0.02 * step,
                "imbalance_after": 1.1, "replicas": 2, "replica_bytes": 3 << 20,
                "planning_s": 1e-3 / 3, "replica_wait_s": 1e-4 * step,
                "gradient_wait_s": 2e-4 * step, "forward_s": 4e-3, "backward_s": 9e-3,
                "predicted_experts_s": 1e-2, "predicted_exposed_s": 1e-3, "predicted_s": 2e-2,
                "predicted_unbalanced_s": 3e-2,
                **self.story.balance,
            }
            for layer in range(self.story.layers)
        ]  # fmt: skip

    def _write_facts(self) -> None:
        story = self.story
        model: dict[str, Any] = {
            "family": "olmoe" if story.experts else "llama", "vocab": 320, "hidden": 128,
            "layers": story.layers, "heads": 4, "experts": story.experts,
            "top_k": story.top_k if story.experts else 0,
        }  # fmt: skip
        job = {
            "model": model, "routing": {"balance_loss": 0.01}, "data": {"path": "text/*.txt"},
            "train": {"steps": story.steps, "clip": 1.0}, "optimizer": {"lr": 3e-3},
            **story.job,
        }  # fmt: skip
        versions = {"moesaic": "0.1.0", "command": "moesaic train job.toml --nproc 2"}
        for name, value in (("job", job), ("plan", self.plan()), ("versions", versions)):
            (self.directory / f"{name}.json").write_text(json.dumps(value))


def fabricate(directory: Path, **story: Any) -> Path:
    """Write the run of `Story(**story)` to `directory`."""
    Fabric(directory, Story(**story)).write()
    return directory


def predict(directory: Path, predicted: Any = PREDICTED) -> RunStats:
    """Return the run at `directory` with this prediction in its plan."""
    path = directory / "plan.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "predictions": predicted}))
    return RunStats.read(directory)
