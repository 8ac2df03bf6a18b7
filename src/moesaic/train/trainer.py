"""Trainer: from a job of any kind and a world to a finished run directory.

It finds the starting point (a checkpoint or the kind's initial values), takes steps, records
events, validates, saves, and ends with a checkpoint. The kind of the job reads the data, chooses
the layout and assembles the run. Everything is checked before anything is written to the run's
directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import torch

from moesaic.base.config import Section
from moesaic.base.decisions import Decision
from moesaic.base.errors import DivergedError, StoreError
from moesaic.dist.checkpoint import Checkpoint, Saver
from moesaic.dist.collectives import all_gather
from moesaic.dist.probe.reference import RunReference
from moesaic.dist.world import World
from moesaic.facts.plan import Plan, describe_plan
from moesaic.kernels import device as devices
from moesaic.nn.inputs import LOW_PRECISION
from moesaic.train.good_checkpoint import GoodCheckpoint
from moesaic.train.job_file import LoadedJob
from moesaic.train.kinds import AnyJob
from moesaic.train.record import RunRecord
from moesaic.train.resume_checks import (
    check_same_run,
    is_same_data,
    open_checkpoint,
    set_resume_point,
)
from moesaic.train.resumed_job import START
from moesaic.train.run import Run
from moesaic.train.run_directory import lock_run_directory, write_run_metadata
from moesaic.train.stop_request import ENDED_BY_SIGTERM, StopRequest
from moesaic.train.topology import describe_ranks

J = TypeVar("J", bound=AnyJob)
StepCallback = Callable[[dict[str, float]], object]
"""Function of a step's figures; a false value other than None ends the run after that step."""


class Resume(NamedTuple):
    """Checkpoint that a run goes on from."""

    path: str
    """Path of the checkpoint, or "auto" for the newest one of the run."""
    may_change_data: bool = False
    """True if the run may go on with other data."""


class Progress(Protocol):
    """Progress display of a run; only rank 0's is shown."""

    def message(self, text: str) -> None:
        """Show a message."""

    def detail(self, text: str) -> None:
        """Show a message to a user who wants every one."""

    def start(self, total: int, done: int) -> None:
        """Begin a display of `total` steps, `done` of which are behind it."""

    def step(self, figures: Mapping[str, float]) -> None:
        """Show one more step."""

    def done(self) -> None:
        """End the display."""


class Data(Protocol):
    """Data of a run."""

    @property
    def train(self) -> Any:
        """Samples to train on; their type is the kind's own."""

    @property
    def validation(self) -> Any:
        """Samples to validate on, or None."""

    @property
    def digest(self) -> str:
        """Digest of everything that fixes the samples: a run resumes on the same ones, or on
        those and more if the digest has more words."""

    def files(self) -> dict[str, bytes]:
        """Return files for the run's directory, by relative path, such as those of a tokenizer."""


@dataclass(frozen=True)
class RunStart(Generic[J]):
    """Facts and state that a kind assembles a run from."""

    loaded: LoadedJob[J]
    """The job."""
    plan: Plan
    """Layout of the ranks."""
    world: World
    """The ranks."""
    out: Path
    """Directory of the run."""
    checkpoint: Checkpoint | None
    """State to start from; None: initial values."""
    data: Any
    """Data that the kind has opened."""
    log: Callable[[str], None]
    """Function that shows a message before slow work."""
    decisions: list[Decision[Any, Any]]
    """List that receives what policies decide."""


class JobKind(Protocol[J]):
    """One kind of job."""

    unit: str
    """Plural noun of the unit of progress, such as "tokens": figures have `tokens_per_s`."""
    restarts_data: bool
    """True if a resumed run may go on with other data, from their first sample."""
    data_change: str
    """Clause for a resume on other samples though no key has changed: "the files ... have
    changed"."""
    new_run: str
    """Remedy for a resume that cannot go on: "start a new run ..."."""

    def units_per_step(self, job: J) -> int:
        """Return the units in one step."""

    def plan(self, loaded: LoadedJob[J], world: World, decisions: list[Decision[Any, Any]]) -> Plan:
        """Return the layout over `world`, and add what policies decided to `decisions`; raise if
        the ranks do not match the plan of the job."""

    def open_data(self, job: J, world: World, log: Callable[[str], None]) -> Data:
        """Open the data; raise if they do not fit the job."""

    def assemble(self, start: RunStart[J]) -> Run[Any, Any]:
        """Return a run that is ready to step."""

    def describe(self, run: Any) -> Iterator[str]:
        """Yield what the user should know before the first step."""

    def details(self, run: Any) -> Iterator[str]:
        """Yield what only a user who wants every message should see before the first step."""

    def start_fields(self, run: Any) -> dict[str, Any]:
        """Return the kind's own fields of the event `run_start`."""


def train(
    loaded: LoadedJob[J],
    out: Path,
    resume: Resume | None,
    world: World,
    progress: Progress,
    kind: JobKind[J],
    on_step: StepCallback | None = None,
    stop: StopRequest | None = None,
) -> dict[str, Any]:
    """Train `loaded.job` into `out` and return the run's last figures.

    Their `reason` says why the run ended.

    Args:
        loaded: the job, its text, and the plan that rules it, if any.
        out: the run's directory.
        resume: checkpoint to go on from; None for a new run.
        world: the ranks.
        progress: display of progress.
        kind: kind of the job.
        on_step: callback of rank 0 after each step, given on every rank; None: none.
        stop: request of this rank to end the run after a step, with a checkpoint; None: none.
    """
    with lock_run_directory(out, world, fresh=resume is None) as kept_try:
        if kept_try:
            progress.message(kept_try)
        return _train(loaded, out, resume, world, progress, kind, on_step, stop or StopRequest())


def _train(
    loaded: LoadedJob[J],
    out: Path,
    resume: Resume | None,
    world: World,
    progress: Progress,
    kind: JobKind[J],
    on_step: StepCallback | None,
    stop: StopRequest,
) -> dict[str, Any]:
    decisions = [*loaded.decisions]
    job, plan = loaded.job, kind.plan(loaded, world, decisions)
    data = kind.open_data(job, world, progress.message)
    checkpoint, has_new_data = None, False
    if resume is not None:
        checkpoint = open_checkpoint(job, out, resume.path, world, progress.message)
        takes_data = resume.may_change_data and kind.restarts_data
        changes = check_same_run(checkpoint, job, data, kind, world.size, takes_data=takes_data)
        has_new_data = not is_same_data(checkpoint, data)
        for change in changes:
            progress.message(change)
    run = kind.assemble(
        RunStart(loaded, plan, world, out, checkpoint, data, progress.message, decisions)
    )
    try:
        if checkpoint is not None:
            set_resume_point(checkpoint.path, out, world, progress.message)
        if has_new_data:
            run.counters["samples"] = 0
        start = write_run_metadata(out, loaded, run.plan, world, data.files())
        record = RunRecord(out, job, world)
        run.stop = stop
    except BaseException:
        run.close()
        raise
    with _Session(run, data, record, progress, world, start, kind) as session:
        for line in _describe_placements(run):
            progress.message(line)
        origin = None if checkpoint is None else str(checkpoint.path)
        return session.train(origin, decisions, on_step)


def _describe_placements(run: Run[Any, Any]) -> Iterator[str]:
    """Yield the layout of each part for the user, with its ranks unless it has all; the first line
    has the device."""
    device = f"; {devices.describe(run.world.device)}"
    for part in run.placements:
        has_all = len(part.ranks) == run.world.size
        whose = f" of {part.label}" if len(run.placements) > 1 or not has_all else ""
        where = "" if has_all else f" on ranks {', '.join(map(str, part.ranks))}"
        plan = run.plan if part is run.placements[0] else part.plan
        yield f"plan{whose}{where}: {describe_plan(plan)}{device}"
        device = ""


class _Session(Generic[J]):
    """Training of one process in one call of `train`."""

    def __init__(
        self,
        run: Run[Any, Any],
        data: Data,
        record: RunRecord,
        progress: Progress,
        world: World,
        start: Mapping[str, Any],
        kind: JobKind[J],
    ) -> None:
        self.run, self.data, self.record = run, data, record
        self.progress, self.world, self.start, self.kind = progress, world, start, kind
        self.job = cast(J, run.job)
        self.good = GoodCheckpoint()
        self.saver = Saver(
            self._checkpoints, world, self.job.checkpoint.keep,
            asynchronous=self.job.checkpoint.asynchronous, on_event=self._on_save,
            spared=self.good.find,
        )  # fmt: skip
        run.phase_hook = self._on_phase
        self.reference = RunReference(world.device, run.plan.predictions)
        self.figures: dict[str, Any] = {}
        self.validation_figures: dict[str, float] = {}
        """Figures of the last validation pass, which later steps repeat."""

    def train(
        self,
        origin: str | None,
        decisions: list[Decision[Any, Any]],
        on_step: StepCallback | None,
    ) -> dict[str, Any]:
        """Take steps until the job is done or `on_step` ends it; return the last figures."""
        train, began = self.job.train, time.perf_counter()
        first_done = self.run.counters["step"]
        if origin is not None and self.world.is_rank_zero:
            self.good.resume(self.record.out, Path(origin), first_done)
        self._write_run_start(origin, decisions)
        for line in self.kind.describe(self.run):
            self.progress.message(line)
        for line in self.kind.details(self.run):
            self.progress.detail(line)
        if train.precision in LOW_PRECISION and self.world.device.type == "cpu":
            self.progress.message(
                f'train.precision = "{train.precision}" on a CPU: few CPUs are fast at it, '
                'try "fp32"'
            )
        self.saver.prepare(self.run.state())
        self.progress.start(train.steps, first_done)
        rates = list[float]()
        with self.run.stop.heard():
            reason = self._take_steps(first_done, rates, on_step)
            if reason != ENDED_BY_SIGTERM:
                self._validate()
            self._save()
            self.saver.wait()
        peak_bytes = _max_peak_bytes(self.world)
        self.world.barrier()  # The rank that serves the store must not leave before the others.
        self.progress.done()
        seconds = time.perf_counter() - began
        self.record.write_event(
            "run_end", step=self.run.counters["step"], seconds=seconds, reason=reason,
            peak_bytes=peak_bytes,
        )  # fmt: skip
        rates.sort()
        return {
            **self.figures, "seconds": seconds, "step": self.run.counters["step"],
            f"{self.kind.unit}_per_s_median": rates[len(rates) // 2] if rates else 0.0,
            "checkpoint": str(self.saver.newest), "out": str(self.record.out),
            "reason": reason,
        }  # fmt: skip

    def _take_steps(self, first_done: int, rates: list[float], on_step: StepCallback | None) -> str:
        """Take steps, and add their speeds to `rates`; return the reason of the end."""
        train, save_every = self.job.train, self.job.checkpoint.every
        for step in range(first_done + 1, train.steps + 1):
            self._step()
            rates.append(self.figures[f"{self.kind.unit}_per_s"])
            is_stopped = on_step is not None and self._is_stopped_by(on_step)
            if step == train.steps:
                break
            if is_stopped:
                self.progress.message(f"stopped early at step {step} of {train.steps}")
                return "stopped early"
            if self.run.is_stopping:
                self.progress.message(
                    f"{ENDED_BY_SIGTERM} after step {step} of {train.steps}: saving a checkpoint"
                )
                return ENDED_BY_SIGTERM
            if train.validate_every and step % train.validate_every == 0:
                self._validate()
            if save_every and step % save_every == 0:
                self._save()
        return "finished"

    def __enter__(self) -> _Session[J]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close everything; abandon a save in progress if training failed.

        An error in closing, such as a disk that is still full, does not replace the error that
        ended training.
        """
        try:
            with ExitStack() as stack:
                stack.callback(self.run.close)
                stack.callback(self.record.close)
                stack.callback(self.run.flush)
                stack.callback(self.saver.abandon)
        except (OSError, StoreError):
            if kind is None:
                raise

    def _write_run_start(self, origin: str | None, decisions: list[Decision[Any, Any]]) -> None:
        self.record.write_event(
            "run_start", step=self.run.counters["step"] + 1, resumed_from=origin,
            ranks=self.world.size, device=devices.describe(self.world.device),
            plan=self.run.plan.decisions(), rank_hosts=describe_ranks(self.world),
            parts=[
                {"prefix": part.prefix, "ranks": list(part.ranks), "plan": part.plan.decisions()}
                for part in self.run.placements
            ],
            unit=self.kind.unit, decisions=[
                {
                    "facts": _plain(one.facts), "outcome": _plain(one.outcome),
                    "seconds": one.seconds,
                }
                for one in decisions
            ],
            **{f"{self.kind.unit}_per_step": self.kind.units_per_step(self.job)},
            **self.kind.start_fields(self.run),
        )  # fmt: skip

    def _step(self) -> None:
        began = time.perf_counter()
        self.reference.begin_step()
        try:
            stats = self.run.step(self.data.train)
        except DivergedError as error:
            self._end_diverged(error)
            raise
        step_s = time.perf_counter() - began
        written = self.record.write_step(stats, step_s, self.reference.after_step(stats.step))
        self.good.add_step(stats.step, written)
        self.figures = {**self.validation_figures, **written}
        self.figures["step"] = stats.step
        self.progress.step(self.figures)
        for message in stats.messages():
            self.progress.message(f"step {stats.step}: {message}")

    def _is_stopped_by(self, on_step: StepCallback) -> bool:
        """Call `on_step` on rank 0; return on every rank whether the run ends."""

        def ask() -> str:
            answer = on_step(self.figures)
            return "stop" if answer is not None and not answer else "go on"

        return self.world.run_on_rank_zero(ask) == "stop"

    def _end_diverged(self, error: DivergedError) -> None:
        """Record that the step after the last one diverged. A save in progress ends first: it may
        be the way back, and it must not prune that."""
        step = self.run.counters["step"]
        self.good.add_failure(step + 1)
        if error.is_on_all_ranks or self.world.size == 1:
            self.world.run_on_rank_zero(self._wait_for_save)
        self.record.write_event("run_end", step=step, reason="diverged", error=str(error))

    def _wait_for_save(self) -> str:
        with suppress(OSError, StoreError):  # The saver has recorded why a save failed.
            self.saver.wait()
        return ""

    @property
    def _checkpoints(self) -> Path:
        return self.record.out / "checkpoints"

    def _on_save(self, name: str, **fields: Any) -> None:
        """Record an event of the saver, and the checkpoint that it tells of."""
        if name == "checkpoint_done":
            self.good.add_checkpoint(fields["step"], Path(fields["path"]).name)
        self.record.write_event(name, **fields)

    def _on_phase(self, phase: str) -> None:
        """Wait for the copy of a save, which overlaps forward and backward, before the update."""
        if phase == "optimizer":
            self.saver.wait_for_copy()

    def _validate(self) -> None:
        if self.data.validation is None:
            return
        began = time.perf_counter()
        limit = self.job.train.validation_samples
        loss, units, more = self.run.validate(self.data.validation, limit)
        figures = {"loss": loss, self.kind.unit: units, **more}
        self.record.write_validation(
            self.run.counters["step"], figures, time.perf_counter() - began
        )
        scalars = {"loss": loss, **more}
        self.validation_figures = {f"validation_{name}": one for name, one in scalars.items()}
        self.figures = {**self.figures, **self.validation_figures}
        words = [f"validation loss {loss:.4f}"]  # Figures that equal it are not repeated.
        words += [
            f"{name.removesuffix('/loss').replace('_', ' ')} {value:.4f}"
            for name, value in more.items()
            if "/" in name or round(value, 4) != round(loss, 4)
        ]
        self.progress.detail(f"step {self.run.counters['step']}: {', '.join(words)}")

    def _save(self) -> None:
        self.record.flush()
        self.run.flush()
        facts = {
            "job": self.job.model_dump(mode="json"), "plan": self.run.plan.decisions(),
            "data": self.data.digest, START: self.start,
        }  # fmt: skip
        self.good.begin_save(self.run.counters["step"])
        self.saver.save(self.run.state(), self.run.counters["step"], facts, overlap=True)


def _max_peak_bytes(world: World) -> int:
    """Return the peak memory of the rank that used most so far; every rank must call this."""
    peak = torch.tensor([devices.peak_bytes(world.device)], device=world.device)
    return int(all_gather(peak, world.group).max())


def collective_timeout(job: AnyJob) -> timedelta:
    """Return how long a rank of `job` waits for its peers."""
    return timedelta(seconds=job.train.collective_timeout_s)


def _plain(value: Any) -> dict[str, Any]:
    """Return the facts or the outcome of a decision as plain data, by name."""
    if isinstance(value, Section):
        return value.model_dump(mode="json", by_alias=True)
    return dict(value._asdict())
