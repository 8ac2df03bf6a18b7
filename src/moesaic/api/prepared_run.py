"""Training runs that are checked and can start: ranks, directory, checkpoint, plan and warnings."""

from __future__ import annotations

import os
from collections.abc import Mapping
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
from moesaic.api.run import Run
from moesaic.api.step_callback import serve_callback
from moesaic.api.train_worker import MEMORY_HINT, TrainTask, encode, run_train_task
from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.base.file_system import unsuitable_file_system
from moesaic.base.units import plural
from moesaic.facts.job import Job as LanguageModelJob
from moesaic.facts.plan import (
    Plan,
    fewest_ranks,
    idle_ranks_warning,
    plan_from_job,
)
from moesaic.facts.plan.plan import MAX_RANKS
from moesaic.policy.plan.mapping import max_ranks
from moesaic.train.job_file import (
    LoadedJob,
    TrainingJob,
    apply_plan,
    blame_sets,
    is_searched,
)
from moesaic.train.out_checks import check_is_checkpoint, check_no_run, holds_checkpoint
from moesaic.train.resumed_job import RunSource

if TYPE_CHECKING:
    from moesaic.train.stop_request import StopRequest
    from moesaic.train.trainer import StepCallback

_GPU_NODES = ("nvidia[0-9]*", "kfd")
"""Names of GPUs in /dev."""
_RANKS_PER_CORE = 4
"""Most ranks that a job may start per CPU core without being told their number."""


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

    def warn_of_memory(self) -> list[str]:
        """Return a warning if the memory that is free here is too little; raise DoesNotFitError if
        all of it is. A layout that ranks search for fits."""
        if not isinstance(self.config, LanguageModelJob) or self.task.search:
            return []
        from moesaic.api.memory_here import warn_of_memory

        is_shown = self.task.output is not None and is_leader()
        return warn_of_memory(self.config, self.plan, is_shown=is_shown)

    def check_data(self) -> list[str]:
        """Read the data as the start of training would, or their first part, and compare a resumed
        run with its checkpoint; return lines about both. Nothing is written."""
        from moesaic.train.input_checks import read_data

        data, lines = read_data(self.config)
        if self.task.resume is None or self.task.out is None:
            return lines
        from moesaic.api.train_worker import job_kind
        from moesaic.train.resume_checks import check_same_run, newest_checkpoint, open_to_resume

        is_newest = self.task.resume == "auto"
        directory = Path(self.task.out, "checkpoints")
        path = newest_checkpoint(directory) if is_newest else Path(self.task.resume)
        checkpoint, kind = open_to_resume(path, self.config), job_kind(self.config.kind)
        takes_data = self.task.change and kind.restarts_data
        changes = check_same_run(
            checkpoint, self.config, data, kind, self.ranks, takes_data=takes_data
        )
        return [*lines, f"a resume goes on from '{path}'", *changes]

    def run(self, on_step: StepCallback | None = None, stop: StopRequest | None = None) -> Run:
        """Train and return the run; `on_step` as in `Job.train`. `stop` ends a run in this process
        after its step; ranks that it starts heed SIGTERM of their own."""
        out = self.task.out
        try:
            if self.is_spawned:
                with nullcontext() if on_step is None else serve_callback(on_step) as address:
                    task = replace(self.task, callback=address)
                    launch("moesaic.api.train_worker", encode(task), self.ranks, MEMORY_HINT)
            else:
                out = str(run_train_task(self.task, on_step, stop))
        except (KeyboardInterrupt, RunInterrupted) as error:
            if not (isinstance(error, RunInterrupted) and error.is_saved):
                self._record_interruption(str(error) or "interrupted")
            raise
        assert out is not None
        return Run(Path(out))

    def _record_interruption(self, reason: str) -> None:
        """Record the end in the log of the run."""
        from moesaic.train.run_directory import record_run_end

        if self.task.out and is_leader():
            record_run_end(Path(self.task.out), reason)


def count_ranks(
    loaded: LoadedJob[TrainingJob],
    nproc: int | None,
    *,
    is_started: bool,
    cluster: Cluster | None = None,
    earlier: Plan | None = None,
) -> int:
    """Return the number of ranks: that of the plan or `nproc`, else the devices of `cluster`.

    Without them, a resumed run has the ranks of its `earlier` plan, and a new one what its layout
    needs on all devices.
    """
    requested, plan, origin = num_ranks(nproc), loaded.plan, loaded.plan_origin
    if plan is None:
        is_here = cluster is not None and (len(cluster.facts.hosts) == 1 or not is_started)
        if cluster is not None and is_here and requested is None:
            return max_ranks(cluster.facts)
        return requested or _default_ranks(loaded, earlier, is_started=is_started)
    if requested not in (None, plan.ranks):
        actual = f"torchrun started {requested}" if is_torchrun() else f"nproc is {requested}"
        raise ConfigError(
            f"{origin} is for {plural(plan.ranks, 'rank')}, but {actual}: start "
            f"{plan.ranks}, or plan anew for {requested} "
            f"(--nproc {requested}, nproc={requested} in Python)"
        )
    hosts = len({place.host for place in plan.places})
    if hosts > 1 and not is_torchrun() and is_started:
        raise ConfigError(
            f"{origin} has its ranks on {hosts} hosts: start them on all of them with torchrun, "
            "or plan anew for one host"
        )
    return plan.ranks


def _default_ranks(
    loaded: LoadedJob[TrainingJob], earlier: Plan | None, *, is_started: bool
) -> int:
    """Return the ranks of a job that names no number: the `earlier` ones, else one a device and as
    many as the layout needs; raise if this machine is too small to start them."""
    job = loaded.job
    needed = fewest_ranks(job.layout) if isinstance(job, LanguageModelJob) else 1
    if earlier is not None and earlier.ranks % needed == 0:
        return earlier.ranks
    devices = _num_gpus(job.train.device)
    limit = devices or _RANKS_PER_CORE * (os.cpu_count() or 1)
    if is_started and needed > limit:
        has = f"{devices} GPUs" if devices else f"{os.cpu_count()} cores"
        raise ConfigError(
            f"{loaded.origin}: [layout] needs {needed} ranks, and this machine has {has}: start "
            f"them on several machines with torchrun, or change [layout] (--nproc {needed}, in "
            f"Python nproc={needed}, starts them here all the same)"
        )
    return max(needed, devices // needed * needed)


def _num_gpus(device: str) -> int:
    """Return the number of GPUs that `train.device` allows."""
    if (
        device == "cpu"
        or ":" in device
        or not any(any(Path("/dev").glob(name)) for name in _GPU_NODES)
    ):
        return 0  # Importing torch would take seconds.
    from moesaic.kernels import device as devices

    found = devices.resolve(device)
    return 0 if found.type == "cpu" else devices.num_devices(found)


def check_search(loaded: LoadedJob[TrainingJob], ranks: int, cluster: Cluster | None) -> bool:
    """Return whether training searches for the layout of the job; raise if a cluster is useless."""
    if cluster is not None and loaded.plan is not None:
        raise ConfigError(
            f"cluster beside {loaded.plan_origin}, which has its places already: remove one of them"
        )
    job = loaded.job
    is_fixed = isinstance(job, LanguageModelJob) and job.plan != "auto"
    if cluster is not None and is_fixed and "layout" in job.model_fields_set:
        raise ConfigError(
            f"{loaded.origin}: a cluster is for a search of the layout, but the job has a [layout]:"
            ' set plan = "auto", which keeps its keys, or remove the cluster'
        )
    return is_searched(loaded, ranks)


def earlier_plan(source: RunSource | None) -> Plan | None:
    """Return the plan of a run to resume; None if it has none."""
    if source is None or source.plan is None:
        return None
    return parse(Plan, source.plan, "the plan of the run")


def kept_plan(
    loaded: LoadedJob[TrainingJob], source: RunSource, ranks: int
) -> Mapping[str, Any] | None:
    """Return the plan of a resumed run; None if the ranks or keys of the job differ from it."""
    plan = earlier_plan(source)
    if (
        plan is None
        or source.plan is None
        or plan.ranks != ranks
        or not isinstance(loaded.job, LanguageModelJob)
    ):
        return None
    try:
        apply_plan(loaded, source.plan)
        own = {key: getattr(loaded.job.layout, key) for key in loaded.job.layout.model_fields_set}
    except ConfigError:
        return None
    pinned = {key: value for key, value in own.items() if value not in ("auto", None)}
    planned = {key: plan.dp if own[key] == "all" else getattr(plan, key) for key in pinned}
    agree = all(pinned[key] in (value, "all") for key, value in planned.items())
    return source.plan if agree else None


def resolve_run(out: Path | None, resume: str | Path | None) -> tuple[Path | None, str | None]:
    """Return the run directory and the checkpoint to resume from, if any.

    Without a checkpoint a run starts anew, so that one command serves every start of it."""
    if resume is None:
        if out is not None and is_leader():
            check_no_run(out)
        return out, None
    if resume == "auto":
        if out is None:
            raise ConfigError(
                "a resume needs the directory of its run: give --out DIR (out=DIR in Python)"
            )
        if not holds_checkpoint(out):
            if is_leader():
                check_no_run(out)
            return out, None
        return out, "auto"
    return _find_checkpoint(Path(resume), out)


def _find_checkpoint(path: Path, out: Path | None) -> tuple[Path, str]:
    if holds_checkpoint(path) and out in (None, path):
        return path, "auto"
    check_is_checkpoint(path)
    run = path.absolute().parent.parent
    owner = run if (run / "job.json").is_file() else None
    if out is None:
        if owner is None:
            raise ConfigError(
                f"'{path}' belongs to no run: give the directory of one, --out DIR (out=DIR in "
                "Python)"
            )
        return owner, str(path)
    if owner is None or out.resolve() != owner.resolve():
        check_no_run(out)
    return out, str(path)


def own_plan(loaded: LoadedJob[TrainingJob], ranks: int, *, is_open: bool) -> Plan:
    """Return the layout that a job without a plan has; `is_open` says that a search may change it,
    so that it may be invalid."""
    if isinstance(loaded.job, LanguageModelJob):
        try:
            with blame_sets(loaded.origin, loaded.sets):
                return plan_from_job(loaded.job, ranks, loaded.origin)
        except ConfigError:
            if not is_open or ranks > MAX_RANKS:
                raise
    return Plan.data_parallel(ranks)


def run_warnings(
    loaded: LoadedJob[TrainingJob], plan: Plan, *, is_new: bool, is_open: bool
) -> list[str]:
    """Return warnings about the job; a new run also checks its initial weights, and `is_open` says
    that a search may change the plan."""
    job, texts = loaded.job, list(loaded.warnings)
    if not isinstance(job, LanguageModelJob):
        return [*texts, *_drive_warnings("table.ssd", job.table.ssd)]
    idle = None if is_open else idle_ranks_warning(plan, job)
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
