"""Twenty steps under every policy equal those without replicas, and those of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layouts import ASKING, IN_PARTS, assert_same, outcome, reference

from moesaic.testing.jobs import tiny_job
from moesaic.testing.ranks import RankPool

STEPS = 20
POLICIES = ("quota", "pro-prophet", "eplb", "faster-moe")
TOP_K = (1, 2, 8)
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep 2 x 2": {"ep": 2}, "ep 4": {"ep": 4}, "ep 2, sharded": {"ep": 2, "dp_shard": 4},
}  # fmt: skip
CAPACITY = 1.25


DEFAULT = (0, 5, 6, 10)
"""Cases of the default suite: one of each policy, and every layout and top-k."""
CASES = [
    pytest.param(
        policy, top_k, list(LAYOUTS)[(at + turn) % 3], (CAPACITY, None)[(at + turn) % 2],
        marks=[pytest.mark.soak] * (3 * at + turn not in DEFAULT),
    )
    for at, policy in enumerate(POLICIES)
    for turn, top_k in enumerate(TOP_K)
]  # fmt: skip
"""Every pair of policy, top-k, layout and capacity."""


def tables_of(top_k: int, capacity: float | None) -> dict[str, Any]:
    return {
        "model": {"hidden": 16, "ffn": 8, "experts": 16, "init_std": 0.5, "top_k": top_k},
        "data": {"sequence": 6},
        "routing": {"capacity_factor": capacity},
        "train": {"steps": STEPS},
    }


@pytest.mark.parametrize(("policy", "top_k", "layout", "capacity"), CASES)
def test_twenty_steps(
    ranks: RankPool, policy: str, top_k: int, layout: str, capacity: float | None
) -> None:
    tables, place = tables_of(top_k, capacity), {"layout": LAYOUTS[layout]}
    found = outcome(
        ranks, 4, tiny_job(**tables, **place, balance={**ASKING, "policy": policy}), STEPS
    )
    assert_same(found, reference(ranks, STEPS, 4, **tables, **place))
    assert_same(found, reference(ranks, STEPS, **tables))
    assert sum(step["replicas"] for step in found.steps) > 0
    assert (capacity is not None) == (sum(step["dropped"] for step in found.steps) > 0)


@pytest.mark.parametrize(
    ("policy", "layout", "recompute"),
    [("quota", "ep 4", False), ("eplb", "ep 2, sharded", False), ("pro-prophet", "ep 4", True)],
)  # fmt: skip
def test_replicas_prefetched_in_part(
    ranks: RankPool, policy: str, layout: str, recompute: bool
) -> None:
    """With recompute, no replica is prefetched."""
    tables, place = {"model": {"layers": 4}}, {"layout": LAYOUTS[layout]}
    train, balance = {"micro_batches": 2, "recompute": recompute}, {**IN_PARTS, "policy": policy}
    if policy == "pro-prophet":
        del balance["max_replicas"]
    found = outcome(ranks, 4, tiny_job(**tables, **place, train=train, balance=balance), 4)
    last = found.steps[-1]
    assert sum(step["replicas"] for step in found.steps) > 0
    assert (last["prefetched"] > 0, last["not_prefetched"] > 0) == (not recompute, not recompute)
    plain_tables = {**tables, "train": {"micro_batches": 2}}
    assert_same(found, reference(ranks, 4, 4, **plain_tables, **place))
    assert_same(found, reference(ranks, 4, **plain_tables))


@pytest.mark.parametrize("policy", POLICIES)
def test_fixed_costs_give_the_same_bits_twice(ranks: RankPool, policy: str) -> None:
    tables = {**tables_of(2, None), "train": {"steps": STEPS, "precision": "fp32"}}
    job = tiny_job(**tables, layout={"ep": 4}, balance={**ASKING, "policy": policy})
    one, other = (outcome(ranks, 4, job, 3) for _ in range(2))
    assert one.steps == other.steps
    for key, values in one.state.items():
        assert np.array_equal(other.state[key], values), key
    assert sum(step["replicas"] for step in one.steps) > 0
