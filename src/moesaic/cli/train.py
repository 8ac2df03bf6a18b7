"""`moesaic train`: a training run of a job.

Everything that can be checked without torch is checked in one process first, before ranks start or
files are written.
"""

from __future__ import annotations

import shlex
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from moesaic.api.job import Job
from moesaic.api.launch import (
    EXIT_DOES_NOT_FIT,
    EXIT_INTERRUPTED,
    RunInterrupted,
    is_leader,
    is_torchrun,
    said_once,
)
from moesaic.api.prepared_run import PreparedRun
from moesaic.api.run import Run, failure_in
from moesaic.api.start import SAME_COMMAND, exit_on_interrupt, exit_on_sigterm, import_module
from moesaic.api.train_worker import resumed_run, stop_on_sigterm
from moesaic.base.errors import DivergedError, StoreError
from moesaic.base.events import RUN_LOG
from moesaic.base.units import format_bytes, format_clock, format_used_bytes, plural
from moesaic.cli import flags, screen
from moesaic.cli.flags import ClusterPath, Explain, JobPath, Json, PlanPath, Sets
from moesaic.facts.job import CtrJob
from moesaic.facts.job import Job as LanguageModelJob
from moesaic.facts.plan import Plan, describe_plan
from moesaic.facts.workload import count_parameters, job_parts
from moesaic.facts.workload.parameters import describe_trainable
from moesaic.train.out_checks import holds_checkpoint
from moesaic.train.resumed_job import job_name, run_of
from moesaic.train.stop_request import ENDED_BY_SIGTERM

Nproc = Annotated[
    int | None,
    typer.Option(
        "--nproc", metavar="N", show_default="as the layout needs, on all GPUs",
        help="To choose the number of ranks to start on this machine.",
    ),
]  # fmt: skip
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", show_default="runs/JOB-DATE-TIME",
        help="To name the directory of the run, which must be new, empty or resumed.",
    ),
]  # fmt: skip
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume", metavar="[auto|PATH]", show_default=False,
        help="To continue from the newest checkpoint of --out, or from the one at PATH. JOB.toml, "
        "--set, --nproc and --plan may be left out: the run keeps its own.",
    ),
]  # fmt: skip
Change = Annotated[
    bool,
    typer.Option(
        "--change", metavar="",
        help="With --resume: to take changes of schedule, batch, data and whatever else alters "
        "what the run learns.",
    ),
]  # fmt: skip
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", metavar="",
        help="To see first whether the job fits, its plan and the memory of a rank, after all "
        "checks of a start, those of the data included; nothing is written.",
    ),
]  # fmt: skip

Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", metavar="",
        help="To see kernels, balance, validations and each message; with --dry-run the resolved "
        "job.",
    ),
]  # fmt: skip

_STARTS_ANEW = SAME_COMMAND.removeprefix(ENDED_BY_SIGTERM)
_NOTHING_SAVED = ": nothing was saved, the same command starts anew"
_RESUMES = ": the same command resumes from the checkpoint"
"""Ends of the line about an interrupt or SIGTERM."""


def train(  # noqa: PLR0913 - a parameter for each flag
    job: JobPath = None,
    nproc: Nproc = None,
    plan: PlanPath = None,
    cluster: ClusterPath = None,
    resume: Resume = None,
    change: Change = False,
    sets: Sets = None,
    out: Out = None,
    dry_run: DryRun = False,
    verbose: Verbose = False,
    as_json: Json = False,
    explain: Explain = None,
) -> int | None:
    """Train a model by a job file."""
    if explain is not None:
        flags.print_job_explanation(explain, as_json, job)
        return 0
    if resume is None:
        flags.require(job, "JOB.toml", "train")
    with said_once():
        run = resumed_run(None if out is None else str(out), resume)
    resumes = run is not None and (holds_checkpoint(run) or run_of(run) != run)
    again = f" before the first step{_RESUMES}" if resumes else _STARTS_ANEW
    with exit_on_sigterm(f"error: {ENDED_BY_SIGTERM}{again}"):
        with exit_on_interrupt(), said_once():
            prepared = Job.load(job, sets=sets or (), run=run, needs_data=True).prepare(
                out=out, nproc=nproc, resume=resume, change=change, plan=plan,
                output="stderr" if as_json else "stdout", is_started=not dry_run,
                cluster=None if cluster is None else flags.load_cluster(cluster),
            )  # fmt: skip
            warnings = prepared.warnings + ([] if dry_run else prepared.warn_of_memory())
        if dry_run:
            with exit_on_interrupt():
                name = str(job) if run is None or job is not None else job_name(run)
                fits = _print_dry_run(name, prepared, cluster, verbose=verbose, as_json=as_json)
        for warning in warnings if is_leader() else ():  # A dry run begins with its verdict.
            screen.print_warning(warning)
        if dry_run:
            return 0 if fits else EXIT_DOES_NOT_FIT
        shown = replace(prepared, task=replace(prepared.task, is_verbose=verbose))
        finished = _run(shown, as_json)
    if is_leader():
        _write_report(finished, as_json, verbose)
    return 0


def _run(prepared: PreparedRun, as_json: bool) -> Run:
    """Train and return the finished run."""
    with exit_on_interrupt():
        prepared.check_machine()
        import_module("moesaic.train.trainer")
        import_module(f"moesaic.train.{prepared.config.kind}")
        if prepared.is_spawned:
            import_module("torch.distributed.launcher.api")
    began_s = time.time()
    try:
        with stop_on_sigterm() as stop:
            return prepared.run(stop=stop)
    except (KeyboardInterrupt, RunInterrupted) as error:
        raise _with_next_step(error, prepared, as_json, began_s) from None
    except DivergedError:
        _write_page(prepared, as_json)
        raise


def _with_next_step(
    error: KeyboardInterrupt | RunInterrupted, prepared: PreparedRun, as_json: bool, began_s: float
) -> RunInterrupted:
    """Return the error with the command that resumes the run, or the way back if it diverged after
    `began_s`."""
    reason = str(error) or "interrupted"
    status = error.status if isinstance(error, RunInterrupted) else EXIT_INTERRUPTED
    out, failure = Path(prepared.task.out or ""), None
    if is_leader() and prepared.task.out and (out / RUN_LOG).is_file():
        with exit_on_interrupt(), suppress(StoreError):  # The end of the run counts more.
            failure = Run(out).failure_since(began_s)
    if failure is None or status == EXIT_DOES_NOT_FIT:
        text = f"{reason}{_go_on(reason, status, prepared, as_json)}"
    else:
        text = f"{reason}; {failure}"
    if isinstance(error, RunInterrupted):
        return RunInterrupted(text, error.status, is_saved=error.is_saved)
    return RunInterrupted(text, EXIT_INTERRUPTED)


def _go_on(reason: str, status: int, prepared: PreparedRun, as_json: bool) -> str:
    """Return how to go on, such as the command that resumes the run, as a clause."""
    task = prepared.task
    if task.out is None or not holds_checkpoint(Path(task.out)):
        if status == EXIT_DOES_NOT_FIT:
            return ""  # The remedy is in the reason.
        if task.resume is not None:
            return _RESUMES
        return _STARTS_ANEW if reason == ENDED_BY_SIGTERM else _NOTHING_SAVED
    words = ["moesaic", "train", *(["--json"] if as_json else []), "--out", task.out, "--resume"]
    again = shlex.join(words)
    if is_torchrun():
        again = f"the same command with {shlex.join(('--out', task.out))} --resume"
    if status == EXIT_DOES_NOT_FIT:
        return f"; to continue with the change: {again} --set KEY=VALUE"
    return f"; to continue: {again}"


def _write_page(prepared: PreparedRun, as_json: bool) -> None:
    """Write the report of a run that diverged in a step, and print where it is."""
    out = prepared.task.out
    if out is not None and is_leader() and (Path(out) / RUN_LOG).is_file():
        page = Run(Path(out)).report()
        if not as_json:
            screen.print_line(f"  report      {page}")


def _write_report(run: Run, as_json: bool, verbose: bool) -> None:
    """Write the report and print a summary of the run."""
    page, facts = run.report(), run.summary()
    if as_json:
        screen.print_json({**facts, "report": str(page)})
    else:
        _print_summary(run, facts, page, verbose)
    failure = failure_in(facts)
    if failure is not None:
        raise DivergedError(failure)


def _print_summary(run: Run, facts: dict[str, Any], page: Path, verbose: bool) -> None:
    is_frozen = run.job["kind"] == "lm" and run.job["distill"]["frozen"]
    screen.print_line(_headline(facts, is_frozen))
    if facts["prediction"] is not None:
        screen.print_line(f"  {facts['prediction']['text']}")
    for finding in facts["findings"] if verbose else ():
        if finding["kind"].startswith("replicas_"):
            screen.print_line(f"  {finding['title'][0].lower()}{finding['title'][1:]}")
    for name, figures in facts["students"].items():
        words = [
            f"{term.replace('_', ' ')} {figures[term]:.3f}"
            for term in ("loss", "validation_loss")
            if figures.get(term) is not None
        ]
        if words:  # A student that has left has none.
            screen.print_line(f"  student {name}: {', '.join(words)}")
    rows = {
        "run": run.directory, "checkpoint": facts["newest_checkpoint"], "report": page,
        "next": _next_command(run),
    }  # fmt: skip
    if facts["status"] == "diverged":
        del rows["next"]  # The error after the summary says what to do.
    for name, value in rows.items():
        screen.print_line(f"  {name:<11} {value}")


def _next_command(run: Run) -> str:
    """Return the command that uses what the run has trained."""
    directory = shlex.quote(str(run.directory))
    if run.job["kind"] == "ctr":
        data = "" if run.job["data"]["stream"] else " --data FILE"
        return f"moesaic predict {directory}{data}"
    if run.job["distill"]["frozen"]:
        name = run.job["student"][0]["name"]
        return f"moesaic convert {directory} --student {name} --out {name}"
    chat = " --chat" if run.job["data"]["format"] == "chat" else ""
    return f'moesaic generate {directory}{chat} --prompt "..."'


def _headline(facts: dict[str, Any], is_frozen: bool) -> str:
    first = facts["first_step"] or 1  # A run may go on from a checkpoint of another one.
    num_steps = facts["step"] - first + 1
    steps = plural(num_steps, "step")
    if first > 1:
        steps = f"step {first:,}" if num_steps == 1 else f"steps {first:,} to {facts['step']:,}"
    text = f"trained {steps} in {format_clock(facts['seconds'] or 0.0)}"
    if facts["resumes"]:
        text += f" over {facts['resumes'] + 1} starts"
    if facts["skipped"]:
        text += f", {facts['skipped']:,} of {num_steps:,} steps skipped because fp16 overflowed"
    if facts["loss"] is not None:
        change = f"{facts['first_loss']:.3f} -> {facts['loss']:.3f}"
        text += f": loss {change}" if not is_frozen else ", students alone: the teacher is frozen"
    if facts["validation_loss"] is not None and not is_frozen:
        text += f", validation loss {facts['validation_loss']:.3f}"
    if facts["credibility"] and facts["credibility"]["validation"]:
        found = facts["credibility"]["validation"]
        text += "".join(f", {one} {found[one]:.3f}" for one in ("auc", "accuracy") if one in found)
    if facts["tokens_per_s"] is not None:
        text += f", {facts['tokens_per_s']:,.0f} {facts['unit']}/s (median)"
    return text


def _print_dry_run(
    name: str, prepared: PreparedRun, cluster: str | None, *, verbose: bool, as_json: bool
) -> bool:
    """Print whether the ranks fit, the plan, the memory of a rank or of rows, and which data were
    read; with `verbose` the resolved job too. Return false if the ranks do not fit."""
    job = prepared.config
    data = prepared.check_data()
    if isinstance(job, CtrJob):
        facts, lines = _describe_recommender(job, prepared.plan)
    else:
        facts, lines = _describe_language_model(job, prepared.plan, cluster, not as_json)
    if as_json:
        screen.print_json(
            {
                "job": job.model_dump(mode="json", by_alias=True),
                "plan": prepared.plan.decisions(), **facts, "data": data,
                "warnings": prepared.warnings,
            }
        )  # fmt: skip
        return facts.get("fits") is not False
    from moesaic.cli.prediction import print_parts, print_verdict

    if "fits" in facts:
        print_verdict(facts)
    lines += [f"{'data' * (not index):<16} {line}" for index, line in enumerate(data)]
    for line in (*([f"# {name}, resolved\n", job.to_toml()] if verbose else ()), *lines):
        screen.print_line(line)
    print_parts(facts.get("parts", ()))
    return facts.get("fits") is not False


def _describe_recommender(job: CtrJob, plan: Plan) -> tuple[dict[str, Any], list[str]]:
    """Return the network's parameters and the bytes of a row, as facts and as lines."""
    facts = {"parameters": {"network": job.num_network_parameters}, "row_bytes": job.row_bytes}
    return facts, [
        f"parameters       {job.num_network_parameters:,} in the network",
        f"rows             {format_bytes(job.row_bytes)} each with optimizer state; ranks share "
        "them by key",
        f"plan             {describe_plan(plan)}",
    ]


def _describe_language_model(
    job: LanguageModelJob, plan: Plan, cluster: str | None, is_shown: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return the parameters and the memory of a rank, as facts and as lines; `is_shown` shows the
    progress of a search for a remedy."""
    from moesaic.api.memory_here import memory_here
    from moesaic.api.memory_replay import forecast
    from moesaic.base.host_memory import free_memory_bytes
    from moesaic.cli.prediction import describe_tiers

    counts = count_parameters(job.model)
    where = None if cluster is None else flags.load_cluster(cluster).facts
    rank, room = memory_here(job, plan, where, is_shown=is_shown)
    memory = rank.memory
    tiers = forecast(job, plan, free_memory_bytes() // plan.ranks)
    facts = {
        "parameters": {"total": counts.total, "active": counts.active},
        **room,
        "memory_tiers": tiers,
        "parts": [
            part.describe(part.memory()) for part in (job_parts(job, plan) if job.student else ())
        ],
    }
    share = f"{counts.active / counts.total:.0%}"
    used = format_used_bytes(memory.peak_bytes, room["usable_memory_bytes"])
    lines = [
        f"parameters       {counts.total:,} in total, {counts.active:,} active ({share})",
        *(describe_trainable(job) if job.finetune is not None else ()),
        f"plan             {describe_plan(plan)}",
        f"memory per rank  peak {used}, of which",
    ]
    by_kind = {kind: num_bytes for kind, num_bytes in memory.by_kind().items() if num_bytes}
    for kind, num_bytes in by_kind.items():
        name = kind.removesuffix("_bytes")
        remark = " (estimate)" if name in ("activations", "gathered", "working") else ""
        lines.append(f"  {name:<14} {format_bytes(num_bytes)}{remark}")
    if tiers is not None:
        step_s = None if plan.predictions is None else plan.predictions.step_s
        told = describe_tiers(tiers, step_s).items()
        lines += [f"{name:<16} {text}" for name, text in told]
    return facts, lines
