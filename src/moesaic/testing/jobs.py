"""Tiny jobs and random samples for tests: a whole run takes well under a second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moesaic.base.config import parse
from moesaic.facts.job import Job
from moesaic.train.data.batch import Batch

TINY: dict[str, Any] = {
    "seed": 7,
    "model": {
        "family": "olmoe", "vocab": 61, "hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2,
        "head_dim": 8, "ffn": 24, "experts": 8, "top_k": 2, "init_std": 0.2,
    },
    "routing": {"balance_loss": 0.02, "z_loss": 0.001},
    "balance": {"policy": "none"},
    "data": {"path": "unused", "sequence": 12},
    "train": {"steps": 10, "batch": 8, "precision": "fp64"},
    "optimizer": {"lr": 0.003},
    "schedule": {"warmup": 2},
}  # fmt: skip

RUN_JOB = """
[model]
preset = "tiny-olmoe"
layers = 1
hidden = 32
head_dim = 8
ffn = 16

[data]
path = "text.txt"
sequence = 16
cache = "cache"

[train]
steps = 4
batch = 4
device = "cpu"

[log]
tensorboard = false
"""
"""Job file of a tiny run on the CPU."""


def tiny_job(**tables: Any) -> Job:
    """Return the tiny job with the given keys of its tables changed, or lists of tables set."""
    raw = {key: dict(value) if isinstance(value, dict) else value for key, value in TINY.items()}
    for table, changes in tables.items():
        raw[table] = {**raw.get(table, {}), **changes} if isinstance(changes, dict) else changes
    return parse(Job, raw, "tiny job")


class RandomSamples:
    """Endless random samples, each a function of its index; every third one has two documents,
    unless `packed` is false."""

    def __init__(self, vocab: int, sequence: int, *, packed: bool = True) -> None:
        self._vocab, self._sequence, self._packed = vocab, sequence, packed

    def __len__(self) -> int:
        return 1 << 30

    def batch(self, indices: Sequence[int], *, shuffled: bool = True) -> Batch:
        """Return the samples of `indices`."""
        del shuffled
        rows = [self._sample(index) for index in indices]
        whole = torch.stack(rows) if rows else torch.zeros(0, 3, self._sequence, dtype=torch.int64)
        inputs, targets, documents = whole.unbind(1)
        place = torch.arange(self._sequence).expand(len(rows), -1)
        first = torch.where(documents > 0, self._sequence // 2, 0)
        return Batch(
            samples=torch.tensor(list(indices), dtype=torch.int64),
            inputs=inputs, targets=targets, documents=documents.int(), positions=place - first,
        )  # fmt: skip

    def _sample(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self._vocab, (self._sequence + 1,), generator=generator)
        documents = torch.zeros(self._sequence, dtype=torch.int64)
        targets = tokens[1:].clone()
        if self._packed and index % 3 == 0:
            documents[self._sequence // 2 :] = 1
            targets[self._sequence // 2 - 1] = -100
        return torch.stack((tokens[:-1], targets, documents))
