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
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moesaic.facts.cluster.calibration import MAX_FACTOR, MIN_FACTOR

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
    factors, cost = start, _loss(steps, start)
    for _ in range(max_iterations):
        move = _LinearModel.linearize_at(steps, factors).fit() - factors
        fraction = 1.0
        while (
            tried := _loss(steps, factors + fraction * move)
        ) >= cost and fraction > _MIN_STEP_FRACTION:
            fraction /= 2
        if tried >= cost:
            break
        factors, cost = factors + fraction * move, tried
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


@dataclass(frozen=True)
class _LinearModel:
    """Linear model of the log ratio of predicted to measured time, per step.

    Logarithms make twice the time as bad as half of it.
    """

    slopes: NDArray[np.float64]
    residuals: NDArray[np.float64]

    @classmethod
    def linearize_at(cls, steps: Sequence[Observation], factors: Factors) -> _LinearModel:
        """Linearize the predictions of `steps` at `factors`."""
        measured = np.array([one.measured_s for one in steps])
        predicted = np.array([one.predict_s(factors) for one in steps])
        slopes = np.array([_gradient(one.predict_s, factors) for one in steps])
        relative_slopes = slopes.reshape(-1, len(KINDS)) / predicted[:, None]
        return cls(relative_slopes, np.log(predicted / measured) - relative_slopes @ factors)

    def fit(self) -> Factors:
        """Return the best factors of this linear model, by iteratively reweighted least squares."""
        weights = np.ones(len(self.residuals))
        for _ in range(_REWEIGHTING_ROUNDS):
            weighted = self.slopes.T * weights
            square = weighted @ self.slopes + PRIOR_WEIGHT**2 * np.eye(len(KINDS))
            factors = _solve_bounded(square, PRIOR_WEIGHT**2 - weighted @ self.residuals)
            errors = np.abs(self.slopes @ factors + self.residuals)
            weights = 1.0 / np.maximum(errors / HUBER_DELTA, 1.0)
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
