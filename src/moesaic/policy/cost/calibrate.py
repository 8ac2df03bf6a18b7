"""From what runs were predicted to take and what they took to the factors of a cluster.

A predicted step is seconds of products, of passes and of messages, and of waiting that follows from
them. Of factors of these three, those are chosen with which the steps of runs come out as they were
measured, by their ratio and in the sense of least squares, with two precautions. A factor stays
near 1 where the runs say little of it: its distance from 1 counts as an error of a tenth of that
does. And a run that is off by more than a few percent, whatever the factors, counts for less.

Who waits for whom changes with the factors, so a step is no sum of what each of them brings to it.
Near the factors found so far it is taken for one, and the best of such sums says where to go: as
far as the steps themselves come nearer to what was measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moesaic.facts.cluster.calibration import LEAST, MOST

Factors = NDArray[np.float64]
"""By the kinds of `KINDS`."""
KINDS = ("products", "passes", "messages")
BARE = np.ones(len(KINDS))
"""Factors of a cluster whose own figures hold."""
CAUTION = 0.1
"""Weight of a factor's distance from 1, next to that of a run's error."""
USUAL_ERROR = 0.05
"""Errors beyond this count in proportion, not squared."""
_MOVES, _STILL = 40, 1e-4
"""How often factors are moved at most, and a move that is none."""
_NEAR = 3
"""Moves that are enough where one step of many is left out."""
_LEAST_SHARE = 1e-3
"""Of the way to where a move would go: what is not better from there on is no better at all."""
_ROUNDS = 20
_SMALL = 1e-3
"""By how much a factor is moved, to see how a step follows."""


@dataclass(frozen=True)
class Observed:
    """A step that was predicted and measured."""

    name: str
    measured_s: float
    predict_s: Callable[[Factors], float]
    """Seconds that the cluster's own figures say, multiplied by factors."""
    punctual_s: Callable[[Factors], float]
    """The same, if no rank were later than others that do the same."""

    def error(self, factors: Factors) -> float:
        """How far the prediction with `factors` is off, as a share of what was measured."""
        return self.predict_s(factors) / self.measured_s - 1.0

    def shares(self) -> Factors:
        """By kind, its share of the predicted step; the rest is waiting for who comes late."""
        return _slopes(self.punctual_s, BARE) / self.predict_s(BARE)


def _slopes(seconds: Callable[[Factors], float], factors: Factors) -> Factors:
    """How `seconds` follow each factor, near `factors`."""
    here, moves = seconds(factors), _SMALL * np.eye(len(KINDS))
    return np.array([(seconds(factors + move) - here) / _SMALL for move in moves])


def fit(steps: Sequence[Observed], start: Factors = BARE, moves: int = _MOVES) -> Factors:
    """The factors that `steps` show, some `moves` from `start`; 1 where they show none."""
    factors, cost = start, _cost(steps, start)
    for _ in range(moves):
        whole = _Sums.near(steps, factors).fit() - factors
        share = 1.0
        while (tried := _cost(steps, factors + share * whole)) >= cost and share > _LEAST_SHARE:
            share /= 2
        if tried >= cost:
            break
        factors, cost = factors + share * whole, tried
        if np.abs(share * whole).max() < _STILL:
            break
    return factors


def left_out(steps: Sequence[Observed]) -> list[Factors]:
    """For each step the factors that all others show, which are not far from those of all."""
    start = fit(steps)
    return [fit([other for other in steps if other is not one], start, _NEAR) for one in steps]


def _cost(steps: Sequence[Observed], factors: Factors) -> float:
    """How bad `factors` are."""
    errors = np.abs([np.log(one.predict_s(factors) / one.measured_s) for one in steps])
    counted = np.where(errors > USUAL_ERROR, USUAL_ERROR * (2 * errors - USUAL_ERROR), errors**2)
    return float(counted.sum() + (CAUTION**2 * (factors - 1.0) ** 2).sum())


@dataclass(frozen=True)
class _Sums:
    """How much longer steps are predicted to take than they took, as a sum of what each kind
    brings to it by its factor, and of a rest; in logarithms, so that twice and half are as bad."""

    parts: NDArray[np.float64]
    rest: NDArray[np.float64]

    @classmethod
    def near(cls, steps: Sequence[Observed], factors: Factors) -> _Sums:
        """What steps are near `factors`."""
        taken = np.array([one.measured_s for one in steps])
        whole = np.array([one.predict_s(factors) for one in steps])
        slopes = np.array([_slopes(one.predict_s, factors) for one in steps])
        parts = slopes.reshape(-1, len(KINDS)) / whole[:, None]
        return cls(parts, np.log(whole / taken) - parts @ factors)

    def fit(self) -> Factors:
        """The best factors, if these were the steps."""
        weights = np.ones(len(self.rest))
        for _ in range(_ROUNDS):
            weighted = self.parts.T * weights
            square = weighted @ self.parts + CAUTION**2 * np.eye(len(KINDS))
            factors = _bounded(square, CAUTION**2 - weighted @ self.rest)
            errors = np.abs(self.parts @ factors + self.rest)
            weights = 1.0 / np.maximum(errors / USUAL_ERROR, 1.0)
        return factors


def _bounded(square: NDArray[np.float64], wanted: Factors) -> Factors:
    """Where x `square` x / 2 - `wanted` x is least, within the bounds of factors.

    Each of the three is at one of its bounds or at neither: every way is tried.
    """
    found, least = BARE, np.inf
    for bounds in itertools.product((None, LEAST, MOST), repeat=len(KINDS)):
        free = [kind for kind, bound in enumerate(bounds) if bound is None]
        tried = np.array([0.0 if bound is None else bound for bound in bounds])
        left = (wanted - square @ tried)[free]
        tried[free] = np.linalg.solve(square[np.ix_(free, free)], left)
        value = float(tried @ square @ tried / 2 - wanted @ tried)
        if value < least and ((tried >= LEAST) & (tried <= MOST)).all():
            found, least = tried, value
    return found
