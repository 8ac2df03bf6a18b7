"""Clicks of the theme `tables`, by numpy alone: the peers' environment has no moesaic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SLOTS, DENSE, DIM = 26, 13, 16
BOTTOM, TOP = (64, 16), (64, 32)
"""Widths of the stack over dense features, and of the stack over dot products."""
BATCH = 4096
ZIPF = 1.05
LR, EPSILON, STD = 0.05, 1e-8, 0.01
"""Learning rate and epsilon of rows, and standard deviation of their first values."""
DENSE_LR = 1e-3
"""Learning rate of Adam for the network."""


class Clicks(NamedTuple):
    """Samples: one row number per slot, dense features and labels."""

    numbers: NDArray[np.int64]
    """Row numbers inside the slot's table, [slots, samples]."""
    dense: NDArray[np.float32]
    labels: NDArray[np.float32]


@dataclass(frozen=True)
class Stream:
    """Samples whose labels follow planted weights of their keys and dense features."""

    rows: int
    """Rows of a slot."""

    def batch(self, seed: int, size: int = BATCH) -> Clicks:
        """Return the samples of a seed."""
        draw = np.random.default_rng(seed)
        power = 1 - ZIPF
        ranks = ((self.rows**power - 1) * draw.random((SLOTS, size)) + 1) ** (1 / power) - 1
        numbers = ranks.astype(np.int64) * 0x9E3779B1 % self.rows
        dense = draw.standard_normal((size, DENSE), np.float32)
        planted = np.random.default_rng(7)
        weights = planted.standard_normal((SLOTS, self.rows)).astype(np.float32)
        logits = np.take_along_axis(weights, numbers, 1).sum(0) * 0.3
        logits += dense @ planted.standard_normal(DENSE).astype(np.float32) * 0.3 - 1.0
        labels = draw.random(size) < 1 / (1 + np.exp(-logits))
        return Clicks(numbers, dense, labels.astype(np.float32))


def auc(labels: NDArray[np.float32], scores: NDArray[np.float32]) -> float:
    """Return the probability that a click scores above another sample."""
    order = np.argsort(scores, kind="stable")
    ranks = np.empty(len(scores))
    ranks[order] = np.arange(1, len(scores) + 1)
    clicks = labels > 0
    count = int(clicks.sum())
    lowest = count * (count + 1) / 2
    return float((ranks[clicks].sum() - lowest) / (count * (len(labels) - count)))
