"""Jobs: training runs to start, and plans to predict."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.api.cluster import Cluster
from moesaic.api.launch import (
    RunInterrupted,
    is_leader,
    is_torchrun,
    launch,
    num_ranks,
)
from moesaic.api.loads import recorded_loads
from moesaic.api.memory_replay import forecast
from moesaic.api.progress import Output
from moesaic.api.run import Run
from moesaic.api.step_callback import serve_callback
from moesaic.api.train_worker import TrainTask, default_out, encode, run_train_task
from moesaic.base.errors import ConfigError
from moesaic.base.file_system import unsuitable_file_system
from moesaic.facts.job import Job as LanguageModelJob
from moesaic.facts.plan import Plan, idle_ranks_warning, plan_from_job
from moesaic.train.job_file import (
    LoadedJob,
    TrainingJob,
    apply_plan,
    blame_sets,
    check_inputs,
    check_no_run,
    check_out_is_not_data,
    check_writable,
    holds_checkpoint,
    language_model,
    load_job,
)

if TYPE_CHECKING:
    from moesaic.policy.plan.predict import PlannedJob
    from moesaic.train.trainer import StepCallback


class Job:
    """A training job: model, data, optimizer and layout."""

    def __init__(self, loaded: LoadedJob[TrainingJob], source: Path | dict[str, Any]) -> None:
        self._loaded, self._source = loaded, source

    @classmethod
    def load(
        cls,
        source: str | Path | Mapping[str, Any],
        *,
        sets: Sequence[str] = (),
        run: Path | None = None,
    ) -> Job:
        """Return a job, checked; raise ConfigError for a mistake.

        Args:
            source: path of a job file, or its tables as a dict.
            sets: changes of single keys, such as "train.steps=100".
            run: run to resume, which has a copy of a model whose directory is gone.
        """
        if isinstance(source, Mapping):
            tables: dict[str, Any] = json.loads(json.dumps(source, default=str))
            return cls(load_job(tables, sets, run), tables)
        return cls(load_job(Path(source), sets, run), Path(source))

    @property
    def config(self) -> TrainingJob:
        """The job with every default filled in."""
        return self._loaded.job

    @property
    def warnings(self) -> list[str]:
        """Sentences about settings that have no effect or are unusual."""
        return self._loaded.warnings

    def train(
        self,
        *,
        out: str | Path | None = None,
        nproc: int | None = None,
        resume: str | Path | None = None,
        plan: PlannedJob | str | Path | None = None,
        on_step: StepCallback | None = None,
        output: Output = "stderr",
    ) -> Run:
        """Train, and return the finished run.

        Args:
            out: directory of the run; None: runs/job-DATE-TIME.
            nproc: ranks to start on this machine; None: those of the plan, else one. Under
                torchrun this process is a rank already.
            resume: "auto" for the newest checkpoint of `out`, or the path of a checkpoint; None:
                a new run.
            plan: a result of `plan`, or the path of a plan file; it sets ranks and layout.
            on_step: function of each step's figures (`step`, `loss`, ...). It runs in this
                process, on rank 0 under torchrun. A false value other than None, also one of
                numpy or torch, ends the run after that step, with a checkpoint. Ranks wait for
                it, at most `train.collective_timeout_s`.
            output: stream for progress; None for none.
        """
        prepared = self.prepare(out=out, nproc=nproc, resume=resume, plan=plan, output=output)
        for text in prepared.warnings if is_leader() else ():
            warnings.warn(text, stacklevel=2)
        prepared.check_machine()
        return prepared.run(on_step)

    def plan(
        self,
        cluster: Cluster,
        *,
        nproc: int | None = None,
        plan: PlannedJob | str | Path | None = None,
        loads: str | Path | None = None,
    ) -> PlannedJob:
        """Return the plan of this job on a cluster, with its predictions; nothing runs.

        `figures` of the result has time, memory and price as plain data, and `plan.to_json()` is
        the content of a plan file.

        Args:
            cluster: hosts, devices and links.
            nproc: number of ranks; None: all that the cluster has room for.
            plan: plan to predict as it is; None: choose the settings that the job leaves open.
            loads: directory of a run whose last expert loads are assumed; None: even loads.
        """
        from moesaic.policy.plan.predict import choose_plan, predict_plan

        loaded = self._language_model(plan)
        recorded = None
        if loads is not None:
            recorded = recorded_loads(Run.open(loads).directory, loaded.job)
        origin = loaded.plan_origin or loaded.origin
        with cluster.named_in_errors(), blame_sets(loaded.origin, loaded.sets):
            choices, facts = choose_plan(
                loaded.job, cluster.facts, nproc, loaded.plan, origin, recorded
            )
            tiers = None
            if loaded.job.memory is not None:
                device = facts.tightest_rank(choices.plan).device
                tiers = forecast(loaded.job, choices.plan, int(device.memory_bytes))
            planned = predict_plan(choices, facts, tiers)
        return planned._replace(warnings=[*loaded.warnings, *planned.warnings])

    def largest_model(
        self, cluster: Cluster, ssd_bytes: float, *, nproc: int | None = None
    ) -> dict[str, Any]:
        """Return the largest models of this job's shape on a cluster as plain data; nothing runs.

        Args:
            cluster: hosts and devices.
            ssd_bytes: space on the drive of each host.
            nproc: number of ranks; None: all that the cluster has room for.
        """
        from moesaic.policy.plan.capacity import largest_model

        loaded = self._language_model()
        with cluster.named_in_errors(), blame_sets(loaded.origin, loaded.sets):
            return largest_model(loaded.job, cluster.facts, ssd_bytes, nproc, loaded.origin)

    def prepare(
        self,
        *,
        out: str | Path | None = None,
        nproc: int | None = None,
        resume: str | Path | None = None,
        plan: PlannedJob | str | Path | None = None,
        output: Output = "stderr",
        is_started: bool = True,
    ) -> PreparedRun:
        """Return a run that can start, after all checks that need no torch.

        With `is_started` false it need not start here: a plan may have ranks on several hosts.
        """
        directory, checkpoint = _resolve_run(None if out is None else Path(out), resume)
        if directory is None and not is_torchrun():
            directory = default_out(self._source)
        loaded = self._under(plan)
        ranks = _count_ranks(loaded, nproc, is_started=is_started)
        used_plan = loaded.plan
        if used_plan is None:
            with blame_sets(loaded.origin, loaded.sets):
                used_plan = _own_plan(loaded, ranks)
        if directory is not None:
            check_out_is_not_data(directory, loaded.job)
        check_inputs(loaded)
        if directory is not None and is_leader() and is_started:
            check_writable(directory)
        task = TrainTask(
            job=self._source if isinstance(self._source, dict) else str(self._source),
            sets=list(loaded.sets), out=None if directory is None else str(directory),
            resume=checkpoint, output=output, command=sys.argv, plan=_plan_as_json(plan),
        )  # fmt: skip
        texts = _warnings(loaded, used_plan, is_new=checkpoint is None)
        return PreparedRun(task, loaded.job, used_plan, ranks, texts)

    def _under(self, plan: PlannedJob | str | Path | None) -> LoadedJob[TrainingJob]:
        """Return the job under a plan, if there is one."""
        source = _plan_as_json(plan)
        if source is None:
            return self._loaded
        return apply_plan(self._loaded, Path(source) if isinstance(source, str) else source)

    def _language_model(
        self, plan: PlannedJob | str | Path | None = None
    ) -> LoadedJob[LanguageModelJob]:
        """Return the job under a plan, if there is one; raise if it is of another kind."""
        return language_model(
            self._under(plan), "has no plan: plans are for language models yet, train it as it is"
        )


def _plan_as_json(plan: PlannedJob | str | Path | None) -> str | dict[str, Any] | None:
    """Return the path of a plan, or its content."""
    if plan is None or isinstance(plan, str | Path):
        return None if plan is None else str(plan)
    content: dict[str, Any] = json.loads(plan.plan.to_json())
    return content


@dataclass(frozen=True)
class PreparedRun:
    """A training run that is checked and can start."""

    task: TrainTask
    config: TrainingJob
    """Job under the plan."""
    plan: Plan
    """Layout of the ranks."""
    ranks: int
    warnings: list[str]
    """Warnings for the user."""

    @property
    def is_spawned(self) -> bool:
        """True if the run starts ranks as processes."""
        return self.ranks > 1 and not is_torchrun()

    def check_machine(self) -> None:
        """Check devices, which needs torch; nothing is written yet."""
        from moesaic.kernels import device

        device.resolve(self.config.train.device, self.ranks - 1 if self.is_spawned else 0)

    def run(self, on_step: StepCallback | None = None) -> Run:
        """Train and return the run; `on_step` as in `Job.train`."""
        out = self.task.out
        try:
            if self.is_spawned:
                with nullcontext() if on_step is None else serve_callback(on_step) as address:
                    task = replace(self.task, callback=address)
                    launch("moesaic.api.train_worker", encode(task), self.ranks)
            else:
                out = str(run_train_task(self.task, on_step))
        except (KeyboardInterrupt, RunInterrupted) as error:
            self._record_interruption(str(error) or "interrupted")
            raise
        assert out is not None
        return Run(Path(out))

    def _record_interruption(self, reason: str) -> None:
        """Record the end in the log of the run."""
        from moesaic.train.run_directory import record_run_end

        if self.task.out and is_leader():
            record_run_end(Path(self.task.out), reason)


def _count_ranks(loaded: LoadedJob[TrainingJob], nproc: int | None, *, is_started: bool) -> int:
    """Return the number of ranks: that of the plan, if there is one."""
    requested, plan, origin = num_ranks(nproc), loaded.plan, loaded.plan_origin
    if plan is None:
        return requested or 1
    if requested not in (None, plan.ranks):
        actual = f"torchrun started {requested}" if is_torchrun() else f"nproc is {requested}"
        raise ConfigError(
            f"{origin} is for {plan.ranks} rank{'s' * (plan.ranks > 1)}, but {actual}: start "
            f"{plan.ranks}, or plan anew for {requested} (nproc = {requested})"
        )
    hosts = len({place.host for place in plan.places})
    if hosts > 1 and not is_torchrun() and is_started:
        raise ConfigError(
            f"{origin} has its ranks on {hosts} hosts: start them on all of them with torchrun, "
            "or plan anew for one host"
        )
    return plan.ranks


def _resolve_run(out: Path | None, resume: str | Path | None) -> tuple[Path | None, str | None]:
    """Return the run directory and the checkpoint to resume from, if any."""
    if resume is None:
        if out is not None and is_leader():
            check_no_run(out)
        return out, None
    if resume == "auto":
        if out is None:
            raise ConfigError("resume needs out, the directory of the run to continue")
        if not holds_checkpoint(out):
            raise ConfigError(
                f"'{out}' has no checkpoint to resume from: start anew, after removing the "
                "directory if a run that has ended left it, or give another one"
            )
        return out, "auto"
    return _find_checkpoint(Path(resume), out)


def _find_checkpoint(path: Path, out: Path | None) -> tuple[Path, str]:
    if holds_checkpoint(path) and out in (None, path):
        return path, "auto"
    if not (path / "COMMIT").is_file():
        raise ConfigError(
            f"'{path}' is not a checkpoint to resume from: give a directory such as "
            "RUN/checkpoints/step-00000100, or auto"
        )
    run = path.absolute().parent.parent
    owner = run if (run / "job.json").is_file() else None
    if out is None:
        if owner is None:
            raise ConfigError(f"'{path}' belongs to no run: give out, the directory of one")
        return owner, str(path)
    if owner is None or out.resolve() != owner.resolve():
        check_no_run(out)
    return out, str(path)


def _own_plan(loaded: LoadedJob[TrainingJob], ranks: int) -> Plan:
    """Return the layout that a job without a plan has."""
    if isinstance(loaded.job, LanguageModelJob):
        return plan_from_job(loaded.job, ranks, loaded.origin)
    return Plan.data_parallel(ranks)


def _warnings(loaded: LoadedJob[TrainingJob], plan: Plan, *, is_new: bool) -> list[str]:
    """Return warnings about the job; a new run also checks its initial weights."""
    job, texts = loaded.job, list(loaded.warnings)
    if not isinstance(job, LanguageModelJob):
        return [*texts, *_drive_warnings("table.ssd", job.table.ssd)]
    idle = idle_ranks_warning(plan, job)
    if idle is not None:
        texts.append(idle)
    if job.layout.embedding == "columns" and plan.ranks // plan.pp == 1:
        texts.append("layout.embedding has no effect: each stage has one rank, with all columns")
    texts += _drive_warnings("memory.ssd", None if job.memory is None else job.memory.ssd)
    if not is_new:
        return texts
    if job.distill.frozen and job.source is None:
        texts.append(
            "distill.frozen = true without model.from: students learn from a teacher with random "
            "weights, name a Hugging Face model directory or resume the teacher's run"
        )
    return [*texts, *_check_weights(job)]


def _drive_warnings(key: str, directory: str | None) -> list[str]:
    """Return a warning if the file system of the `directory` that `key` names does not suit it."""
    if directory is None:
        return []
    found = unsuitable_file_system(Path(directory).expanduser())
    text = f"{key} = '{directory}' is on {found}: name a directory on a local drive"
    return [] if found is None else [text]


def _check_weights(job: LanguageModelJob) -> list[str]:
    """Compare the headers of initial weights with the models; return notes on unused tensors."""
    models = [(job.source, job.model), *((one.source, one.model) for one in job.student)]
    found = list[str]()
    for source, model in models:
        if source is not None:
            from moesaic.models.hf.reader import PretrainedSource

            found += PretrainedSource(Path(source), model).notes
    return found
