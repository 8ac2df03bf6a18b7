"""Passes: rows of the coming steps are read from the drive while the present steps train.

A pass is a number of steps. One thread scans the keys of the steps after the next pass. Others read
rows of the next pass. The thread that trains puts these rows into memory between steps, so it alone
changes the table. Tasks wait for data and drive only, so no deadlock is possible. Their results are
futures, so an error reaches the thread that trains.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moesaic.base.errors import ConfigError
from moesaic.base.units import format_bytes, format_larger_bytes
from moesaic.facts.table_rows import PassLength, PassNeeds
from moesaic.ps.drive_rows import Records
from moesaic.ps.index import ABSENT, Int64s, KeyIndex
from moesaic.ps.table import as_keys
from moesaic.ps.tiers import READ_ROWS, TableTiers

PassLengthChoice = Callable[[PassNeeds], PassLength]
"""Choice of the steps of a pass."""

_SCAN_STEPS = 64
"""Steps whose keys are scanned at once, at most, where the job sets no length of a pass."""
_READERS = 2
"""Threads that read rows: one reads blocks while the other takes rows out of them."""


@dataclass(frozen=True)
class PassStats:
    """Figures of one pass."""

    number: int
    """Number of the pass, from 1."""
    steps: int
    """Steps of the pass."""
    keys: int
    """Distinct keys."""
    hits: int
    """Distinct keys whose row was in memory already."""
    raised: int
    """Rows that were read from the drive."""
    stall_s: float
    """Seconds that training waited for rows of the pass."""
    memory_rows: int
    """Rows in memory at its start."""
    drive_rows: int
    """Rows that are on the drive alone at its start."""
    memory_bytes: int
    """Bytes of records, index and buffers in memory at its start."""
    drive_bytes: int
    """Bytes of segments on the drive at its start."""

    @property
    def hit_rate(self) -> float:
        """Share of the rows of the pass that were in memory already."""
        return self.hits / max(self.hits + self.raised, 1)


class _Scan(NamedTuple):
    """Keys of coming steps."""

    batches: list[Int64s]
    """Keys of each step."""
    keys: Int64s
    """Distinct keys of all steps."""
    first_steps: Int64s
    """First step of each distinct key."""
    step_rows: tuple[int, ...]
    """Distinct keys of the first step, of the first two, and so on."""


class Batches:
    """Keys of coming steps, some of which were scanned for a pass that was too long."""

    def __init__(self, source: Iterator[Int64s]) -> None:
        self._source, self._scanned = source, deque[Int64s]()

    def put_back(self, batches: list[Int64s]) -> None:
        """Return scanned batches, which come again next."""
        self._scanned.extendleft(reversed(batches))

    def next(self) -> Int64s | None:
        """Return the keys of the next step; None at the end."""
        return self._scanned.popleft() if self._scanned else next(self._source, None)


class _PassReads:
    """Reads of the rows of one pass, some of which are in flight."""

    def __init__(
        self, tiers: TableTiers, number: int, steps: int, keys: Int64s, pool: ThreadPoolExecutor
    ) -> None:
        self.number, self.steps, self.num_keys = number, steps, len(keys)
        self._tiers, self._pool = tiers, pool
        self.rows = tiers.pin(keys, number)
        self._read = tiers.drive.reader()
        self._next = 0
        self._pending = deque[tuple[slice, Future[Records]]]()
        record_bytes = tiers.table.layout.record_bytes
        self._most = max(tiers.read_ahead_bytes // (READ_ROWS * record_bytes), 1)
        """Reads in flight, or done and not yet in memory, at most."""
        self._submit()

    def advance(self, *, wait: bool) -> None:
        """Put rows into memory that were read, and start further reads; or wait for all."""
        while self._pending and (wait or self._pending[0][1].done()):
            part, records = self._pending.popleft()
            self._tiers.install(
                self.rows.below[part], self.rows.locations[part], records.result(), self.number
            )
            self._submit()

    def finish(self) -> None:
        """Wait until all rows are in memory, with those that the pass before has made."""
        self._tiers.pin_new(self.rows.absent, self.number)
        self.advance(wait=True)

    def _submit(self) -> None:
        while self._next < len(self.rows.below) and len(self._pending) < self._most:
            part = slice(self._next, self._next + READ_ROWS)
            locations = self.rows.locations[part]
            self._pending.append((part, self._pool.submit(self._read, locations)))
            self._next = part.stop


class TablePasses:
    """Passes over the steps of a run."""

    def __init__(
        self,
        tiers: TableTiers,
        batches: Iterable[Int64s],
        choose_length: PassLengthChoice,
        pass_steps: int = 0,
    ) -> None:
        """Start to scan keys.

        Args:
            tiers: tiers of the table.
            batches: keys of each step. A thread iterates over them, up to two passes ahead.
            choose_length: choice of the steps of a pass.
            pass_steps: steps of a pass; 0: as many as memory allows.
        """
        self.tiers, self._choose_length, self._pass_steps = tiers, choose_length, pass_steps
        self.stats: PassStats | None = None
        """Figures of the present pass."""
        self._batches = Batches(iter(batches))
        self._scanner = ThreadPoolExecutor(1, "table-scan")
        self._readers = ThreadPoolExecutor(_READERS, "table-read")
        self._coming: _PassReads | None = None
        """Reads of the next pass, once its keys are known."""
        self._steps_left = 0
        """Steps of the present pass that have not begun."""
        tiers.end_pass()
        self._first = tiers.pass_number
        """Number of the first pass."""
        self._number = self._first - 1
        """Number of the present pass."""
        self._scan = self._start_scan()

    def begin_step(self) -> None:
        """Begin the next step, and a pass if it is the first one of it.

        Raises:
            ConfigError: memory does not hold the rows of two passes.
            ValueError: all batches have had a step.
        """
        if self._steps_left:
            self._advance()
        else:
            self.end_pass()
            self.begin_pass()
        self._steps_left -= 1

    def begin_pass(self) -> None:
        """Wait until the rows of the next pass are in memory, and begin it."""
        began = time.perf_counter()
        if self._coming is None:
            self._start_reads()
        coming = self._coming
        if coming is None:
            raise ValueError("the batches of all passes have had a step")
        coming.finish()
        self.tiers.follow_moves(False)
        self.tiers.fit()
        self._coming, self._steps_left, self._number = None, coming.steps, coming.number
        figures = self.tiers.stats()
        self.stats = PassStats(
            number=coming.number - self._first + 1, steps=coming.steps, keys=coming.num_keys,
            hits=coming.rows.num_in_memory, raised=len(coming.rows.below),
            stall_s=time.perf_counter() - began,
            memory_rows=(in_memory := len(self.tiers.table.arena)),
            drive_rows=self.tiers.table.num_rows - in_memory,
            memory_bytes=figures.memory_bytes, drive_bytes=figures.drive_bytes,
        )  # fmt: skip

    def end_pass(self) -> None:
        """End the present pass, if there is one; its rows may leave memory."""
        self._steps_left = 0
        if self._number == self.tiers.pass_number:
            self.tiers.end_pass()

    def close(self) -> None:
        """End the threads; reads that have not begun are dropped."""
        for pool in (self._scanner, self._readers):
            pool.shutdown(cancel_futures=True)
        self.tiers.pinned_pass = None
        self.tiers.follow_moves(False)

    def _advance(self) -> None:
        """Go on with the next pass, without waiting."""
        if self._coming is None and self._scan.done():
            self._start_reads()
        if self._coming is not None:
            self._coming.advance(wait=False)

    def _start_scan(self) -> Future[_Scan]:
        steps = self._pass_steps or _SCAN_STEPS
        rows = None if self._pass_steps else self.tiers.memory_rows // 2
        return self._scanner.submit(_scan_steps, self._batches, steps, rows)

    def _start_reads(self) -> None:
        """Start to read the rows of the next pass, if there is one, and scan further keys."""
        scan = self._scan.result()
        if not scan.batches:
            return
        needs = PassNeeds(self.tiers.memory_rows, scan.step_rows, self._pass_steps)
        length = self._choose_length(needs)
        if not length.steps:
            raise self._too_small(needs, length)
        self._batches.put_back(scan.batches[length.steps :])
        self._scan = self._start_scan()
        keys = scan.keys[scan.first_steps < length.steps]
        self.tiers.follow_moves(True)
        self._coming = _PassReads(self.tiers, self._number + 1, length.steps, keys, self._readers)

    def _too_small(self, needs: PassNeeds, length: PassLength) -> ConfigError:
        host, needed = self.tiers.host_bytes, self.tiers.bytes_for(length.needed_rows)
        steps = "the steps" if self._pass_steps else "a step"
        less = "table.pass_steps or the batch" if self._pass_steps > 1 else "the batch"
        return ConfigError(
            f'table.host = "{format_bytes(host)}" holds {needs.memory_rows} rows beside index and '
            f"buffers, and {steps} of two passes need {length.needed_rows}: raise table.host to "
            f"{format_larger_bytes(needed)}, or lower {less}"
        )


def _scan_steps(batches: Batches, most_steps: int, most_rows: int | None) -> _Scan:
    """Scan keys of coming steps, as many as are wanted or as have so many rows."""
    scanned, step_rows, index = list[Int64s](), list[int](), KeyIndex()
    while len(scanned) < most_steps and (batch := batches.next()) is not None:
        keys = as_keys(batch)
        new = keys[index.find(keys) == ABSENT]
        index.set(new, np.full(len(new), len(scanned), np.int64))
        scanned.append(keys)
        step_rows.append(len(index))
        if most_rows is not None and len(index) > most_rows:
            break
    return _Scan(scanned, *index.items(), tuple(step_rows))
