"""`moesaic calibrate`: factors that correct predictions, fitted to runs of a cluster."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from moesaic.api.loads import find_loads_mismatch
from moesaic.base.config import parse
from moesaic.base.errors import ClusterError, ConfigError
from moesaic.base.units import format_seconds
from moesaic.cli import flags, screen
from moesaic.cli.flags import ClusterPath, DryRun, Json, Out
from moesaic.facts.cluster import (
    Calibration,
    Cluster,
    device_models,
    parse_cluster,
    replace_calibration,
)
from moesaic.facts.cluster.calibration import MAX_FACTOR, MIN_FACTOR
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, check_plan, placement_mismatch, round_digits

if TYPE_CHECKING:
    from moesaic.policy.cost.calibrate import Factors, Observation
    from moesaic.report import RunStats

Runs = Annotated[
    list[Path] | None,
    typer.Argument(metavar="RUN...", help="Runs with plans for the cluster.", show_default=False),
]
_MIN_SHOWN_SHARE = 0.005
"""Least share of waiting for stragglers that is shown."""
_ERROR_MARGIN = 0.005
"""Growth of an error that still counts as no worse: half a percentage point."""


def calibrate(
    runs: Runs = None,
    cluster_path: ClusterPath = None,
    out: Out = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> int:
    """Fit factors to runs that correct predictions for a cluster.

    The factors become the last table of the cluster file, or of a copy, --out FILE. Later plans for
    the cluster use them. They replace earlier factors, so give all runs at once.
    """
    if not runs:
        raise ConfigError("RUN is missing: moesaic calibrate RUN... --cluster FILE")
    if cluster_path is None:
        raise ConfigError(
            "--cluster is missing: give the cluster file that the runs were planned for"
        )
    if out is not None:
        flags.check_new_file("--out", out, "cluster.toml")
    opened = flags.load_cluster(cluster_path)
    cluster = opened.facts
    with opened.named_in_errors():
        calibration, facts = _fit_factors(
            [_read_run(run, cluster, cluster_path) for run in _check_unique(runs)], cluster
        )
    if as_json:
        writes = not (_is_worse(facts) or dry_run)
        screen.print_json({"out": str(out or cluster_path), "writes": writes, **facts})
    else:
        _print_facts(facts)
    if _is_worse(facts):
        error = facts["error"]
        raise ConfigError(
            f"the factors make predictions of held-out runs worse (median error "
            f"{error['held_out']:.1%}, {error['uncalibrated']:.1%} without them), so nothing is "
            "written: give more runs, or leave out runs that other work on the machine disturbed"
        )
    if not dry_run:
        _write(cluster_path, out, cluster, calibration)
    if as_json:
        return 0
    screen.print_line(f"{'would write' if dry_run else 'wrote'} {out or cluster_path}")
    return 0


def _is_worse(facts: dict[str, Any]) -> bool:
    """Return whether the factors fail on runs that they were not fitted to."""
    error = facts["error"]
    limit = error["uncalibrated"] + _ERROR_MARGIN
    return bool(facts["leave_one_out"] and error["held_out"] > limit)


def _write(path: Path, out: Path | None, cluster: Cluster, calibration: Calibration) -> None:
    """Put the calibration into the cluster's file, or into a copy of it."""
    text = path.read_text(encoding="utf-8-sig") if path.is_file() else None
    if text is None or parse_cluster(text, str(path)) != cluster:
        raise ConfigError(
            f"--cluster '{path}' has changed meanwhile, or is not a plain file: try again with a "
            "plain file that stays as it is"
        )
    result = replace_calibration(text, calibration, str(path))
    if out is None:
        flags.write_file("--cluster", path.resolve(), result)
    else:
        flags.write_new_file("--out", out, result)


def _fit_factors(runs: Sequence[RunStats], cluster: Cluster) -> tuple[Calibration, dict[str, Any]]:
    """Return the factors that fit `runs`, and a summary as plain data."""
    from moesaic.policy.cost.calibrate import KINDS, fit_factors, fit_leave_one_out

    steps = [_observe_run(run, cluster) for run in runs]
    factors = np.array([round_digits(factor) for factor in fit_factors(steps)])
    models = {model for run in runs for model in device_models(cluster, _plan(run).ranks)}
    by_kind = dict(zip(KINDS, factors.tolist(), strict=True))
    calibration = Calibration(runs=len(steps), devices=sorted(models), **by_kind)
    held_out_factors = fit_leave_one_out(steps) if len(steps) > 1 else [factors]
    return calibration, _summarize(calibration, steps, factors, held_out_factors)


def _check_unique(runs: Sequence[Path]) -> Sequence[Path]:
    """Return `runs`; raise ConfigError if one is given twice."""
    places = [run.resolve() for run in runs]
    for run, place in zip(runs, places, strict=True):
        if places.count(place) > 1:
            raise ConfigError(f"RUN '{run}' is given twice: give it once")
    return runs


def _read_run(path: Path, cluster: Cluster, cluster_path: Path) -> RunStats:
    """Return the run at `path`; raise ConfigError if the factors cannot be fitted to it."""
    from moesaic.policy.plan.mapping import assign_places
    from moesaic.report import RunStats
    from moesaic.report.prediction import WARMUP_STEPS

    run = RunStats.read(path)
    if run.prediction is None:
        missing = "predictions in its plan" if not run.plan.get("predictions") else "measured step"
        raise ConfigError(
            f"RUN '{path}' has no {missing}: plan it (moesaic plan --cluster FILE --out PLAN) and "
            "train it with the plan (moesaic train --plan PLAN)"
        )
    name = run.prediction.predicted.cluster
    if name != cluster.name:
        raise ConfigError(
            f"RUN '{path}' was planned for cluster '{name}', but '{cluster_path}' describes "
            f"'{cluster.name}': give runs that were planned for '{cluster.name}'"
        )
    num_steps = int((run.steps.step > (run.launches[-1].step if run.launches else 0)).sum())
    if num_steps <= WARMUP_STEPS:
        since = " since it was resumed" if len(run.launches) > 1 else ""
        raise ConfigError(
            f"RUN '{path}' has {num_steps} steps{since}, and the first {WARMUP_STEPS} after a "
            "start are slower than others: give a longer run"
        )
    plan = _plan(run)
    check_plan(plan, _job(run), str(path))
    mismatch = None if run.loads is None else find_loads_mismatch(run.loads, _job(run).model)
    if mismatch is not None:
        raise ConfigError(f"RUN '{path}' {mismatch}: give an unchanged run")
    try:
        places = assign_places(plan, cluster).places
    except ClusterError as error:
        raise ConfigError(
            f"RUN '{path}' had {plan.ranks} rank{'s'[: plan.ranks > 1]}, for which "
            f"'{cluster_path}' has no places ({error}): give the cluster as it was, or other runs"
        ) from None
    mismatch = placement_mismatch(plan, places)
    if mismatch is not None:
        raise ConfigError(
            f"RUN '{path}' does not fit '{cluster_path}': {mismatch}; give the cluster as it was, "
            "or other runs"
        )
    return run


def _job(run: RunStats) -> Job:
    return parse(Job, run.job, str(run.directory / "job.json"))


def _plan(run: RunStats) -> Plan:
    return parse(Plan, run.plan, str(run.directory / "plan.json"))


def _observe_run(run: RunStats, cluster: Cluster) -> Observation:
    """Return the measured step of `run` and its prediction from uncalibrated figures and the
    recorded loads."""
    from moesaic.policy.cost.calibrate import UNCALIBRATED, observe_step
    from moesaic.policy.cost.timeline import check_step_time

    assert run.prediction is not None
    measured_s = run.prediction.measured.step_s
    loads = None if run.loads is None else list(run.loads.recent)
    step = observe_step(str(run.directory), measured_s, _job(run), _plan(run), cluster, loads)
    predicted_s = step.predict_s(UNCALIBRATED)
    check_step_time(cluster.name, predicted_s)
    if not MIN_FACTOR <= measured_s / predicted_s <= MAX_FACTOR:
        raise ConfigError(
            f"RUN '{run.directory}' took {format_seconds(measured_s)} per step, but "
            f"{format_seconds(predicted_s)} were predicted, and factors are limited to "
            f"{MIN_FACTOR} to {MAX_FACTOR:g}: leave the run out if the machine was busy, or probe "
            "the machine again"
        )
    return step


def _summarize(
    calibration: Calibration,
    steps: Sequence[Observation],
    factors: Factors,
    held_out_factors: Sequence[Factors],
) -> dict[str, Any]:
    """Return factors with their range, and errors of predictions, as plain data.

    `held_out_factors` has, for each step, the factors that predict it as a held-out run.
    """
    from moesaic.policy.cost.calibrate import KINDS, UNCALIBRATED

    shares = np.mean([step.fractions_by_kind() for step in steps], axis=0)
    runs: list[dict[str, Any]] = [
        {
            "run": step.name, "measured_s": step.measured_s,
            "predicted_s": step.predict_s(UNCALIBRATED), "calibrated_s": step.predict_s(factors),
            "uncalibrated": step.relative_error(UNCALIBRATED),
            "calibrated": step.relative_error(factors),
            "held_out": step.relative_error(own_factors),
        }
        for step, own_factors in zip(steps, held_out_factors, strict=True)
    ]  # fmt: skip
    return {
        "calibration": calibration.model_dump(),
        "kinds": [
            {
                "kind": kind, "share": float(share), "factor": getattr(calibration, kind),
                "factor_min": float(min(own[index] for own in held_out_factors)),
                "factor_max": float(max(own[index] for own in held_out_factors)),
            }
            for index, (kind, share) in enumerate(zip(KINDS, shares, strict=True))
        ],
        "straggler_share": max(float(1.0 - shares.sum()), 0.0),
        "runs": runs,
        "error": {
            key: statistics.median(abs(run[key]) for run in runs)
            for key in ("uncalibrated", "calibrated", "held_out")
        },
        "leave_one_out": len(steps) > 1,
    }  # fmt: skip


def _print_facts(facts: dict[str, Any]) -> None:
    several_runs, error = facts["leave_one_out"], facts["error"]
    kinds = []
    for kind in facts["kinds"]:
        factors = f"{kind['factor_min']:.2f} to {kind['factor_max']:.2f}" if several_runs else "-"
        kinds.append((kind["kind"], f"{kind['share']:.0%}", f"{kind['factor']:.2f}", factors))
    if facts["straggler_share"] >= _MIN_SHOWN_SHARE:
        kinds.append(("waiting for stragglers", f"{facts['straggler_share']:.0%}", "-", "-"))
    screen.print_table(("kind", "share of a step", "factor", "without one run"), kinds)
    screen.print_line("")
    runs = [
        (
            run["run"],
            format_seconds(run["measured_s"]),
            format_seconds(run["predicted_s"]),
            f"{run['uncalibrated']:+.0%}",
            format_seconds(run["calibrated_s"]),
            f"{run['calibrated']:+.0%}",
            f"{run['held_out']:+.0%}" if several_runs else "-",
        )
        for run in facts["runs"]
    ]
    titles = ("run", "measured", "predicted", "error", "calibrated", "error", "held out")
    screen.print_table(titles, runs)
    basis = "of held-out runs (median)"
    if not several_runs:
        basis = "of the same run, which tests nothing; give several runs"
    screen.print_line(
        f"\nerror {error['uncalibrated']:.1%} without factors, {error['held_out']:.1%} with them, "
        f"{basis}"
    )
