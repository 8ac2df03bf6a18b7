"""Theme `tables`, files: what a snapshot writes, how long training waits for it, flipped bits."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks import measure
from moesaic.base.errors import StoreError
from moesaic.facts.job.table import TableConfig
from moesaic.ps.snapshots import TableSnapshots
from moesaic.ps.stored_rows import StoredRows
from moesaic.ps.table import Table
from moesaic.ps.table_shard import TableShard

SIZES = {16: 16_000_000, 64: 4_000_000}
"""Rows of a table by their width."""
CHANGED = 0.05
"""Share of rows that change between two snapshots."""
BATCH, SLOTS = 8192, 26
"""Samples of a step, and keys of a sample."""
LAYERS = (512, 256, 128)
"""Widths of the dense layers."""
ZIPF = 1.05
FLIPS = 300
LOADED = 1 << 18
"""Rows that are loaded at once."""


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a new directory on the drive of the working tree."""
    parent = measure.ROOT / "build"
    parent.mkdir(exist_ok=True)
    directory = tempfile.mkdtemp(dir=parent, prefix="tables-")
    try:
        yield Path(directory)
    finally:
        shutil.rmtree(directory)


def full_table(dim: int, num_rows: int, random: np.random.Generator) -> Table:
    """Return a table with the keys from 0 on."""
    table = Table(TableConfig(), dim)
    table.index.reserve(num_rows)
    size = table.layout.record_bytes
    for start in range(0, num_rows, LOADED):
        keys = np.arange(start, min(start + LOADED, num_rows))
        records = random.integers(0, 60, (len(keys), size), np.uint8)
        records.view(np.int32)[:, table.layout.counters :] = 0  # Of today, without samples.
        table.load(keys, records)
    return table


@dataclass
class SnapshotTimes:
    """Seconds by round, and bytes."""

    wait_s: list[float]
    """Seconds until the thread that trains goes on."""
    copy_s: list[float]
    """Seconds of one copy of the records that changed."""
    step_s: list[float]
    """Seconds of a training step."""
    write_s: list[float]
    """Seconds until the snapshot is durable, after the wait."""
    byte_ratio: list[float]
    """Bytes written over bytes of the records that changed."""


def time_snapshots(dim: int, num_rows: int, rounds: int) -> SnapshotTimes:
    """Change rows, snapshot them and train, in turn."""
    random, times = np.random.default_rng(0), SnapshotTimes([], [], [], [], [])
    table = full_table(dim, num_rows, random)
    num_changed = int(CHANGED * num_rows)
    train = Step(table)
    with (
        scratch() as directory,
        TableSnapshots(directory, TableShard(table), 0, 1, lambda: []) as snapshots,
    ):
        snapshots.begin(0)()
        for step in range(1, rounds + 2):
            keys = random.permutation(num_rows)[:num_changed]
            table.push(keys, np.full((num_changed, dim), 1e-3, np.float32))
            rows = table.index.find(keys)
            copy_s = _seconds(partial(table.arena.records.take, rows, axis=0))
            start = time.perf_counter()
            wait = snapshots.begin(step)
            middle = time.perf_counter()
            facts = wait()
            end = time.perf_counter()
            keys = zipf_keys(random, num_rows)
            step_s = _seconds(partial(train, keys))
            if step == 1:
                continue  # Compiles, and gets memory from the system.
            times.copy_s.append(copy_s)
            times.wait_s.append(middle - start)
            times.write_s.append(end - middle)
            times.step_s.append(step_s)
            times.byte_ratio.append(facts["bytes"] / (facts["rows"] * table.layout.record_bytes))
    return times


def zipf_keys(random: np.random.Generator, num_rows: int) -> NDArray[np.int64]:
    """Return the keys of a batch, Zipf-distributed by rank; key k has rank k + 1."""
    draws = random.random(BATCH * SLOTS)
    power = 1 - ZIPF
    ranks = (1 + draws * (float(num_rows) ** power - 1)) ** (1 / power)
    keys: NDArray[np.int64] = ranks.astype(np.int64) - 1
    return keys


class Step:
    """Training step of a table with a network of dense layers on top, as `ctr-dnn` has them."""

    def __init__(self, table: Table) -> None:
        self.table = table
        widths = [SLOTS * table.dim, *LAYERS]
        layers = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in itertools.pairwise(widths)]
        self.network = nn.Sequential(*layers, nn.Linear(LAYERS[-1], 1))
        self.optimizer = torch.optim.Adam(self.network.parameters())

    def __call__(self, keys: NDArray[np.int64]) -> None:
        """Take a step; every key is a bag."""
        lookup = self.table.look_up(keys, np.arange(len(keys) + 1), training=True)
        rows = torch.from_numpy(lookup.sums).requires_grad_()
        logits = self.network(rows.view(BATCH, -1)).squeeze(1)
        nn.functional.binary_cross_entropy_with_logits(logits, torch.ones(BATCH) / 2).backward()
        assert rows.grad is not None
        lookup.push(rows.grad.numpy())
        self.table.step()
        self.optimizer.step()
        self.optimizer.zero_grad()


def snapshots(rounds: int) -> Iterator[measure.Row]:
    """Measure incremental snapshots of both widths."""
    measured = {dim: time_snapshots(dim, rows, rounds) for dim, rows in SIZES.items()}
    sizes = [
        measure.row(
            f"snapshot bytes, rows of {dim}", float(np.median(times.byte_ratio)), "ratio", bar="",
            interval=measure.bootstrap(times.byte_ratio), repeats=rounds,
            against=f"bytes of the records that changed, of {SIZES[dim] / 1e6:.0f} M rows; "
            f"durable {np.median(times.write_s):.2f} s after the wait",
        )
        for dim, times in measured.items()
    ]  # fmt: skip
    yield from measure.claim(
        "bytes of a snapshot after 5% of rows changed, over these rows", "<= 1.2", sizes
    )
    waits, copies = list[measure.Row](), list[measure.Row]()
    for dim, times in measured.items():
        wait_s = np.asarray(times.wait_s)
        ratio = wait_s / np.asarray(times.step_s)
        waits.append(
            measure.row(
                f"wait for a snapshot in steps, rows of {dim}", float(np.median(ratio)), "ratio",
                bar="", interval=measure.bootstrap(ratio), repeats=rounds,
                against=f"a step of {BATCH} samples of {SLOTS} keys, dense layers of "
                f"{', '.join(map(str, LAYERS))}, {np.median(times.step_s) * 1e3:.0f} ms; wait "
                f"{np.median(wait_s) * 1e3:.0f} ms",
            )
        )  # fmt: skip
        ratio = wait_s / np.asarray(times.copy_s)
        copies.append(
            measure.row(
                f"wait for a snapshot over one copy of its rows, rows of {dim}",
                float(np.median(ratio)), "ratio", bar="", interval=measure.bootstrap(ratio),
                repeats=rounds, against=f"numpy.take, {np.median(times.copy_s) * 1e3:.0f} ms",
            )
        )  # fmt: skip
    name = "wait for a snapshot after 5% of rows changed, over one copy of these rows"
    yield from measure.claim(name, "<= 1", copies)
    yield from waits


def flips(rounds: int) -> Iterator[measure.Row]:
    """Flip single bits in all files of a table, and count those that are found."""
    del rounds
    random, found = np.random.default_rng(1), 0
    table = Table(TableConfig(admit_count=2), 16)
    facts = dict[str, dict[str, object]]()
    with scratch() as directory:
        with TableSnapshots(directory, TableShard(table), 0, 1, lambda: [facts]) as snapshots:
            for step in range(2):
                keys = random.integers(0, 5000, 6000)
                table.push(keys, random.standard_normal((6000, 16)).astype(np.float32))
                facts = {"0": snapshots.begin(step)()}
        StoredRows.open_snapshot(directory, facts).verify()
        manifest = StoredRows.open_snapshot(directory, facts).manifests[0]
        names = sorted(manifest.files | {str(facts["0"]["snapshot"])})
        for number in range(FLIPS):
            path = directory / "shard-0" / names[number % len(names)]
            whole = path.read_bytes()
            bit = int(random.integers(8 * len(whole)))
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            try:
                StoredRows.open_snapshot(directory, facts).verify()
            except StoreError:
                found += 1
            path.write_bytes(whole)
    yield measure.row(
        "single flipped bits in table files, found", found, "flips", bar=f"== {FLIPS}",
        repeats=FLIPS, against=f"{FLIPS} bits in turn in {len(names)} files: segments, manifest, "
        "counts of keys without a row",
    )  # fmt: skip


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


PARTS = {"snapshots": snapshots, "flips": flips}
