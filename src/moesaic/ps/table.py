"""Embedding table of one rank: rows by key, their look-up, update, admission and eviction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moesaic.base.errors import ConfigError, DivergedError
from moesaic.facts.job.table import RecordLayout, RowDType, TableConfig
from moesaic.ps.first_values import FirstValues
from moesaic.ps.index import ABSENT, Int64s, KeyIndex, hash_keys
from moesaic.ps.optimizers import update_rows
from moesaic.ps.records import Floats, RecordArena, Tier
from moesaic.ps.update import BagGradients, KeyBags, KeyGradients, combine, gather_rows

_PULL_KEYS = 65_536
"""Keys that a pull or a read handles at once, so that a tier raises no more at a time."""

_BagValues = tuple[ArrayLike, ArrayLike | None, ArrayLike | None]
"""Gradients, clicks and shows of bags."""


@dataclass(frozen=True)
class TableStats:
    """Figures of a table since it was made."""

    rows: int
    """Rows in memory and below it."""
    rows_in_memory: int
    """Rows in memory."""
    candidates: int
    """Keys that have samples and no row."""
    memory_bytes: int
    """Bytes of records and index in memory."""
    admitted: int
    """Rows that were made."""
    evicted: int
    """Rows that were evicted."""
    day: int
    """Days that have ended."""


@dataclass(frozen=True)
class _FoundRows:
    """Rows of distinct keys, found in the index at some time."""

    rows: Int64s
    """Row of each key in memory, or `ABSENT`, [distinct]."""
    changes: int
    """The index's `changes` at that time: if they are the same, so are the rows."""


@dataclass(frozen=True)
class _Push:
    """Merged gradients of a look-up, until the next step."""

    bags: KeyBags
    merged: KeyGradients
    found: _FoundRows


class Lookup:
    """Rows that one batch has looked up, summed per bag."""

    def __init__(self, table: Table, bags: KeyBags, found: _FoundRows, sums: Floats) -> None:
        self.sums = sums
        """Sums of rows, [bags, dim]; an empty bag has zeros."""
        self.bags = bags
        """Bags and distinct keys."""
        self._table, self._found = table, found

    def push(
        self,
        grad_sums: ArrayLike,
        clicks: ArrayLike | None = None,
        shows: ArrayLike | None = None,
    ) -> None:
        """Collect gradients for the table's next step.

        Args:
            grad_sums: gradients of `sums`, [bags, dim].
            clicks: clicked samples of each bag, [bags]; None: none.
            shows: samples of each bag, [bags]; None: one per bag.

        Raises:
            DivergedError: a gradient is not finite; nothing is collected.
        """
        self._table._collect(self.bags, self._found, (grad_sums, clicks, shows))


class Table:
    """Embedding rows by key on this rank."""

    def __init__(
        self,
        config: TableConfig,
        dim: int,
        *,
        seed: int = 0,
        name: str = "table",
        dtype: RowDType = "float32",
        capacity: int | None = None,
        read_only: bool = False,
    ) -> None:
        """Make an empty table.

        Args:
            config: optimizer, admission and eviction.
            dim: numbers of a row.
            seed: seed of first values.
            name: name of the table, which changes first values.
            dtype: type of rows and optimizer state.
            capacity: rows in memory; None: as many as the machine's memory.
            read_only: True refuses pushes.
        """
        self.config, self.dim, self.name, self.read_only = config, dim, name, read_only
        self.seed = seed
        """Seed of first values."""
        self.layout = RecordLayout(dim, dtype, config.optimizer)
        self.arena = RecordArena(self.layout, capacity)
        """Records in memory."""
        self.index = KeyIndex()
        """Locations of keys with a row: a row of `arena`, or ~position below memory."""
        self.candidates = KeyIndex()
        """Keys with samples and no row; each value packs show and click as two float32."""
        self.tier: Tier | None = None
        """Storage below memory; None: all rows are in memory."""
        self.on_remove: Callable[[Int64s], None] | None = None
        """Function that is called with the keys of each removal of rows."""
        self.today = 0
        """Days that have ended."""
        self._first_values = FirstValues(seed, name, config.init_std)
        self._pending = list[_Push]()
        self._pinned = list[Int64s]()
        self._admitted = self._evicted = 0

    @property
    def num_rows(self) -> int:
        """Rows in memory and below it."""
        return len(self.index)

    def stats(self) -> TableStats:
        """Return the table's figures."""
        return TableStats(
            rows=self.num_rows,
            rows_in_memory=len(self.arena),
            candidates=len(self.candidates),
            memory_bytes=self.arena.memory_bytes
            + self.index.memory_bytes
            + self.candidates.memory_bytes,
            admitted=self._admitted,
            evicted=self._evicted,
            day=self.today,
        )

    # Reading.

    def pull(self, keys: ArrayLike) -> Floats:
        """Return the values of `keys`, [n, dim]; a key without a row has its first values."""
        flat = as_keys(keys)
        values = np.empty((len(flat), self.dim), self.layout.dtype)
        for start in range(0, len(flat), _PULL_KEYS):
            part = flat[start : start + _PULL_KEYS]
            self._fit()
            rows = self.index.find(part)
            self._raise(part, rows)
            if not gather_rows(self.arena.numbers, rows, values[start : start + _PULL_KEYS]):
                absent = np.flatnonzero(rows == ABSENT)
                self._first_values.fill(part[absent], start + absent, values, self.dim)
        return values

    def look_up(self, keys: ArrayLike, offsets: ArrayLike, *, training: bool) -> Lookup:
        """Return the sums of rows in bags.

        Args:
            keys: keys of all bags, [n].
            offsets: first key of each bag, and at the end n, [bags + 1].
            training: True if gradients follow: the rows stay in memory until the next `step`.
        """
        bags = KeyBags.of(as_keys(keys), np.ascontiguousarray(offsets, np.int64))
        found = self._find(bags)
        if training:
            self._pinned.append(found.rows)
        sources, fresh = found.rows, self.arena.numbers[:0]
        absent = np.flatnonzero(sources == ABSENT)
        if len(absent):
            count = np.arange(len(absent))
            fresh = np.empty((len(absent), self.dim), self.layout.dtype)
            self._first_values.fill(bags.distinct[absent], count, fresh, self.dim)
            sources = sources.copy()
            sources[absent] = ~count
        sums = bags.sum_rows(self.arena.numbers, fresh, sources, self.dim)
        return Lookup(self, bags, found, sums)

    @property
    def num_pending(self) -> int:
        """Look-ups whose gradients the next `step` applies."""
        return len(self._pending)

    def pinned_rows(self) -> Int64s:
        """Return the rows that training look-ups use since the last `step`, with repeats."""
        rows = np.concatenate([np.empty(0, np.int64), *self._pinned])
        return rows[rows >= 0]

    # Training.

    def push(self, keys: ArrayLike, grads: ArrayLike, clicks: ArrayLike | None = None) -> None:
        """Update rows at once; gradients of equal keys are summed in their order.

        Args:
            keys: a key per sample, [n].
            grads: gradients, [n, dim].
            clicks: 1 for a clicked sample, [n]; None: none was clicked.

        Raises:
            DivergedError: a gradient is not finite; nothing changes.
        """
        flat = as_keys(keys)
        bags = KeyBags.of(flat, np.arange(len(flat) + 1))
        self._apply(bags, self._merge(bags, (grads, clicks, None)), self._find(bags))

    def step(self) -> None:
        """Admit keys, and update each row once by the gradients that look-ups collected."""
        pending, self._pending = self._pending, []
        if len(pending) == 1:
            self._apply(pending[0].bags, pending[0].merged, pending[0].found)
        elif pending:
            bags, merged = combine([(push.bags, push.merged) for push in pending])
            self._apply(bags, self._checked(bags, merged), self._find(bags))
        self._pinned.clear()

    def end_day(self, sum_over_ranks: Callable[[int], int] = int) -> int:
        """End the day: counts decay, and rows are evicted.

        Args:
            sum_over_ranks: function that sums a number over the ranks that share the table. Their
                rows count for `max_rows` together. Default: one rank.

        Returns:
            Evicted rows of this rank.
        """
        self.today += 1
        self._decay_candidates()
        config = self.config
        if not (config.evict_score or config.evict_days or config.max_rows):
            return 0
        keys, scores, idle_days = self.ages()
        evicted = scores < config.evict_score
        if config.evict_days:
            evicted |= idle_days >= config.evict_days
        excess = sum_over_ranks(int(np.count_nonzero(~evicted))) - config.max_rows
        if config.max_rows and excess > 0:
            order = _eviction_order(keys[~evicted], scores[~evicted])
            evicted[~evicted] = order <= _find_smallest(np.sort(order), excess, sum_over_ranks)
        self.remove(keys[evicted])
        count = int(np.count_nonzero(evicted))
        self._evicted += count
        return count

    def ages(self) -> tuple[Int64s, NDArray[np.float32], NDArray[np.int32]]:
        """Return keys, scores and idle days of all rows, in an order that the keys decide."""
        keys, locations = self.index.items()
        order = np.argsort(locations)  # Rows that are neighbours on a drive are read at once.
        scores, idle = np.empty(len(keys), np.float32), np.empty(len(keys), np.int32)
        for start in range(0, len(keys), _PULL_KEYS):
            part = order[start : start + _PULL_KEYS]
            records = self._read(locations[part])
            counts, days = decayed_counts(records, self.layout, self.config, self.today)
            scores[part] = scores_of(self.config, counts)
            idle[part] = days - 1
        return keys, scores, np.maximum(idle, 0)

    # Rows as records, for tiers and snapshots.

    def read(self, keys: Int64s) -> NDArray[np.uint8]:
        """Return the records of `keys`, all of which have a row, [n, record_bytes]."""
        return self._read(self.index.find(keys))

    def load(self, keys: Int64s, records: NDArray[np.uint8]) -> None:
        """Add rows for distinct `keys` that have none, from their records."""
        self.index.set(keys, self._write(records))

    def remove(self, keys: Int64s) -> None:
        """Remove the rows of `keys`, all of which have one."""
        locations = self.index.find(keys)
        self.index.remove(keys)
        if self.tier is not None:
            self.tier.remove(locations)
        self.arena.free(locations[locations >= 0])
        if self.on_remove is not None:
            self.on_remove(keys)

    def _read(self, locations: Int64s) -> NDArray[np.uint8]:
        records = self.arena.records[np.maximum(locations, 0)]
        below = locations < 0
        if self.tier is not None and below.any():
            records[below] = self.tier.read(locations[below])
        return records

    def _write(self, records: NDArray[np.uint8]) -> Int64s:
        rows = self._allocate(len(records))
        self.arena.records[rows] = records
        return rows

    def _allocate(self, count: int) -> Int64s:
        if count > self.arena.num_free and self.tier is not None:
            self.tier.make_room(count)
        return self.arena.allocate(count)

    def _find(self, bags: KeyBags) -> _FoundRows:
        """Find rows of distinct keys, and bring them into memory."""
        self._fit()
        rows = self.index.find_hashed(bags.hashes)
        self._raise(bags.distinct, rows)
        return _FoundRows(rows, self.index.changes)

    def _fit(self) -> None:
        """Let the tier take back memory, unless look-ups hold rows."""
        if self.tier is not None and not self._pinned:
            self.tier.fit()

    def _raise(self, keys: Int64s, rows: Int64s) -> None:
        """Bring the rows of `keys` that are below memory into it, and correct `rows`."""
        if self.tier is None:
            return
        below = (rows < 0) & (rows != ABSENT)
        if below.any():
            self._pinned.append(rows)  # Raising some rows must not demote the others.
            self.tier.raise_rows(np.unique(keys[below]))
            self._pinned.pop()
            rows[below] = self.index.find(keys[below])
            if (rows[below] < 0).any():
                raise AssertionError("rows left memory while others were read")

    # Updates.

    def _collect(self, bags: KeyBags, found: _FoundRows, given: _BagValues) -> None:
        self._pending.append(_Push(bags, self._merge(bags, given), found))

    def _merge(self, bags: KeyBags, given: _BagValues) -> KeyGradients:
        """Return the sums of gradients, shows and clicks that were given per bag."""
        if self.read_only:
            raise ConfigError(f"table '{self.name}' is read-only: open it without read_only")
        shape = bags.num_bags, self.dim
        grads = np.ascontiguousarray(given[0], self.layout.dtype)
        clicks, shows = (
            np.full(shape[0], default, np.float32)
            if counts is None
            else np.ascontiguousarray(counts, np.float32)
            for counts, default in zip(given[1:], (0, 1), strict=True)
        )
        if grads.shape != shape or clicks.shape != shape[:1] or shows.shape != shape[:1]:
            raise ConfigError(
                f"gradients of table '{self.name}' have shape {grads.shape}, clicks "
                f"{clicks.shape} and shows {shows.shape}: pass {shape}, {shape[:1]} and {shape[:1]}"
            )
        if not ((clicks >= 0) & (clicks <= shows)).all():
            bad = clicks[~((clicks >= 0) & (clicks <= shows))][0]
            raise ConfigError(
                f"clicks of table '{self.name}' hold {bad}: pass 1 for a clicked sample, else 0"
            )
        return self._checked(bags, bags.merge(BagGradients(grads, shows, clicks)))

    def _checked(self, bags: KeyBags, merged: KeyGradients) -> KeyGradients:
        """Return `merged`.

        Raises:
            DivergedError: a gradient is not finite.
        """
        if not merged.is_finite:
            bad = np.flatnonzero(~np.isfinite(merged.grads).all(1))
            error = DivergedError(
                f"the gradient of key {bags.distinct[bad[0]]} of table '{self.name}' is not "
                "finite: lower table.lr or optimizer.lr"
            )
            error.is_on_all_ranks = False  # Only the owner of the key has it.
            raise error
        return merged

    def _apply(self, bags: KeyBags, merged: KeyGradients, found: _FoundRows) -> None:
        if found.changes != self.index.changes:
            found = self._find(bags)
        rows = found.rows
        absent = np.flatnonzero(rows == ABSENT)
        if len(absent):
            self._pinned.append(rows)
            rows = rows.copy()
            rows[absent] = self._admit(bags.distinct[absent], merged, absent)
            self._pinned.pop()
        update_rows(self.arena, self.config, rows, merged, self.today)

    def _admit(self, keys: Int64s, merged: KeyGradients, places: Int64s) -> Int64s:
        """Return new rows of `keys`, or `ABSENT` for those that are not admitted.

        `places` are the keys' indices in `merged`."""
        config = self.config
        rows = np.full(len(keys), ABSENT)
        counts = np.zeros((len(keys), 2), np.float32)
        admitted = np.ones(len(keys), bool)
        if config.admit_count > 1 or config.admit_score > 0:
            found = self.candidates.find(keys)
            found[found == ABSENT] = 0
            counts = found.view(np.float32).reshape(-1, 2)
            total = counts + merged.counts[places, :2]
            admitted = (total[:, 0] >= config.admit_count) & (
                scores_of(config, total) >= config.admit_score
            )
            self.candidates.remove(keys[admitted])
            self.candidates.set(keys[~admitted], total.view(np.int64)[~admitted, 0])
        rows[admitted] = self._make(keys[admitted], counts[admitted])
        return rows

    def _make(self, keys: Int64s, counts: NDArray[np.float32]) -> Int64s:
        rows = self._allocate(len(keys))
        arena, place = self.arena, self.layout.counters
        arena.records[rows] = 0
        self._first_values.fill(keys, rows, arena.numbers, self.dim)
        arena.words[rows, place : place + 2] = counts
        arena.whole_words[rows, place + 2] = self.today
        self.index.set(keys, rows)
        self._admitted += len(keys)
        return rows

    def _decay_candidates(self) -> None:
        keys, packed = self.candidates.items()
        counts = packed.view(np.float32).reshape(-1, 2) * np.float32(self.config.decay)
        kept = counts[:, 0] >= 1
        self.candidates.remove(keys[~kept])
        self.candidates.set(keys[kept], counts.view(np.int64)[kept, 0])


def scores_of(config: TableConfig, counts: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return the scores of shows and clicks, [n, 2]."""
    show, click = counts[:, 0], counts[:, 1]
    return (show - click) * config.nonclick_weight + click * config.click_weight


def decayed_counts(
    records: NDArray[np.uint8], layout: RecordLayout, config: TableConfig, today: int
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Return shows and clicks as of today, [n, 2], and days since the last sample."""
    place = layout.counters
    days = today - records.view(np.int32)[:, place + 2]
    counts = records.view(np.float32)[:, place : place + 2].astype(np.float64)
    return counts * (config.decay**days)[:, None], days


def as_keys(keys: ArrayLike) -> Int64s:
    """Return keys, an int64 array or tensor, as a flat array.

    Raises:
        ConfigError: the keys are of another type.
    """
    array = np.asarray(keys)
    if array.dtype != np.int64 and array.size:
        raise ConfigError(f"keys have the type {array.dtype}: pass int64")
    return np.ascontiguousarray(array, np.int64).reshape(-1)


def _eviction_order(keys: Int64s, scores: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Return numbers whose order is that of scores, then of the keys' hashes."""
    bits = np.maximum(scores, np.float32(0)).view(np.uint32).astype(np.uint64)
    return (bits << np.uint64(32)) | (hash_keys(keys) >> np.uint64(32))


def _find_smallest(
    values: NDArray[np.uint64], count: int, sum_over_ranks: Callable[[int], int]
) -> np.uint64:
    """Return the `count`-th smallest of all ranks' sorted values."""
    low, high = 0, (1 << 64) - 1
    while low < high:
        middle = (low + high) // 2
        below = int(np.searchsorted(values, np.uint64(middle), side="right"))
        if sum_over_ranks(below) >= count:
            high = middle
        else:
            low = middle + 1
    return np.uint64(low)
