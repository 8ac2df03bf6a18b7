"""Passes block by block: the numbers of one micro-batch after the other, and FSDP2's gathers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from layouts import SIGMOID, assert_same, outcome, plain, reference
from torch.utils._python_dispatch import TorchDispatchMode

from moesaic.base.errors import ConfigError
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import RankPool
from moesaic.testing.runs import start_run

STEPS = 3
BY_BLOCK = {"micro_batch_order": "by_block"}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one rank": (1, {}, {"train": {"micro_batches": 4}}),
    "recompute": (1, {}, {"train": {"micro_batches": 2, "recompute": True}}),
    "tied": (1, {}, {"model": {"tied": True}, "train": {"micro_batches": 2}}),
    "ep2": (2, {"ep": 2}, {"train": {"micro_batches": 4}}),
    "ep2, dp4": (4, {"ep": 2}, {"train": {"micro_batches": 4}}),
    "sharded": (2, {"ep": 2, "dp_shard": 2}, {"train": {"micro_batches": 4}}),
    "sharded, recompute": (
        4,
        {"ep": 2, "dp_shard": 4},
        {"train": {"micro_batches": 2, "recompute": True}},
    ),
    "replicas of shards": (4, {"ep": 2, "dp_shard": 2}, {"train": {"micro_batches": 4}}),
    "sharded columns": (
        2,
        {"ep": 2, "dp_shard": 2, "embedding": "columns"},
        {"train": {"micro_batches": 2}},
    ),
    "tp": (2, {"tp": 2, "etp": 2}, {"model": {"vocab": 64}, "train": {"micro_batches": 2}}),
    "sigmoid router": (2, {"ep": 2, "dp_shard": 2}, {**SIGMOID, "train": {"micro_batches": 4}}),
    "drops": (
        2,
        {"ep": 2},
        {
            "routing": {"router": "gshard", "capacity_factor": 1.0, "balance_loss": 1.0},
            "train": {"micro_batches": 2},
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_order_changes_no_number(ranks: RankPool, name: str) -> None:
    size, layout, tables = CASES[name]
    one = reference(ranks, STEPS, **tables)
    train = tables.get("train", {}) | BY_BLOCK
    job = tiny_job(**{**tables, "train": train, "layout": layout})
    assert_same(outcome(ranks, size, job, STEPS), one)


def trained(world: World, job: Job) -> tuple[list[float], list[Any]]:
    """Return the gradient norms of some steps, and the state after them."""
    run, samples = start_run(job, world), RandomSamples(job.model.vocab, job.data.sequence)
    norms = [run.step(samples).grad_norm for _ in range(STEPS)]
    norms.append(run.validate(samples, 4)[0])
    state = [plain(shard) for shard in run.state().shards]
    run.close()
    return norms, state


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_one_rank_gets_the_same_bits(ranks: RankPool, precision: str) -> None:
    """Gradients of a parameter are added up in the order of micro-batches in both orders."""
    results = []
    for order in ("by_micro_batch", "by_block"):
        train = {"micro_batches": 4, "precision": precision, "micro_batch_order": order}
        results += ranks.run(1, trained, tiny_job(train=train))
    (norms, state), (expected_norms, expected) = results
    assert norms == expected_norms
    for (key, *_, found), (*_, wanted) in zip(state, expected, strict=True):
        assert np.array_equal(found, wanted), key


class GatherCounter(TorchDispatchMode):
    """Count all-gathers into one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def gathers(world: World, job: Job) -> int:
    run, samples = start_run(job, world), RandomSamples(job.model.vocab, job.data.sequence)
    run.step(samples)
    with GatherCounter() as counter:
        run.step(samples)
    run.close()
    return sum(n for name, n in counter.counts.items() if "_allgather_base" in name)


def test_a_block_is_gathered_once_per_direction(ranks: RankPool) -> None:
    """Embedding, two layers and head, forward and backward, whatever the micro-batches."""
    for micro_batches in (1, 4):
        job = tiny_job(
            layout={"ep": 2, "dp_shard": 2}, train={"micro_batches": micro_batches, **BY_BLOCK}
        )
        assert ranks.run(2, gathers, job) == [8, 8]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"layout": {"pp": 2}}, "layout.pp = 2 with train.micro_batch_order"),
        ({"balance": {"policy": "eplb"}}, 'balance.policy = "eplb" with'),
        (
            {"layout": {"dp_shard": 2}, "model": {"tied": True}},
            "layout.dp_shard = 2 with .* tied",
        ),
    ],
)
def test_settings_that_need_the_other_order_are_refused(
    tables: dict[str, dict[str, Any]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_job(train=BY_BLOCK, **tables)
