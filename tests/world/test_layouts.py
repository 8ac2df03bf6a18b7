"""Every layout gives the same numbers as one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layouts import SIGMOID, Outcome, assert_same, outcome, reference, weights, worst_tensor

from moesaic.testing.jobs import tiny_job
from moesaic.testing.ranks import RankPool

LAYOUTS = [
    # ranks, ep, dp_shard; test_table.py has every axis
    (2, 2, 1),
    (4, 2, 2),
    (4, 1, 4),
]
STEPS = 6
_recorded: dict[int, tuple[Outcome, Path]] = {}


# With micro-batches of 2 samples, half of four ranks have no token.
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(("size", "ep", "dp_shard"), LAYOUTS)
def test_fp64(ranks: RankPool, size: int, ep: int, dp_shard: int, micro_batches: int) -> None:
    train = {"micro_batches": micro_batches}
    one = reference(ranks, STEPS, train=train)
    job = tiny_job(train=train, layout={"ep": ep, "dp_shard": dp_shard})
    assert_same(outcome(ranks, size, job, STEPS), one)


@pytest.mark.parametrize(
    ("size", "dp_shard", "placement"),
    [
        (1, 1, [[3, 1, 4, 0, 5, 7, 2, 6]]),
        (2, 1, [[6, 1, 3, 4], [0, 7, 5, 2]]),
        (4, 4, [[6, 1, 3, 4], [0, 7, 5, 2]]),
        (4, 1, [[5, 2], [7, 0], [1, 6], [4, 3]]),
    ],
)
def test_fp64_for_any_expert_placement(
    ranks: RankPool, size: int, dp_shard: int, placement: list[list[int]]
) -> None:
    tables: dict[str, Any] = {
        "model": {"top_k": 2},
        "routing": {"router": "gshard", "capacity_factor": 1.0, "balance_loss": 1.0},
        "train": {"micro_batches": 2},
    }
    one = reference(ranks, STEPS, **tables)
    job = tiny_job(**tables, layout={"ep": len(placement), "dp_shard": dp_shard})
    assert_same(outcome(ranks, size, job, STEPS, placement=placement), one)
    assert sum(step["dropped"] for step in one.steps) > 0


ROUTERS: dict[str, dict[str, Any]] = {
    "switch with noise and drops": {
        "model": {"top_k": 1},
        "routing": {"router": "switch", "noise": 0.1, "capacity_factor": 1.0},
    },
    "gshard with drops": {
        "model": {"top_k": 2},
        "routing": {"router": "gshard", "capacity_factor": 1.0, "balance_loss": 1.0},
    },
    "balanced": {"routing": {"router": "balanced"}},
    "mixtral": {"model": {"family": "mixtral", "renormalise": True}},
    "qwen3_moe with a window and yarn": {
        "model": {
            "family": "qwen3_moe",
            "renormalise": True,
            "window": 5,
            "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_max_positions": 8},
        },
        "train": {"micro_batches": 2},
    },
    "one expert of eight per token": {"model": {"top_k": 1}},
    "dense": {"model": {"family": "llama", "experts": 0, "top_k": 0, "tied": True}},
    "recompute": {"train": {"recompute": True, "micro_batches": 2}},
    "tied": {"model": {"tied": True}, "train": {"micro_batches": 2}},
    "sigmoid": {**SIGMOID, "train": {"micro_batches": 4}},
    "sigmoid, recompute": {**SIGMOID, "train": {"recompute": True, "micro_batches": 2}},
    "sigmoid with drops": {**SIGMOID, "routing": {**SIGMOID["routing"], "capacity_factor": 1.0}},
    "latent attention": {
        "model": {
            "family": "deepseek_v3", "kv_heads": 4,
            "latent": SIGMOID["model"]["latent"],
        },
        "train": {"micro_batches": 4},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize(("size", "ep", "dp_shard"), [(4, 2, 2)])
def test_fp64_with_every_router(
    ranks: RankPool, name: str, size: int, ep: int, dp_shard: int
) -> None:
    tables = ROUTERS[name]
    one = reference(ranks, STEPS, **tables)
    ep = ep if tables.get("model", {}).get("experts", 8) else 1
    job = tiny_job(**{**tables, "layout": {"ep": ep, "dp_shard": dp_shard}})
    several = outcome(ranks, size, job, STEPS)
    assert_same(several, one)
    if "drops" in name:
        assert sum(step["dropped"] for step in one.steps) > 0
    for key, bias in one.state.items():
        if key.endswith("router.bias"):
            assert bias.any()
            assert np.array_equal(several.state[key], bias)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(("size", "ep", "dp_shard"), LAYOUTS)
def test_fp32_with_replayed_routing(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, size: int, ep: int, dp_shard: int,
    micro_batches: int,
) -> None:  # fmt: skip
    train = {"micro_batches": micro_batches, "precision": "fp32"}
    one, record = recorded(ranks, tmp_path_factory, micro_batches)
    job = tiny_job(train=train, layout={"ep": ep, "dp_shard": dp_shard})
    several = outcome(ranks, size, job, STEPS, replay=str(record))
    assert worst_tensor(several.gradients, one.gradients) < 1e-5
    assert worst_tensor(weights(several), weights(one)) < 1e-5
    mismatches = sum(step["num_replay_mismatches"] for step in several.steps)
    assert mismatches < 10, "replayed choices are those of the router except for ties"
    for a, b in zip(several.steps, one.steps, strict=True):
        assert a["counts"] == b["counts"]
        for figure in ("loss", "balance", "z", "norm"):
            assert a[figure] == pytest.approx(b[figure], rel=1e-5), figure


def recorded(
    ranks: RankPool, factory: pytest.TempPathFactory, micro_batches: int
) -> tuple[Outcome, Path]:
    if micro_batches not in _recorded:
        path = factory.mktemp("routes")
        job = tiny_job(train={"micro_batches": micro_batches, "precision": "fp32"})
        _recorded[micro_batches] = outcome(ranks, 1, job, STEPS, record=str(path)), path
    return _recorded[micro_batches]


@pytest.mark.parametrize(("size", "ep", "dp_shard"), [(1, 1, 1), (4, 2, 2)])
def test_bf16_stays_close_to_fp32(
    ranks: RankPool,
    tmp_path_factory: pytest.TempPathFactory,
    size: int,
    ep: int,
    dp_shard: int,
) -> None:
    """bf16 keeps 8 bits: one percent of a gradient, far less of a loss; never equal."""
    one, record = recorded(ranks, tmp_path_factory, 2)
    train = {"micro_batches": 2, "precision": "bf16", "recompute": size == 4}
    job = tiny_job(train=train, layout={"ep": ep, "dp_shard": dp_shard})
    half = outcome(ranks, size, job, STEPS, replay=str(record))
    assert 0 < worst_tensor(half.gradients, one.gradients) < 0.06
    assert 0 < worst_tensor(weights(half), weights(one)) < 0.02
    for a, b in zip(half.steps, one.steps, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=5e-3)
        assert a["norm"] == pytest.approx(b["norm"], rel=0.02)
