"""Calibration: factors on a cluster's figures, fitted to the measured steps of runs.

A predicted step consists of matmul, elementwise and collective seconds, and of the waiting that
follows from them. The fit chooses one factor per kind, so that log ratios of predicted to measured
steps are least in the sense of least squares. Two precautions apply:

- A prior keeps a factor near 1 if the runs say little about it. Its distance from 1 counts as an
  error of a tenth of that distance.
- The Huber loss limits the weight of runs that are off by more than a few percent with any factors.

Waiting changes with the factors, so a step is not linear in them. Each iteration linearizes the
steps near the current factors and solves that model. It then moves towards the solution as far as
the true loss decreases.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moesaic.facts.cluster import Calibration, Cluster, device_models
from moesaic.facts.cluster.calibration import MAX_FACTOR, MIN_FACTOR
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.policy.cost.event import Event
from moesaic.policy.cost.step import JobCosts
from moesaic.policy.cost.timeline import simulate_events

Factors = NDArray[np.float64]
"""One factor per kind, in the order of `KINDS`."""
KINDS = ("matmul", "elementwise", "collectives")
UNCALIBRATED = np.ones(len(KINDS))
"""Factors of a cluster that is not calibrated."""
PRIOR_WEIGHT = 0.1
"""Weight of a factor's distance from 1, relative to a run's error."""
HUBER_DELTA = 0.05
"""Errors beyond this count linearly instead of quadratically."""
_MAX_ITERATIONS, _CONVERGED = 40, 1e-4
"""Iterations, at most, and the largest move that counts as converged."""
_REFIT_ITERATIONS = 3
"""Iterations of a refit that leaves out one of many steps."""
_MIN_STEP_FRACTION = 1e-3
"""Smallest fraction of a proposed move that the line search tries."""
_REWEIGHTING_ROUNDS = 20
_FINITE_DIFFERENCE = 1e-3
"""Change of a factor for finite differences."""


@dataclass(frozen=True)
class Observation:
    """A step with its prediction and its measured time."""

    name: str
    measured_s: float
    predict_s: Callable[[Factors], float]
    """Predicted seconds as a function of factors."""
    predict_without_skew_s: Callable[[Factors], float]
    """The prediction without skew: no rank is later than others with equal work."""

    def relative_error(self, factors: Factors) -> float:
        """Return the error of the prediction with `factors`, as a fraction of the measured time."""
        return self.predict_s(factors) / self.measured_s - 1.0

    def fractions_by_kind(self) -> Factors:
        """Return the fraction of the predicted step per kind; the rest is waiting."""
        return _gradient(self.predict_without_skew_s, UNCALIBRATED) / self.predict_s(UNCALIBRATED)


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
    uncalibrated = Calibration(runs=1, devices=models, **dict.fromkeys(KINDS, 1.0))

    def events(factors: Factors) -> list[Event]:
        values = dict(zip(KINDS, factors.tolist(), strict=True))
        calibrated = cluster.model_copy(
            update={"calibration": uncalibrated.model_copy(update=values)}
        )
        return JobCosts.from_job(job, plan, calibrated, loads).events()

    events_before = events(UNCALIBRATED)
    # Seconds of an event are linear in the factors, so a unit change of each one gives its part.
    changed = [events(UNCALIBRATED + kind) for kind in np.eye(len(KINDS))]
    parts = [
        np.stack([two.seconds - one.seconds for two in variants])
        for one, *variants in zip(events_before, *changed, strict=True)
    ]

    def step_function(base: Sequence[Event]) -> Callable[[Factors], float]:
        @cache
        def step_s(*factors: float) -> float:
            values = np.array(factors)
            scaled = (
                replace(event, seconds=values @ part)
                for event, part in zip(base, parts, strict=True)
            )
            return simulate_events(scaled, plan.ranks).step_s

        return lambda factors: step_s(*factors.tolist())

    without_skew = [replace(event, skew_s=0.0) for event in events_before]
    return Observation(name, measured_s, step_function(events_before), step_function(without_skew))


def _gradient(predict_s: Callable[[Factors], float], factors: Factors) -> Factors:
    """Return the derivative of `predict_s` by each factor at `factors`."""
    base_s, changes = predict_s(factors), _FINITE_DIFFERENCE * np.eye(len(KINDS))
    return np.array(
        [(predict_s(factors + change) - base_s) / _FINITE_DIFFERENCE for change in changes]
    )


def fit_factors(
    steps: Sequence[Observation],
    start: Factors = UNCALIBRATED,
    max_iterations: int = _MAX_ITERATIONS,
) -> Factors:
    """Return the factors that fit `steps` best, and 1 for kinds that `steps` do not determine.

    Args:
        steps: predicted and measured steps.
        start: factors to begin with.
        max_iterations: iterations, at most.
    """
    factors, loss = start, _loss(steps, start)
    for _ in range(max_iterations):
        move, fraction = _fit_linearized(steps, factors) - factors, 1.0
        while (
            tried := _loss(steps, factors + fraction * move)
        ) >= loss and fraction > _MIN_STEP_FRACTION:
            fraction /= 2
        if tried >= loss:
            break
        factors, loss = factors + fraction * move, tried
        if np.abs(fraction * move).max() < _CONVERGED:
            break
    return factors


def fit_leave_one_out(steps: Sequence[Observation]) -> list[Factors]:
    """Return the factors fitted without each step; each fit starts at the fit of all steps."""
    start = fit_factors(steps)
    return [
        fit_factors([other for other in steps if other is not one], start, _REFIT_ITERATIONS)
        for one in steps
    ]


def _loss(steps: Sequence[Observation], factors: Factors) -> float:
    errors = np.abs([np.log(one.predict_s(factors) / one.measured_s) for one in steps])
    losses = np.where(errors > HUBER_DELTA, HUBER_DELTA * (2 * errors - HUBER_DELTA), errors**2)
    return float(losses.sum() + (PRIOR_WEIGHT**2 * (factors - 1.0) ** 2).sum())


def _fit_linearized(steps: Sequence[Observation], factors: Factors) -> Factors:
    """Return the factors that fit `steps` best if log steps are linear near `factors`.

    Logarithms make twice the time as bad as half of it. Weights turn the Huber loss into squares.
    """
    predicted = np.array([one.predict_s(factors) for one in steps])
    slopes = np.array([_gradient(one.predict_s, factors) for one in steps])
    slopes = slopes.reshape(-1, len(KINDS)) / predicted[:, None]
    residuals = np.log(predicted / [one.measured_s for one in steps]) - slopes @ factors
    for _ in range(_REWEIGHTING_ROUNDS):
        errors = np.abs(slopes @ factors + residuals)
        weighted = slopes.T / np.maximum(errors / HUBER_DELTA, 1.0)
        square = weighted @ slopes + PRIOR_WEIGHT**2 * np.eye(len(KINDS))
        target = PRIOR_WEIGHT**2 - weighted @ residuals
        factors = _solve_bounded(square, target)
    return factors


def _solve_bounded(square: NDArray[np.float64], target: Factors) -> Factors:
    """Minimize x `square` x / 2 - `target` x within the bounds of factors.

    Each factor is at one of its bounds or free; all combinations are tried.
    """
    best, least = UNCALIBRATED, np.inf
    for bounds in itertools.product((None, MIN_FACTOR, MAX_FACTOR), repeat=len(KINDS)):
        free = [kind for kind, bound in enumerate(bounds) if bound is None]
        tried = np.array([0.0 if bound is None else bound for bound in bounds])
        left = (target - square @ tried)[free]
        tried[free] = np.linalg.solve(square[np.ix_(free, free)], left)
        value = float(tried @ square @ tried / 2 - target @ tried)
        if value < least and ((tried >= MIN_FACTOR) & (tried <= MAX_FACTOR)).all():
            best, least = tried, value
    return best
