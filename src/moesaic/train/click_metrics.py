"""Metrics of predicted click probabilities: AUC, log-loss, normalised entropy, calibration, GAUC.

All are exact: AUC sorts every score once and counts equal scores of both classes as half a pair.
Scores are logits, which order samples as probabilities do and lose nothing near 0 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from moesaic.dist.collectives import all_gather, all_reduce_, gather
from moesaic.dist.world import World

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ClickMetrics:
    """Metrics of scored samples; None where they are not defined."""

    samples: int
    """Number of samples."""
    weight: float
    """Sum of the sample weights."""
    log_loss: float | None = None
    """Mean of the negative log-likelihoods."""
    auc: float | None = None
    """Probability that a click scores above another sample; a tie is one half."""
    normalized_entropy: float | None = None
    """Log-loss over the entropy of the mean label; 1: no better than predicting the mean."""
    calibration: float | None = None
    """Sum of predicted probabilities over sum of labels; 1: right on average."""
    gauc: float | None = None
    """Mean AUC of users with both classes, weighted by their samples."""
    gauc_users: int = 0
    """Users with both classes."""

    def figures(self) -> dict[str, float]:
        """Return the metrics that are defined, by name."""
        return {
            name: value
            for name in _METRIC_NAMES
            if (value := getattr(self, name)) is not None
        }  # fmt: skip

    def remarks(self, *, has_users: bool) -> Iterator[str]:
        """Yield why a metric is not defined."""
        if not self.weight:
            yield "no metrics: there are no samples with a weight above zero"
        elif self.log_loss is None:
            yield "no metrics: some scores are not finite"
        elif self.auc is None:
            yield "no AUC and no normalised entropy: all labels are equal"
        elif has_users and self.gauc is None:
            yield "no GAUC: no user has both clicks and other samples"


_FIELDS = tuple(one.name for one in fields(ClickMetrics))
_METRIC_NAMES = ("log_loss", "auc", "normalized_entropy", "calibration", "gauc")


def click_metrics(
    labels: ArrayLike,
    logits: ArrayLike,
    weights: ArrayLike | None = None,
    users: ArrayLike | None = None,
) -> ClickMetrics:
    """Return the metrics of samples with labels 0 or 1; unset weights are 1."""
    y, x = np.asarray(labels, np.float64), np.asarray(logits, np.float64)
    w = np.ones_like(x) if weights is None else np.asarray(weights, np.float64)
    # Each is exactly 0 if its class is missing, however the other one is rounded.
    clicks, others = float(w @ y), float(w @ (1 - y))
    weight = clicks + others
    if weight == 0 or not np.isfinite(x).all():
        return ClickMetrics(len(y), weight)
    log_loss = float(w @ (np.logaddexp(0, x) - y * x)) / weight
    predicted = float(w @ _sigmoid(x))
    calibration = predicted / clicks if clicks > 0 else None
    if not clicks or not others:
        return ClickMetrics(len(y), weight, log_loss, calibration=calibration)
    rate = clicks / weight
    entropy = -rate * math.log(rate) - others / weight * math.log(others / weight)
    order = np.argsort(x)
    x, y, w = x[order], y[order], w[order]
    (auc,), _ = _auc_by_group(np.zeros(1, np.int64), x, w * y, w - w * y)
    gauc, gauc_users = None, 0
    if users is not None:
        gauc, gauc_users = _gauc(np.asarray(users, np.int64)[order], x, y, w)
    return ClickMetrics(
        len(y), weight, log_loss, float(auc), log_loss / entropy, calibration, gauc, gauc_users
    )


class ClickScores:
    """Scores and labels of samples, collected over batches and ranks."""

    def __init__(self, *, has_users: bool) -> None:
        self._has_users = has_users
        none = np.zeros(0, np.float32)
        self._batches = [(none, none, none, np.zeros(0, np.int64))]
        """Labels, logits, weights and users of each batch."""

    def add(
        self,
        labels: ArrayLike,
        logits: ArrayLike,
        weights: ArrayLike | None = None,
        users: ArrayLike | None = None,
    ) -> None:
        """Add a batch of this rank; unset weights are 1."""
        x = np.array(logits)
        self._batches.append(
            (
                np.array(labels, np.float32),
                x if x.dtype == np.float32 else x.astype(np.float64),
                np.ones(len(x), np.float32) if weights is None else np.array(weights, np.float32),
                np.array(users if self._has_users else [], np.int64),
            )
        )

    def metrics(self, world: World | None = None) -> ClickMetrics:
        """Return the metrics over all ranks of `world`; every rank must call this.

        The first rank gathers all scores, and the others receive its result.
        """
        labels, logits, weights, users = (
            np.concatenate(column) for column in zip(*self._batches, strict=True)
        )
        if world is None or world.group is None:
            return self._compute(labels, logits, weights, users)
        columns = [
            labels,
            logits.astype(np.float64),
            weights,
            users,
        ]  # Of equal types on all ranks.
        gathered = [_gather(column, world) for column in columns]
        found = torch.zeros(len(_FIELDS), dtype=torch.float64, device=world.device)
        if world.rank == 0:
            values = astuple(self._compute(*(one for one in gathered if one is not None)))
            found += found.new_tensor([math.nan if value is None else value for value in values])
        named = zip(_FIELDS, all_reduce_(found, world.group).tolist(), strict=True)
        known: dict[str, Any] = {name: value for name, value in named if not math.isnan(value)}
        known |= {name: int(known[name]) for name in ("samples", "gauc_users")}
        return ClickMetrics(**known)

    def _compute(self, labels: Any, logits: Any, weights: Any, users: Any) -> ClickMetrics:
        return click_metrics(labels, logits, weights, users if self._has_users else None)


def _gather(column: NDArray[Any], world: World) -> NDArray[Any] | None:
    """Return the arrays of all ranks, joined by rank, on the first rank; None on the others."""
    tensor = torch.from_numpy(column).to(world.device)
    lengths = all_gather(torch.tensor([len(tensor)], device=world.device), world.group)
    longest = int(lengths.max())
    padded = torch.nn.functional.pad(tensor, (0, longest - len(tensor)))
    stacked = gather(padded, world.group)
    if stacked is None:
        return None
    parts = zip(stacked, lengths.flatten().tolist(), strict=True)
    joined: NDArray[Any] = torch.cat([part[:length] for part, length in parts]).cpu().numpy()
    return joined


def _sigmoid(x: Floats) -> Floats:
    """Return probabilities of logits, without overflow."""
    small = np.exp(-np.abs(x))
    probabilities: Floats = np.where(x < 0, small, 1.0) / (1 + small)
    return probabilities


def _gauc(users: Ints, x: Floats, y: Floats, w: Floats) -> tuple[float | None, int]:
    """Return the mean AUC of users, weighted by their samples, and the users with both classes.

    The samples are in the order of their scores.
    """
    order = np.argsort(users, kind="stable")
    users, x, y, w = users[order], x[order], y[order], w[order]
    starts = np.flatnonzero(np.concatenate([[True], users[1:] != users[:-1]]))
    aucs, weights = _auc_by_group(starts, x, w * y, w - w * y)
    defined = ~np.isnan(aucs)
    if not defined.any():
        return None, 0
    return float(np.average(aucs[defined], weights=weights[defined])), int(defined.sum())


def _auc_by_group(starts: Ints, x: Floats, clicks: Floats, others: Floats) -> tuple[Floats, Floats]:
    """Return AUC and weight of each group of samples, NaN for a group with one class.

    Groups begin at `starts`; within a group, the samples are in the order of their scores.
    """
    is_first = np.concatenate([[True], x[1:] != x[:-1]])
    is_first[starts] = True
    ties = np.flatnonzero(is_first)
    clicks, others = np.add.reduceat(clicks, ties), np.add.reduceat(others, ties)
    firsts = np.searchsorted(ties, starts)
    below = np.cumsum(others) - others
    below -= np.repeat(below[firsts], np.diff(np.append(firsts, len(ties))))
    pairs = np.add.reduceat(clicks * (below + others / 2), firsts)
    total_clicks, total_others = np.add.reduceat(clicks, firsts), np.add.reduceat(others, firsts)
    all_pairs = total_clicks * total_others
    aucs = np.divide(pairs, all_pairs, out=np.full(len(pairs), np.nan), where=all_pairs > 0)
    return aucs, total_clicks + total_others
