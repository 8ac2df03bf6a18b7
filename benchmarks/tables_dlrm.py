"""Part `dlrm` of theme `tables`: a whole model, over a plain PyTorch loop and over TorchRec."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import measure
from benchmarks.peer_process import Arm, peer
from benchmarks.tables_clicks import (
    BATCH,
    BOTTOM,
    DENSE,
    DENSE_LR,
    DIM,
    EPSILON,
    LR,
    SLOTS,
    STD,
    TOP,
    Clicks,
    Stream,
    auc,
)
from benchmarks.tables_speed import MISSING, PYTHON
from moesaic.facts.job import RecommenderConfig, TableConfig
from moesaic.facts.job.table import TableOptimizer
from moesaic.models.recommender import Recommender
from moesaic.nn.embedding import TableBag
from moesaic.ps.table import Table

ROWS = 200_000
"""Rows of a slot."""
THREADS = 2
STEPS = 20
"""Steps that an arm takes between turns."""
ROUNDS = 15
EVALUATION = 1 << 40
"""Seed of the samples for the AUC."""


def network() -> Recommender:
    """Return DLRM's network with the first values of torch's linear layers."""
    config = RecommenderConfig(
        family="dlrm", dim=DIM, hidden=list(TOP), dense_hidden=list(BOTTOM[:-1])
    )
    made = Recommender(config, SLOTS, DENSE)
    for layer in made.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    return made


def arm(look_up: Callable[[Clicks], Tensor], update: Callable[[], None]) -> Arm:
    """Return an arm over sums of rows, [slots * samples, dim], and their update after backward."""
    torch.manual_seed(0)
    model, stream, loss_of = network(), Stream(ROWS), nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=DENSE_LR)

    def predict(batch: Clicks) -> Tensor:
        sums = look_up(batch).view(SLOTS, len(batch.labels), DIM).transpose(0, 1)
        logits: Tensor = model(sums, torch.from_numpy(batch.dense))
        return logits

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if "evaluate" in request:
            batch = stream.batch(request["evaluate"], 100_000)
            with torch.no_grad():
                return {"auc": auc(batch.labels, predict(batch).numpy())}
        work = [stream.batch(seed) for seed in range(*request["seeds"])]
        began = time.perf_counter()
        for batch in work:
            optimizer.zero_grad()
            loss_of(predict(batch), torch.from_numpy(batch.labels)).backward()
            optimizer.step()
            update()
        return {"seconds": time.perf_counter() - began}

    return answer


def moesaic(optimizer: TableOptimizer) -> Arm:
    """Return moesaic's arm: one table of arbitrary 64-bit keys for all slots."""
    table = Table(TableConfig(optimizer=optimizer, lr=LR, epsilon=EPSILON, init_std=STD), DIM)
    bag = TableBag(table, include_last_offset=True)
    slots = np.arange(SLOTS, dtype=np.int64)[:, None]

    def look_up(batch: Clicks) -> Tensor:
        keys = (batch.numbers * SLOTS + slots) * np.int64(-7046029254386353131)
        flat = torch.from_numpy(keys.reshape(-1))
        sums: Tensor = bag(flat, torch.arange(len(flat) + 1))
        return sums

    return arm(look_up, table.step)


def plain() -> Arm:
    """Return a plain loop: nn.EmbeddingBag with sparse gradients, and torch's Adagrad."""
    torch.manual_seed(1)
    bags = [
        nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True, include_last_offset=True)
        for _ in range(SLOTS)
    ]
    for bag in bags:
        nn.init.normal_(bag.weight, std=STD)
    weights = list(chain.from_iterable(bag.parameters() for bag in bags))
    optimizer = torch.optim.Adagrad(weights, lr=LR, eps=EPSILON)

    def look_up(batch: Clicks) -> Tensor:
        offsets = torch.arange(len(batch.labels) + 1)
        numbers = zip(bags, batch.numbers, strict=True)
        return torch.cat([bag(torch.from_numpy(one), offsets) for bag, one in numbers])

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return arm(look_up, update)


def compared(
    name: str, bar: str, against: str, arms: Sequence[Arm], rounds: int
) -> Iterator[measure.Row]:
    """Yield the speed of the first arm over the second, and the difference of their AUC."""
    torch.set_num_threads(THREADS)
    ratios = list[float]()
    for turn in range(-1, max(rounds, ROUNDS)):
        first = (turn + 1) * STEPS
        order = arms if turn % 2 else arms[::-1]
        answers = {id(one): one({"seeds": (first, first + STEPS)}) for one in order}
        ours, theirs = (answers[id(one)]["seconds"] for one in arms)
        if turn >= 0:
            ratios.append(theirs / ours)
            spent = ours, theirs
    found = [one({"evaluate": EVALUATION})["auc"] for one in arms]
    speeds = " and ".join(f"{STEPS * BATCH / one:,.0f}" for one in spent)
    row = measure.row(
        name, float(np.median(ratios)), "ratio", bar=bar, interval=measure.bootstrap(ratios),
        repeats=len(ratios), against=f"{against}; {speeds} samples/s in the last turn; "
        f"AUC {found[0]:.4f} and {found[1]:.4f} after {(len(ratios) + 1) * STEPS} steps",
    )  # fmt: skip
    if found[0] < found[1] - 0.001:
        row = replace(row, holds=False)
    yield row


def dlrm(rounds: int) -> Iterator[measure.Row]:
    """Compare the training of DLRM."""
    yield from compared(
        "DLRM, samples/s over a plain PyTorch loop, AUC no lower by 0.001", ">= 1.5",
        f"nn.EmbeddingBag(sparse=True) per slot and torch.optim.Adagrad, torch {torch.__version__}",
        [moesaic("adagrad"), plain()], rounds,
    )  # fmt: skip
    name = "DLRM, samples/s over TorchRec, AUC no lower by 0.001"
    if not PYTHON.exists():
        yield measure.untried(name, ">= 1.1", MISSING)
        return
    with peer(PYTHON, "benchmarks.tables_torchrec", ROWS, THREADS) as theirs:
        arms = [moesaic("rowwise-adagrad"), theirs]
        against = "TorchRec 1.8.0, DistributedModelParallel, fused row-wise AdaGrad, one process"
        yield from compared(name, ">= 1.1", against, arms, rounds)


PARTS = {"dlrm": dlrm}
