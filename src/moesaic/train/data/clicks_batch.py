"""Batch of click samples, and a day of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ClickBatch:
    """Samples of clicks as numpy arrays. The bag of slot s and sample b is s * B + b."""

    labels: NDArray[np.float32]
    """1 for a click, else 0, [B]."""
    weights: NDArray[np.float32]
    """Weights of the samples in the loss, [B]."""
    dense: NDArray[np.float32]
    """Dense features, [B, num_dense]."""
    keys: NDArray[np.int64]
    """Keys of all bags, one bag after the other, [nnz]."""
    offsets: NDArray[np.int64]
    """Start of each bag in `keys`, and the end of the last one, [num_slots * B + 1]."""
    users: NDArray[np.int64] | None
    """User of each sample, [B]; None: unknown."""
    days: NDArray[np.int32]
    """Day of each sample, [B]."""
    probabilities: NDArray[np.float64] | None = None
    """True click probabilities of the built-in stream, [B]; None: unknown."""

    def __len__(self) -> int:
        """Return the number of samples, B."""
        return len(self.labels)


class Day(Protocol):
    """Samples of one day."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def load(self, positions: NDArray[np.int64], number: int) -> ClickBatch:
        """Return the samples at `positions`, marked as samples of day `number`."""


def offsets_of(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the offsets of bags with `counts` keys, [num_slots, B]."""
    offsets = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def concatenate(batches: Sequence[ClickBatch]) -> ClickBatch:
    """Return one batch of the samples of `batches`, in their order; none is empty."""
    if len(batches) == 1:
        return batches[0]
    counts = [np.diff(batch.offsets).reshape(-1, len(batch)) for batch in batches]
    keys = [
        batch.keys[batch.offsets[slot * len(batch)] : batch.offsets[(slot + 1) * len(batch)]]
        for slot in range(len(counts[0]))
        for batch in batches
    ]
    users = [batch.users for batch in batches if batch.users is not None]
    known = [batch.probabilities for batch in batches if batch.probabilities is not None]
    return ClickBatch(
        labels=np.concatenate([batch.labels for batch in batches]),
        weights=np.concatenate([batch.weights for batch in batches]),
        dense=np.concatenate([batch.dense for batch in batches]),
        keys=np.concatenate(keys),
        offsets=offsets_of(np.concatenate(counts, axis=1)),
        users=np.concatenate(users) if users else None,
        days=np.concatenate([batch.days for batch in batches]),
        probabilities=np.concatenate(known) if known else None,
    )
