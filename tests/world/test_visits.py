"""Tokens that travel once to each rank, or by way of hosts: the numbers of one process.

Here is what is about travelling; under other axes, and in every family, they are in the table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layouts import SIGMOID, Outcome, assert_same, outcome

from moesaic.testing.jobs import tiny_job
from moesaic.testing.ranks import Ranks

STEPS = 2
HOMES = [[5, 2], [7, 0], [1, 6], [4, 3]]
DROPS = {
    "model": {"top_k": 2},
    "routing": {"router": "gshard", "capacity": 1.0, "balance_loss": 1.0},
}
SLICED = {"model": {"vocab": 64}}
CASES: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("drops", 4, {"ep": 4}, {**DROPS, "train": {"micro_batches": 2}}),
    ("one choice", 4, {"ep": 4}, {"model": {"top_k": 1}}),
    ("every choice", 2, {"ep": 2}, {"model": {"top_k": 8}}),
    ("one expert", 4, {"ep": 4}, {"routing": {"router": "balanced"}, "model": {"top_k": 1}}),
    ("adapters", 2, {"ep": 2}, {"finetune": {"method": "lora", "rank": 4}}),
    ("hosts", 8, {"ep": 8, "hosts": 2}, {"train": {"micro_batches": 2}}),
    ("hosts", 8, {"ep": 8, "hosts": 4, "shard": 4}, {}),
    ("a rank a host", 4, {"ep": 4, "hosts": 4}, {}),
    ("drops", 8, {"ep": 8, "hosts": 2}, {**DROPS, "train": {"micro_batches": 2}}),
    ("one choice", 4, {"ep": 4, "hosts": 2}, {"model": {"top_k": 1}}),
    ("every choice", 4, {"ep": 4, "hosts": 2}, {"model": {"top_k": 8}}),
    (
        "one expert", 4, {"ep": 4, "hosts": 2},
        {"routing": {"router": "balanced"}, "model": {"top_k": 1}},
    ),
    ("adapters", 4, {"ep": 4, "hosts": 2}, {"finetune": {"method": "lora", "rank": 4}}),
]  # fmt: skip
_references: dict[str, Outcome] = {}


def visiting(tables: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    return {**tables, "layout": {**layout, "dispatch": "visits"}}


@pytest.mark.parametrize(("name", "size", "layout", "tables"), CASES)
def test_fp64(
    ranks: Ranks, name: str, size: int, layout: dict[str, Any], tables: dict[str, Any]
) -> None:
    key = str(tables)
    if key not in _references:
        _references[key] = outcome(ranks, 1, tiny_job(**tables), STEPS)
    one = _references[key]
    assert_same(outcome(ranks, size, tiny_job(**visiting(tables, layout)), STEPS), one)
    assert (name == "drops") == (sum(step["dropped"] for step in one.steps) > 0)


@pytest.mark.parametrize("hosts", [1, 2])
def test_fp64_wherever_experts_live(ranks: Ranks, hosts: int) -> None:
    one = outcome(ranks, 1, tiny_job(**DROPS), STEPS)
    job = tiny_job(**visiting(DROPS, {"ep": 4, "hosts": hosts}))
    assert_same(outcome(ranks, 4, job, STEPS, homes=HOMES), one)


@pytest.mark.parametrize(
    ("size", "layout", "tables"),
    [
        (4, {"ep": 4}, {}),
        (4, {"ep": 4, "shard": 2}, {**SIGMOID, "train": {"micro_batches": 4, "recompute": True}}),
        (4, {"ep": 4}, {**DROPS, "train": {"precision": "fp32"}}),
        (8, {"ep": 4, "tp": 2, "etp": 2}, SLICED),
    ],
)
def test_rows_by_way_of_hosts_change_no_bit(
    ranks: Ranks, size: int, layout: dict[str, Any], tables: dict[str, Any]
) -> None:
    straight, by_hosts = (
        outcome(
            ranks,
            size,
            tiny_job(**{**tables, "layout": {**layout, "dispatch": "rows", "hosts": hosts}}),
            STEPS,
        )
        for hosts in (1, 2)
    )
    assert straight.steps == by_hosts.steps
    for one, other in (
        (straight.gradients, by_hosts.gradients), (straight.state, by_hosts.state),
    ):  # fmt: skip
        assert all(np.array_equal(one[key], other[key]) for key in one)
