"""Expert state on a drive: the bits of a run with all state in memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from layouts import SIGMOID, plain

from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import plan_from_layout
from moesaic.models.init import InitialSource
from moesaic.policy.plan import budget
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import RankPool
from moesaic.train import tiers
from moesaic.train.assemble import assemble

STEPS = 4
WIDE = {"ffn": 32}
"""Rows of whole cache lines: otherwise the last digit depends on alignment."""
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "clipped": (1, {}),
    "not clipped": (1, {"train": {"clip": 0.0}}),
    "micro-batches": (1, {"train": {"micro_batches": 4}}),
    "micro-batches, not clipped": (1, {"train": {"micro_batches": 4, "clip": 0.0}}),
    "recompute": (1, {"train": {"micro_batches": 2, "recompute": True}}),
    "bf16": (1, {"train": {"precision": "bf16", "clip": 0.0}}),
    "fp16": (1, {"train": {"precision": "fp16", "clip": 0.0}}),
    "fp64": (1, {"train": {"precision": "fp64"}}),
    "sigmoid router, shared expert": (1, {**SIGMOID, "train": {"clip": 0.0}}),
    "few touched": (1, {"model": {"top_k": 1}, "train": {"batch": 1, "clip": 0.0}}),
    "few touched, clipped": (1, {"model": {"top_k": 1}, "train": {"batch": 1}}),
    "ep2": (2, {"layout": {"ep": 2}, "train": {"clip": 0.0}}),
    "ep2, few touched": (
        2,
        {
            "layout": {"ep": 2},
            "model": {"top_k": 1},
            "data": {"sequence": 6},
            "train": {"batch": 2, "clip": 0.0},
        },
    ),
    "ep2, few touched, clipped": (
        2,
        {
            "layout": {"ep": 2},
            "model": {"top_k": 1},
            "data": {"sequence": 6},
            "train": {"batch": 2},
        },
    ),
    "ep2, sharded": (2, {"layout": {"ep": 2, "dp_shard": 2}, "train": {"clip": 0.0}}),
    "ep2, clipped": (2, {"layout": {"ep": 2}, "train": {"micro_batches": 2}}),
    "tp": (2, {"layout": {"tp": 2, "etp": 2}, "model": {"vocab": 64}}),
}


BLOCKS = (4, 9, 20)
"""Blocks in memory; outside the soak tests, cases take them in turn."""


def merged(tables: dict[str, Any], **memory: Any) -> Job:
    """Return a tiny job in block order; with `memory` it has a budget."""
    result: dict[str, Any] = {
        "train": {"precision": "fp32", "clip": 0.1, "micro_batch_order": "by_block"},
        "model": dict(WIDE),
    }
    for table, keys in tables.items():
        result[table] = {**result.get(table, {}), **keys}
    if memory:
        result["memory"] = memory
    return tiny_job(**result)


def trained(
    world: World, job: Job, num_blocks: int | None, group_size: int | None = None
) -> tuple[list[Any], list[Any], list[dict[str, float]]]:
    """Return facts of some steps, the last state, and the figures of each step."""
    with ExitStack() as stack:
        least = num_blocks or budget.MIN_BLOCKS
        stack.enter_context(mock.patch.object(budget, "MIN_BLOCKS", least))
        if group_size is not None:
            given = budget.Budget(group_size, least)
            stack.enter_context(mock.patch.object(tiers, "divide_budget", return_value=given))
        plan = plan_from_layout(job.layout, job.model, world.size)
        run = assemble(job, plan, world, InitialSource(job.seed, job.model.init_std))
    if num_blocks is not None:
        assert run.part.tiers is not None
        assert group_size in {None, run.part.tiers.num_micro_batches}
    samples, facts, figures = RandomSamples(job.model.vocab, job.data.sequence), [], []
    for number in range(STEPS):
        step = run.step(samples)
        facts.append((step.loss, step.balance_loss, step.z_loss, step.grad_norm, step.is_skipped))
        if number == 1:
            facts.append(run.validate(samples, 4))
        figures.append(step.figures(1.0))
    state = [plain(shard) for shard in run.state().shards]
    run.close()
    return facts, state, figures


def smallest(job: Job, blocks: int, ranks: int) -> str:
    """Return a budget that leaves room for `blocks` blocks of expert state."""
    plan = plan_from_layout(job.layout, job.model, ranks)
    facts = budget.budget_facts(job, plan, ranks - 1, 0)
    return f"{min(facts.other_bytes.values()) + blocks * facts.block_bytes}B"


@pytest.fixture(scope="module")
def in_memory(ranks: RankPool) -> Callable[[str], list[Any]]:
    """Return a function that gives the results of a case with all state in memory."""

    @cache
    def run(name: str) -> list[Any]:
        size, tables = CASES[name]
        return ranks.run(size, trained, merged(tables), None)

    return run


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        pytest.param(name, blocks, marks=[pytest.mark.soak] * (blocks != BLOCKS[at % 3]))
        for at, name in enumerate(CASES)
        for blocks in BLOCKS
    ],
)
def test_tiers_change_no_bit(
    ranks: RankPool,
    tmp_path: Path,
    in_memory: Callable[[str], list[Any]],
    name: str,
    blocks: int,
) -> None:
    size, tables = CASES[name]
    ssd = str(tmp_path)
    host = smallest(merged(tables, ssd=ssd), blocks, size)
    few = ranks.run(size, trained, merged(tables, ssd=ssd, host=host), blocks)
    compare(few, in_memory(name))
    assert not list(tmp_path.glob("*.blocks")), "the scratch file stays"


def compare(found: list[Any], expected: list[Any]) -> None:
    for (found_facts, found_state, _), (facts, state, _) in zip(found, expected, strict=True):
        assert found_facts == facts
        assert [one[:3] for one in found_state] == [one[:3] for one in state]
        for (key, *_, values), (*_, wanted) in zip(found_state, state, strict=True):
            assert np.array_equal(values, wanted), key


@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("few_touched", [False, True])
def test_groups_of_some_micro_batches_change_no_bit(
    ranks: RankPool, tmp_path: Path, clip: float, few_touched: bool
) -> None:
    """Two micro-batches of four pass together."""
    tables: dict[str, Any] = {"train": {"micro_batches": 4, "clip": clip}}
    if few_touched:
        tables["model"], tables["data"] = {"top_k": 1}, {"sequence": 4}
        tables["train"]["batch"] = 4
    ssd = str(tmp_path)
    host = smallest(merged(tables, ssd=ssd), 14, 1)
    few = ranks.run(1, trained, merged(tables, ssd=ssd, host=host), 14, 2)
    compare(few, ranks.run(1, trained, merged(tables), None))
