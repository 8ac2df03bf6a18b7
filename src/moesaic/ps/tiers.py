"""Memory over drive for a table: which rows are where, within a budget of memory.

Rows that changed are appended to the newest segment when they leave memory. Rows that are equal to
their copy on the drive are dropped. A segment with few rows in use is rewritten and deleted.

The thread that trains owns the index, the arena and this module's arrays. Other threads may only
read segments, so nothing here needs a lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moesaic.base.compiled import cached_loop
from moesaic.base.errors import ConfigError, StoreError
from moesaic.base.units import format_bytes, format_larger_bytes
from moesaic.facts.table_rows import MemoryRows
from moesaic.ps.drive_rows import CHANGED_BIT, SEGMENT_BYTES, DriveRows, Records
from moesaic.ps.index import ABSENT, Int64s, KeyIndex
from moesaic.ps.records import CHANGED_SINCE_SNAPSHOT, CHANGED_SINCE_WRITE
from moesaic.ps.segments import SegmentLayout
from moesaic.ps.table import Table

DemotionChoice = Callable[[MemoryRows], Int64s]
"""Choice of the rows that leave memory: ascending positions among those of the facts."""

READ_ROWS = 2048
"""Rows that are read from the drive at once."""
_NO_COPY = np.int64(0)
"""Location of the copy of a row without a copy; those on the drive are negative."""
_NEW = 2**31 - 1
"""Last pass of a row that the table made in the present pass."""
_LEAVE_ROWS = 4096
"""Rows that leave memory at once, at least."""
_HOT_SHARE = 2
"""Rows in memory for one hot row, at least."""
_CHOICE_SHARE = 16
"""Rows in memory for one row that a choice makes leave, where others can."""
_ROW_BYTES = 1 + 8 + 4
"""Bytes of a row in memory beside its record: flags, copy and last pass."""
_CHOICE_BYTES = 32
"""Bytes of a row in memory while rows are chosen that leave."""
_PASS_BYTES = 24
"""Bytes of a row in memory for keys of passes."""
_BUFFER_BYTES = 8 << 20
"""Bytes of blocks that one read holds at most."""
_BUFFER_SHARE = 128
"""Bytes of the budget for one byte of such blocks, at least."""
_READ_AHEAD_SHARE = 16
"""Bytes of the budget for one byte of records that are read ahead."""
_BUDGET_SHARE = 8
"""Bytes of the budget for one byte of buffers whose size follows it, at least."""
_REWRITE_ROWS = 4
"""Rows of old segments that are checked for each row that is written."""


@dataclass(frozen=True)
class TierStats:
    """Figures of a table's tiers."""

    memory_rows: int
    """Rows that fit in memory."""
    memory_bytes: int
    """Bytes of records, index and buffers in memory."""
    drive_rows: int
    """Rows that have a copy on the drive."""
    drive_bytes: int
    """Bytes of segments on the drive."""
    raised: int
    """Rows that were read from the drive."""
    demoted: int
    """Rows that left memory."""
    written: int
    """Rows that were written to the drive because they left memory."""
    rewritten: int
    """Rows that were written to the drive because their segment had few rows in use."""


class PassRows(NamedTuple):
    """Keys of a pass by the place of their rows."""

    below: Int64s
    """Keys of rows below memory, in the order of the drive."""
    locations: Int64s
    """Locations of these rows."""
    absent: Int64s
    """Keys without a row."""
    num_in_memory: int
    """Keys of rows in memory."""


class TableTiers:
    """The tier below a table's memory; the table gets it as its `tier`.

    Rows whose last pass is `pinned_pass` or later stay in memory if others can leave."""

    def __init__(
        self,
        table: Table,
        directory: Path,
        host_bytes: int,
        choose: DemotionChoice,
        *,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """Take over a table.

        Args:
            table: the table; its arena holds as many rows as the budget does, or more.
            directory: directory for segments, whose files have no names.
            host_bytes: bytes of index, records and buffers in memory.
            choose: choice of the rows that leave memory.
            segment_bytes: bytes from which on a segment takes no more rows.

        Raises:
            ConfigError: the budget holds no rows.
        """
        self.table, self.host_bytes = table, host_bytes
        layout = SegmentLayout(
            record_bytes=table.layout.record_bytes, table=table.name, dim=table.dim,
            optimizer=table.layout.optimizer, dtype=table.layout.dtype,
        )  # fmt: skip
        buffer_bytes = min(host_bytes // _BUFFER_SHARE, _BUFFER_BYTES)
        self.drive = DriveRows(
            directory, layout, buffer_bytes=buffer_bytes, segment_bytes=segment_bytes
        )
        """Rows below memory, and copies of rows in memory."""
        self.pass_number = 0
        """Number of the present pass."""
        self.pinned_pass: int | None = None
        """First pass whose rows stay in memory; None: rows of no pass do."""
        self._choose = choose
        self._moved: KeyIndex | None = None
        """New positions of rewritten rows by old ones; None: no rows are read ahead."""
        self._row_bytes = table.layout.record_bytes + _ROW_BYTES + _CHOICE_BYTES + _PASS_BYTES
        most = max(host_bytes // self._row_bytes, table.arena.extent)
        most = min(most, len(table.arena.records))
        self._copies = np.zeros(most, np.int64)
        """Location of the copy of each row in memory."""
        self._last_pass = np.full(most, _NEW, np.int32)
        """Last pass that used each row in memory."""
        self._leaving: Iterator[tuple[Int64s, Int64s, int]] = iter(())
        """Parts of the last choice: keys and rows that leave, unless a newer pass uses them."""
        self._rewriting: Iterator[int] = iter(())
        self._day = table.today
        """Day of the last choice of idle rows."""
        self._raised = self._demoted = self._written = self._rewritten = 0
        if self.memory_rows < 1:
            used = table.index.memory_bytes + self.drive.buffer_bytes + self._row_bytes
            needed = used * _BUDGET_SHARE // (_BUDGET_SHARE - 1)
            raise ConfigError(
                f'table.host = "{format_bytes(host_bytes)}" holds no rows: buffers and the index '
                f"of {table.num_rows} keys need {format_bytes(needed)}; raise table.host above it"
            )
        table.tier = self
        self.fit()

    @property
    def memory_rows(self) -> int:
        """Rows that fit in memory beside index and buffers."""
        table = self.table
        left = self.host_bytes - table.index.memory_bytes - table.candidates.memory_bytes
        left -= self.drive.buffer_bytes + self.read_ahead_bytes
        return min(max(left // self._row_bytes, 0), len(self._copies))

    @property
    def read_ahead_bytes(self) -> int:
        """Bytes of records that are read ahead at most."""
        return self.host_bytes // _READ_AHEAD_SHARE

    def bytes_for(self, num_rows: int) -> int:
        """Return a budget that holds so many rows beside index and buffers."""
        missing = max(num_rows - self.memory_rows, 0) * self._row_bytes
        return self.host_bytes + missing * _BUDGET_SHARE // (_BUDGET_SHARE - 1)

    def stats(self) -> TierStats:
        """Return the figures since the start."""
        table = self.table
        return TierStats(
            memory_rows=self.memory_rows,
            memory_bytes=table.stats().memory_bytes
            + len(table.arena) * (_ROW_BYTES - 1)
            + self.drive.buffer_bytes
            + self.read_ahead_bytes,
            drive_rows=self.drive.num_rows,
            drive_bytes=self.drive.num_bytes,
            raised=self._raised,
            demoted=self._demoted,
            written=self._written,
            rewritten=self._rewritten,
        )

    def close(self) -> None:
        """Delete the rows on the drive."""
        self.table.tier = None
        self.drive.close()

    # The tier of the table.

    def raise_rows(self, keys: Int64s) -> None:
        """Read the rows of distinct `keys`, all below memory, into memory. No pass needs them."""
        self._read_now(keys, self.pass_number if self.pinned_pass is None else self.pinned_pass - 1)

    def fit(self) -> None:
        """Let idle rows leave memory after a day, and give back memory that the index needs by now.

        Rows in memory may move."""
        table, arena = self.table, self.table.arena
        if self._day != table.today:
            self._day = table.today
            if table.config.demote_days:
                self._choose_demoted(0)
                for part in self._leaving:
                    self._demote(*self._may_demote(*part))
        if arena.extent <= self.memory_rows == arena.capacity:
            return
        self.make_room(0)
        old, new = arena.truncate(arena.capacity)
        for values in (self._copies, self._last_pass):
            values[new] = values[old]
        self._copies[old], self._last_pass[old] = _NO_COPY, _NEW
        chosen = np.zeros(len(self._copies), np.bool_)
        chosen[old] = True
        keys, rows = table.index.find_keys(chosen)
        table.index.set(keys, new[np.searchsorted(old, rows)])

    def make_room(self, count: int) -> None:
        """Let rows leave memory until `count` fit.

        Raises:
            StoreError: the rows of the present step leave too little room.
        """
        arena = self.table.arena
        arena.capacity = self.memory_rows
        num_before = self._demoted
        while (lacking := count - arena.num_free) > 0:
            part = next(self._leaving, None)
            if part is not None:
                self._demote(*self._may_demote(*part))
            elif not self._choose_demoted(lacking):
                needed = len(arena) + count
                raise StoreError(
                    f'table.host = "{format_bytes(self.host_bytes)}" holds {arena.capacity} rows '
                    f"beside the index, and look-ups since the last step need {needed}: raise "
                    f"table.host to {format_larger_bytes(self.bytes_for(needed))}, or lower the "
                    "batch; in a loop of your own, call step() after each backward, and evaluate "
                    "under torch.no_grad()"
                )
        self.rewrite(_REWRITE_ROWS * (self._demoted - num_before))

    def read(self, locations: Int64s) -> Records:
        """Return the records at negative `locations`."""
        order = np.argsort(positions_of(locations))
        records = np.empty((len(locations), self.table.layout.record_bytes), np.uint8)
        records[order] = self.drive.read(locations[order])
        return records

    def remove(self, locations: Int64s) -> None:
        """Forget rows at `locations`, in memory or below."""
        rows = locations[locations >= 0]
        copies = self._copies[rows]
        self.drive.forget(np.concatenate([locations[locations < 0], copies[copies != _NO_COPY]]))
        self._copies[rows], self._last_pass[rows] = _NO_COPY, _NEW

    # Passes.

    def pin(self, keys: Int64s, number: int) -> PassRows:
        """Keep those of distinct `keys` that are in memory until the end of pass `number`."""
        locations = self.table.index.find(keys)
        rows = locations[locations >= 0]
        self._last_pass[rows] = number
        below = np.flatnonzero((locations < 0) & (locations != ABSENT))
        below = below[np.argsort(positions_of(locations[below]))]
        return PassRows(keys[below], locations[below], keys[locations == ABSENT], len(rows))

    def install(self, keys: Int64s, locations: Int64s, records: Records, number: int) -> None:
        """Take rows into memory that were read ahead, and keep them until the end of a pass.

        Rows that came into memory in the meantime are newer, and those that were removed are gone.

        Args:
            keys: distinct keys.
            locations: their locations at the time of reading.
            records: records that were read.
            number: number of the pass.
        """
        self.make_room(len(keys))
        now = self.table.index.find(keys)
        self._last_pass[now[now >= 0]] = number
        same = positions_of(now) == self._follow(locations)
        self._put(keys[same], now[same], records[same], number)
        other = keys[(now < 0) & (now != ABSENT) & ~same]
        self._read_now(other, number)

    def pin_new(self, keys: Int64s, number: int) -> None:
        """Keep rows, which distinct keys have by now, until the end of pass `number`."""
        self._read_now(self.pin(keys, number).below, number)

    def end_pass(self) -> None:
        """End the present pass: rows that no later pass has pinned may leave memory."""
        self._end_last_pass()
        self.pass_number += 1
        self.pinned_pass = self.pass_number

    # Segments and snapshots.

    def follow_moves(self, follow: bool) -> None:
        """Remember from now on where rows move, as long as rows are read ahead; or forget."""
        self._moved = KeyIndex() if follow else None

    def rewrite(self, num_rows: int) -> None:
        """Move rows in use out of segments that hold few, until about `num_rows` were checked."""
        while num_rows > 0:
            checked = next(self._rewriting, None)
            if checked is not None:
                num_rows -= checked
                continue
            sparse = self.drive.sparse_segments()
            if not sparse:
                return
            self._rewriting = self._rewrite_segment(sparse[0])

    def take_changes(self) -> Iterator[tuple[Int64s, Records]]:
        """Yield keys and records below memory that changed since the last snapshot, and count them
        as unchanged. Rows do not move meanwhile."""
        keys, locations = self.table.index.items()
        changed = (locations < 0) & (locations & CHANGED_BIT == 0)
        keys, locations = keys[changed], locations[changed] | CHANGED_BIT
        self.table.index.set(keys, locations)
        order = np.argsort(positions_of(locations))
        for start in range(0, len(keys), READ_ROWS):
            part = order[start : start + READ_ROWS]
            yield keys[part], self.drive.read(locations[part])

    def _rewrite_segment(self, number: int) -> Iterator[int]:
        """Yield after each part of a segment how many of its rows were checked."""
        table = self.table
        for keys, locations, records in self.drive.scan(number):
            now = table.index.find(keys)
            in_memory = np.flatnonzero(now >= 0)
            in_memory = in_memory[self._copies[now[in_memory]] == locations[in_memory]]
            self._copies[now[in_memory]] = _NO_COPY
            below = np.flatnonzero(positions_of(now) == positions_of(locations))
            written = self.drive.append(keys[below], records[below])
            table.index.set(keys[below], written & (now[below] | ~CHANGED_BIT))
            self.drive.forget(locations[np.concatenate([in_memory, below])])
            if self._moved is not None:
                self._moved.set(positions_of(locations[below]), positions_of(written))
            self._rewritten += len(written)
            yield len(keys)
        self.drive.delete(number)

    def _follow(self, locations: Int64s) -> Int64s:
        """Return the present positions of rows that were rewritten since they had `locations`."""
        positions = positions_of(locations)
        while self._moved is not None:
            moved = self._moved.find(positions)
            is_moved = moved != ABSENT
            if not is_moved.any():
                return positions
            positions[is_moved] = moved[is_moved]
        return positions

    # Moves between memory and drive.

    def _read_now(self, keys: Int64s, number: int) -> None:
        """Read rows below memory into memory, as rows of a pass.

        All get room first: room for a later part must not demote an earlier one."""
        if not len(keys):
            return
        self.make_room(len(keys))
        keys = keys[np.argsort(positions_of(self.table.index.find(keys)))]
        for start in range(0, len(keys), READ_ROWS):
            part = keys[start : start + READ_ROWS]
            locations = self.table.index.find(part)
            self._put(part, locations, self.drive.read(locations), number)

    def _put(self, keys: Int64s, locations: Int64s, records: Records, number: int) -> None:
        """Put rows from the drive into memory, which has room."""
        arena = self.table.arena
        rows = arena.allocate(len(keys))
        arena.records[rows] = records
        is_changed = locations & CHANGED_BIT == 0
        arena.changed[rows] = np.where(is_changed, CHANGED_SINCE_SNAPSHOT, 0)
        self._copies[rows], self._last_pass[rows] = locations | CHANGED_BIT, number
        self.table.index.set(keys, rows)
        self._raised += len(keys)

    def _demote(self, keys: Int64s, rows: Int64s) -> None:
        """Let rows leave memory; those that differ from their copy are written."""
        arena = self.table.arena
        changed, locations = arena.changed[rows], self._copies[rows]
        differs = (changed & CHANGED_SINCE_WRITE != 0) | (locations == _NO_COPY)
        written = self.drive.append(keys[differs], arena.records[rows[differs]])
        self.drive.forget(locations[differs & (locations != _NO_COPY)])
        locations[differs] = written
        locations[changed & CHANGED_SINCE_SNAPSHOT != 0] &= ~CHANGED_BIT
        self.table.index.set(keys, locations)
        self._copies[rows], self._last_pass[rows] = _NO_COPY, _NEW
        arena.free(rows)
        self._demoted += len(keys)
        self._written += len(written)

    def _choose_demoted(self, num_needed: int) -> bool:
        """Choose rows that leave memory; return False if none does.

        Rows of look-ups stay until the next step. Rows of passes stay as long as others can leave.
        """
        if self.pinned_pass is None:
            self._end_last_pass()
            self.pass_number += 1
        table, arena = self.table, self.table.arena
        able = arena.used_rows()
        able[table.pinned_rows()] = False
        newest, pinned = _NEW, self.pinned_pass
        if pinned is not None:
            unpinned = able & (self._last_pass[: len(able)] < pinned)
            if unpinned.any() or not num_needed:
                able, newest = unpinned, pinned - 1
        if num_needed and (pinned is None or newest < pinned):
            num_needed = max(num_needed, arena.capacity // _CHOICE_SHARE)
        rows = np.flatnonzero(able)
        leaves = np.zeros(len(able), np.bool_)
        leaves[rows[self._choose(self._facts(rows, num_needed))]] = True
        keys, rows = table.index.find_keys(leaves)
        self._leaving = (
            (keys[start : start + _LEAVE_ROWS], rows[start : start + _LEAVE_ROWS], newest)
            for start in range(0, len(keys), _LEAVE_ROWS)
        )
        return len(keys) > 0

    def _facts(self, rows: Int64s, num_needed: int) -> MemoryRows:
        table, config, arena = self.table, self.table.config, self.table.arena
        count = len(rows)
        idle_days = np.empty(count, np.int32)
        shows, scores = np.empty(count, np.float32), np.empty(count, np.float32)
        factors = config.decay, config.nonclick_weight, config.click_weight
        _rate(
            (arena.words, arena.whole_words), table.layout.counters, rows, table.today, factors,
            idle_days, (shows, scores),
        )  # fmt: skip
        return MemoryRows(
            idle_days, self._last_pass[rows], shows, scores, num_needed, config.demote_days,
            base_score=config.nonclick_weight, num_hot=arena.capacity // _HOT_SHARE,
        )  # fmt: skip

    def _may_demote(self, keys: Int64s, rows: Int64s, newest: int) -> tuple[Int64s, Int64s]:
        """Return those of chosen rows that nothing has used or removed since."""
        table = self.table
        stays = np.zeros(len(self._copies), np.bool_)
        stays[table.pinned_rows()] = True
        able = (table.index.find(keys) == rows) & (self._last_pass[rows] <= newest) & ~stays[rows]
        return keys[able], rows[able]

    def _end_last_pass(self) -> None:
        """Number the rows that the table made since the last pass began."""
        used = self.table.arena.used_rows()
        last_pass = self._last_pass[: len(used)]
        last_pass[used & (last_pass == _NEW)] = self.pass_number


def positions_of(locations: Int64s) -> Int64s:
    """Return the positions of rows on the drive; rows elsewhere have numbers of no position."""
    return ~locations & ~CHANGED_BIT


@cached_loop
def _rate(
    words: tuple[NDArray[np.float32], NDArray[np.int32]],
    place: int,
    rows: Int64s,
    today: int,
    factors: tuple[float, float, float],
    idle_days: NDArray[np.int32],
    rates: tuple[NDArray[np.float32], NDArray[np.float32]],
) -> None:
    """Fill idle days, and shows and scores as of today, of rows in memory."""
    decay, nonclick_weight, click_weight = factors
    floats, integers = words
    shows, scores = rates
    for index in range(len(rows)):
        row = rows[index]
        days = today - integers[row, place + 2]
        factor = decay**days
        show, click = floats[row, place] * factor, floats[row, place + 1] * factor
        idle_days[index], shows[index] = days, show
        scores[index] = (show - click) * nonclick_weight + click * click_weight
