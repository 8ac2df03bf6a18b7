"""Tokens that travel to their experts in chunks: the numbers of one process, whatever the way.

Here is what is about chunks; under other axes, and in every family, they are in the table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layouts import Outcome, assert_same, outcome
from test_visits import DROPS, HOMES, SLICED

from moesaic.testing.jobs import tiny_job
from moesaic.testing.ranks import Ranks

STEPS = 2
ROWS, VISITS = {"dispatch": "rows"}, {"dispatch": "visits"}
MICRO = {"train": {"micro_batches": 2}}
LORA = {"finetune": {"method": "lora", "rank": 4}}
HALVES = {"pp": 2, "schedule": "zero-bubble"}
CASES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {"ep": 2, "chunks": 2, **ROWS}, {}),
    (2, {"ep": 2, "chunks": 3, **VISITS}, MICRO),
    (2, {"ep": 2, "chunks": 64, **ROWS}, {"data": {"sequence": 7}}),
    (2, {"ep": 2, "chunks": 64, **VISITS}, {"data": {"sequence": 7}}),
    (4, {"ep": 4, "chunks": 5, "hosts": 2, **ROWS}, DROPS),
    (4, {"ep": 4, "chunks": 5, "hosts": 2, **VISITS}, {**DROPS, **MICRO}),
    (4, {"ep": 4, "chunks": 64, "hosts": 2, **VISITS}, {"data": {"sequence": 7}}),
    (4, {"ep": 4, "chunks": 2, **ROWS}, {"model": {"top_k": 8}}),
    (4, {"ep": 4, "chunks": 2, "hosts": 2, **VISITS}, {"train": {"recompute": True}}),
    (
        4, {"ep": 4, "chunks": 4, **VISITS},
        {"routing": {"router": "balanced"}, "model": {"top_k": 1}},
    ),
    (2, {"ep": 2, "chunks": 3, **ROWS}, LORA),
    (4, {"ep": 4, "chunks": 3, "hosts": 2, **VISITS}, {**LORA, **MICRO}),
    (4, {"ep": 2, "chunks": 3, **HALVES, **ROWS}, {"train": {"micro_batches": 4}}),
    (4, {"ep": 2, "chunks": 3, **HALVES, **VISITS}, {"train": {"micro_batches": 4}, **LORA}),
    (4, {"ep": 2, "tp": 2, "etp": 2, "chunks": 3, **VISITS}, SLICED),
    (4, {"ep": 2, "tp": 2, "shard": 2, "chunks": 2, **ROWS}, SLICED),
]  # fmt: skip
_references: dict[str, Outcome] = {}


@pytest.mark.parametrize(("size", "layout", "tables"), CASES, ids=str)
def test_fp64(ranks: Ranks, size: int, layout: dict[str, Any], tables: dict[str, Any]) -> None:
    key = str(tables)
    if key not in _references:
        _references[key] = outcome(ranks, 1, tiny_job(**tables), STEPS)
    found = outcome(ranks, size, tiny_job(**{**tables, "layout": layout}), STEPS)
    assert_same(found, _references[key])


@pytest.mark.parametrize("hosts", [1, 2])
def test_fp64_wherever_experts_live(ranks: Ranks, hosts: int) -> None:
    one = outcome(ranks, 1, tiny_job(**DROPS), STEPS)
    job = tiny_job(**DROPS, layout={"ep": 4, "chunks": 3, "hosts": hosts, **VISITS})
    assert_same(outcome(ranks, 4, job, STEPS, homes=HOMES), one)


@pytest.mark.parametrize("way", [ROWS, VISITS], ids=["rows", "visits"])
def test_what_tokens_become_does_not_depend_on_chunks(ranks: Ranks, way: dict[str, Any]) -> None:
    """Forward each token has the same bits; gradients of weights are summed chunk by chunk."""
    train = {"precision": "fp32"}
    whole, cut = (
        outcome(ranks, 2, tiny_job(train=train, layout={"ep": 2, "chunks": num, **way}), 1)
        for num in (1, 3)
    )
    assert [step["loss"] for step in whole.steps] == [step["loss"] for step in cut.steps]
    assert not all(np.array_equal(whole.gradients[k], cut.gradients[k]) for k in whole.gradients)
