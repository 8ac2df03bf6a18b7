"""`moesaic plan`: predicted memory, time and price of a job on a cluster, without running it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from moesaic.api.cluster import Cluster
from moesaic.api.launch import EXIT_DOES_NOT_FIT
from moesaic.api.plan_search import without_speeds
from moesaic.base.errors import ConfigError
from moesaic.cli import flags, prediction, screen, searched
from moesaic.cli.flags import ClusterPath, Explain, JobPath, Json, PlanPath, Sets
from moesaic.cli.questions import (
    Question,
    check_questions,
    choose_part,
    load_cluster_beside,
    print_block,
    print_compared,
    print_largest,
)
from moesaic.facts.plan.search import SearchMethod
from moesaic.facts.workload import load_traced

if TYPE_CHECKING:
    from moesaic.facts.plan import Plan
    from moesaic.policy.cost.timeline import Timeline
    from moesaic.policy.plan.predict import PlannedJob

Nproc = Annotated[
    int | None,
    typer.Option(
        "--nproc", metavar="N", min=1, show_default=False,
        help="For fewer ranks than the cluster has room for.",
    ),
]  # fmt: skip
Workload = Annotated[
    Path | None,
    typer.Option(
        "--workload", metavar="FILE", show_default=False,
        help="For a torch model instead of JOB.toml: a file of `moesaic trace`.",
    ),
]  # fmt: skip
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace", metavar="FILE", show_default=False,
        help="To see one step: write its timeline for ui.perfetto.dev.",
    ),
]  # fmt: skip
LoadsRun = Annotated[
    Path | None,
    typer.Option(
        "--loads", metavar="RUN", show_default=False,
        help="For uneven expert loads: those of the last steps of this run.",
    ),
]  # fmt: skip
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", show_default=False,
        help="To train by this plan: write it for `moesaic train --plan FILE`.",
    ),
]  # fmt: skip
Fit = Annotated[
    str | None,
    typer.Option(
        "--fit", metavar="[cluster|model]", show_default=False,
        help="cluster: the cheapest part of it on which the job fits. model: the largest model of "
        "this shape, by experts per layer.",
    ),
]  # fmt: skip
Ssd = Annotated[
    str | None,
    typer.Option(
        "--ssd", metavar="SIZE", show_default=False,
        help="For --fit model with \\[memory]: space on the drive of each host, such as 500GB.",
    ),
]  # fmt: skip
Search = Annotated[
    bool,
    typer.Option(
        "--search", metavar="",
        help="To find the fastest layout that fits; keys of \\[layout] that the job writes stay.",
    ),
]  # fmt: skip
Method = Annotated[
    str | None,
    typer.Option(
        "--method", metavar="NAME", show_default="best-first",
        help=f"For --search by another method: {', '.join(get_args(SearchMethod)[1:])}.",
    ),
]  # fmt: skip
MinCost = Annotated[
    bool,
    typer.Option(
        "--min-cost", metavar="",
        help="To pay least per token: search parts of the cluster too.",
    ),
]  # fmt: skip
Floor = Annotated[
    float | None,
    typer.Option(
        "--floor", metavar="TOKENS_PER_S", show_default=False,
        help="For --min-cost: tokens a second to reach at least.",
    ),
]  # fmt: skip
Why = Annotated[
    str | None,
    typer.Option(
        "--why", metavar="BLOCK", show_default=False,
        help="To see where a block is, such as layers.0.moe, and what its time comes from.",
    ),
]  # fmt: skip
Compare = Annotated[
    tuple[str, str] | None,
    typer.Option(
        "--compare", metavar="A B", show_default=False,
        help='To see two plans side by side: files, or layouts such as "ep=8,dp_shard=all".',
    ),
]  # fmt: skip
_MAX_TRACED_RANKS = 16


def plan(  # noqa: PLR0913 - a parameter for each flag
    job_path: JobPath = None,
    cluster_path: ClusterPath = None,
    search: Search = False,
    nproc: Nproc = None,
    plan_path: PlanPath = None,
    why: Why = None,
    compare: Compare = None,
    method: Method = None,
    min_cost: MinCost = False,
    floor: Floor = None,
    fit: Fit = None,
    ssd: Ssd = None,
    workload: Workload = None,
    loads: LoadsRun = None,
    sets: Sets = None,
    out: Out = None,
    trace: Trace = None,
    as_json: Json = False,
    explain: Explain = None,
) -> int:
    """Predict memory, time, speed and price of a job on a cluster, or search for its best layout.

    Nothing is measured and no rank starts. The job needs no table \\[data] and no
    train.steps. The exit status is 3 if it does not fit.
    """
    if explain is not None:
        flags.print_job_explanation(explain, as_json)
        return 0
    path = flags.require(job_path or workload, "JOB.toml", "plan")
    if workload is None:
        cluster = load_cluster_beside(cluster_path, path, sets or ())
    else:
        cluster = flags.load_cluster(cluster_path)
    given = {
        "--search": search, "--why": why, "--compare": compare, "--min-cost": min_cost,
        "--fit": fit, "--plan": plan_path, "--loads": loads, "--out": out, "--trace": trace,
        "--method": method, "--floor": floor, "--ssd": ssd,
    }  # fmt: skip
    if workload is not None:
        job_flags = {"JOB.toml": job_path, "--set": sets, **given}
        return _plan_workload(workload, cluster, nproc, as_json, job_flags)
    check_questions({**given, "--nproc": nproc})
    _check_outputs(out, trace)
    question = Question(path, cluster, nproc, loads, method, tuple(sets or ()), as_json)
    if fit == "model":
        return print_largest(question, ssd)
    if compare is not None:
        return print_compared(question, compare)
    ranks = None
    if fit == "cluster" or min_cost:
        planned, status = choose_part(question, (floor or 0.0) if min_cost else None)
    else:
        planned, status = question.predict(plan_path, search=search)
        if nproc is None and plan_path is None:
            ranks = _describe_ranks(planned.plan.ranks, cluster)
    _print(planned, question, why, (out, trace), ranks)
    return status


def _describe_ranks(ranks: int, cluster: Cluster) -> str | None:
    """Return where the number of ranks comes from, if it is more than one and all that there is
    room for."""
    from moesaic.policy.plan.mapping import max_ranks

    takes_all = 1 < ranks == max_ranks(cluster.facts)
    return f"{ranks}, one a device of the cluster; --nproc N for fewer" if takes_all else None


def _print(
    planned: PlannedJob,
    question: Question,
    why: str | None,
    files: tuple[Path | None, Path | None],
    ranks: str | None,
) -> None:
    """Print the prediction, or the reasons for one block, then warnings; write the `files` of
    `--out` and `--trace`. `ranks` says where their number comes from."""
    from moesaic.policy.plan.predict import DOES_NOT_FIT

    if why is not None:
        print_block(planned, why, question.as_json)
    else:
        _print_prediction(planned, question, files, ranks)
    for warning in planned.warnings:
        if question.as_json or why is not None or not warning.startswith(DOES_NOT_FIT):
            screen.print_warning(warning)


def _print_prediction(
    planned: PlannedJob,
    question: Question,
    files: tuple[Path | None, Path | None],
    ranks: str | None,
) -> None:
    written = _write(planned, question, *files)
    if question.as_json:
        screen.print_json(without_speeds(planned.figures))
    elif planned.found is not None:
        searched.print_searched_job(planned, written, ranks)
    else:
        prediction.print_planned_job(planned, written, ranks)


def _write(
    planned: PlannedJob, question: Question, out: Path | None, trace: Path | None
) -> dict[str, str]:
    """Write the plan and the timeline; return rows about them."""
    written = {}
    if trace is not None:
        flags.write_new_file("--trace", trace, _perfetto_json(planned.timeline, planned.plan))
        written["timeline"] = f"{trace}, for ui.perfetto.dev"
    if out is not None:
        flags.write_new_file("--out", out, planned.plan.to_json())
        if planned.figures["fits"]:
            written["next"] = _train_command(question.path, out, question.sets)
    return written


def _plan_workload(
    path: Path, cluster: Cluster, nproc: int | None, as_json: bool, job_flags: Mapping[str, object]
) -> int:
    """Print the prediction for a traced model; any of `job_flags` is an error."""
    for flag, value in job_flags.items():
        if value:
            raise ConfigError(
                f"--workload {path} cannot be combined with {flag}, which is for jobs: remove one"
            )
    from moesaic.policy.plan.predict import predict_traced

    with cluster.named_in_errors():
        figures = predict_traced(load_traced(path), cluster.facts, nproc)
    if as_json:
        screen.print_json(without_speeds(figures))
    else:
        prediction.print_traced_model(figures)
    return 0 if figures["fits"] else EXIT_DOES_NOT_FIT


def _check_outputs(out: Path | None, trace: Path | None) -> None:
    """Refuse output files that exist or cannot be written."""
    if out is not None:
        flags.check_new_file("--out", out, "plan.json")
    if trace is not None:
        flags.check_new_file("--trace", trace, "step.json")
    if out is not None and trace is not None and out.resolve() == trace.resolve():
        raise ConfigError(f"--out and --trace are both '{out}': name two files")


def _train_command(job: Path, out: Path, sets: Sequence[str]) -> str:
    """Return the train command; the plan replaces settings of the layout."""
    kept = [item for item in sets if not item.startswith("layout.")]
    set_flags = [word for item in kept for word in ("--set", item)]
    return shlex.join(["moesaic", "train", str(job), *set_flags, "--plan", str(out)])


def _perfetto_json(timeline: Timeline, plan: Plan) -> str:
    """Return the trace of the first ranks; all pipeline ranks of the same micro-batches come
    together."""
    from moesaic.sim.perfetto import perfetto_trace

    ranks = [rank for group in plan.pp_groups() for rank in group]
    return screen.dumps(perfetto_trace(timeline, sorted(ranks[:_MAX_TRACED_RANKS]))) + "\n"
