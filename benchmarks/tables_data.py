"""Click data: Criteo TSV into the cache against `pyarrow.csv`, and how long training waits for it.

The TSV has Zipf-distributed integers and hexadecimal strings, a tenth of them missing. pyarrow
reads the file with all threads into columns of integers and strings. We also parse, scale, hash and
write them with fsync. Both read from the page cache.

The stall is the share of a cached epoch that training spends in `load`. Each step trains a network
over summed embedding rows.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import torch
from torch import nn

from benchmarks import measure
from moesaic.dist.world import World
from moesaic.facts.job.clicks import CRITEO_DENSE, CRITEO_SLOTS, ClicksConfig
from moesaic.train.data.clicks import ClickBatch, ClickData, ClickSamples

ROWS = 800_000
"""Rows of the TSV, about 200 MB."""
EPOCH_ROWS, BATCH = 250_000, 4096
VOCABULARY, MISSING, DIM, TABLE_ROWS = 1 << 20, 0.1, 16, 1 << 18
READ_BAR, STALL_BAR = ">= 0.4", "<= 0.05"
NAMES = [
    "label", *(f"I{n}" for n in range(CRITEO_DENSE)), *(f"C{n}" for n in range(CRITEO_SLOTS)),
]  # fmt: skip


def rows(rounds: int) -> Iterator[measure.Row]:
    """Measure reading into the cache, and the stall of a cached epoch."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "day_0.tsv"
        write_criteo(file, ROWS)
        yield _read(file, Path(place) / "cache", rounds)
        write_criteo(file, EPOCH_ROWS)
        yield from _stall(open_data(file, Path(place) / "cache").train, rounds)


def write_criteo(file: Path, num_rows: int) -> None:
    """Write random Criteo TSV."""
    draw = np.random.default_rng(0)
    words = pa.array([f"{number * 2654435761 % 2**32:08x}" for number in range(VOCABULARY)])
    columns = [pa.array(draw.integers(2, size=num_rows))]
    for number in range(CRITEO_DENSE + CRITEO_SLOTS):
        ranks = np.minimum(draw.zipf(1.2, num_rows), VOCABULARY) - 1
        column = pa.array(ranks, mask=draw.random(num_rows) < MISSING)
        columns.append(column if number < CRITEO_DENSE else words.take(column))
    options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    csv.write_csv(pa.table(columns, NAMES), file, options)


def open_data(file: Path, cache: Path) -> ClickData:
    """Open the data, from the cache if it is there."""
    return ClickData.open(ClicksConfig(path=str(file), cache=str(cache)), 0, World.solo())


def _read(file: Path, cache: Path, rounds: int) -> measure.Row:
    types = {name: pa.string() if name.startswith("C") else pa.int64() for name in NAMES}
    options = csv.ConvertOptions(column_types=types)

    def theirs() -> pa.Table:
        return csv.read_csv(
            file, csv.ReadOptions(column_names=NAMES), csv.ParseOptions(delimiter="\t"), options
        )

    def ours() -> ClickData:
        shutil.rmtree(cache, ignore_errors=True)
        return open_data(file, cache)

    _check_same(theirs(), ours().train)
    times = measure.interleave({"pyarrow.csv": theirs, "moesaic": ours}, rounds)
    ratio, interval = times.ratio("pyarrow.csv", "moesaic")
    megabytes = file.stat().st_size / 1e6
    return measure.row(
        f"Criteo TSV of {megabytes:.0f} MB read, hashed and cached, rows/s", ratio, "ratio",
        bar=READ_BAR, against=f"pyarrow.csv {pa.__version__} alone, all threads",
        interval=interval, repeats=times.rounds,
    )  # fmt: skip


def _check_same(table: pa.Table, samples: ClickSamples) -> None:
    """Raise ValueError if labels or the number of keys differ."""
    batch = samples.read(range(len(samples)), shuffled=False)
    num_keys = sum(len(column.filter(pc.not_equal(column, ""))) for column in table.columns[14:])
    if batch.labels.tolist() != table["label"].to_pylist() or len(batch.keys) != num_keys:
        raise ValueError("moesaic and pyarrow.csv read other samples")


class _Network:
    """Network over summed embedding rows and dense features, in plain PyTorch."""

    def __init__(self) -> None:
        self.table = nn.EmbeddingBag(TABLE_ROWS, DIM, mode="sum", sparse=True)
        self.stack = nn.Sequential(
            nn.Linear(CRITEO_DENSE + CRITEO_SLOTS * DIM, 256), nn.ReLU(), nn.Linear(256, 128),
            nn.ReLU(), nn.Linear(128, 1),
        )  # fmt: skip
        self.optimizers = [
            torch.optim.Adagrad(self.table.parameters(), lr=0.05),
            torch.optim.Adam(self.stack.parameters()),
        ]

    def step(self, batch: ClickBatch) -> None:
        """Train on a batch."""
        keys = torch.from_numpy(batch.keys) % TABLE_ROWS
        bags = self.table(keys, torch.from_numpy(batch.offsets[:-1]))
        bags = bags.view(CRITEO_SLOTS, len(batch), DIM).transpose(0, 1).flatten(1)
        logits = self.stack(torch.cat((torch.from_numpy(batch.dense), bags), 1)).squeeze(1)
        labels = torch.from_numpy(batch.labels)
        nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _stall(samples: ClickSamples, rounds: int) -> Iterator[measure.Row]:
    warnings.filterwarnings("ignore", message="Sparse invariant")
    network, epochs = _Network(), iter(range(1_000_000))

    def epoch(load: Callable[[range], ClickBatch]) -> float:
        """Train one epoch; return the share of its time spent in `load`."""
        waited, began, first = 0.0, time.perf_counter(), next(epochs) * len(samples)
        for start in range(first, first + len(samples) - BATCH, BATCH):
            before = time.perf_counter()
            batch = load(range(start, start + BATCH))
            waited += time.perf_counter() - before
            network.step(batch)
        return waited / (time.perf_counter() - began)

    def ahead(indices: range) -> ClickBatch:
        return samples.load(indices, shuffled=True)

    def direct(indices: range) -> ClickBatch:
        return samples.read(indices, shuffled=True)

    epoch(ahead)
    shares = [(epoch(ahead), epoch(direct)) for _ in range(rounds)]
    for name, values, bar in zip(
        ("input stall of a cached epoch", "the same without reading ahead"),
        zip(*shares, strict=True), (STALL_BAR, ""), strict=True,
    ):  # fmt: skip
        yield measure.row(
            name, float(np.median(values)), "ratio", bar=bar,
            against=f"seconds of the epoch, batches of {BATCH}, plain PyTorch network",
            interval=measure.bootstrap(values), repeats=rounds,
        )  # fmt: skip


PARTS = {"data": rows}
