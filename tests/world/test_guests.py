"""Experts that are computed elsewhere for a step: the numbers of one process, whoever decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layouts import SIGMOID, Outcome, assert_same, outcome

from moesaic.testing.jobs import tiny_job
from moesaic.testing.ranks import Ranks

STEPS = 2
FREE = {"rows_per_s": 1.0, "bytes_per_s": 1e30, "latency_s": 0.0}
"""Prices at which any row that moves from a busy rank to an idle one pays."""
POLICIES = ("auto", "quota", "pro-prophet", "faster-moe", "top-k-broadcast", "eplb", "llep")
DROPS = {
    "model": {"top_k": 2},
    "routing": {"router": "gshard", "capacity": 1.5, "balance_loss": 1.0},
}
SWITCH = {"model": {"top_k": 1}, "routing": {"router": "switch", "noise": 0.1}}
WAYS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {"ep": 2}, {}),
    (4, {"ep": 2}, {"model": {"top_k": 8}}),
    (4, {"ep": 4, "dispatch": "visits"}, {}),
    (4, {"ep": 4, "dispatch": "visits", "chunks": 3}, DROPS),
    (4, {"ep": 2, "dispatch": "visits", "local": "first"}, DROPS),
    (4, {"ep": 4, "dispatch": "rows", "hosts": 2}, SWITCH),
    (4, {"ep": 4, "dispatch": "visits", "hosts": 2, "chunks": 2}, DROPS),
    (2, {"ep": 2, "local": "first", "chunks": 2}, SWITCH),
    (4, {"ep": 2, "shard": 4}, {"train": {"recompute": True}}),
    (4, {"ep": 2, "tp": 2, "etp": 2}, {"model": {"vocab": 64}}),
    (4, {"ep": 2, "pp": 2, "schedule": "zero-bubble"}, {"train": {"micro_batches": 4}}),
    (4, {"ep": 2, "pp": 2, "schedule": "1f1b"}, {**SIGMOID, "train": {"micro_batches": 4}}),
    (8, {"ep": 8}, {"train": {"micro_batches": 4}}),
    (
        2, {"ep": 2},
        {"finetune": {"method": "lora", "targets": ["attention"], "router": "train"}},
    ),
]  # fmt: skip
HOMES = {2: [[5, 2, 7, 0], [1, 6, 4, 3]], 4: [[5, 2], [7, 0], [1, 6], [4, 3]]}
_references: dict[str, Outcome] = {}


def balanced(tables: dict[str, Any], policy: str = "quota") -> dict[str, Any]:
    return {**tables, "balance": {"policy": policy, "prices": FREE, "least_rows": 1}}


def alone(ranks: Ranks, tables: dict[str, Any]) -> Outcome:
    key = str(tables)
    if key not in _references:
        _references[key] = outcome(ranks, 1, tiny_job(**tables), STEPS)
    return _references[key]


@pytest.mark.parametrize(("size", "layout", "tables"), WAYS)
def test_copies_at_random(
    ranks: Ranks, size: int, layout: dict[str, Any], tables: dict[str, Any]
) -> None:
    job = tiny_job(**balanced({**tables, "layout": layout}))
    several = outcome(ranks, size, job, STEPS, shaken=3, homes=HOMES.get(layout["ep"]))
    assert_same(several, alone(ranks, tables))


@pytest.mark.parametrize("recompute", [False, True])
def test_copies_that_leave_early(ranks: Ranks, recompute: bool) -> None:
    tables = {**SWITCH, "train": {"micro_batches": 2, "recompute": recompute}}
    raw = balanced({**tables, "layout": {"ep": 4}}, "auto")
    raw["balance"]["early"] = True
    several = outcome(ranks, 4, tiny_job(**raw), STEPS)
    assert_same(several, alone(ranks, tables))
    assert sum(step["copies"] for step in several.steps) > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tables", [{}, SWITCH, DROPS], ids=["top-2", "top-1", "drops"])
def test_every_policy(ranks: Ranks, policy: str, tables: dict[str, Any]) -> None:
    job = tiny_job(**balanced({**tables, "layout": {"ep": 4}}, policy))
    several = outcome(ranks, 4, job, STEPS)
    assert_same(several, alone(ranks, tables))
    assert sum(step["copies"] for step in several.steps) > 0
    assert (tables is DROPS) == (sum(step["dropped"] for step in several.steps) > 0)


def test_a_fixed_plan_gives_the_same_bits_twice(ranks: Ranks) -> None:
    job = tiny_job(**balanced({"layout": {"ep": 4}, "train": {"precision": "fp32"}}))
    one, other = (outcome(ranks, 4, job, 3) for _ in range(2))
    for key, values in one.state.items():
        assert np.array_equal(other.state[key], values), key


def test_narrow_products_send_narrow_experts(ranks: Ranks) -> None:
    """Losses of bf16 are those of another layout to what its rounding leaves."""
    tables = {"train": {"precision": "bf16"}}
    job = tiny_job(**balanced({**tables, "layout": {"ep": 4}}))
    several, one = outcome(ranks, 4, job, STEPS, shaken=5), alone(ranks, tables)
    for a, b in zip(several.steps, one.steps, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-2)
