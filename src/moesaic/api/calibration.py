"""Factors that correct predictions for a cluster, fitted to measured runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesaic.api.loads import find_loads_mismatch
from moesaic.base.config import parse
from moesaic.base.errors import ClusterError, ConfigError
from moesaic.base.units import format_seconds, plural
from moesaic.facts.cluster import Calibration, Cluster, device_models
from moesaic.facts.cluster.cluster import MAX_FACTOR, MIN_FACTOR
from moesaic.facts.job import Job
from moesaic.facts.job.job import parse_language_model
from moesaic.facts.plan import Plan, check_plan, placement_mismatch, round_digits

if TYPE_CHECKING:
    from moesaic.policy.cost.calibrate import Factors, Observation
    from moesaic.report import RunStats


def fit_calibration(
    directories: Sequence[Path], cluster: Cluster, origin: str
) -> tuple[Calibration, dict[str, Any]]:
    """Return the factors that fit the runs in `directories`, and a summary as plain data; `origin`
    names the cluster in errors."""
    from moesaic.policy.cost.calibrate import KINDS, fit_factors, fit_leave_one_out

    runs = [_read_run(one, cluster, origin) for one in _check_unique(directories)]
    steps = [_observe_run(run, cluster) for run in runs]
    factors = np.array([round_digits(factor) for factor in fit_factors(steps)])
    models = {model for run in runs for model in device_models(cluster, _plan(run).ranks)}
    by_kind = dict(zip(KINDS, factors.tolist(), strict=True))
    calibration = Calibration(runs=len(steps), devices=sorted(models), **by_kind)
    held_out_factors = fit_leave_one_out(steps) if len(steps) > 1 else [None]
    summary = _summarize(calibration, steps, factors, held_out_factors)
    errors = [abs(run["held_out"]) for run in summary["runs"] if run["held_out"] is not None]
    error = round_digits(max(errors)) if errors else None
    calibration = calibration.model_copy(update={"error": error})
    return calibration, {**summary, "calibration": calibration.model_dump()}


def _check_unique(runs: Sequence[Path]) -> Sequence[Path]:
    """Return `runs`; raise ConfigError if one is given twice."""
    places = [run.resolve() for run in runs]
    for run, place in zip(runs, places, strict=True):
        if places.count(place) > 1:
            raise ConfigError(f"RUN '{run}' is given twice: give it once")
    return runs


def _read_run(path: Path, cluster: Cluster, origin: str) -> RunStats:
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
            f"RUN '{path}' was planned for cluster '{name}', but '{origin}' describes "
            f"'{cluster.name}': give runs that were planned for '{cluster.name}'"
        )
    num_steps = int((run.steps.step > (run.launches[-1].step if run.launches else 0)).sum())
    if num_steps <= WARMUP_STEPS:
        since = " since it was resumed" if len(run.launches) > 1 else ""
        raise ConfigError(
            f"RUN '{path}' has {num_steps} steps{since}, and the first {WARMUP_STEPS} after a "
            "start are slower than others: give a longer run"
        )
    job, plan = _job(run), _plan(run)
    if job.memory is not None:
        raise ConfigError(
            f"RUN '{path}' had a memory budget ([memory]), so its steps may have waited for the "
            "drive: give runs without one"
        )
    check_plan(plan, job, str(path))
    mismatch = None if run.loads is None else find_loads_mismatch(run.loads, job.model)
    if mismatch is not None:
        raise ConfigError(f"RUN '{path}' {mismatch}: give an unchanged run")
    try:
        places = assign_places(plan, cluster).places
    except ClusterError as error:
        raise ConfigError(
            f"RUN '{path}' had {plural(plan.ranks, 'rank')}, for which "
            f"'{origin}' has no places ({error}): give the cluster as it was, or other runs"
        ) from None
    mismatch = placement_mismatch(plan, places)
    if mismatch is not None:
        raise ConfigError(
            f"RUN '{path}' does not fit '{origin}': {mismatch}; give the cluster as it was, "
            "or other runs"
        )
    return run


def _job(run: RunStats) -> Job:
    return parse_language_model(run.job, str(run.directory / "job.json"))


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
    held_out_factors: Sequence[Factors | None],
) -> dict[str, Any]:
    """Return factors, and errors of predictions, as plain data.

    `held_out_factors` has, for each step, the factors that predict it as a held-out run; None for a
    single run.
    """
    from moesaic.policy.cost.calibrate import UNCALIBRATED

    runs: list[dict[str, Any]] = [
        {
            "run": step.name, "measured_s": step.measured_s,
            "predicted_s": step.predict_s(UNCALIBRATED), "calibrated_s": step.predict_s(factors),
            "uncalibrated": step.relative_error(UNCALIBRATED),
            "calibrated": step.relative_error(factors),
            "held_out": None if others is None else step.relative_error(others),
        }
        for step, others in zip(steps, held_out_factors, strict=True)
    ]  # fmt: skip
    errors = {
        key: [abs(run[key]) for run in runs if run[key] is not None]
        for key in ("uncalibrated", "calibrated", "held_out")
    }
    return {
        "calibration": calibration.model_dump(), "runs": runs,
        "error": {key: statistics.median(one) if one else None for key, one in errors.items()},
    }  # fmt: skip
