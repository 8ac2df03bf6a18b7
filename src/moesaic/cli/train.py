"""`moesaic train`: a training run of a job.

Everything that can be checked without torch is checked in one process first, before ranks start or
files are written.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from moesaic.base.errors import ConfigError, DivergedError, UserError
from moesaic.base.units import format_bytes, format_clock
from moesaic.cli import flags, screen
from moesaic.cli.flags import DryRun, Explain, JobPath, Json, Out, PlanPath, Sets
from moesaic.cli.launch import (
    EXIT_INTERRUPTED,
    Nproc,
    RankFailed,
    RunInterrupted,
    is_leader,
    is_torchrun,
    launch,
    num_ranks,
    print_rank_failure,
)
from moesaic.cli.start import exit_on_interrupt
from moesaic.cli.train_worker import TrainTask, default_out, encode, run_train_task
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, describe_plan, idle_ranks_warning, plan_from_job
from moesaic.facts.workload import count_parameters
from moesaic.facts.workload.parameters import describe_trainable
from moesaic.train.job_file import (
    LoadedJob,
    check_inputs,
    check_no_run,
    check_out_is_not_text,
    load_job,
)

if TYPE_CHECKING:
    from moesaic.report import RunStats

Resume = Annotated[
    str | None,
    typer.Option(
        "--resume", metavar="[auto|PATH]", show_default=False,
        help="Continue from the newest checkpoint of --out, or from the one at PATH.",
    ),
]  # fmt: skip


def train(  # noqa: PLR0913 - a parameter for each flag
    job: JobPath = None,
    nproc: Nproc = None,
    plan: PlanPath = None,
    resume: Resume = None,
    sets: Sets = None,
    out: Out = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    explain: Explain = None,
) -> int | None:
    """Train a model by a job file."""
    if explain is not None:
        flags.print_job_explanation(flags.JobAndPlan, explain, as_json)
        return 0
    path = flags.require(job, "JOB.toml", "train")
    directory, resume = _resolve_run(path, out, resume)
    out_text, plan_text = (str(one) if one else None for one in (directory, plan))
    task = TrainTask(str(path), list(sets or ()), out_text, resume, as_json, sys.argv, plan_text)
    loaded = load_job(path, task.sets, task.resumed_run, plan)
    ranks = _count_ranks(loaded, nproc, dry_run=dry_run)
    used_plan = loaded.plan or plan_from_job(loaded.job, ranks)
    if directory is not None:
        check_out_is_not_text(directory, loaded.job)
    check_inputs(loaded.job, str(path))
    warnings = _warnings(loaded, used_plan, is_new=resume is None)
    if is_leader():
        for warning in warnings:
            screen.print_warning(warning)
    if dry_run:
        _print_dry_run(path, loaded, used_plan, warnings, as_json)
        return 0
    own_ranks = 1 if is_torchrun() else ranks
    _check_machine(loaded.job, own_ranks)
    return _run_task(task, own_ranks)


def _count_ranks(loaded: LoadedJob[Job], nproc: int | None, *, dry_run: bool) -> int:
    """Return the number of ranks: that of the plan, if there is one."""
    requested, plan, origin = num_ranks(nproc), loaded.plan, loaded.plan_origin
    if plan is None:
        return requested or 1
    if requested not in (None, plan.ranks):
        actual = f"torchrun started {requested}" if is_torchrun() else f"--nproc is {requested}"
        raise ConfigError(
            f"{origin} is for {plan.ranks} rank{'s' * (plan.ranks > 1)}, but {actual}: start "
            f"{plan.ranks}, or plan anew for {requested} (moesaic plan --nproc {requested})"
        )
    hosts = len({place.host for place in plan.places})
    if hosts > 1 and not is_torchrun() and not dry_run:
        raise ConfigError(
            f"{origin} has its ranks on {hosts} hosts: start them on all of them with torchrun, "
            "or plan anew for one host"
        )
    return plan.ranks


def _resolve_run(job: Path, out: Path | None, resume: str | None) -> tuple[Path | None, str | None]:
    """Return the run directory and the checkpoint to resume from, if any."""
    if resume is None:
        if out is not None and is_leader():
            check_no_run(out)
        return (out or (None if is_torchrun() else default_out(job))), None
    if resume == "auto":
        if out is None:
            raise UserError("--resume needs --out RUN, the run to continue")
        if not _holds_checkpoint(out):
            raise UserError(
                f"--resume: '{out}' has no checkpoint: start without --resume, or give another "
                "--out"
            )
        return out, "auto"
    return _find_checkpoint(Path(resume), out)


def _find_checkpoint(path: Path, out: Path | None) -> tuple[Path, str]:
    if _holds_checkpoint(path) and out in (None, path):
        return path, "auto"
    if not (path / "COMMIT").is_file():
        raise UserError(
            f"--resume '{path}' is not a checkpoint: give a directory such as "
            "RUN/checkpoints/step-00000100, or auto"
        )
    run = path.absolute().parent.parent
    owner = run if (run / "job.json").is_file() else None
    if out is None:
        if owner is None:
            raise UserError(f"--resume '{path}' belongs to no run: add --out RUN")
        return owner, str(path)
    if owner is None or out.resolve() != owner.resolve():
        check_no_run(out)
    return out, str(path)


def _holds_checkpoint(run: Path) -> bool:
    return any((run / "checkpoints").glob("step-*/COMMIT"))


def _warnings(loaded: LoadedJob[Job], plan: Plan, *, is_new: bool) -> list[str]:
    """Return warnings about the job; a new run also checks its initial weights."""
    warnings, idle = list(loaded.warnings), idle_ranks_warning(plan, loaded.job)
    if idle is not None:
        warnings.append(idle)
    if loaded.job.layout.embedding == "columns" and plan.ranks // plan.pp == 1:
        warnings.append("layout.embedding has no effect: each stage has one rank, with all columns")
    return [*warnings, *_check_weights(loaded.job)] if is_new else warnings


def _check_weights(job: Job) -> list[str]:
    """Compare the headers of the initial weights with the model; return notes on unused tensors."""
    if job.source is None:
        return []
    with exit_on_interrupt():
        from moesaic.models.hf.reader import HFSource

    return HFSource(Path(job.source), job.model).notes


def _check_machine(job: Job, ranks: int) -> None:
    """Check devices, which needs torch; nothing is written yet."""
    with exit_on_interrupt():
        from moesaic.kernels import device

    device.resolve(job.train.device, ranks - 1)


def _run_task(task: TrainTask, ranks: int) -> int:
    out = Path(task.out) if task.out else None
    try:
        if ranks > 1:
            launch("moesaic.cli.train_worker", encode(task), ranks)
        else:
            with _raise_on_sigterm():
                out, is_rank_zero = run_train_task(task)
            if not is_rank_zero:
                return 0
    except RankFailed as error:
        return print_rank_failure(error)
    except KeyboardInterrupt:
        raise _record_interruption(
            RunInterrupted("interrupted", EXIT_INTERRUPTED), task, ranks
        ) from None
    except RunInterrupted as error:
        raise _record_interruption(error, task, ranks) from None
    assert out is not None
    _write_report(out, task.as_json)
    return 0


@contextmanager
def _raise_on_sigterm() -> Iterator[None]:
    """Raise RunInterrupted on SIGTERM, so that every `finally` runs."""

    def end(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise RunInterrupted("ended by SIGTERM")

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _record_interruption(error: RunInterrupted, task: TrainTask, ranks: int) -> RunInterrupted:
    """Record the end in the run's log; return the error with the command that resumes the run."""
    from moesaic.train.run_directory import record_run_end

    if task.out and is_leader():
        record_run_end(Path(task.out), str(error))
    return RunInterrupted(f"{error}{_resume_command(task, ranks)}", error.status)


def _resume_command(task: TrainTask, ranks: int) -> str:
    """Return the command that resumes from the newest checkpoint; empty without one."""
    if task.out is None or not _holds_checkpoint(Path(task.out)):
        return ""
    if is_torchrun():
        return f"; to continue: the same command with {shlex.join(('--out', task.out))} --resume"
    words = ["moesaic", "train", task.job]
    if task.plan is not None:
        words += ["--plan", task.plan]
    elif ranks > 1:
        words += ["--nproc", str(ranks)]
    words += [word for item in task.sets for word in ("--set", item)]
    words += ["--json"] if task.as_json else []
    return f"; to continue: {shlex.join([*words, '--out', task.out, '--resume'])}"


def _write_report(out: Path, as_json: bool) -> None:
    """Write the report and print a summary of the run."""
    from moesaic.report import RunStats, summary, write_report

    page = out / "report.html"
    write_report([out], page)
    run = RunStats.read(out)
    facts = summary(run)
    if as_json:
        screen.print_json({**facts, "report": str(page)})
    else:
        _print_summary(out, run, facts, page)
    if facts["skipped"] and facts["skipped"] == facts["step"]:
        raise DivergedError(
            f"all {facts['step']:,} steps were skipped because fp16 overflowed, so nothing was "
            f"learnt: the loss scale ({run.steps.loss_scale[-1]:g} in the last step) halves with "
            "each skipped step; raise train.steps and continue with --resume, or start again with "
            'train.precision = "bf16" or "fp32"'
        )


def _print_summary(out: Path, run: RunStats, facts: dict[str, Any], page: Path) -> None:
    screen.print_line(_headline(facts))
    chat = " --chat" if run.setting("data.format") == "chat" else ""
    prompt = f'moesaic generate {shlex.quote(str(out))}{chat} --prompt "..."'
    if facts["prediction"] is not None:
        ratio = facts["prediction"]["step_ratio"]
        screen.print_line(
            f"  a step took {ratio:.2f} times the predicted time (median without the first three "
            "steps)"
        )
    for finding in facts["findings"]:
        if finding["kind"].startswith("replicas_"):
            screen.print_line(f"  {finding['title'][0].lower()}{finding['title'][1:]}")
    rows = {"run": out, "checkpoint": facts["newest_checkpoint"], "report": page, "next": prompt}
    for name, value in rows.items():
        screen.print_line(f"  {name:<11} {value}")


def _headline(facts: dict[str, Any]) -> str:
    text = f"trained {facts['step']:,} steps in {format_clock(facts['seconds'] or 0.0)}"
    if facts["skipped"]:
        text += f", {facts['skipped']:,} of {facts['step']:,} steps skipped because fp16 overflowed"
    if facts["loss"] is not None:
        text += f": loss {facts['first_loss']:.3f} -> {facts['loss']:.3f}"
    if facts["validation_loss"] is not None:
        text += f", validation loss {facts['validation_loss']:.3f}"
    if facts["tokens_per_s"] is not None:
        text += f", {facts['tokens_per_s']:,.0f} tokens/s (median)"
    return text


def _print_dry_run(
    path: Path, loaded: LoadedJob[Job], plan: Plan, warnings: list[str], as_json: bool
) -> None:
    """Print the resolved job, the plan and the memory of a rank."""
    from moesaic.policy.cost.memory import highest_memory

    counts = count_parameters(loaded.job.model)
    memory = highest_memory(loaded.job, plan)
    if as_json:
        screen.print_json(
            {
                "job": loaded.job.model_dump(mode="json", by_alias=True),
                "plan": plan.decisions(),
                "parameters": {"total": counts.total, "active": counts.active},
                "memory_per_rank": {**memory.by_kind(), "peak_bytes": memory.peak_bytes},
                "warnings": warnings,
            }
        )
        return
    screen.print_line(f"# {path}, resolved\n")
    screen.print_line(loaded.job.to_toml())
    share = f"{counts.active / counts.total:.0%}"
    screen.print_line(
        f"parameters       {counts.total:,} in total, {counts.active:,} active ({share})"
    )
    for line in describe_trainable(loaded.job) if loaded.job.finetune is not None else ():
        screen.print_line(line)
    screen.print_line(f"plan             {describe_plan(plan)}")
    screen.print_line(f"memory per rank  peak {format_bytes(memory.peak_bytes)}, of which")
    for kind, num_bytes in memory.by_kind().items():
        name = kind.removesuffix("_bytes")
        remark = " (estimate)" if name in ("activations", "gathered", "working") else ""
        screen.print_line(f"  {name:<14} {format_bytes(num_bytes)}{remark}")
