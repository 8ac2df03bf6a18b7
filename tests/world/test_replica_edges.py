"""Expert replicas in steps with few tokens, one expert, long stages, validation and overflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layouts import (
    ASKING,
    IN_PARTS,
    RandomReplicas,
    assert_same,
    first_gradients,
    outcome,
    plain,
    put_together,
    reference,
    worst_element,
    worst_tensor,
)

from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.policy.balance import LayerBalancer
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import RankPool
from moesaic.testing.runs import overflow_gradients, start_run
from moesaic.train.assemble import LMRun
from moesaic.train.balancing import take_layer_balance

STEPS = 2
EARLY = {"balance": {**ASKING, "prefetch": True}}
MANY = {"model": {"experts": 64, "top_k": 3}}
ONE_EACH = {"train": {"micro_batches": 8}, "data": {"sequence": 3}}
"""Micro-batches of one sample, so all ranks but one have no token."""
FEW = {"data": {"sequence": 2}, "train": {"micro_batches": 2}}
"""Two tokens per sample."""
EDGES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "ranks without rows, dedup in chunks": (
        4, {"ep": 4, "dispatch": "dedup", "chunks": 2, "overlap_local": True}, ONE_EACH,
    ),
    "more chunks than tokens, dedup": (
        4, {"ep": 4, "dispatch": "dedup", "dispatch_hosts": 2, "chunks": 3,
            "overlap_local": True}, FEW,
    ),
    "many experts, by hosts": (4, {"ep": 4, "dispatch_hosts": 2, "dispatch": "dedup"}, MANY),
    "clipped": (4, {"ep": 2}, {"train": {"clip": 1e-3, "micro_batches": 2}}),
    "interleaved, recompute": (
        4, {"ep": 2, "pp": 2, "schedule": "interleaved"},
        {"model": {"layers": 4}, "train": {"micro_batches": 4, "recompute": True}},
    ),
    "zero bubble, frozen experts": (
        4, {"ep": 2, "pp": 2, "schedule": "zero-bubble"},
        {
            "train": {"micro_batches": 4},
            "finetune": {"method": "lora", "targets": ["attention"], "router": "train"},
        },
    ),
    "gpipe, dedup, recompute": (
        4, {"ep": 2, "pp": 2, "schedule": "gpipe", "dispatch": "dedup", "overlap_local": True},
        {"train": {"micro_batches": 4, "recompute": True}},
    ),
}  # fmt: skip
DEEP: dict[str, Any] = {"model": {"layers": 8}, "train": {"micro_batches": 4}}
LONG_STAGES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], int | None]] = [
    ({"schedule": "1f1b"}, DEEP, ASKING, 11),
    ({"schedule": "zero-bubble", "chunks": 2}, DEEP, ASKING, 11),
    ({"schedule": "zero-bubble", "chunks": 2}, DEEP, IN_PARTS, None),
    ({"schedule": "interleaved"}, {**DEEP, "model": {"layers": 16}}, IN_PARTS, None),
]
"""Stages of four expert layers, with random replicas or those of a policy."""


@pytest.mark.parametrize("name", EDGES)
def test_random_replicas(ranks: RankPool, name: str) -> None:
    size, layout, tables = EDGES[name]
    balance = {**ASKING, "policy": "faster-moe"}  # quota makes none for so few tokens.
    job = tiny_job(**tables, layout=layout, balance=balance)
    several = outcome(ranks, size, job, STEPS, replica_seed=11)
    assert_same(several, reference(ranks, STEPS, **tables))
    assert sum(step["replicas"] for step in several.steps) > 0


def test_prefetch_in_a_pipeline(ranks: RankPool) -> None:
    size, layout, tables = EDGES["gpipe, dedup, recompute"]
    several = outcome(ranks, size, tiny_job(**tables, layout=layout, **EARLY), STEPS)
    assert_same(several, reference(ranks, STEPS, **tables))
    assert sum(step["replicas"] for step in several.steps) > 0


@pytest.mark.parametrize(("layout", "tables", "balance", "replica_seed"), LONG_STAGES)
def test_prefetch_in_long_stages(
    ranks: RankPool,
    layout: dict[str, Any],
    tables: dict[str, Any],
    balance: dict[str, Any],
    replica_seed: int | None,
) -> None:
    """Some replicas are prefetched, if the layer before is in the same stage."""
    job = tiny_job(**tables, layout={"ep": 2, "pp": 2, **layout}, balance=balance)
    several = outcome(ranks, 4, job, STEPS, replica_seed=replica_seed)
    assert_same(several, reference(ranks, STEPS, **tables))
    assert several.steps[-1]["prefetched"] > 0
    assert several.steps[-1]["not_prefetched"] > 0


class ToOne:
    """Recorded routing of every token to one expert."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def read_expert_ids(self, step: int, samples: torch.Tensor) -> dict[int, torch.Tensor]:
        tokens = len(samples) * self._job.data.sequence
        return {
            layer: torch.full((tokens, 1), (step + layer) % self._job.model.experts)
            for layer in range(self._job.model.layers)
        }


def opened(world: World, job: Job, replica_seed: int | None) -> tuple[LMRun, RandomSamples]:
    run = start_run(job, world)
    if replica_seed is not None:
        for layer, moe in run.part.model.expert_layers():
            homes = moe.dispatcher.placement
            moe.balancer = RandomReplicas(
                homes.slot_of_expert // homes.slots_per_rank, [replica_seed, layer]
            )
    return run, RandomSamples(job.model.vocab, job.data.sequence)


def one_expert(world: World, job: Job, replica_seed: int | None) -> Any:
    """Gradients, and losses of steps."""
    run, samples = opened(world, job, replica_seed)
    run.objective.routing_replay = ToOne(job)  # type: ignore[assignment]
    gradients = first_gradients(run, world.rank)
    facts = [run.step(samples) for _ in range(STEPS)]
    state = [plain(piece) for piece in run.state().shards]
    made = sum(one.stats.replicas for step in facts for one in step.balance.values())
    run.close()
    return [step.loss for step in facts], gradients, state, made


@pytest.mark.parametrize(
    ("balance", "replica_seed"),
    [({}, 5), ({"prefetch": True}, None), ({"policy": "eplb"}, None)],
)
def test_all_rows_for_one_expert(
    ranks: RankPool, balance: dict[str, Any], replica_seed: int | None
) -> None:
    tables: dict[str, Any] = {"model": {"top_k": 1}, "train": {"micro_batches": 2}}
    (one_rank,) = ranks.run(1, one_expert, tiny_job(**tables), None)
    layout = {"ep": 4, "chunks": 3}
    job = tiny_job(**tables, layout=layout, balance={**ASKING, **balance})
    several = ranks.run(4, one_expert, job, replica_seed)
    assert all(one[0] == pytest.approx(one_rank[0], rel=1e-9) for one in several)
    for part in (1, 2):
        expected = put_together([one_rank[part]])
        assert worst_element(put_together([one[part] for one in several]), expected) < 1e-9
    assert replica_seed or several[0][3] > 0


def judged(world: World, job: Job, replica_seed: int | None) -> list[float]:
    """Return the losses of steps, and of a validation before each, without replicas."""
    run, samples = opened(world, job, replica_seed)
    found = list[float]()
    for _ in range(STEPS):
        asked = [moe.balancer for _, moe in run.part.model.expert_layers()]
        made = [getattr(one, "made", 0) for one in asked]
        found.append(run.validate(samples, 11)[0])
        assert made == [getattr(one, "made", 0) for one in asked]
        for _, moe in run.part.model.expert_layers():
            if isinstance(moe.balancer, LayerBalancer):
                decisions, stats = take_layer_balance(moe)
                assert (decisions, stats.forward_s) == ([], 0.0)
        found.append(run.step(samples).loss)
    run.close()
    return found


@pytest.mark.parametrize(
    ("layout", "replica_seed"),
    [({"ep": 2, "pp": 2, "schedule": "1f1b"}, 3), ({"ep": 4}, None)],
)
def test_validation_between_steps(
    ranks: RankPool, layout: dict[str, Any], replica_seed: int | None
) -> None:
    tables: dict[str, Any] = {"train": {"micro_batches": 4, "recompute": True}}
    (one_rank,) = ranks.run(1, judged, tiny_job(**tables), None)
    for losses in ranks.run(4, judged, tiny_job(**tables, layout=layout, **EARLY), replica_seed):
        assert losses == pytest.approx(one_rank, rel=1e-9)


def overflowing(world: World, job: Job, replica_seed: int) -> Any:
    """Take three steps; in the second, a gradient of the last rank is infinite."""
    run, samples = opened(world, job, replica_seed)
    told, states = [], []
    for step in range(3):
        if step == 1 and world.rank == world.size - 1:
            handle = overflow_gradients(run.part.model.layers[0])
        facts = run.step(samples)
        if step == 1 and world.rank == world.size - 1:
            handle.remove()
        told.append((facts.is_skipped, facts.loss_scale, dict(run.counters)))
        states.append([plain(piece) for piece in run.state().shards])
    made = sum(getattr(moe.balancer, "made", 0) for _, moe in run.part.model.expert_layers())
    run.close()
    return told, states, made


def test_an_overflow_among_copies_is_skipped_by_all(ranks: RankPool) -> None:
    train = {"precision": "fp16", "micro_batches": 2, "recompute": True}
    results = ranks.run(4, overflowing, tiny_job(layout={"ep": 4}, train=train, balance=ASKING), 7)
    assert all(told == results[0][0] and made == results[0][2] > 0 for told, _, made in results)
    assert [skipped for skipped, _, _ in results[0][0]] == [False, True, False]
    before, after, last = (put_together([r[1][step] for r in results]) for step in range(3))
    assert all(np.array_equal(before[key], after[key]) for key in before)
    assert not all(np.array_equal(after[key], last[key]) for key in after)
    assert all(np.isfinite(values).all() for values in last.values())


@pytest.mark.parametrize(("precision", "early"), [("fp32", True), ("bf16", True), ("fp16", False)])
def test_routing_replayed_among_copies(
    ranks: RankPool, tmp_path: Path, precision: str, early: bool
) -> None:
    """A record made with replicas leads one process and several."""
    tables: dict[str, Any] = {"train": {"micro_batches": 2, "precision": precision}}
    job = tiny_job(**tables, layout={"ep": 4}, balance={**ASKING, "prefetch": early})
    path = str(tmp_path / "routes")
    first = outcome(ranks, 4, job, STEPS, record=path)
    one_rank = outcome(ranks, 1, tiny_job(**tables), STEPS, replay=path)
    again = outcome(ranks, 4, job, STEPS, replay=path)
    assert sum(step["replicas"] for step in first.steps) > 0
    bound = {"fp32": 1e-5, "bf16": 0.06, "fp16": 0.01}[precision]
    for other in (one_rank, again):
        assert [a["counts"] for a in first.steps] == [b["counts"] for b in other.steps]
        assert worst_tensor(first.gradients, other.gradients) < bound
    assert all(np.array_equal(again.state[key], first.state[key]) for key in first.state)
    assert sum(step["num_replay_mismatches"] for step in again.steps) == 0
