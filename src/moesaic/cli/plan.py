"""`moesaic plan`: predicted memory, time and price of a job on a cluster, without running it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesaic.api.cluster import Cluster
from moesaic.api.job import Job
from moesaic.base import keys
from moesaic.base.errors import ConfigError
from moesaic.base.units import parse_bytes
from moesaic.cli import flags, prediction, screen
from moesaic.cli.flags import ClusterPath, Explain, JobPath, Json, PlanPath, Sets
from moesaic.facts.workload import load_traced

if TYPE_CHECKING:
    from moesaic.facts.plan import Plan
    from moesaic.policy.cost.timeline import Timeline

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
        "--fit", metavar="model", show_default=False,
        help="For the largest model of this shape: vary its experts per layer.",
    ),
]  # fmt: skip
Ssd = Annotated[
    str | None,
    typer.Option(
        "--ssd", metavar="SIZE", show_default=False,
        help="For --fit: space on the drive of each host, such as 500GB.",
    ),
]  # fmt: skip
_MAX_TRACED_RANKS = 16


def plan(  # noqa: PLR0913 - a parameter for each flag
    job_path: JobPath = None,
    cluster_path: ClusterPath = None,
    nproc: Nproc = None,
    plan_path: PlanPath = None,
    workload: Workload = None,
    loads: LoadsRun = None,
    sets: Sets = None,
    out: Out = None,
    trace: Trace = None,
    fit: Fit = None,
    ssd: Ssd = None,
    as_json: Json = False,
    explain: Explain = None,
) -> int:
    """Predict memory, time, speed and price of a job on a cluster.

    Nothing is measured and no rank starts.
    """
    if explain is not None:
        flags.print_job_explanation(explain, as_json)
        return 0
    path = flags.require(job_path or workload, "JOB.toml", "plan")
    cluster = flags.load_cluster(cluster_path)
    if workload is not None:
        job_flags = {
            "JOB.toml": job_path, "--set": sets, "--plan": plan_path, "--loads": loads,
            "--out": out, "--trace": trace, "--fit": fit, "--ssd": ssd,
        }  # fmt: skip
        return _plan_workload(workload, cluster, nproc, as_json, job_flags)
    _check_outputs(out, trace)
    if fit is not None or ssd is not None:
        other_flags = {"--plan": plan_path, "--loads": loads, "--out": out, "--trace": trace}
        ssd_bytes = _check_fit(fit, ssd, other_flags)
        figures = Job.load(path, sets=sets or ()).largest_model(cluster, ssd_bytes, nproc=nproc)
        if as_json:
            screen.print_json(figures)
        else:
            prediction.print_largest_model(figures)
        return 0
    job = Job.load(path, sets=sets or ())
    planned = job.plan(cluster, nproc=nproc, plan=plan_path, loads=loads)
    for warning in planned.warnings:
        screen.print_warning(warning)
    written = {}
    if trace is not None:
        flags.write_new_file("--trace", trace, _perfetto_json(planned.timeline, planned.plan))
        written["timeline"] = f"{trace}, for ui.perfetto.dev"
    if out is not None:
        flags.write_new_file("--out", out, planned.plan.to_json())
        if planned.figures["fits"]:
            written["next"] = _train_command(path, out, sets or ())
    if as_json:
        screen.print_json(planned.figures)
    else:
        prediction.print_planned_job(planned.figures, written)
    return 0


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
        screen.print_json(figures)
    else:
        prediction.print_traced_model(figures)
    return 0


def _check_fit(fit: str | None, ssd: str | None, other_flags: Mapping[str, object]) -> int:
    """Return the bytes of `--ssd`; any of `other_flags` is an error."""
    if fit is None:
        raise ConfigError(f"--ssd {ssd} belongs to --fit model: add it, or remove --ssd")
    keys.check_choice("--fit", fit, ["model"])
    for flag, value in other_flags.items():
        if value:
            raise ConfigError(f"--fit model cannot be combined with {flag}: remove one")
    if ssd is None:
        raise ConfigError(
            "--ssd is missing: cluster files do not have the space of drives; give that of each "
            "host for --fit model, such as --ssd 500GB"
        )
    try:
        return parse_bytes(ssd)
    except ValueError as error:
        raise ConfigError(f"--ssd: {error}") from None


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
