"""Calibration: factors on a cluster's figures, fitted to the measured steps of runs.

A predicted step consists of matmul, elementwise and collective seconds, and of the waiting that
follows from them. The fit chooses one factor per kind, so that log ratios of predicted to measured
steps are least in the sense of least squares. Two precautions apply:

- A prior keeps a factor near 1 if the runs say little about it. Its distance from 1 counts as an
  error of a tenth of that distance.
- The Huber loss limits the weight of runs that are off by more than a few percent with any factors.

Waiting changes with the factors, so a step is not linear in them. Each iteration is one of
Gauss-Newton: it linearizes the steps near the current factors and moves towards the solution as far
as the true loss decreases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moesaic.facts.cluster import Calibration, Cluster, device_models
from moesaic.facts.cluster.cluster import MAX_FACTOR, MIN_FACTOR
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.policy.cost.event import Seconds, Step, map_events
from moesaic.policy.cost.step import JobCosts
from moesaic.policy.cost.timeline import simulate_step

Factors = NDArray[np.float64]
"""One factor per kind, in the order of `KINDS`."""
KINDS = ("matmul", "elementwise", "collectives")
UNCALIBRATED = np.ones(len(KINDS))
"""Factors of a cluster that is not calibrated."""
PRIOR_WEIGHT = 0.1
"""Weight of a factor's distance from 1, relative to a run's error."""
HUBER_DELTA = 0.05
"""Errors beyond this count linearly instead of quadratically."""
_PRIOR_ROWS = PRIOR_WEIGHT * np.eye(len(KINDS))
_MAX_ITERATIONS, _CONVERGED = 40, 1e-4
"""Iterations, at most, and the largest move that counts as converged."""
_MIN_STEP_FRACTION = 1e-3
"""Smallest fraction of a proposed move that the line search tries."""
_FINITE_DIFFERENCE = 1e-3
"""Change of a factor for finite differences."""


@dataclass(frozen=True)
class Observation:
    """A step with its prediction and its measured time."""

    name: str
    measured_s: float
    predict_s: Callable[[Factors], float]
    """Predicted seconds as a function of factors."""

    def relative_error(self, factors: Factors) -> float:
        """Return the error of the prediction with `factors`, as a fraction of the measured time."""
        return self.predict_s(factors) / self.measured_s - 1.0


def observe_step(
    name: str,
    measured_s: float,
    job: Job,
    plan: Plan,
    cluster: Cluster,
    loads: Sequence[ArrayLike] | None = None,
) -> Observation:
    """Return the measured step of `job` with its prediction; an earlier calibration is ignored."""
    models = device_models(cluster, plan.ranks)
    uncalibrated = Calibration(runs=1, devices=models, matmul=1.0, elementwise=1.0, collectives=1.0)

    def step(factors: Factors) -> Step:
        values = dict(zip(KINDS, factors.tolist(), strict=True))
        calibrated = cluster.model_copy(
            update={"calibration": uncalibrated.model_copy(update=values)}
        )
        costs = JobCosts.from_job(job, plan, calibrated, loads)
        return [run for part in costs.parts() for run in part.step()]

    def seconds(step: Step) -> list[Seconds]:
        segments = dict.fromkeys(run.segment for run in step)
        return [event.seconds for segment in segments for event in segment.events]

    step_before = step(UNCALIBRATED)
    # Seconds of an event are linear in the factors, so a unit change of each one gives its part.
    changed = [seconds(step(UNCALIBRATED + kind)) for kind in np.eye(len(KINDS))]
    parts = [
        np.stack([one - before for one in variants])
        for before, *variants in zip(seconds(step_before), *changed, strict=True)
    ]

    @cache
    def step_s(*factors: float) -> float:
        values, remaining = np.array(factors), iter(parts)
        scaled = map_events(
            step_before, lambda event: replace(event, seconds=values @ next(remaining))
        )
        return simulate_step(scaled, plan.ranks).step_s

    return Observation(name, measured_s, lambda factors: step_s(*factors.tolist()))


def _gradient(predict_s: Callable[[Factors], float], factors: Factors) -> Factors:
    """Return the derivative of `predict_s` by each factor at `factors`."""
    base_s, changes = predict_s(factors), _FINITE_DIFFERENCE * np.eye(len(KINDS))
    return np.array(
        [(predict_s(factors + change) - base_s) / _FINITE_DIFFERENCE for change in changes]
    )


def fit_factors(steps: Sequence[Observation], start: Factors = UNCALIBRATED) -> Factors:
    """Return the factors that fit `steps` best, and 1 for kinds that `steps` do not determine."""
    factors, cost = start, _loss(steps, start)
    for _ in range(_MAX_ITERATIONS):
        move, fraction = _gauss_newton_move(steps, factors), 1.0
        tried = np.clip(factors + move, MIN_FACTOR, MAX_FACTOR)
        while _loss(steps, tried) >= cost and fraction > _MIN_STEP_FRACTION:
            fraction /= 2
            tried = np.clip(factors + fraction * move, MIN_FACTOR, MAX_FACTOR)
        if _loss(steps, tried) >= cost or np.abs(tried - factors).max() < _CONVERGED:
            break
        factors, cost = tried, _loss(steps, tried)
    return factors


def fit_leave_one_out(steps: Sequence[Observation]) -> list[Factors]:
    """Return the factors fitted without each step; each fit starts at the fit of all steps."""
    start = fit_factors(steps)
    return [fit_factors([other for other in steps if other is not one], start) for one in steps]


def _log_errors(steps: Sequence[Observation], factors: Factors) -> NDArray[np.float64]:
    """Return the log ratios of predicted to measured time: twice the time is as bad as half."""
    return np.log([one.predict_s(factors) / one.measured_s for one in steps])


def _loss(steps: Sequence[Observation], factors: Factors) -> float:
    errors = np.abs(_log_errors(steps, factors))
    losses = np.where(errors > HUBER_DELTA, HUBER_DELTA * (2 * errors - HUBER_DELTA), errors**2)
    return float(losses.sum() + (PRIOR_WEIGHT**2 * (factors - 1.0) ** 2).sum())


def _gauss_newton_move(steps: Sequence[Observation], factors: Factors) -> Factors:
    """Return the move to the least squares of the linearized errors, weighted as by Huber."""
    errors = _log_errors(steps, factors)
    slopes = [_gradient(one.predict_s, factors) / one.predict_s(factors) for one in steps]
    weights = np.sqrt(1.0 / np.maximum(np.abs(errors) / HUBER_DELTA, 1.0))
    rows = np.vstack([*weights[:, None] * np.reshape(slopes, (-1, len(KINDS))), _PRIOR_ROWS])
    targets = np.concatenate([-weights * errors, PRIOR_WEIGHT * (1.0 - factors)])
    move, free = np.zeros(len(KINDS)), np.ones(len(KINDS), bool)
    for _ in KINDS:  # A factor at a bound stays there if it would leave the range.
        move[free] = np.linalg.lstsq(rows[:, free], targets)[0]
        moved = factors + move
        free &= ~((factors <= MIN_FACTOR) & (moved < MIN_FACTOR))
        free &= ~((factors >= MAX_FACTOR) & (moved > MAX_FACTOR))
        move[~free] = 0.0
    return move
