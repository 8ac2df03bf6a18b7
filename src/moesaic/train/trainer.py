"""The training engine: from a job and a world to a finished run directory.

It opens data, finds what to start from (a checkpoint, Hugging Face weights, initial values),
assembles the run and takes steps; it records what happened, validates, saves, and ends with a
checkpoint. Nothing is written to the run's directory before everything has been checked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from moesaic.base import keys
from moesaic.base.errors import ConfigError, DivergedError, StoreError
from moesaic.dist import device as devices
from moesaic.dist.checkpoint import Checkpoint, Saver, candidates, go_back_to
from moesaic.dist.products import check
from moesaic.dist.state import PARAMETER, Piece, Source
from moesaic.dist.world import World
from moesaic.facts.job import Job, Prices
from moesaic.facts.plan import Plan, in_words, planned
from moesaic.facts.workload import count
from moesaic.facts.workload.finetune import A, B, describe
from moesaic.models.hf.reader import HFSource
from moesaic.models.initial import InitialSource
from moesaic.nn.context import NARROW
from moesaic.train import scale
from moesaic.train.assemble import DTYPES, assemble
from moesaic.train.data import TextData
from moesaic.train.directory import alone, write_opening
from moesaic.train.expectation import Expectation, most_bytes
from moesaic.train.jobfile import LoadedJob
from moesaic.train.machines import check_machines, described, settled
from moesaic.train.record import RunRecord
from moesaic.train.rehoming import Moved
from moesaic.train.routes import RouteReplay, recording
from moesaic.train.run import Run


class Progress(Protocol):
    """What a person watches while a run goes on; only rank 0's is shown."""

    def message(self, text: str) -> None:
        """Say something."""

    def start(self, total: int, done: int) -> None:
        """Training begins with `done` of `total` steps behind it."""

    def step(self, figures: Mapping[str, float]) -> None:
        """One more step is done."""

    def done(self) -> None:
        """Training is over."""


class PretrainedSource:
    """Parameters from a Hugging Face directory; moments and adapters as they are initially."""

    def __init__(self, weights: Source, initial: Source) -> None:
        self._weights, self._initial = weights, initial

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Fill all kinds."""
        given: list[Piece] = []
        new: list[Piece] = []
        for piece in pieces:
            made = piece.kind != PARAMETER or piece.name.endswith((A, B))
            (new if made else given).append(piece)
        self._initial.fill(new)
        self._weights.fill(given)


def train(
    loaded: LoadedJob, out: Path, resume: str | None, world: World, progress: Progress
) -> dict[str, Any]:
    """Train `loaded.job` into `out`; returns the run's last figures.

    Args:
        loaded: the job, its text, and the plan that rules it, if any.
        out: the run's directory.
        resume: a checkpoint's path, "auto" for the newest one under `out`, None to start afresh.
        world: the ranks.
        progress: who watches.
    """
    with alone(out, world, fresh=resume is None):
        return _train(loaded, out, resume, world, progress)


def _train(
    loaded: LoadedJob, out: Path, resume: str | None, world: World, progress: Progress
) -> dict[str, Any]:
    job = loaded.job
    plan = loaded.plan or settled(planned(job, world.size), job, world)
    check_machines(plan, world, loaded.plan_origin)
    if loaded.plan is not None and job.model.experts:
        check(plan.grouped_mm, world.device, key=f"{loaded.plan_origin}: grouped_mm")
    data = TextData.open(job.data, job.seed, world, progress.message)
    data.check_vocab(job.model.vocab)
    replay = None
    if job.routing.replay:
        replay = RouteReplay(Path(job.routing.replay), job, data.digest)
    source, counters, origin = _find_start(loaded, out, resume, world, progress, data.digest)
    homes = loaded.plan is None or job.balance.rehome_every > 0
    plan = _as_left(plan, source, homes=homes)
    first = (counters or {}).get("step", 0)
    if replay is not None:
        replay.check_steps(first)
    run = assemble(job, plan, world, source, counters, progress.message)
    plan, run.replay = run.plan, replay
    if origin is not None:
        _go_back(Path(origin), out, world, progress)
    with ExitStack() as stack:
        if job.routing.record:
            place = Path(job.routing.record)
            run.recorder = stack.enter_context(recording(place, world, data.digest, first))
        write_opening(out, loaded.text, job, plan, world, data.tokenizer)
        session = _Session(run, data, RunRecord(out, job, world), progress, world)
        stack.enter_context(session)
        if world.size > 1:
            progress.message(f"plan: {in_words(plan)}")
        return session.go(origin)


def _find_start(
    loaded: LoadedJob, out: Path, resume: str | None, world: World, progress: Progress, digest: str
) -> tuple[Source, dict[str, int] | None, str | None]:
    """The source of state, the position in the run, and the checkpoint it comes from."""
    job = loaded.job
    if resume is None:
        initial = InitialSource(job.seed, job.model.init_std)
        if job.source is None:
            return initial, None, None
        return PretrainedSource(HFSource(Path(job.source), job.model), initial), None, None
    path = Path(resume)
    if resume == "auto":
        path = Path(world.led(lambda: str(_newest(out / "checkpoints"))))
    progress.message(f"resuming from {path}")
    checkpoint = Checkpoint.open(path)
    checkpoint.verify_shared(world)
    if checkpoint.step >= job.train.steps:
        raise ConfigError(
            f"train.steps = {job.train.steps}, but '{path}' has done {checkpoint.step} already: "
            "raise train.steps (--set train.steps=N)"
        )
    _compare(checkpoint.facts, job, digest, path, progress)
    return checkpoint, dict(checkpoint.counters), str(path)


def _as_left(plan: Plan, source: Source, *, homes: bool) -> Plan:
    """`plan`, with what a checkpoint of the same layout goes by, so that the run goes on as if it
    had never stopped: what anything costs, if nobody says so now, and where experts live, if that
    changes, or no plan was given."""
    if not isinstance(source, Checkpoint):
        return plan
    kept = {"homes_of_layers": {}, **source.facts["plan"]}
    now, prices = plan.decisions(), kept.pop("prices", None)
    kept.pop("grouped_mm", None)
    del now["prices"], now["grouped_mm"]
    if homes:
        now |= {key: kept[key] for key in ("homes", "homes_of_layers")}
    if kept != now:
        return plan
    changes: dict[str, Any] = {
        "homes_by_rank": kept["homes"], "homes_of_layers": kept["homes_of_layers"],
    }  # fmt: skip
    if plan.prices is None and prices:
        changes["prices"] = Prices(**prices)
    return plan.model_copy(update=changes)


def _go_back(origin: Path, out: Path, world: World, progress: Progress) -> None:
    """Leave the checkpoints behind that are newer than the one that the run goes on from."""

    def point() -> str:
        directory = out / "checkpoints"
        if origin.resolve().parent != directory.resolve():
            return ""
        names = [path.name for path in candidates(directory)]
        newer = names[: names.index(origin.name)]
        if newer:
            go_back_to(origin)
        return ", ".join(newer)

    left = world.led(point)
    if left:
        progress.message(
            f"going back to {origin.name}: --resume goes on from here now, no more from {left}"
        )


def _newest(directory: Path) -> Path:
    found = candidates(directory)
    if not found:
        raise StoreError(
            f"--resume: '{directory}' holds no whole checkpoint to go on from; start afresh "
            "without --resume, in another --out"
        )
    return found[0]


def _compare(
    facts: Mapping[str, Any], job: Job, digest: str, path: Path, progress: Progress
) -> None:
    """Refuse to go on over other samples; say what else the job has changed since."""
    if facts.get("data") != digest:
        raise ConfigError(
            f"--resume: '{path}' was trained on other samples (text, tokenizer, seed, sequence or "
            "packing have changed): restore them, or start a new run from its weights "
            "(moesaic convert, then [model] from)"
        )
    before, now = dict(_flatten(facts["job"])), dict(_flatten(job.model_dump(mode="json")))
    kept, wanted = before.get("optimizer.moments", "full"), now["optimizer.moments"]
    if kept != wanted:
        raise ConfigError(
            f"--resume: '{path}' has moments of optimizer.moments = {_shown(kept)}, the job has "
            f"{_shown(wanted)}: restore it, or start a new run from its weights (moesaic convert, "
            "then [model] from)"
        )
    kept, wanted = before.get("train.precision", "fp32"), now["train.precision"]
    if DTYPES[kept] != DTYPES[wanted]:
        bits = {key: 8 * DTYPES[key].itemsize for key in (kept, wanted)}
        raise ConfigError(
            f"--resume: '{path}' has weights of train.precision = {_shown(kept)}, which are kept "
            f"in {bits[kept]} bits, the job has {_shown(wanted)}, of {bits[wanted]}: restore it, "
            "or start a new run from its weights (moesaic convert, then [model] from)"
        )
    for key in (key for key in (*now, *before) if key.startswith("finetune")):
        if before.get(key) != now.get(key):
            was, has = (_shown(one.get(key)) for one in (before, now))
            raise ConfigError(
                f"--resume: '{path}' was trained with {key} = {was}, the job has {has}: restore "
                "it, or start a new run from its weights (moesaic convert, then [model] from)"
            )
    for key in _changed(before, now):
        old, new = (_shown(one.get(key)) for one in (before, now))
        named = key.removeprefix("model.")
        if named not in (key, "init_std", "max_positions") and not named.startswith("extras."):
            raise ConfigError(
                f"--resume: '{path}' is of a model with {key} = {old}, the job has {new}: "
                "restore it, or start a new run"
            )
        progress.message(f"changed since the checkpoint: {key} = {new}, was {old}")


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Keys whose values differ, those of a table that only one of the two has among them.

    A key that an older version did not know is not one.
    """
    for key in sorted({*before, *now}):
        table = key.rpartition(".")[0]
        known = (key in before and key in now) or table in before or table in now
        if known and before.get(key) != now.get(key):
            yield key


def _shown(value: object) -> str:
    return "unset" if value is None else keys.show(value)


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class _Session:
    """One process's part in one call of `train`."""

    def __init__(
        self, run: Run, data: TextData, record: RunRecord, progress: Progress, world: World
    ) -> None:
        self.run, self.data, self.record = run, data, record
        self.progress, self.world, self.job = progress, world, run.job
        self.saver = Saver(
            record.out / "checkpoints", world, self.job.checkpoint.keep,
            asynchronous=self.job.checkpoint.asynchronous, on_event=record.event,
        )  # fmt: skip
        run.hook = self._enter
        self.expectation = Expectation(run.plan, run.job, world)
        self.figures: dict[str, Any] = {}

    def go(self, origin: str | None) -> dict[str, Any]:
        """Steps until the job is done."""
        train, began = self.job.train, time.perf_counter()
        done = self.run.counters["step"]
        self._announce(origin)
        for line in (self.run.engines(), self.run.balance()):
            if line is not None:
                self.progress.message(line)
        for line in describe(self.job) if self.job.finetune is not None else ():
            self.progress.message(line)
        if train.precision in NARROW and self.world.device.type == "cpu":
            self.progress.message(
                f'train.precision = "{train.precision}" on a CPU: few are quick at it, "fp32" may '
                "be far faster"
            )
        named = self.job.kernels.grouped_mm != "auto" and self.job.model.experts > 0
        if named and self.world.device.type == "cpu":
            self.progress.message("kernels.grouped_mm has no effect on a CPU")
        self.saver.prepare(self.run.state())
        self.progress.start(train.steps, done)
        rates: list[float] = []
        for step in range(done + 1, train.steps + 1):
            self._step()
            rates.append(self.figures["tokens_per_s"])
            if train.validate_every and step % train.validate_every == 0 and step < train.steps:
                self._validate()
            every = self.job.checkpoint.every
            if every and step % every == 0 and step < train.steps:
                self._save()
        self._validate()
        self._save()
        self.saver.wait()
        peak_bytes = most_bytes(self.world)
        compared = self.expectation.compare(peak_bytes)
        if compared is not None:
            self.record.event("prediction", step=self.run.counters["step"], **compared)
        self.world.barrier()  # the rank that serves the store must not leave before the others
        self.progress.done()
        seconds = time.perf_counter() - began
        self.record.event(
            "run_end", step=self.run.counters["step"], seconds=seconds, reason="finished",
            peak_bytes=peak_bytes,
        )  # fmt: skip
        rates.sort()
        return {
            **self.figures, "seconds": seconds, "step": self.run.counters["step"],
            "tokens_per_s_median": rates[len(rates) // 2] if rates else 0.0,
            "checkpoint": str(self.saver.newest), "out": str(self.record.out),
        }  # fmt: skip

    def __enter__(self) -> None:
        """Nothing: all is open."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let go of everything; a save that is under way is abandoned if training failed.

        What closing then meets (a full disk, still full) does not take the place of the failure.
        """
        try:
            with ExitStack() as stack:
                stack.callback(self.run.close)
                stack.callback(self.record.close)
                if self.run.recorder is not None:
                    stack.callback(self.run.recorder.flush)
                stack.callback(self.saver.abandon)
        except (OSError, StoreError):
            if kind is None:
                raise

    def _announce(self, origin: str | None) -> None:
        counts, train = count(self.job.model), self.job.train
        self.record.event(
            "run_start", step=self.run.counters["step"] + 1, resumed_from=origin,
            ranks=self.world.size, device=devices.describe(self.world.device),
            parameters_total=counts.total, parameters_active=counts.active,
            plan=self.run.plan.decisions(), tokens_per_step=train.batch * self.job.data.sequence,
            machines=described(self.world), engines=self.run.engines(),
        )  # fmt: skip

    def _step(self) -> None:
        began = time.perf_counter()
        try:
            facts = self.run.step(self.data.train)
        except DivergedError as error:
            joint = "; else" if scale.EXPONENT in self.run.counters else ":"
            raise DivergedError(f"{error}{joint} {self._advise()}") from None
        step_s = time.perf_counter() - began
        self.expectation.add(step_s, facts.phases)
        self.figures = {**self.figures, **self.record.step(facts, step_s)}
        self.figures["step"] = facts.step
        self.progress.step(self.figures)
        if facts.moved:
            self.progress.message(f"step {facts.step}: {_in_words(facts.moved)}")

    def _advise(self) -> str:
        """What helps against divergence."""
        saved = candidates(self.record.out / "checkpoints")
        back = "go on from the newest checkpoint with --resume" if saved else "start again"
        return f"lower optimizer.lr or lengthen schedule.warmup, and {back}"

    def _enter(self, phase: str) -> None:
        """The copy of a save goes on beside forward and backward; the update waits for its end."""
        if phase == "optimizer":
            self.saver.settle()

    def _validate(self) -> None:
        if self.data.validation is None:
            return
        began = time.perf_counter()
        limit = self.job.train.validation_samples
        loss, tokens = self.run.validate(self.data.validation, limit)
        self.record.validation(self.run.counters["step"], loss, tokens, time.perf_counter() - began)
        self.figures["validation_loss"] = loss
        self.progress.message(f"step {self.run.counters['step']}: validation loss {loss:.4f}")

    def _save(self) -> None:
        self.record.flush()
        if self.run.recorder is not None:
            self.run.recorder.flush()
        facts = {
            "job": self.job.model_dump(mode="json"), "plan": self.run.plan.decisions(),
            "data": self.data.digest,
        }  # fmt: skip
        self.saver.save(self.run.state(), self.run.counters["step"], facts, overlap=True)


def _in_words(moved: Sequence[Moved]) -> str:
    """What has moved, for a person."""
    number = sum(len(one.to.moves) for one in moved)
    experts = f"{number} experts of {len(moved)} layer{'s'[: len(moved) > 1]} have moved"
    size = f"{sum(one.num_bytes for one in moved) / 1e6:,.3g} MB"
    worst = max(moved, key=lambda one: one.to.before)
    return (
        f"{experts} for good, {size}; in layer {worst.layer} the busiest rank had "
        f"{worst.to.before:.2f} times the mean, and would have had {worst.to.after:.2f}"
    )


def deadline(job: Job) -> timedelta:
    """How long a rank of `job` waits for its peers."""
    return timedelta(seconds=job.train.deadline_s)
