"""Deduplicated and hierarchical dispatch equal one process.

`test_table.py` covers every family and the other axes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layouts import SIGMOID, Outcome, assert_same, outcome

from moesaic.testing.jobs import tiny_job
from moesaic.testing.ranks import RankPool

STEPS = 2
PLACEMENT = [[5, 2], [7, 0], [1, 6], [4, 3]]
DROPS = {
    "model": {"top_k": 2},
    "routing": {"router": "gshard", "capacity_factor": 1.0, "balance_loss": 1.0},
}
TP_SIZES = {"model": {"vocab": 64}}
CASES: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("one choice", 4, {"ep": 4}, {"model": {"top_k": 1}}),
    ("one expert", 4, {"ep": 4}, {"routing": {"router": "balanced"}, "model": {"top_k": 1}}),
    ("hosts", 8, {"ep": 8, "dispatch_hosts": 4, "dp_shard": 4}, {}),
    ("one rank per host", 4, {"ep": 4, "dispatch_hosts": 4}, {}),
    ("drops", 8, {"ep": 8, "dispatch_hosts": 2}, {**DROPS, "train": {"micro_batches": 2}}),
    ("every choice", 4, {"ep": 4, "dispatch_hosts": 2}, {"model": {"top_k": 8}}),
    (
        "one expert", 4, {"ep": 4, "dispatch_hosts": 2},
        {"routing": {"router": "balanced"}, "model": {"top_k": 1}},
    ),
    ("adapters", 4, {"ep": 4, "dispatch_hosts": 2}, {"finetune": {"method": "lora", "rank": 4}}),
]  # fmt: skip
_references: dict[str, Outcome] = {}


def with_dedup(tables: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    return {**tables, "layout": {**layout, "dispatch": "dedup"}}


@pytest.mark.parametrize(("name", "size", "layout", "tables"), CASES)
def test_fp64(
    ranks: RankPool, name: str, size: int, layout: dict[str, Any], tables: dict[str, Any]
) -> None:
    key = str(tables)
    if key not in _references:
        _references[key] = outcome(ranks, 1, tiny_job(**tables), STEPS)
    one = _references[key]
    assert_same(outcome(ranks, size, tiny_job(**with_dedup(tables, layout)), STEPS), one)
    assert (name == "drops") == (sum(step["dropped"] for step in one.steps) > 0)


@pytest.mark.parametrize("hosts", [1, 2])
def test_fp64_for_any_expert_placement(ranks: RankPool, hosts: int) -> None:
    one = outcome(ranks, 1, tiny_job(**DROPS), STEPS)
    job = tiny_job(**with_dedup(DROPS, {"ep": 4, "dispatch_hosts": hosts}))
    assert_same(outcome(ranks, 4, job, STEPS, placement=PLACEMENT), one)


@pytest.mark.parametrize(
    ("size", "layout", "tables"),
    [
        (
            4,
            {"ep": 4, "dp_shard": 2},
            {**SIGMOID, "train": {"micro_batches": 4, "recompute": True}},
        ),
        (4, {"ep": 4}, {**DROPS, "train": {"precision": "fp32"}}),
        (8, {"ep": 4, "tp": 2, "etp": 2}, TP_SIZES),
    ],
)
def test_hierarchical_all_to_all_is_bit_identical(
    ranks: RankPool, size: int, layout: dict[str, Any], tables: dict[str, Any]
) -> None:
    flat, hierarchical = (
        outcome(
            ranks,
            size,
            tiny_job(
                **{
                    **tables,
                    "layout": {**layout, "dispatch": "all_to_all", "dispatch_hosts": hosts},
                }
            ),
            STEPS,
        )
        for hosts in (1, 2)
    )
    assert flat.steps == hierarchical.steps
    for one, other in (
        (flat.gradients, hierarchical.gradients), (flat.state, hierarchical.state),
    ):  # fmt: skip
        assert all(np.array_equal(one[key], other[key]) for key in one)
