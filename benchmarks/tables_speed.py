"""Parts of theme `tables`: training steps and pulls of a table whose rows are all in memory.

Every batch has one key per bag. moesaic's keys are arbitrary 64-bit ids, those of the others are
row numbers. All have the same rows, batches, gradients and number of threads, and take turns.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks import measure
from benchmarks.peer_process import Arm, interpreter, peer
from benchmarks.tables_batches import EPSILON, LR, Shape, batches
from moesaic.facts.job.table import TableConfig, TableOptimizer
from moesaic.nn.embedding import TableBag
from moesaic.ps.table import Table

PYTHON = interpreter("tables")
"""Interpreter of the environment of fbgemm."""
MISSING = f"no fbgemm in {PYTHON.parents[1]}; benchmarks/tables.md says how to install it"
FBGEMM = "fbgemm-gpu-cpu 1.8.0"
SHAPES = (Shape(16, 16_000_000), Shape(64, 4_000_000))
SIZES = (512, 2048, 8192, 32_768, 65_536)
ZIPF = 1.05
THREADS = 1
REQUEST_KEYS = 65_536
"""Keys that an arm handles between turns."""


def ids(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return arbitrary 64-bit ids of rows."""
    return numbers * np.int64(-7046029254386353131) + np.int64(12345)


def table(shape: Shape, optimizer: TableOptimizer) -> Table:
    """Return moesaic's table with all rows; all are read once, see `tables.md`."""
    made = Table(TableConfig(optimizer=optimizer, lr=LR, epsilon=EPSILON), shape.dim)
    for numbers, values in shape.chunks():
        records = np.zeros((len(numbers), made.layout.record_bytes), np.uint8)
        records.view(np.float32)[:, : shape.dim] = values
        made.load(ids(numbers), records)
    for start in range(0, shape.rows, REQUEST_KEYS):
        made.pull(ids(np.arange(start, min(start + REQUEST_KEYS, shape.rows))))
    return made


def weight(shape: Shape) -> torch.Tensor:
    """Return the rows of a table as a tensor."""
    rows = torch.empty(shape.rows, shape.dim)
    for numbers, values in shape.chunks():
        rows[numbers[0] : numbers[-1] + 1] = torch.from_numpy(values)
    rows.sum()
    return rows


def moesaic_training(made: Table, shape: Shape) -> Arm:
    """Return moesaic's training steps through `TableBag`."""
    bag = TableBag(made, include_last_offset=True)

    def steps(request: dict[str, Any]) -> dict[str, Any]:
        work = [
            (torch.from_numpy(ids(numbers)), torch.from_numpy(grads))
            for numbers, grads in batches(shape, **request)
        ]
        offsets = torch.arange(request["size"] + 1)
        began = time.perf_counter()
        for keys, grads in work:
            bag(keys, offsets).backward(grads)
            made.step()
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "rows": made.pull(work[0][0][:8]).tolist()}

    return steps


def torch_training(shape: Shape) -> Arm:
    """Return steps of nn.EmbeddingBag with sparse gradients and torch's Adagrad."""
    bag = nn.EmbeddingBag.from_pretrained(
        weight(shape), freeze=False, mode="sum", sparse=True, include_last_offset=True
    )
    optimizer = torch.optim.Adagrad(bag.parameters(), lr=LR, eps=EPSILON)
    optimizer.state[bag.weight]["sum"].add_(0).sum()

    def steps(request: dict[str, Any]) -> dict[str, Any]:
        work = [
            (torch.from_numpy(numbers), torch.from_numpy(grads))
            for numbers, grads in batches(shape, **request)
        ]
        offsets = torch.arange(request["size"] + 1)
        began = time.perf_counter()
        for numbers, grads in work:
            optimizer.zero_grad()
            bag(numbers, offsets).backward(grads)
            optimizer.step()
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "rows": bag.weight[work[0][0][:8]].tolist()}

    return steps


def moesaic_pull(made: Table, shape: Shape) -> Arm:
    """Return moesaic's pulls."""

    def pulls(request: dict[str, Any]) -> dict[str, Any]:
        work = [ids(numbers) for numbers, _ in batches(shape, **request)]
        began = time.perf_counter()
        found = [made.pull(keys)[:8] for keys in work]
        return {"seconds": time.perf_counter() - began, "rows": found[0].tolist()}

    return pulls


def index_select(shape: Shape) -> Arm:
    """Return selections from a tensor."""
    rows = weight(shape)

    def selections(request: dict[str, Any]) -> dict[str, Any]:
        work = [torch.from_numpy(numbers) for numbers, _ in batches(shape, **request)]
        began = time.perf_counter()
        found = [rows.index_select(0, numbers)[:8] for numbers in work]
        return {"seconds": time.perf_counter() - began, "rows": found[0].tolist()}

    return selections


def in_turn(arms: Mapping[str, Arm], size: int, zipf: float, rounds: int) -> measure.Times:
    """Let arms handle the same batches in turn; return seconds of a batch.

    Raises:
        RuntimeError: the arms have different rows after the warm-up.
    """
    count = REQUEST_KEYS // size
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    disturbed = 0
    for turn in range(-1, rounds):
        request = {"size": size, "zipf": zipf, "count": count, "seed": turn + 1}
        names = list(arms) if turn % 2 else list(arms)[::-1]
        watch = measure.Watch()
        answers = {name: arms[name](request) for name in names}
        if turn < 0:
            check_rows(answers)
            continue
        disturbed += watch.foreign_share() > measure.FOREIGN_SHARE
        for name in arms:
            seconds[name].append(answers[name]["seconds"] / count)
    return measure.Times(seconds, disturbed)


def check_rows(answers: Mapping[str, dict[str, Any]]) -> None:
    """Raise unless all arms that train have the same rows."""
    found = {name: np.array(answer["rows"]) for name, answer in answers.items() if "rows" in answer}
    for name, rows in found.items():
        if not np.allclose(rows, next(iter(found.values())), rtol=1e-4, atol=1e-5):
            raise RuntimeError(f"rows of {' and '.join(found)} differ after the same steps: {name}")


def cases(
    arms: Mapping[str, Arm], shape: Shape, rounds: int, name: str, against: str
) -> Iterator[measure.Row]:
    """Yield the speed of moesaic, the first arm, over the second for every size."""
    ours, other = arms
    for size in SIZES:
        times = in_turn(arms, size, ZIPF, rounds)
        one = measure.compare(
            f"{name}, {shape.rows / 1e6:g} M x {shape.dim}, {size} keys",
            times, other, ours, against=against,
        )  # fmt: skip
        spent = ", ".join(f"{times.median(arm) / size * 1e9:.0f} ns" for arm in arms)
        noise = f"; {times.disturbed} rounds disturbed" * (times.disturbed > 0)
        yield replace(one, against=f"{against}; {THREADS} thread; {spent} a key{noise}")


def fbgemm(rounds: int) -> Iterator[measure.Row]:
    """Compare training steps with fbgemm's."""
    name = "training step, row-wise AdaGrad, dynamic ids, over fbgemm with static ids"
    median, least = f"{name}, median of sizes", f"{name}, worst size"
    if not PYTHON.exists():
        missing = [measure.untried(median, ">= 1.15", MISSING)]
        yield from measure.joint(name, [*missing, measure.untried(least, ">= 0.95", MISSING)])
        return
    torch.set_num_threads(THREADS)
    rows = list[measure.Row]()
    for shape in SHAPES:
        with peer(PYTHON, "benchmarks.tables_fbgemm", shape.dim, shape.rows, THREADS) as theirs:
            arms = {"moesaic": moesaic_training(table(shape, "rowwise-adagrad"), shape)}
            arms["fbgemm"] = theirs
            rows += cases(arms, shape, rounds, "step over fbgemm", FBGEMM)
    tried = sorted(rows, key=lambda row: row.value or 0.0)
    middle = tried[(len(tried) - 1) // 2]
    claim = replace(
        middle, name=median, bar=">= 1.15", holds=measure.holds(">= 1.15", middle.value),
        against=f"{middle.against}; the lower median of {len(tried)}: {middle.name}",
    )  # fmt: skip
    yield from measure.joint(name, [claim, measure.worst(least, tried, ">= 0.95")])
    yield from rows


def adagrad(rounds: int) -> Iterator[measure.Row]:
    """Compare training steps with torch's."""
    torch.set_num_threads(THREADS)
    rows = list[measure.Row]()
    against = f"nn.EmbeddingBag(sparse=True) and torch.optim.Adagrad of torch {torch.__version__}"
    for shape in SHAPES:
        arms = {
            "moesaic": moesaic_training(table(shape, "adagrad"), shape),
            "torch": torch_training(shape),
        }
        rows += cases(arms, shape, rounds, "step over torch", against)
    name = "training step, AdaGrad, over nn.EmbeddingBag(sparse=True) and torch's Adagrad"
    yield measure.worst(name, rows, ">= 3")
    yield from rows


def pull(rounds: int) -> Iterator[measure.Row]:
    """Compare pulls with index_select."""
    torch.set_num_threads(THREADS)
    rows, claims = list[measure.Row](), list[measure.Row]()
    for shape, bar in zip(SHAPES, (">= 0.6", ">= 0.8"), strict=True):
        arms = {
            "moesaic": moesaic_pull(table(shape, "rowwise-adagrad"), shape),
            "index_select": index_select(shape),
        }
        found = list(cases(arms, shape, rounds, "pull over index_select", "torch.index_select"))
        name = f"pull over index_select of the same rows, {shape.dim} numbers, dynamic ids"
        claims.append(measure.worst(name, found, bar))
        rows += found
    yield from measure.joint("pull over index_select of the same rows", claims)
    yield from rows


PARTS = {"fbgemm": fbgemm, "adagrad": adagrad, "pull": pull}
