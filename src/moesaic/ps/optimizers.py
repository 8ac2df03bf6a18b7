"""Optimizers of rows: one update of each row by its merged gradient, in its record."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from moesaic.base.compiled import (
    BLOCK,
    adagrad_block,
    cached_loop,
    prefetch,
    subtract_scaled_block,
)
from moesaic.facts.job.table import TableConfig
from moesaic.kernels.threads import run_ranges
from moesaic.ps.index import MIN_THREADED_KEYS, Int64s
from moesaic.ps.records import CHANGED, Floats, RecordArena
from moesaic.ps.update import COUNTS, KeyGradients, prefetch_row, sum_squares

_AHEAD = 32
"""Rows between a prefetch and its use."""
_SGD, _ROWWISE_ADAGRAD, _ADAGRAD, _ADAM = range(4)
_NUMBERS = {
    "sgd": _SGD, "rowwise-adagrad": _ROWWISE_ADAGRAD, "adagrad": _ADAGRAD, "adam": _ADAM
}  # fmt: skip


def update_rows(
    arena: RecordArena, config: TableConfig, rows: Int64s, merged: KeyGradients, today: int
) -> None:
    """Update the records at distinct `rows`; rows below 0 are skipped."""
    layout = arena.layout
    number = np.dtype(layout.dtype).type
    records = (
        arena.numbers.reshape(-1), arena.numbers.shape[1], arena.words.reshape(-1),
        arena.whole_words.reshape(-1), arena.words.shape[1], layout.counters, arena.changed,
    )  # fmt: skip
    optimizer = (
        _NUMBERS[config.optimizer], number(config.lr), number(config.epsilon),
        float(config.betas[0]), float(config.betas[1]),
    )  # fmt: skip
    dim = layout.dim

    def update(start: int, end: int) -> None:
        gradients = (
            merged.grads.reshape(-1)[start * dim :],
            merged.counts.reshape(-1)[start * COUNTS :],
        )
        _update(records, optimizer, rows[start:end], gradients, dim, today, config.decay)

    run_ranges(update, len(rows), MIN_THREADED_KEYS)


@cached_loop
def _update(
    records: tuple[Any, ...],
    optimizer: tuple[Any, ...],
    rows: Int64s,
    gradients: tuple[Any, ...],
    dim: int,
    today: int,
    decay: float,
) -> None:
    numbers, stride, words, whole_words, word_stride, counters, changed = records
    kind, lr, epsilon, first_beta, second_beta = optimizer
    grads, counts = gradients
    for index in range(len(rows)):
        if index + _AHEAD < len(rows):
            coming = max(rows[index + _AHEAD], 0)
            prefetch_row(words, coming * word_stride, word_stride)
            prefetch(changed, coming)
        row = rows[index]
        if row < 0:
            continue
        at, start = row * stride, index * dim
        if kind == _SGD:
            _subtract(numbers, at, grads, start, lr, dim)
        elif kind == _ROWWISE_ADAGRAD:
            _rowwise_adagrad(numbers, at, grads, start, lr, epsilon, dim)
        elif kind == _ADAGRAD:
            _adagrad(numbers, at, grads, start, lr, epsilon, dim)
        show = row * word_stride + counters
        if kind == _ADAM:
            whole_words[show + 3] += 1
            steps = whole_words[show + 3]
            step = lr * math.sqrt(1 - second_beta**steps) / (1 - first_beta**steps)
            rates = step, epsilon, 1 - first_beta, 1 - second_beta
            _adam(numbers, at, grads, start, rates, dim)
        if whole_words[show + 2] != today:
            factor = np.float32(decay ** (today - whole_words[show + 2]))
            words[show] *= factor
            words[show + 1] *= factor
            whole_words[show + 2] = today
        words[show] += counts[index * COUNTS]
        words[show + 1] += counts[index * COUNTS + 1]
        changed[row] = CHANGED


@cached_loop
def _subtract(target: Floats, at: int, source: Floats, start: int, factor: float, dim: int) -> None:
    whole = dim - dim % BLOCK
    for column in range(0, whole, BLOCK):
        subtract_scaled_block(target, at + column, source, start + column, factor)
    for column in range(whole, dim):
        target[at + column] -= factor * source[start + column]


@cached_loop
def _rowwise_adagrad(
    record: Floats, at: int, grads: Floats, start: int, lr: float, epsilon: float, dim: int
) -> None:
    total = record[at + dim] + sum_squares(grads, start, dim) / grads.dtype.type(dim)
    record[at + dim] = total
    _subtract(record, at, grads, start, lr / (np.sqrt(total) + epsilon), dim)


@cached_loop
def _adagrad(
    record: Floats, at: int, grads: Floats, start: int, lr: float, epsilon: float, dim: int
) -> None:
    whole, state = dim - dim % BLOCK, at + dim
    for column in range(0, whole, BLOCK):
        adagrad_block(record, at + column, dim, grads, start + column, lr, epsilon)
    for column in range(whole, dim):
        grad = grads[start + column]
        total = record[state + column] + grad * grad
        record[state + column] = total
        record[at + column] -= lr * grad / (np.sqrt(total) + epsilon)


@cached_loop
def _adam(
    record: Floats, at: int, grads: Floats, start: int, rates: tuple[float, ...], dim: int
) -> None:
    step, epsilon, first_rate, second_rate = rates
    for column in range(dim):
        grad = grads[start + column]
        first, second = record[at + dim + column], record[at + 2 * dim + column]
        first += first_rate * (grad - first)
        second += second_rate * (grad * grad - second)
        record[at + dim + column], record[at + 2 * dim + column] = first, second
        record[at + column] -= step * first / (math.sqrt(second) + epsilon)
