"""Training with fewer places than a layer's experts: the bits of the full bank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from layouts import ASKING, SIGMOID, plain
from test_resume import end, middle, run_job

from moesaic.dist.transfer import PeerSource
from moesaic.dist.world import World
from moesaic.facts.expert_blocks import ExpertBlocks
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, plan_from_layout
from moesaic.models.init import InitialSource
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import RankFailed, RankPool
from moesaic.testing.runs import start_run
from moesaic.testing.states import read_checkpoint
from moesaic.train.assemble import assemble
from moesaic.train.tiers import ExpertTiers

STEPS = 3
WIDE = {"ffn": 32}
"""Rows of whole cache lines: otherwise the last digit depends on alignment."""
FP32: dict[str, Any] = {"precision": "fp32", "clip": 0.1}
LORA = {"method": "lora", "targets": ["attention", "experts"], "router": "train"}
ZERO_BUBBLE, DEEP = {"pp": 2, "schedule": "zero-bubble"}, {"layers": 4}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "recompute, accumulation": (1, {"train": {"recompute": True, "micro_batches": 4}}),
    "sigmoid router, shared expert": (1, {**SIGMOID, "train": {"micro_batches": 2}}),
    "bf16": (1, {"train": {"precision": "bf16"}}),
    "8-bit moments": (1, {"optimizer": {"moments": "8bit"}}),
    "lora": (1, {"finetune": LORA, "train": {"micro_batches": 2}}),
    "ep2, chunks": (2, {"layout": {"ep": 2, "chunks": 2, "overlap_local": True}}),
    "etp": (2, {"layout": {"tp": 2, "etp": 2}, "model": {"vocab": 64}}),
    "sharded": (2, {"layout": {"ep": 2, "dp_shard": 2}}),
    "1f1b, recompute": (
        2,
        {"layout": {"pp": 2}, "train": {"micro_batches": 4, "recompute": True}},
    ),
    "zero-bubble": (2, {"layout": ZERO_BUBBLE, "train": {"micro_batches": 4}, "model": DEEP}),
    "migration": (
        2,
        {"layout": {"ep": 2}, "balance": {**ASKING, "policy": "none", "migrate_every": 1}},
    ),
}


@contextmanager
def few_places(places: int | None, ssd: Path) -> Iterator[None]:
    """Give new runs this number of places, in layouts too that `[memory]` refuses."""

    def make(job: Job, plan: Plan, world: World, dtype: torch.dtype) -> ExpertTiers | None:
        del world
        if places is None:
            return None
        per_layer = dict.fromkeys(job.model.expert_layers, plan.experts // plan.ep)
        return ExpertTiers(
            Path(mkdtemp(dir=ssd)) / "experts.blocks",
            ExpertBlocks(per_layer, 1, recomputes=False, updates_early=False),
            3 * job.model.hidden * job.model.ffn // plan.etp,
            dtype,
            num_places=places,
            residency="lru",
        )

    with mock.patch("moesaic.train.assemble.make_tiers", make):
        yield


def merged(tables: dict[str, Any]) -> Job:
    result: dict[str, Any] = {"train": dict(FP32), "model": dict(WIDE)}
    for table, keys in tables.items():
        result[table] = {**result.get(table, {}), **keys}
    return tiny_job(**result)


def trained(
    world: World, job: Job, places: int | None, ssd: Path
) -> tuple[list[Any], list[Any], int]:
    """Return facts of some steps, the last state, and the number of reads from the drive."""
    with few_places(places, ssd):
        run = start_run(job, world)
    samples, facts, num_reads = RandomSamples(job.model.vocab, job.data.sequence), list[Any](), 0
    for _ in range(STEPS):
        step = run.step(samples)
        num_reads += 0 if step.memory is None else step.memory.traffic.reads
        moves = [(one.layer, one.decision.outcome.moves) for one in step.migrations]
        facts.append((step.loss, step.balance_loss, step.z_loss, step.grad_norm, moves))
    facts.append(run.validate(samples, 4))
    banks = [bank for _, bank in run.part.model.expert_banks()]
    assert not any(bank.places.leased.total() for bank in banks if bank.places is not None)
    state = [plain(shard) for shard in run.state().shards]
    run.close()
    return facts, state, num_reads


@pytest.mark.parametrize("name", CASES)
def test_few_places_train_to_the_same_bits(ranks: RankPool, tmp_path: Path, name: str) -> None:
    size, tables = CASES[name]
    job = merged(tables)
    full = ranks.run(size, trained, job, None, tmp_path)
    few = ranks.run(size, trained, job, 4 if name == "one rank" else 9, tmp_path)
    for (expected_facts, expected, _), (facts, state, num_reads) in zip(full, few, strict=True):
        assert num_reads > 0
        assert facts == expected_facts
        assert [one[:3] for one in state] == [one[:3] for one in expected]
        for (key, *_, found), (*_, wanted) in zip(state, expected, strict=True):
            assert np.array_equal(found, wanted), key
    if name == "migration":
        assert any(moves for *_, moves in full[0][0][:STEPS])


def run_with_places(world: World, places: int | None, ssd: Path, *arguments: Any) -> list[float]:
    with few_places(places, ssd):
        return run_job(world, *arguments)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_checkpoints_fit_any_number_of_places(
    ranks: RankPool, text: Path, tmp_path: Path, asynchronous: bool
) -> None:
    """A run with few places is saved and resumed with and without them, and the reverse."""
    changes = {
        "model": {**WIDE, "vocab": 260},
        "train": FP32,
        "checkpoint": {"asynchronous": asynchronous},
    }
    losses, states = {}, {}
    for name, places, start in (
        ("full", None, None), ("few", 4, None), ("few from full", 4, "full"),
        ("full from few", None, "few"), ("few from few", 7, "few"),
    ):  # fmt: skip
        out = tmp_path / name
        resume = None if start is None else middle(tmp_path / start)
        given = places, tmp_path, str(text), str(out), {"ep": 1}, resume, changes
        (losses[name],) = ranks.run(1, run_with_places, *given)
        states[name] = read_checkpoint(end(out))
    for name, state in states.items():
        assert losses[name] == losses["full"][-len(losses[name]) :], name
        assert all(np.array_equal(state[key], states["full"][key]) for key in state), name


def moved(world: World, job: Job, places: int, ssd: Path) -> list[Any]:
    """Return the state after a step, moved from a full bank to few places and back to another."""
    source: Any = InitialSource(job.seed, job.model.init_std)
    plan = plan_from_layout(job.layout, job.model, world.size)
    runs, samples = [], RandomSamples(job.model.vocab, job.data.sequence)
    for number in (None, places, None):
        with few_places(number, ssd):
            run = assemble(job, plan, world, source)
        if number is None and not runs:
            run.step(samples)
        source = PeerSource(world, run.state().shards)
        runs.append(run)
    first, last = ([plain(shard) for shard in run.state().shards] for run in (runs[0], runs[-1]))
    assert all(np.array_equal(a[-1], b[-1]) for a, b in zip(first, last, strict=True))
    for run in runs:
        run.close()
    return [one[0] for one in first]


def test_state_moves_between_banks_of_any_places(ranks: RankPool, tmp_path: Path) -> None:
    job = merged({"layout": {"ep": 2}})
    assert all(ranks.run(2, moved, job, 4, tmp_path))


def balanced(world: World, job: Job, ssd: Path) -> None:
    with few_places(4, ssd):
        start_run(job, world)


def test_replicas_are_refused_with_the_reason(ranks: RankPool, tmp_path: Path) -> None:
    job = merged({"layout": {"ep": 2}, "balance": ASKING})
    with pytest.raises(RankFailed, match="expert replicas need all 4 experts of a layer in memory"):
        ranks.run(2, balanced, job, tmp_path)
    assert not list(tmp_path.glob("*/*"))
