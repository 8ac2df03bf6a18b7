"""Work of one rank in a training run, and entry point of the ranks that `nproc` starts."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from moesaic.api.launch import RunInterrupted, is_torchrun, run_reporting_errors
from moesaic.api.progress import Output, RunProgress
from moesaic.api.run import Run, failure_in
from moesaic.api.start import exit_on_interrupt
from moesaic.api.step_callback import remote_callback
from moesaic.base.config import parse
from moesaic.base.errors import DivergedError
from moesaic.facts.cluster import Cluster
from moesaic.train.job_file import language_model, load_job
from moesaic.train.out_checks import check_is_checkpoint, holds_checkpoint
from moesaic.train.stop_request import ENDED_BY_SIGTERM, StopRequest

if TYPE_CHECKING:
    from moesaic.dist.world import World
    from moesaic.facts.job import Job
    from moesaic.train.job_file import LoadedJob, TrainingJob
    from moesaic.train.trainer import JobKind, StepCallback

MEMORY_HINT = (
    "raise train.micro_batches or set train.recompute = true, which keep the batch (auxiliary "
    "losses are taken over each micro-batch, so their number changes them); else use a smaller "
    "batch, shorter samples or more ranks (moesaic train JOB.toml --dry-run names the smallest "
    "change that fits)"
)


@dataclass(frozen=True)
class TrainTask:
    """Task of a training run, the same on every rank."""

    job: str | dict[str, Any] | None
    """Path of the job file, or its tables; None: those of `run`."""
    sets: list[str]
    """Items of `--set`."""
    out: str | None
    """Run directory; None: rank 0 chooses one."""
    resume: str | None
    """Path of a checkpoint, or "auto" for the newest; None: a new run."""
    output: Output
    """Stream for progress."""
    command: list[str]
    """Command line of the user."""
    run: str | None = None
    """Run or checkpoint whose job goes on; None: a new job."""
    change: bool = False
    """True to take changes of what a resumed run learns, and other data."""
    plan: str | dict[str, Any] | None = None
    """Path of the plan, or its content; None: the job's own."""
    callback: str | None = None
    """Address of the process that runs the callback of each step; None: no callback."""
    search: bool = False
    """True if the ranks search for the layout before they train."""
    cluster: dict[str, Any] | None = None
    """Cluster to search on, as plain data; None: the ranks measure their machines."""
    is_verbose: bool = False
    """True to show every message."""


def resumed_run(out: str | None, resume: str | None) -> Path | None:
    """Return what gives a resumed run its job: its directory, or the checkpoint that is named; None
    for a new run."""
    if resume is None or (resume == "auto" and out is None):
        return None
    if resume == "auto":
        return Path(str(out))
    path = Path(resume)
    if not holds_checkpoint(path):
        check_is_checkpoint(path)
    return path


def run_train_task(
    task: TrainTask, on_step: StepCallback | None = None, stop: StopRequest | None = None
) -> Path:
    """Train and return the run directory; raise RunInterrupted if `stop` ended the run.

    Imports and waiting for other ranks may swallow an interrupt, so it kills a rank meanwhile.
    """
    with exit_on_interrupt() if is_torchrun() else nullcontext():
        from moesaic.dist.world import World
        from moesaic.train.trainer import Resume, collective_timeout, train

        job, plan = (Path(one) if isinstance(one, str) else one for one in (task.job, task.plan))
        loaded = load_job(job, task.sets, None if task.run is None else Path(task.run), plan)
        kind = job_kind(loaded.job.kind)
        world = World.from_launcher(loaded.job.train.device, collective_timeout(loaded.job))
    if task.callback is not None:
        on_step = remote_callback(task.callback)
    resume = None if task.resume is None else Resume(task.resume, may_change_data=task.change)
    try:
        out = Path(world.run_on_rank_zero(lambda: task.out or str(default_out(job))))
        progress = RunProgress(
            task.output if world.is_rank_zero else None, is_verbose=task.is_verbose
        )
        try:
            if task.search:
                loaded = _search_layout(loaded, task, world, progress.message)
            last = train(loaded, out, resume, world, progress, kind, on_step, stop)
        except DivergedError as error:
            raise _in_words_of_report(error, out, world) from None
        finally:
            progress.done()
    except BaseException:
        world.close_transports()
        raise
    world.leave()
    if last["reason"] == ENDED_BY_SIGTERM:
        raise RunInterrupted(ENDED_BY_SIGTERM, is_saved=True)
    return out


def _in_words_of_report(error: DivergedError, out: Path, world: World) -> DivergedError:
    """Return the error with cause and way back, equal on all ranks that raise it."""

    def explain() -> str:
        return failure_in(Run(out).summary()) or str(error)

    if error.is_on_all_ranks:
        return DivergedError(world.run_on_rank_zero(explain))
    return DivergedError(explain()) if world.is_rank_zero else error


def _search_layout(
    loaded: LoadedJob[TrainingJob], task: TrainTask, world: World, say: Callable[[str], None]
) -> LoadedJob[Job]:
    """Return the job under the fastest plan of a search."""
    from moesaic.train.layout_search import search_layout

    cluster = None if task.cluster is None else parse(Cluster, task.cluster, "the cluster")
    return search_layout(language_model(loaded, "has no plan"), world, cluster, say)


def job_kind(name: str) -> JobKind[Any]:
    """Return the kind of job that `kind = name` means; another one is not imported."""
    if name == "ctr":
        from moesaic.train.ctr import CtrKind

        return CtrKind()
    from moesaic.train.lm import LanguageModelKind

    return LanguageModelKind()


def default_out(job: Path | Mapping[str, Any] | None) -> Path:
    """Return runs/NAME-DATE-TIME, a directory that does not exist yet."""
    name = job.stem if isinstance(job, Path) else "job"
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    paths = [Path("runs") / f"{name}-{now}{suffix}" for suffix in ("", "-2", "-3", "-4", "-5")]
    return next((path for path in paths if not path.exists()), paths[-1])


def main() -> int:
    """Run the task in the first argument, as one rank; return the exit status."""
    task = TrainTask(**json.loads(sys.argv[1]))
    sys.argv = task.command

    def work() -> None:
        with stop_on_sigterm() as stop:
            run_train_task(task, None, stop)

    return run_reporting_errors(work, MEMORY_HINT)


@contextmanager
def stop_on_sigterm() -> Iterator[StopRequest]:
    """Let SIGTERM end training after its step, with a checkpoint.

    Before and after the steps it raises RunInterrupted at once, so that every `finally` runs.
    """
    request, is_ending = StopRequest(), False

    def end(_signal: int, _frame: FrameType | None) -> None:
        nonlocal is_ending
        if not request.make() and not is_ending:
            is_ending = True
            raise RunInterrupted(ENDED_BY_SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, before)


def encode(task: TrainTask) -> str:
    """Return the task as an argument of a rank's process."""
    return json.dumps(asdict(task))
