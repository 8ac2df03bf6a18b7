"""`moesaic calibrate`: what runs teach of a cluster's figures, written into the cluster's file."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.table import Table

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError, UserError
from moesaic.cli import flags, outlook, screen
from moesaic.cli.flags import DryRun, Json, Out
from moesaic.facts.cluster import (
    Calibration,
    Cluster,
    device_at,
    load_cluster,
    place,
    with_calibration,
)  # fmt: skip
from moesaic.facts.cluster.calibration import LEAST, MOST
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, short

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
_SMALL = 1e-3
"""By how much a factor is moved, to see how the step follows."""


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
    where = load_cluster(cluster)
    if out is not None:
        flags.check_new("--out", out, "cluster.toml")
    from moesaic.policy.cost.calibrate import KINDS, fit, left_out

    taken = [_taken(run, where, cluster) for run in _once(runs)]
    bare = where.model_copy(update={"calibration": None})
    steps = [_observed(run, bare) for run in taken]
    factors = dict(zip(KINDS, (short(one) for one in fit(steps)), strict=True))
    models = sorted({model for run in taken for model in _models(run, bare)})
    learnt = Calibration(runs=len(steps), devices=models, **factors)
    others = left_out(steps) if len(steps) > 1 else [fit(steps)]
    text = with_calibration(cluster.read_bytes().decode("utf-8"), learnt, str(cluster))
    if not dry_run:
        if out is None:
            flags.write("--cluster", cluster.resolve(), text)
        else:
            flags.write_new("--out", out, text)
    facts = _findings(learnt, steps, others)
    if as_json:
        screen.as_json({"out": str(out or cluster), **facts})
        return 0
    _show(facts)
    screen.say(f"{'would write' if dry_run else 'wrote'} {out or cluster}")
    return 0


def _once(runs: Sequence[Path]) -> Sequence[Path]:
    seen: set[Path] = set()
    for run in runs:
        if run.resolve() in seen:
            raise UserError(f"RUN '{run}' is given twice: once is enough")
        seen.add(run.resolve())
    return runs


def _taken(path: Path, where: Cluster, file: Path) -> RunFacts:
    """The run at `path`, if the cluster can learn from it."""
    from moesaic.report import RunFacts

    run = RunFacts.read(path)
    if run.prediction is None:
        raise UserError(
            f"RUN '{path}' has no predictions, or no step that was measured: plan it "
            "(moesaic plan --cluster FILE --out PLAN) and train it so (moesaic train --plan PLAN)"
        )
    name = run.prediction.predicted.cluster
    if name != where.name:
        raise UserError(
            f"RUN '{path}' was planned for cluster '{name}', and '{file}' describes "
            f"'{where.name}': give runs that were planned for that"
        )
    plan = _plan(run)
    try:
        models = _models(run, where)
    except ConfigError:
        raise UserError(
            f"RUN '{path}' had {plan.ranks} rank{'s'[: plan.ranks > 1]}, for which '{file}' has no "
            "places: give the cluster as it was, or other runs"
        ) from None
    for rank, one in enumerate(plan.places):
        if one.device != models[rank]:
            raise UserError(
                f"RUN '{path}' had rank {rank} on a '{one.device}', and '{file}' has a "
                f"'{models[rank]}' there: give the cluster as it was, or other runs"
            )
    return run


def _plan(run: RunFacts) -> Plan:
    return parse(Plan, run.plan, str(run.directory / "plan.json"))


def _models(run: RunFacts, where: Cluster) -> list[str]:
    """By rank, the model of its device."""
    return [device_at(where, one).model for one in place(where, _plan(run).ranks)]


def _observed(run: RunFacts, bare: Cluster) -> Observed:
    """A step of `run` as predicted from `bare` figures and from the loads that it recorded."""
    from moesaic.policy.cost.calibrate import KINDS, Observed
    from moesaic.policy.cost.step import Costs
    from moesaic.sim.timeline import run as simulate

    assert run.prediction is not None
    job, plan = parse(Job, run.job, str(run.directory / "job.json")), _plan(run)
    loads = None if run.loads is None else list(run.loads.recent)
    models, even = _models(run, bare), dict.fromkeys(KINDS, 1.0)

    def step_s(**factors: float) -> float:
        tried = Calibration(runs=1, devices=models, **{**even, **factors})
        cluster = bare.model_copy(update={"calibration": tried})
        return simulate(Costs.of(job, plan, cluster, loads).events(), plan.ranks).step_s

    whole_s, measured_s = step_s(), run.prediction.measured.step_s
    if not LEAST <= measured_s / whole_s <= MOST:
        raise UserError(
            f"RUN '{run.directory}' took {outlook.time(measured_s)} a step where the cluster's "
            f"figures say {outlook.time(whole_s)}, and those are not so far off: leave the run out "
            "if the machine was busy, or probe it anew"
        )
    parts = [(step_s(**{kind: 1 + _SMALL}) - whole_s) / _SMALL for kind in KINDS]
    return Observed(str(run.directory), np.array(parts), measured_s)


def _findings(
    learnt: Calibration, steps: Sequence[Observed], others: Sequence[Factors]
) -> dict[str, Any]:
    """What was learnt, how much of it hangs on single runs, and what it is worth.

    `others` has for each step the factors that are tried on it.
    """
    from moesaic.policy.cost.calibrate import KINDS

    shares = [step.predicted_s / step.predicted_s.sum() for step in steps]
    runs: list[dict[str, Any]] = [
        {
            "run": step.name, "measured_s": step.measured_s,
            "predicted_s": float(step.predicted_s.sum()),
            "before": step.error(np.ones(len(KINDS))), "after": step.error(factors),
        }
        for step, factors in zip(steps, others, strict=True)
    ]  # fmt: skip
    return {
        "calibration": learnt.model_dump(),
        "kinds": [
            {
                "kind": kind, "share": float(np.mean([one[index] for one in shares])),
                "factor": getattr(learnt, kind),
                "least": min(one[index] for one in others),
                "most": max(one[index] for one in others),
            }
            for index, kind in enumerate(KINDS)
        ],
        "runs": runs,
        "error": {
            when: statistics.median(abs(one[when]) for one in runs) for when in ("before", "after")
        },
        "runs_left_out": len(steps) > 1,
    }  # fmt: skip


def _show(facts: dict[str, Any]) -> None:
    apart, error = facts["runs_left_out"], facts["error"]
    kinds = _table("time of", "share of a step", "factor", "without one run")
    for one in facts["kinds"]:
        spread = f"{one['least']:.2f} to {one['most']:.2f}" if apart else "-"
        kinds.add_row(one["kind"], f"{one['share']:.0%}", f"{one['factor']:.2f}", spread)
    runs = _table("run", "measured", "predicted", "off by", "calibrated")
    for one in facts["runs"]:
        times = (outlook.time(one["measured_s"]), outlook.time(one["predicted_s"]))
        runs.add_row(one["run"], *times, f"{one['before']:+.0%}", f"{one['after']:+.0%}")
    screen.show(kinds)
    screen.say("")
    screen.show(runs)
    tried = "each run from the others" if apart else "on the run that it is learnt from, so no test"
    screen.say(
        f"\npredictions of a step were off by {error['before']:.1%}, calibrated they are by "
        f"{error['after']:.1%} (median; {tried})"
    )


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        first = title == titles[0]
        table.add_column(title, justify="left" if first else "right", overflow="fold")
    return table
