"""`moesaic train`: a job file in, a run directory out.

Everything that can be checked without the engine is checked here first, in one process, before a
rank starts or anything is written.
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
from moesaic.cli import flags, screen
from moesaic.cli.flags import DryRun, Explain, Json, Out, Sets
from moesaic.cli.launch import (
    INTERRUPTED,
    CutOff,
    Nproc,
    RankFailed,
    launch,
    launched,
    leads,
    num_ranks,
    tell_bug,
)
from moesaic.cli.progress import duration
from moesaic.cli.rank import Part, default_out, encode, take_part
from moesaic.cli.start import at_once
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, idle_words, in_words, planned
from moesaic.facts.workload import count
from moesaic.facts.workload.finetune import describe as describe_learnt
from moesaic.train.jobfile import LoadedJob, check_inputs, load_job, obey, refuse_run

if TYPE_CHECKING:
    from moesaic.report import RunFacts

JobFile = Annotated[
    Path | None, typer.Argument(metavar="JOB.toml", help="The job.", show_default=False)
]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume", metavar="[auto|PATH]", show_default=False,
        help="Go on from the newest checkpoint of --out, or from the one at PATH.",
    ),
]  # fmt: skip

PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--plan", metavar="FILE", show_default=False,
        help="Obey a plan that `moesaic plan --out` wrote, and start its ranks.",
    ),
]  # fmt: skip


def train(  # noqa: PLR0913 - a parameter for each flag
    job: JobFile = None,
    nproc: Nproc = None,
    plan: PlanFile = None,
    resume: Resume = None,
    sets: Sets = None,
    out: Out = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    explain: Explain = None,
) -> int | None:
    """Train a model as JOB.toml says."""
    if explain is not None:
        flags.explain_job(flags.JobAndPlan, explain, as_json)
        return 0
    path = flags.need(job, "JOB.toml", "train")
    chosen, resume = _find_place(path, out, resume)
    place, by = (str(one) if one else None for one in (chosen, plan))
    part = Part(str(path), list(sets or ()), place, resume, as_json, sys.argv, by)
    loaded = load_job(path, part.sets, part.goes_on_with)
    if plan is not None:
        loaded = obey(loaded, plan, sets or ())
    ranks = _count_ranks(loaded, nproc, dry_run=dry_run)
    ruling = loaded.plan or planned(loaded.job, ranks)
    check_inputs(loaded.job, str(path))
    warnings = _warnings(loaded, ruling, fresh=resume is None)
    if leads():
        for warning in warnings:
            screen.warn(warning)
    if dry_run:
        _tell(path, loaded, ruling, warnings, as_json)
        return 0
    _check_machine(loaded.job, 1 if launched() else ranks)
    return _run(part, 1 if launched() else ranks)


def _count_ranks(loaded: LoadedJob, nproc: int | None, *, dry_run: bool) -> int:
    """How many ranks there will be, are, or would be: as many as the plan has, if there is one."""
    asked, plan, origin = num_ranks(nproc), loaded.plan, loaded.plan_origin
    if plan is None:
        return asked or 1
    if asked not in (None, plan.ranks):
        there = f"torchrun started {asked}" if launched() else f"--nproc {asked}"
        many = f"{plan.ranks} rank" + "s" * (plan.ranks > 1)
        raise ConfigError(
            f"{origin} is for {many}, and {there}: start {plan.ranks}, or plan anew "
            f"for {asked} (moesaic plan --nproc {asked})"
        )
    hosts = len({place.host for place in plan.places})
    if hosts > 1 and not launched() and not dry_run:
        raise ConfigError(
            f"{origin} has its ranks on {hosts} hosts: start them on all of them with torchrun, "
            "or plan anew for one host"
        )
    return plan.ranks


def _find_place(job: Path, out: Path | None, resume: str | None) -> tuple[Path | None, str | None]:
    """The run's directory and the checkpoint to go on from, both as the engine takes them."""
    if resume is None:
        if out is not None and leads():
            refuse_run(out)
        return (out or (None if launched() else default_out(job))), None
    if resume == "auto":
        if out is None:
            raise UserError("--resume needs --out RUN, the run to go on with")
        if not _holds_checkpoint(out):
            raise UserError(
                f"--resume: '{out}' holds no checkpoint to go on from: start without --resume, "
                "or give another --out"
            )
        return out, "auto"
    return _find_checkpoint(Path(resume), out)


def _find_checkpoint(path: Path, out: Path | None) -> tuple[Path, str]:
    if _holds_checkpoint(path) and out in (None, path):
        return path, "auto"
    if not (path / "COMMIT").is_file():
        raise UserError(
            f"--resume '{path}' is no checkpoint: give a directory such as "
            "RUN/checkpoints/step-00000100, or auto"
        )
    run = path.absolute().parent.parent
    holder = run if (run / "job.json").is_file() else None
    if out is None:
        if holder is None:
            raise UserError(f"--resume '{path}' belongs to no run: say with --out where to go on")
        return holder, str(path)
    if holder is None or out.resolve() != holder.resolve():
        refuse_run(out)
    return out, str(path)


def _holds_checkpoint(run: Path) -> bool:
    return any((run / "checkpoints").glob("step-*/COMMIT"))


def _warnings(loaded: LoadedJob, plan: Plan, *, fresh: bool) -> list[str]:
    """What a person should know before ranks start; only a `fresh` run takes weights that the job
    starts from."""
    idle, alone = idle_words(plan, loaded.job), plan.ranks // plan.pp == 1
    found = [*loaded.warnings, *([] if idle is None else [idle])]
    if loaded.job.layout.embedding == "columns" and alone:
        found.append("layout.embedding has no effect: nobody shares the table with another rank")
    return [*found, *_check_weights(loaded.job)] if fresh else found


def _check_weights(job: Job) -> list[str]:
    """Hold the headers of the weights that the job starts from against its model; returns what of
    them is left out."""
    if job.source is None:
        return []
    with at_once():
        from moesaic.models.hf.reader import HFSource

    with HFSource(Path(job.source), job.model) as weights:
        return weights.notes


def _check_machine(job: Job, ranks: int) -> None:
    """What needs torch or a look into the data: still nothing is written."""
    with at_once():
        from moesaic.dist import device
        from moesaic.train.data import check_text

    device.resolve(job.train.device, ranks - 1)
    check_text(job.data)


def _run(part: Part, ranks: int) -> int:
    out = Path(part.out) if part.out else None
    try:
        if ranks > 1:
            launch("moesaic.cli.rank", encode(part), ranks)
        else:
            with _tidy_end():
                out, speaks = take_part(part)
            if not speaks:
                return 0
    except RankFailed as error:
        return tell_bug(error)
    except KeyboardInterrupt:
        raise _cut_off(CutOff("interrupted", INTERRUPTED), part, ranks) from None
    except CutOff as error:
        raise _cut_off(error, part, ranks) from None
    assert out is not None
    _close(out, part.as_json)
    return 0


@contextmanager
def _tidy_end() -> Iterator[None]:
    """Let SIGTERM end this process by way of every `finally`."""

    def end(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise CutOff("ended by SIGTERM")

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _cut_off(error: CutOff, part: Part, ranks: int) -> CutOff:
    """Note in the run's log how it ended, and say how it goes on."""
    from moesaic.train.directory import note_end

    if part.out and leads():
        note_end(Path(part.out), str(error))
    return CutOff(f"{error}{_how_to_go_on(part, ranks)}", error.status)


def _how_to_go_on(part: Part, ranks: int) -> str:
    """The command that goes on from the newest checkpoint, if there is one."""
    if part.out is None or not _holds_checkpoint(Path(part.out)):
        return ""
    if launched():
        return f"; to go on: the same command with {shlex.join(('--out', part.out))} --resume"
    words = ["moesaic", "train", part.job]
    if part.plan is not None:
        words += ["--plan", part.plan]
    elif ranks > 1:
        words += ["--nproc", str(ranks)]
    words += [word for item in part.sets for word in ("--set", item)]
    words += ["--json"] if part.as_json else []
    return f"; to go on: {shlex.join([*words, '--out', part.out, '--resume'])}"


def _close(out: Path, as_json: bool) -> None:
    """Write the report and tell what came of the run."""
    from moesaic.report import RunFacts, summary, write_report

    page = out / "report.html"
    write_report([out], page)
    run = RunFacts.read(out)
    facts = summary(run)
    if as_json:
        screen.as_json({**facts, "report": str(page)})
    else:
        _say(out, run, facts, page)
    if facts["skipped"] and facts["skipped"] == facts["step"]:
        raise DivergedError(
            f"all {facts['step']:,} steps were skipped for an overflow of fp16, and nothing was "
            f"learnt: the loss scale, {run.steps.loss_scale[-1]:g} in the last one, halves with "
            "each, so raise train.steps and go on with --resume, or start again with "
            'train.precision = "bf16" or "fp32"'
        )


def _say(out: Path, run: RunFacts, facts: dict[str, Any], page: Path) -> None:
    """What came of the run, for a person."""
    screen.say(_headline(facts))
    chat = " --chat" if run.setting("data.format") == "chat" else ""
    prompt = f'moesaic generate {shlex.quote(str(out))}{chat} --prompt "..."'
    if facts["prediction"] is not None:
        ratio = facts["prediction"]["step_ratio"]
        screen.say(
            f"  a step took {ratio:.2f} times what the plan predicted, in the median without the "
            "first three"
        )
    copies = (facts["balance"] or {}).get("verdict")
    if copies is not None and copies["kind"] != "no_copies":
        screen.say(f"  {copies['title'][0].lower()}{copies['title'][1:]}")
    rows = {"run": out, "checkpoint": facts["newest_checkpoint"], "report": page, "next": prompt}
    for name, value in rows.items():
        screen.say(f"  {name:<11} {value}")


def _headline(facts: dict[str, Any]) -> str:
    text = f"trained {facts['step']:,} steps in {duration(facts['seconds'] or 0.0)}"
    if facts["skipped"]:
        text += f", {facts['skipped']:,} of {facts['step']:,} steps skipped for an overflow of fp16"
    if facts["loss"] is not None:
        text += f": loss {facts['first_loss']:.3f} -> {facts['loss']:.3f}"
    if facts["validation_loss"] is not None:
        text += f", validation loss {facts['validation_loss']:.3f}"
    if facts["tokens_per_s"] is not None:
        text += f", {facts['tokens_per_s']:,.0f} tokens/s in the median"
    return text


def _tell(path: Path, loaded: LoadedJob, plan: Plan, warnings: list[str], as_json: bool) -> None:
    """What a run of the job would be."""
    from moesaic.policy.cost.room import fullest

    counts = count(loaded.job.model)
    needs = fullest(loaded.job, plan)[1]
    if as_json:
        held = {
            **needs.by_kind(),
            "total_bytes": needs.total_bytes,
            "peak_bytes": needs.peak_bytes,
        }
        screen.as_json(
            {
                "job": loaded.job.model_dump(mode="json", by_alias=True),
                "plan": plan.decisions(),
                "parameters": {"total": counts.total, "active": counts.active},
                "memory_per_rank": held,
                "warnings": warnings,
            }
        )
        return
    screen.say(f"# {path}, resolved\n")
    screen.say(loaded.job.to_toml())
    share = f"{counts.active / counts.total:.0%}"
    screen.say(f"parameters       {counts.total:,} in all, {counts.active:,} active ({share})")
    for line in describe_learnt(loaded.job) if loaded.job.finetune is not None else ():
        screen.say(line)
    screen.say(f"plan             {in_words(plan)}")
    peak, total = screen.size(needs.peak_bytes), screen.size(needs.total_bytes)
    screen.say(f"memory per rank  {peak} at one time; {total} in all, of which")
    for kind, num_bytes in needs.by_kind().items():
        name = kind.removesuffix("_bytes")
        about = " (estimate)" if name in ("activations", "head", "gathered", "working") else ""
        screen.say(f"  {name:<14} {screen.size(num_bytes)}{about}")
