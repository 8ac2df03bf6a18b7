"""Bags of keys: their distinct keys, sums of rows, merged gradients, and updates of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moesaic.base.compiled import cached_njit
from moesaic.facts.job.table import TableConfig
from moesaic.ps.index import Int64s, hash_keys
from moesaic.ps.records import Floats, RecordArena

_AHEAD = 12
_SGD, _ROWWISE_ADAGRAD, _ADAGRAD, _ADAM = range(4)
_OPTIMIZERS = {
    "sgd": _SGD, "rowwise-adagrad": _ROWWISE_ADAGRAD, "adagrad": _ADAGRAD, "adam": _ADAM
}  # fmt: skip


@dataclass(frozen=True)
class KeyBags:
    """Bags of keys, with the distinct keys of all of them."""

    distinct: Int64s
    """Distinct keys in the order of their first places, [distinct]."""
    inverse: NDArray[np.int32]
    """Index of each key among the distinct ones, [keys]."""
    offsets: Int64s
    """Bag b holds the keys from offsets[b] to offsets[b + 1], [bags + 1]."""

    @staticmethod
    def of(keys: Int64s, offsets: Int64s) -> KeyBags:
        """Return bags of `keys`; `offsets` are those of `KeyBags`."""
        inverse = np.empty(len(keys), np.int32)
        distinct = np.empty(len(keys), np.int64)
        size = 1 << max(2 * len(keys) - 1, 1).bit_length()
        count = _deduplicate(keys, hash_keys(keys), np.full(size, -1, np.int32), distinct, inverse)
        return KeyBags(distinct[:count].copy(), inverse, offsets)

    @property
    def num_bags(self) -> int:
        """Number of bags."""
        return len(self.offsets) - 1

    def sum_rows(self, values: Floats, fresh: Floats, rows: Int64s, dim: int) -> Floats:
        """Return the sum of rows in each bag, [bags, dim].

        Args:
            values: rows in memory, in their first `dim` columns.
            fresh: further rows.
            rows: for each distinct key its row in `values`, or ~row in `fresh`.
            dim: numbers of a row.
        """
        sums = np.empty((self.num_bags, dim), values.dtype)
        _sum_rows(values, fresh, rows, self.inverse, self.offsets, sums)
        return sums

    def merge(self, push: BagGradients) -> KeyGradients:
        """Return the sums of gradients and counts per distinct key, in the order of bags."""
        count, dim = len(self.distinct), push.grads.shape[1]
        merged = KeyGradients(
            np.zeros((count, dim), push.grads.dtype),
            np.zeros(count, np.float32),
            np.zeros(count, np.float32),
        )
        _merge(
            self.inverse, self.offsets, push.grads, push.shows, push.clicks,
            merged.grads, merged.shows, merged.clicks,
        )  # fmt: skip
        return merged


@dataclass(frozen=True)
class BagGradients:
    """Gradients of the sums of bags, and the samples that the bags stand for."""

    grads: Floats
    """Gradients, [bags, dim]."""
    shows: NDArray[np.float32]
    """Samples of each bag, [bags]."""
    clicks: NDArray[np.float32]
    """Clicked samples of each bag, [bags]."""


@dataclass(frozen=True)
class KeyGradients:
    """Gradients and samples of distinct keys."""

    grads: Floats
    """Sums of gradients, [distinct, dim]."""
    shows: NDArray[np.float32]
    """Samples with each key, [distinct]."""
    clicks: NDArray[np.float32]
    """Clicked samples with each key, [distinct]."""


def update_rows(
    arena: RecordArena, config: TableConfig, rows: Int64s, merged: KeyGradients, today: int
) -> None:
    """Update the records at distinct `rows`; rows below 0 are skipped."""
    layout = arena.layout
    number = np.dtype(layout.dtype).type
    betas = np.array(config.betas, np.float64)
    _update(
        (arena.numbers, arena.words, arena.whole_words, arena.changed), layout.counters,
        _OPTIMIZERS[config.optimizer], (number(config.lr), number(config.epsilon), betas),
        rows, (merged.grads, merged.shows, merged.clicks), today, config.decay,
    )  # fmt: skip


@cached_njit(nogil=True)
def _deduplicate(
    keys: Int64s,
    hashes: NDArray[np.uint64],
    slots: NDArray[np.int32],
    distinct: Int64s,
    inverse: NDArray[np.int32],
) -> int:
    mask, count = np.uint64(len(slots) - 1), 0
    for index in range(len(keys)):
        key = keys[index]
        slot = np.int64(hashes[index] & mask)
        while slots[slot] >= 0 and distinct[slots[slot]] != key:
            slot = (slot + 1) & np.int64(mask)
        if slots[slot] < 0:
            slots[slot] = count
            distinct[count] = key
            count += 1
        inverse[index] = slots[slot]
    return count


@cached_njit(nogil=True)
def _sum_rows(
    values: Floats,
    fresh: Floats,
    rows: Int64s,
    inverse: NDArray[np.int32],
    offsets: Int64s,
    sums: Floats,
) -> None:
    dim = sums.shape[1]
    for bag in range(len(offsets) - 1):
        for column in range(dim):
            sums[bag, column] = 0
        for index in range(offsets[bag], offsets[bag + 1]):
            row = rows[inverse[index]]
            source = values[row] if row >= 0 else fresh[~row]
            for column in range(dim):
                sums[bag, column] += source[column]


@cached_njit(nogil=True)
def _merge(
    inverse: NDArray[np.int32],
    offsets: Int64s,
    grads: Floats,
    shows: NDArray[np.float32],
    clicks: NDArray[np.float32],
    merged: Floats,
    merged_shows: NDArray[np.float32],
    merged_clicks: NDArray[np.float32],
) -> None:
    last_bag = np.full(len(merged), -1, np.int64)
    for bag in range(len(offsets) - 1):
        for index in range(offsets[bag], offsets[bag + 1]):
            key = inverse[index]
            for column in range(merged.shape[1]):
                merged[key, column] += grads[bag, column]
            if last_bag[key] != bag:  # A key that a bag repeats has one sample there.
                last_bag[key] = bag
                merged_shows[key] += shows[bag]
                merged_clicks[key] += clicks[bag]


@cached_njit(nogil=True)
def _update(arena, counters, optimizer, settings, rows, merged, today, decay):  # type: ignore[no-untyped-def]
    numbers, words, whole_words, changed = arena
    lr, epsilon, betas = settings
    grads, shows, clicks = merged
    for index in range(len(rows)):
        if rows[index] < 0:
            continue
        row = rows[index]
        days = today - whole_words[row, counters + 2]
        if days:
            factor = np.float32(decay**days)
            words[row, counters] *= factor
            words[row, counters + 1] *= factor
            whole_words[row, counters + 2] = today
        words[row, counters] += shows[index]
        words[row, counters + 1] += clicks[index]
        changed[row] = 3
        record, grad = numbers[row], grads[index]
        if optimizer == _SGD:
            _sgd(record, grad, lr)
        elif optimizer == _ROWWISE_ADAGRAD:
            _rowwise_adagrad(record, grad, lr, epsilon)
        elif optimizer == _ADAGRAD:
            _adagrad(record, grad, lr, epsilon)
        else:
            whole_words[row, counters + 3] += 1
            _adam(record, grad, whole_words[row, counters + 3], lr, epsilon, betas)


@cached_njit(nogil=True)
def _sgd(record: Floats, grad: Floats, lr: float) -> None:
    for column in range(len(grad)):
        record[column] -= lr * grad[column]


@cached_njit(nogil=True)
def _rowwise_adagrad(record: Floats, grad: Floats, lr: float, epsilon: float) -> None:
    dim, total = len(grad), grad[0] * 0
    for column in range(dim):
        total += grad[column] * grad[column]
    record[dim] += total / grad.dtype.type(dim)
    step = lr / (np.sqrt(record[dim]) + epsilon)
    for column in range(dim):
        record[column] -= step * grad[column]


@cached_njit(nogil=True)
def _adagrad(record: Floats, grad: Floats, lr: float, epsilon: float) -> None:
    dim = len(grad)
    for column in range(dim):
        record[dim + column] += grad[column] * grad[column]
        record[column] -= lr * grad[column] / (np.sqrt(record[dim + column]) + epsilon)


@cached_njit(nogil=True)
def _adam(
    record: Floats, grad: Floats, steps: int, lr: float, epsilon: float, betas: Floats
) -> None:
    dim = len(grad)
    step = lr * math.sqrt(1 - betas[1] ** steps) / (1 - betas[0] ** steps)
    for column in range(dim):
        first, second = record[dim + column], record[2 * dim + column]
        first += (1 - betas[0]) * (grad[column] - first)
        second += (1 - betas[1]) * (grad[column] * grad[column] - second)
        record[dim + column], record[2 * dim + column] = first, second
        record[column] -= step * first / (math.sqrt(second) + epsilon)


def concatenate(
    batches: Sequence[tuple[KeyBags, BagGradients]],
) -> tuple[KeyBags, BagGradients]:
    """Return all bags and gradients of `batches`, in their order."""
    if len(batches) == 1:
        return batches[0]
    keys = np.concatenate([bags.distinct[bags.inverse] for bags, _ in batches])
    sizes = np.concatenate([np.diff(bags.offsets) for bags, _ in batches])
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    pushes = [push for _, push in batches]
    return KeyBags.of(keys, offsets), BagGradients(
        np.concatenate([push.grads for push in pushes]),
        np.concatenate([push.shows for push in pushes]),
        np.concatenate([push.clicks for push in pushes]),
    )
