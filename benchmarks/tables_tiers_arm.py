"""One table in a process of its own: in memory, or with rows on a drive; it answers requests.

Requests and answers are lines of JSON, as `benchmarks.memory_group.Arm` sends them.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.facts.job.table import TableConfig
from moesaic.policy.table_rows import choose_leaving, choose_pass_length
from moesaic.ps.passes import TablePasses
from moesaic.ps.table import Table
from moesaic.ps.tiers import TableTiers

EXPONENT = 1.05
"""Exponent of the keys' frequencies."""
SLOTS = 32
"""Slots of a sample, each with one key."""
WIDTHS = 256, 128, 64
"""Widths of the network over the slots of a sample, before its output."""
BARE_THREADS = 8
"""Threads that read blocks and do nothing else."""
_LOAD_ROWS = 1 << 16
_LOOK_S = 1.0
"""Seconds of one measurement of reads."""
_READ_KEYS = 16_384
_MIX = 0x9E3779B97F4A7C15 | 1


@dataclass(frozen=True)
class Settings:
    """Table and steps of one arm."""

    rows_log2: int
    """Binary logarithm of the rows."""
    dim: int
    """Numbers of a row."""
    step_keys: int
    """Keys of a step."""
    directory: str
    """Directory on a drive."""
    host_bytes: int = 0
    """Budget of memory; 0: all rows are in memory."""

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return 1 << self.rows_log2

    def to_json(self) -> str:
        """Return the settings as an argument of the command line."""
        return json.dumps(asdict(self))


def key_of(ranks: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """Return the key of each rank of frequency, one of `rows`; neighbours lie far apart."""
    return ranks * (_MIX % rows | 1) % rows


class Network:
    """Deep stack over the rows of a sample's slots, with a logistic loss."""

    def __init__(self, dim: int) -> None:
        rng, widths = np.random.default_rng(1), [SLOTS * dim, *WIDTHS, 1]
        self.weights = [
            rng.standard_normal((before, after)).astype(np.float32) / np.sqrt(np.float32(before))
            for before, after in pairwise(widths)
        ]

    def train(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Update the weights by one batch of samples, and return the gradients of `rows`."""
        layers = [rows.reshape(-1, len(self.weights[0]))]
        for weight in self.weights[:-1]:
            layers.append(np.maximum(layers[-1] @ weight, 0))
        labels = np.arange(len(layers[0]))[:, None] % 4 == 0
        chance = 1 / (1 + np.exp(-(layers[-1] @ self.weights[-1])))
        grads = (chance - labels).astype(np.float32) / np.float32(len(labels))
        for layer, weight in zip(layers[::-1], self.weights[::-1], strict=True):
            before = (grads @ weight.T) * (layer > 0 if layer is not layers[0] else 1)
            weight -= np.float32(0.01) * (layer.T @ grads)
            grads = before
        return grads.reshape(rows.shape)


class Arm:
    """The table, and what it does on request."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.table = Table(TableConfig(), settings.dim)
        self.tiers: TableTiers | None = None
        if settings.host_bytes:
            self.tiers = TableTiers(
                self.table, Path(settings.directory), settings.host_bytes, choose_leaving
            )
        self.network = Network(settings.dim)
        self.rng = np.random.default_rng(0)
        self._load()

    def _load(self) -> None:
        """Make all rows, in an order that has nothing to do with their frequency."""
        count, layout = min(_LOAD_ROWS, self.settings.rows), self.table.layout
        numbers = self.rng.standard_normal((count, layout.record_bytes // 4)).astype(np.float32)
        numbers[:, layout.counters :] = 0
        numbers[:, layout.counters - 1] = 1
        records = numbers.view(np.uint8)
        for start in range(0, self.settings.rows, count):
            self.table.load(np.arange(start, start + count), records)
            if self.tiers is not None:
                self.tiers.fit()

    def batches(self, steps: int) -> Iterator[NDArray[np.int64]]:
        """Yield keys of steps, whose frequencies follow Zipf's law."""
        rows, power = self.settings.rows, 1 - EXPONENT
        for _ in range(steps):
            uniform = self.rng.random(self.settings.step_keys)
            ranks = (1 + uniform * (rows**power - 1)) ** (1 / power)
            yield key_of(np.minimum(ranks.astype(np.int64), rows) - 1, rows)

    def step(self, keys: NDArray[np.int64]) -> None:
        """Look up rows, train the network on them, push their gradients, and update the rows."""
        found = self.table.look_up(keys, np.arange(len(keys) + 1), training=True)
        found.push(self.network.train(found.sums))
        self.table.step()

    def due(self, steps: int) -> dict[str, Any]:
        """Take steps, each of which reads its rows when they are due."""
        keys = [*self.batches(steps)]
        with self._counted() as counts:
            began = time.perf_counter()
            for one in keys:
                self.step(one)
            seconds = time.perf_counter() - began
        return {"step_s": seconds / steps, "blocks": counts[0] / steps}

    def ahead(self, passes: int, pass_steps: int) -> dict[str, Any]:
        """Take the steps of passes, whose rows are read a pass ahead.

        The time begins with the steps of the first pass, and ends when the rows of a further one
        are in memory: so many steps, and the reads of as many."""
        assert self.tiers is not None
        keys = [*self.batches((passes + 1) * pass_steps)]
        with self._counted() as counts:
            table_passes = TablePasses(self.tiers, keys, choose_pass_length, pass_steps)
            table_passes.begin_pass()
            counts[0] = 0
            stall_s, hits, raised = 0.0, 0, 0
            began = time.perf_counter()
            for step in range(passes * pass_steps):
                table_passes.begin_step()
                self.step(keys[step])
                if step % pass_steps == pass_steps - 1:
                    table_passes.end_pass()
                    table_passes.begin_pass()
                    stats = table_passes.stats
                    assert stats is not None
                    stall_s += stats.stall_s
                    hits, raised = hits + stats.hits, raised + stats.raised
            seconds = time.perf_counter() - began
            table_passes.close()
        steps = passes * pass_steps
        return {
            "step_s": seconds / steps, "blocks": counts[0] / steps, "stall_s": stall_s / steps,
            "hit_rate": hits / max(hits + raised, 1), **asdict(self.tiers.stats()),
        }  # fmt: skip

    def reads(self) -> dict[str, Any]:
        """Read rows of uniform keys from the drive; return distinct blocks per second."""
        assert self.tiers is not None
        drive = self.tiers.drive
        with self._counted() as counts:
            began = time.perf_counter()
            while time.perf_counter() < began + _LOOK_S:
                keys = self.rng.integers(0, self.settings.rows, _READ_KEYS)
                locations = self.table.index.find(keys)
                drive.read(np.sort(locations[locations < 0])[::-1])
            seconds = time.perf_counter() - began
        return {"blocks_per_s": counts[0] / seconds}

    def bare(self) -> dict[str, Any]:
        """Return blocks per second of threads that read blocks anywhere, and do nothing else."""
        assert self.tiers is not None
        drive = self.tiers.drive
        size = drive.layout.block_bytes
        segments = [(one.file.fileno(), one.num_blocks) for one in drive.segments.values()]
        end = time.perf_counter() + _LOOK_S

        def read(thread: int) -> None:
            memory, rng = mmap.mmap(-1, size), np.random.default_rng(thread)
            while time.perf_counter() < end:
                for which in rng.integers(0, len(segments), 64).tolist():
                    fd, blocks = segments[which]
                    os.preadv(fd, [memory], int(rng.integers(blocks)) * size)
                    done[thread] += 1

        done = [0] * BARE_THREADS
        threads = [threading.Thread(target=read, args=(n,)) for n in range(BARE_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"blocks_per_s": sum(done) / _LOOK_S}

    def _counted(self) -> _Counted:
        return _Counted(self.tiers)


class _Counted:
    """Count of the blocks that a table's tiers read."""

    def __init__(self, tiers: TableTiers | None) -> None:
        self._reads = None if tiers is None else tiers.drive._reads
        self._lock = threading.Lock()

    def __enter__(self) -> list[int]:
        counts, reads = [0], self._reads
        if reads is not None:
            read: Callable[..., None] = type(reads).read

            def counting(files: Any, file_of: Any, blocks: Any, out: Any) -> None:
                read(reads, files, file_of, blocks, out)
                with self._lock:
                    counts[0] += len(blocks)

            reads.read = counting  # type: ignore[method-assign]
        return counts

    def __exit__(self, *_: object) -> None:
        if self._reads is not None:
            del self._reads.read  # type: ignore[method-assign]


def main() -> None:
    """Answer requests until the input ends."""
    arm = Arm(Settings(**json.loads(sys.argv[1])))
    print(json.dumps({"rows": arm.table.num_rows}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        method = getattr(arm, request.pop("do"))
        print(json.dumps(method(**request)), flush=True)


if __name__ == "__main__":
    main()
