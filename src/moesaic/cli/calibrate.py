"""`moesaic calibrate`: what runs teach of a cluster's figures, written into the cluster's file."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.table import Table

from moesaic.base.config import parse
from moesaic.base.errors import ClusterError, UserError
from moesaic.cli import flags, outlook, screen
from moesaic.cli.flags import DryRun, Json, Out
from moesaic.cli.plan import placed, unlike
from moesaic.facts.cluster import (
    Calibration,
    Cluster,
    cluster_of,
    device_models,
    with_calibration,
)
from moesaic.facts.cluster.calibration import LEAST, MOST
from moesaic.facts.job import Job
from moesaic.facts.plan import FIRST, Plan, check, misplaced, short

if TYPE_CHECKING:
    from moesaic.policy.cost.calibrate import Factors, Observed
    from moesaic.report import RunFacts

Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="RUN...", help="Runs whose plans were made for the cluster.", show_default=False
    ),
]
ClusterFile = Annotated[
    Path | None,
    typer.Option("--cluster", metavar="FILE", show_default=False, help="What they ran on."),
]
_WORTH_A_ROW = 0.005
"""Share of a step that is shown, of waiting for ranks that come late."""
_MARGIN = 0.005
"""By how much an error may grow that is still called no worse: half a point."""


def calibrate(
    runs: Runs = None,
    cluster: ClusterFile = None,
    out: Out = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> int:
    """Learn from runs by what factors predictions for a cluster are off.

    They become the last table of the cluster's own file, or of a copy, --out FILE, and predictions
    of later plans obey them. Earlier ones do not count, and are replaced: give all the runs that
    the factors should rest on.
    """
    if not runs:
        raise UserError("RUN is missing: moesaic calibrate RUN... --cluster FILE")
    if cluster is None:
        raise UserError("--cluster is missing: give the file that the runs were planned for")
    if out is not None:
        flags.check_new("--out", out, "cluster.toml")
    with flags.at_cluster(cluster) as where:
        learnt, facts = _learn([_taken(run, where, cluster) for run in _once(runs)], where)
    if as_json:
        writes = not (_worse(facts) or dry_run)
        screen.as_json({"out": str(out or cluster), "writes": writes, **facts})
    else:
        _show(facts)
    if _worse(facts):
        error = facts["error"]
        raise UserError(
            f"by factors of the other runs, runs are predicted worse ({error['by_others']:.1%} off "
            f"in the median) than by the cluster's own figures ({error['before']:.1%}), so that "
            "nothing is written: give more runs, or leave out those that other work on the machine "
            "disturbed"
        )
    if not dry_run:
        _write(cluster, out, where, learnt)
    if as_json:
        return 0
    screen.say(f"{'would write' if dry_run else 'wrote'} {out or cluster}")
    return 0


def _worse(facts: dict[str, Any]) -> bool:
    """Whether the factors do not stand the test by runs that they are not learnt from."""
    error = facts["error"]
    return bool(facts["runs_left_out"] and error["by_others"] > error["before"] + _MARGIN)


def _write(cluster: Path, out: Path | None, where: Cluster, learnt: Calibration) -> None:
    """Put what was learnt of `where` into its file, or into a copy."""
    text = cluster.read_bytes().decode("utf-8") if cluster.is_file() else None
    if text is None or cluster_of(text, str(cluster)) != where:
        raise UserError(
            f"--cluster '{cluster}' has changed meanwhile, or is no plain file: do this again with "
            "a file that stays as it is"
        )
    result = with_calibration(text, learnt, str(cluster))
    if out is None:
        flags.write("--cluster", cluster.resolve(), result)
    else:
        flags.write_new("--out", out, result)


def _learn(taken: Sequence[RunFacts], where: Cluster) -> tuple[Calibration, dict[str, Any]]:
    """What runs teach of the cluster's own figures, and what is to be said of it."""
    from moesaic.policy.cost.calibrate import KINDS, fit, left_out

    steps = [_observed(run, where) for run in taken]
    factors = np.array([short(one) for one in fit(steps)])
    models = {model for run in taken for model in device_models(where, _plan(run).ranks)}
    by = dict(zip(KINDS, factors.tolist(), strict=True))
    learnt = Calibration(runs=len(steps), devices=sorted(models), **by)
    others = left_out(steps) if len(steps) > 1 else [factors]
    return learnt, _findings(learnt, steps, factors, others)


def _once(runs: Sequence[Path]) -> Sequence[Path]:
    """The same runs; a copy of one has its log, which says when all of it happened."""
    seen: dict[bytes, Path] = {}
    for run in runs:
        log, known = run / "events" / "rank-0.jsonl", bytes(run.resolve())
        if log.is_file():
            with log.open("rb") as file:
                known = hashlib.file_digest(file, "sha256").digest()
        if known in seen:
            as_well = f", as '{seen[known]}' too" if seen[known] != run else ""
            raise UserError(f"RUN '{run}' is given twice{as_well}: once is enough")
        seen[known] = run
    return runs


def _taken(path: Path, where: Cluster, file: Path) -> RunFacts:
    """The run at `path`, if the cluster can learn from it."""
    from moesaic.report import RunFacts

    run = RunFacts.read(path)
    if run.prediction is None:
        lacks = "predictions in its plan" if not run.plan.get("predictions") else "measured step"
        raise UserError(
            f"RUN '{path}' has no {lacks}: plan it (moesaic plan --cluster FILE --out PLAN) and "
            "train it so (moesaic train --plan PLAN)"
        )
    name = run.prediction.predicted.cluster
    if name != where.name:
        raise UserError(
            f"RUN '{path}' was planned for cluster '{name}', and '{file}' describes "
            f"'{where.name}': give runs that were planned for that"
        )
    taken = int((run.steps.step > (run.parts[-1].step if run.parts else 0)).sum())
    if taken <= FIRST:
        since = ", since it was resumed" if len(run.parts) > 1 else ""
        raise UserError(
            f"RUN '{path}' has {taken} steps{since}, and the first {FIRST} of a start are slower "
            "than others: give a longer one"
        )
    plan = _plan(run)
    check(plan, _job(run), str(path))
    fault = None if run.loads is None else unlike(run.loads, _job(run).model)
    if fault is not None:
        raise UserError(f"RUN '{path}' {fault}: give a run as it was")
    try:
        found = placed(plan, where).places
    except ClusterError as error:
        raise UserError(
            f"RUN '{path}' had {plan.ranks} rank{'s'[: plan.ranks > 1]}, for which '{file}' has no "
            f"places ({error}): give the cluster as it was, or other runs"
        ) from None
    fault = misplaced(plan, found)
    if fault is not None:
        raise UserError(
            f"RUN '{path}' does not fit '{file}': {fault}; give the cluster as it was, or other "
            "runs"
        )
    return run


def _job(run: RunFacts) -> Job:
    return parse(Job, run.job, str(run.directory / "job.json"))


def _plan(run: RunFacts) -> Plan:
    return parse(Plan, run.plan, str(run.directory / "plan.json"))


def _observed(run: RunFacts, where: Cluster) -> Observed:
    """A step of `run` as predicted from the cluster's own figures and the loads it recorded."""
    from moesaic.policy.cost.calibrate import BARE
    from moesaic.sim.observe import observe

    assert run.prediction is not None
    measured_s = run.prediction.measured.step_s
    loads = None if run.loads is None else list(run.loads.recent)
    step = observe(str(run.directory), measured_s, _job(run), _plan(run), where, loads)
    predicted_s = step.predict_s(BARE)
    outlook.check(where.name, predicted_s)
    if not LEAST <= measured_s / predicted_s <= MOST:
        raise UserError(
            f"RUN '{run.directory}' took {outlook.time(measured_s)} a step where the cluster's "
            f"figures say {outlook.time(predicted_s)}, and no factor is beyond {LEAST} and "
            f"{MOST:g}: leave the run out if the machine was busy, or probe it anew"
        )
    return step


def _findings(
    learnt: Calibration, steps: Sequence[Observed], factors: Factors, others: Sequence[Factors]
) -> dict[str, Any]:
    """What was learnt, how much of it hangs on single runs, and what it is worth.

    `others` has for each step the factors that are tried on it.
    """
    from moesaic.policy.cost.calibrate import BARE, KINDS

    shares = np.mean([step.shares() for step in steps], axis=0)
    runs: list[dict[str, Any]] = [
        {
            "run": step.name, "measured_s": step.measured_s,
            "predicted_s": step.predict_s(BARE), "calibrated_s": step.predict_s(factors),
            "before": step.error(BARE), "after": step.error(factors), "by_others": step.error(by),
        }
        for step, by in zip(steps, others, strict=True)
    ]  # fmt: skip
    return {
        "calibration": learnt.model_dump(),
        "kinds": [
            {
                "kind": kind, "share": float(share), "factor": getattr(learnt, kind),
                "least": float(min(by[index] for by in others)),
                "most": float(max(by[index] for by in others)),
            }
            for index, (kind, share) in enumerate(zip(KINDS, shares, strict=True))
        ],
        "late": max(float(1.0 - shares.sum()), 0.0),
        "runs": runs,
        "error": {
            when: statistics.median(abs(one[when]) for one in runs)
            for when in ("before", "after", "by_others")
        },
        "runs_left_out": len(steps) > 1,
    }  # fmt: skip


def _show(facts: dict[str, Any]) -> None:
    apart, error = facts["runs_left_out"], facts["error"]
    kinds = _table("time of", "share of a step", "factor", "without one run")
    for one in facts["kinds"]:
        spread = f"{one['least']:.2f} to {one['most']:.2f}" if apart else "-"
        kinds.add_row(one["kind"], f"{one['share']:.0%}", f"{one['factor']:.2f}", spread)
    if facts["late"] >= _WORTH_A_ROW:
        kinds.add_row("ranks that come late", f"{facts['late']:.0%}", "-", "-")
    runs = _table("run", "measured", "predicted", "off by", "calibrated", "off by", "by the others")
    for one in facts["runs"]:
        times = [outlook.time(one[f"{name}_s"]) for name in ("measured", "predicted", "calibrated")]
        by_others = f"{one['by_others']:+.0%}" if apart else "-"
        shown = (f"{one['before']:+.0%}", times[2], f"{one['after']:+.0%}", by_others)
        runs.add_row(one["run"], *times[:2], *shown)
    screen.show(kinds)
    screen.say("")
    screen.show(runs)
    by = "those of all others"
    if not apart:
        by = "those learnt from it, which is no test; give several runs"
    screen.say(
        f"\nruns are off by {error['before']:.1%} by the cluster's own figures, and by "
        f"{error['by_others']:.1%} with factors, each run with {by}" + " (median)" * apart
    )


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        first = title == titles[0]
        table.add_column(title, justify="left" if first else "right", overflow="fold")
    return table
