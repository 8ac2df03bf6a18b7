"""Bags of keys: their distinct keys, sums of their rows, merged gradients.

Loops run on torch's number of threads over disjoint parts, so results do not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.base.compiled import (
    BLOCK,
    accumulate_block,
    cached_loop,
    copy_block,
    sum_squares_block,
)
from moesaic.base.compiled import prefetch as prefetch_line
from moesaic.base.errors import ConfigError
from moesaic.kernels.threads import run_ranges
from moesaic.ps.index import MIN_THREADED_KEYS, Int64s, hash_key
from moesaic.ps.records import Floats

_AHEAD = 32
"""Rows between a prefetch and its use."""
_SLOTS_PER_KEY = 2
COUNTS = 4
"""Words for the counts of a merged key: shows, clicks, and the last bag while it is merged."""
_MERGE_PARTS = 16
"""Parts of distinct keys that threads may merge, by the remainder of their index."""


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
    counts: NDArray[np.float32]
    """Samples with each key, and clicked ones, in the first columns, [distinct, 4]."""
    is_finite: bool
    """True if all gradients are finite."""

    @property
    def shows(self) -> NDArray[np.float32]:
        """Samples with each key, [distinct]."""
        return self.counts[:, 0]

    @property
    def clicks(self) -> NDArray[np.float32]:
        """Clicked samples with each key, [distinct]."""
        return self.counts[:, 1]


@dataclass(frozen=True)
class KeyBags:
    """Bags of keys, with the distinct keys of all of them."""

    distinct: Int64s
    """Distinct keys in the order of their first places, [distinct]."""
    hashes: NDArray[np.uint64]
    """Hash of each distinct key, [distinct]."""
    inverse: NDArray[np.int32]
    """Index of each key among the distinct ones, [keys]."""
    offsets: Int64s
    """Bag b holds the keys from offsets[b] to offsets[b + 1], [bags + 1]."""

    @staticmethod
    def of(keys: Int64s, offsets: Int64s) -> KeyBags:
        """Return bags of `keys`; `offsets` are those of `KeyBags`.

        Raises:
            ConfigError: the offsets do not rise from 0 to the number of keys.
        """
        length = len(keys)
        is_whole = offsets.ndim == 1 and len(offsets) and offsets[0] == 0 and offsets[-1] == length
        if not is_whole or (offsets[1:] < offsets[:-1]).any():
            raise ConfigError(
                f"offsets of {length} keys are {offsets.tolist()[:8]}...: they rise from 0, and "
                f"the end of the last bag is {length}"
            )
        distinct, hashes = np.empty(length, np.int64), np.empty(length, np.uint64)
        inverse = np.empty(length, np.int32)
        slots = np.full(_SLOTS_PER_KEY << max(length - 1, 1).bit_length(), -1, np.int32)
        count = _deduplicate(keys, slots, distinct, hashes, inverse)
        return KeyBags(distinct[:count], hashes[:count], inverse, offsets)

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
        sources = values.reshape(-1), values.shape[1], fresh.reshape(-1)
        flat = sums.reshape(-1)

        def sum_bags(start: int, end: int) -> None:
            _sum_rows(
                sources, rows, self.inverse, self.offsets[start : end + 1], flat[start * dim :], dim
            )

        run_ranges(sum_bags, self.num_bags, MIN_THREADED_KEYS)
        return sums

    def merge(self, push: BagGradients) -> KeyGradients:
        """Return the sums of gradients and counts per distinct key, in the order of bags."""
        count, dim = len(self.distinct), push.grads.shape[1]
        grads = np.empty((count, dim), push.grads.dtype)
        counts = np.empty((count, COUNTS), np.float32)
        given = push.grads.reshape(-1), push.shows, push.clicks
        flat_counts = counts.reshape(-1)
        merged = grads.reshape(-1), flat_counts, flat_counts.view(np.int32)
        finite = [True]

        def merge_parts(start: int, end: int) -> None:
            if not _merge(self.inverse, self.offsets, given, merged, dim, start, end):
                finite[0] = False

        if len(self.inverse) < MIN_THREADED_KEYS:
            merge_parts(0, _MERGE_PARTS)
        else:
            run_ranges(merge_parts, _MERGE_PARTS, 1)
        return KeyGradients(grads, counts, finite[0])


def combine(parts: Sequence[tuple[KeyBags, KeyGradients]]) -> tuple[KeyBags, KeyGradients]:
    """Return the distinct keys of all `parts` and their gradients, summed in order."""
    if len(parts) == 1:
        return parts[0]
    keys = np.concatenate([bags.distinct for bags, _ in parts])
    bags = KeyBags.of(keys, np.arange(len(keys) + 1))
    merged = [gradients for _, gradients in parts]
    return bags, bags.merge(
        BagGradients(
            np.concatenate([one.grads for one in merged]),
            np.concatenate([one.shows for one in merged]),
            np.concatenate([one.clicks for one in merged]),
        )
    )


def gather_rows(values: Floats, rows: Int64s, out: Floats) -> bool:
    """Copy the first columns of `values` at `rows` to `out`, [rows, dim].

    Return whether all rows are at least 0; others are not copied."""
    flat, stride, dim = values.reshape(-1), values.shape[1], out.shape[1]
    flat_out = out.reshape(-1)

    complete = [True]

    def gather(start: int, end: int) -> None:
        if not _gather(flat, stride, rows[start:end], flat_out[start * dim :], dim):
            complete[0] = False

    run_ranges(gather, len(rows), MIN_THREADED_KEYS)
    return complete[0]


@cached_loop
def _deduplicate(
    keys: Int64s,
    slots: NDArray[np.int32],
    distinct: Int64s,
    hashes: NDArray[np.uint64],
    inverse: NDArray[np.int32],
) -> np.int32:
    """Number keys in the order of their first places; `slots` is a hash table of numbers."""
    mask, count = np.uint64(len(slots) - 1), np.int32(0)
    for place in range(len(keys)):
        key = keys[place]
        hashed = hash_key(key)
        slot = hashed & mask
        found = slots[slot]
        new = found < 0
        number = count if new else found
        distinct[count] = key  # An old key's number is below, so this one is overwritten.
        while distinct[number] != key:  # Another key has the slot.
            slot = (slot + np.uint64(1)) & mask
            found = slots[slot]
            new = found < 0
            number = count if new else found
        slots[slot] = number
        hashes[count] = hashed
        inverse[place] = number
        count += np.int32(new)
    return count


@cached_loop
def prefetch_row(values: Floats, start: int, length: int) -> None:
    """Load the cache lines of `length` numbers without waiting for them."""
    per_line, column = 16 if values.itemsize == 4 else 8, 0
    while column < length:
        prefetch_line(values, start + column)
        column += per_line
    prefetch_line(values, start + length - 1)


@cached_loop
def _copy(target: Floats, at: int, source: Floats, start: int, dim: int) -> None:
    whole = dim - dim % BLOCK
    for column in range(0, whole, BLOCK):
        copy_block(target, at + column, source, start + column)
    for column in range(whole, dim):
        target[at + column] = source[start + column]


@cached_loop
def _accumulate(target: Floats, at: int, source: Floats, start: int, dim: int, keep: bool) -> bool:
    """Set target[at : at + dim] to source[start : start + dim], plus the old values if `keep`.

    Return whether all new values are finite. There is no branch for `keep`, as keys decide it."""
    whole, finite = dim - dim % BLOCK, True
    for column in range(0, whole, BLOCK):
        finite &= accumulate_block(target, at + column, source, start + column, keep)
    for column in range(whole, dim):
        old = target[at + column] if keep else source.dtype.type(0)
        target[at + column] = old + source[start + column]
        finite &= np.isfinite(target[at + column])
    return finite


@cached_loop
def sum_squares(source: Floats, start: int, dim: int) -> Any:
    """Return the sum of squares of source[start : start + dim]."""
    whole, total = dim - dim % BLOCK, source.dtype.type(0)
    for column in range(0, whole, BLOCK):
        total += sum_squares_block(source, start + column)
    for column in range(whole, dim):
        total += source[start + column] * source[start + column]
    return total


@cached_loop
def _gather(values: Floats, stride: int, rows: Int64s, out: Floats, dim: int) -> bool:
    length, complete = len(rows), True
    for place in range(length):
        if place + _AHEAD < length:
            prefetch_row(values, max(rows[place + _AHEAD], 0) * stride, dim)
        if rows[place] >= 0:
            _copy(out, place * dim, values, rows[place] * stride, dim)
        else:
            complete = False
    return complete


@cached_loop
def _sum_rows(
    sources: tuple[Floats, int, Floats],
    rows: Int64s,
    inverse: NDArray[np.int32],
    offsets: Int64s,
    sums: Floats,
    dim: int,
) -> None:
    values, stride, fresh = sources
    last = offsets[len(offsets) - 1]
    for bag in range(len(offsets) - 1):
        at, begin = bag * dim, offsets[bag]
        for place in range(begin, offsets[bag + 1]):
            if place + _AHEAD < last:
                prefetch_row(values, max(rows[inverse[place + _AHEAD]], 0) * stride, dim)
            row = rows[inverse[place]]
            if row >= 0 and place == begin:
                _copy(sums, at, values, row * stride, dim)
            elif row >= 0:
                _accumulate(sums, at, values, row * stride, dim, True)
            else:
                _accumulate(sums, at, fresh, ~row * dim, dim, place > begin)
        if begin == offsets[bag + 1]:
            for column in range(dim):
                sums[at + column] = 0


@cached_loop
def _merge(
    inverse: NDArray[np.int32],
    offsets: Int64s,
    given: tuple[Floats, NDArray[np.float32], NDArray[np.float32]],
    merged: tuple[Floats, NDArray[np.float32], NDArray[np.int32]],
    dim: int,
    first_part: int,
    last_part: int,
) -> bool:
    """Merge the keys of some parts; return whether their gradients are finite."""
    grads, shows, clicks = given
    sums, counts, bags = merged
    seen, finite, zero = 0, True, np.float32(0)
    for bag in range(len(offsets) - 1):
        for place in range(offsets[bag], offsets[bag + 1]):
            number = inverse[place]
            keep = number < seen
            seen += not keep
            part = number % _MERGE_PARTS
            if part < first_part or part >= last_part:
                continue
            finite &= _accumulate(sums, number * dim, grads, bag * dim, dim, keep)
            at = number * COUNTS
            show, click, last_bag = counts[at], counts[at + 1], bags[at + 2]
            is_sample = (not keep) | (last_bag != bag)  # A bag may repeat a key.
            counts[at] = (show if keep else zero) + (shows[bag] if is_sample else zero)
            counts[at + 1] = (click if keep else zero) + (clicks[bag] if is_sample else zero)
            bags[at + 2] = bag
    return finite
