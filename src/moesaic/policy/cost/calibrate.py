"""From what runs were predicted to take and what they took to the factors of a cluster.

A predicted step is so many seconds of products, of passes and of messages. Of factors of these
three, those are chosen with which the steps of runs come out as they were measured, as shares of
them and in the sense of least squares, with two precautions. A factor stays near 1 where the runs
say little of it: its distance from 1 counts as an error of a tenth of that does. And a run that is
off by more than a few percent, whatever the factors, counts for less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moesaic.facts.cluster.calibration import LEAST, MOST

KINDS = ("products", "passes", "messages")
CAUTION = 0.1
"""Weight of a factor's distance from 1, next to that of a run's error."""
USUAL_ERROR = 0.05
"""Errors beyond this count in proportion, not squared."""
_ROUNDS, _SWEEPS = 20, 50

Factors = NDArray[np.float64]
"""By the kinds of `KINDS`."""


@dataclass(frozen=True)
class Observed:
    """A step of one run."""

    name: str
    predicted_s: Factors
    """By kind, with no factors: seconds that the step would be shorter if these took no time."""
    measured_s: float

    def error(self, factors: Factors) -> float:
        """How far the prediction with `factors` is off, as a share of what was measured."""
        return float(self.predicted_s @ factors) / self.measured_s - 1.0


def fit(steps: Sequence[Observed]) -> Factors:
    """The factors that `steps` show; 1 where they show none."""
    shares = np.array([one.predicted_s / one.measured_s for one in steps]).reshape(-1, len(KINDS))
    factors, weights = np.ones(len(KINDS)), np.ones(len(shares))
    for _ in range(_ROUNDS):
        weighted = shares.T * weights
        square = weighted @ shares + CAUTION**2 * np.eye(len(KINDS))
        wanted = weighted.sum(axis=1) + CAUTION**2
        for _ in range(_SWEEPS):
            for kind in range(len(KINDS)):
                step = (wanted[kind] - square[kind] @ factors) / square[kind, kind]
                factors[kind] = np.clip(factors[kind] + step, LEAST, MOST)
        weights = 1.0 / np.maximum(np.abs(shares @ factors - 1.0) / USUAL_ERROR, 1.0)
    return factors


def left_out(steps: Sequence[Observed]) -> list[Factors]:
    """For each step the factors that all others show."""
    return [fit([other for other in steps if other is not one]) for one in steps]
