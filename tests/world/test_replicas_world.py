"""Experts that are computed elsewhere for a step: the numbers of one process, whoever decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layouts import ASKING, SIGMOID, Outcome, assert_same, outcome, worst_tensor

from moesaic.dist.shm_all_to_all import SharedMemoryAllToAll
from moesaic.dist.world import World
from moesaic.facts.balance import BalanceDecision, IntArray, no_replicas
from moesaic.facts.job import BalanceConfig, Job
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import RankPool
from moesaic.testing.runs import start_run

STEPS = 2
DROPS = {
    "model": {"top_k": 2},
    "routing": {"router": "gshard", "capacity_factor": 1.5, "balance_loss": 1.0},
}
SWITCH = {"model": {"top_k": 1}, "routing": {"router": "switch", "noise": 0.1}}
WAYS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {"ep": 2}, {}),
    (4, {"ep": 2}, {"model": {"top_k": 8}}),
    (4, {"ep": 4, "dispatch": "dedup"}, {}),
    (4, {"ep": 4, "dispatch": "dedup", "chunks": 3}, DROPS),
    (4, {"ep": 2, "dispatch": "dedup", "overlap_local": True}, DROPS),
    (4, {"ep": 4, "dispatch": "all_to_all", "dispatch_hosts": 2}, SWITCH),
    (4, {"ep": 4, "dispatch": "dedup", "dispatch_hosts": 2, "chunks": 2}, DROPS),
    (2, {"ep": 2, "overlap_local": True, "chunks": 2}, SWITCH),
    (4, {"ep": 2, "dp_shard": 4}, {"train": {"recompute": True}}),
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
    return {**tables, "balance": {**ASKING, "policy": policy}}


def alone(ranks: RankPool, tables: dict[str, Any]) -> Outcome:
    key = str(tables)
    if key not in _references:
        _references[key] = outcome(ranks, 1, tiny_job(**tables), STEPS)
    return _references[key]


@pytest.mark.parametrize(("size", "layout", "tables"), WAYS)
def test_copies_at_random(
    ranks: RankPool, size: int, layout: dict[str, Any], tables: dict[str, Any]
) -> None:
    job = tiny_job(**balanced({**tables, "layout": layout}))
    several = outcome(ranks, size, job, STEPS, replica_seed=3, placement=HOMES.get(layout["ep"]))
    assert_same(several, alone(ranks, tables))
    if "pp" not in layout:  # Rank 0, which is asked, has few of a pipeline's layers.
        assert several.steps[-1]["replicas"] > 0


@pytest.mark.parametrize("recompute", [False, True])
def test_copies_that_leave_early(ranks: RankPool, recompute: bool) -> None:
    tables = {**SWITCH, "train": {"micro_batches": 2, "recompute": recompute}}
    raw = balanced({**tables, "layout": {"ep": 4}}, "quota")
    raw["balance"]["prefetch"] = True
    several = outcome(ranks, 4, tiny_job(**raw), STEPS)
    assert_same(several, alone(ranks, tables))
    assert sum(step["replicas"] for step in several.steps) > 0


def wired(world: World, job: Job) -> list[list[int]]:
    """The layers whose experts may leave while those of each one compute."""
    run = start_run(job, world)
    found = [
        [one.router.layer for one in moe.next_layers] for _, moe in run.part.model.expert_layers()
    ]
    run.close()
    return found


@pytest.mark.parametrize(
    ("layout", "recompute", "expected"),
    [({"ep": 2}, False, [[1], [2], [3], []]), ({"ep": 2}, True, [[]] * 4),
     ({"ep": 1, "pp": 2}, False, [[], []])],
)  # fmt: skip
def test_experts_leave_under_the_layer_before(
    ranks: RankPool, layout: dict[str, Any], recompute: bool, expected: list[list[int]]
) -> None:
    raw = balanced({"model": {"layers": 4}, "layout": layout}, "eplb")
    raw["train"] = {"recompute": recompute, "micro_batches": 2}
    assert ranks.run(2, wired, tiny_job(**raw)) == [expected] * 2


def test_copies_that_are_kept(ranks: RankPool) -> None:
    """For three of the four micro-batches that there are of two steps."""
    tables = {**SWITCH, "train": {"micro_batches": 2}}
    raw = balanced({**tables, "layout": {"ep": 4}}, "eplb")
    raw["balance"] |= {"replan_every": 3, "replan_drift": 0.9}
    several = outcome(ranks, 4, tiny_job(**raw), STEPS)
    assert_same(several, alone(ranks, tables))
    assert sum(step["replicas"] for step in several.steps) > 0


def test_where_nobody_says_anything_two_runs_decide_alike(ranks: RankPool) -> None:
    """By prices that are usual, and not measured."""
    tables = {
        "model": {"hidden": 256, "ffn": 512, "top_k": 1}, "layout": {"ep": 2},
        "data": {"sequence": 64}, "train": {"precision": "fp32", "batch": 16, "micro_batches": 2},
    }  # fmt: skip
    job = tiny_job(**tables).model_copy(update={"balance": BalanceConfig()})
    one, other = (outcome(ranks, 2, job, 2) for _ in range(2))
    for key, values in one.state.items():
        assert np.array_equal(other.state[key], values), key
    assert sum(step["replicas"] for step in one.steps) > 0


def test_narrow_products_send_narrow_experts(ranks: RankPool) -> None:
    """Gradients of bf16 are those of another layout to what its rounding leaves, routing replayed
    by what it is: a router that the rounding does not move."""
    tables = {"train": {"precision": "bf16"}, "routing": {"router": "balanced"}}
    job = tiny_job(**balanced({**tables, "layout": {"ep": 4}}))
    several, one = outcome(ranks, 4, job, 1, replica_seed=5), alone(ranks, tables)
    assert several.steps[-1]["replicas"] > 0
    assert worst_tensor(several.gradients, one.gradients) < 0.05


class Unneeded:
    """Copies of everything everywhere, with nothing to do."""

    prefetches = True

    def __init__(self, homes: IntArray, ranks: int) -> None:
        self._ranks = ranks
        self.set_owners(homes)

    def set_owners(self, owners: IntArray) -> None:
        ranks = self._ranks
        away = np.ones((len(owners), ranks), bool)
        away[np.arange(len(owners)), owners] = False
        self._copies = np.argwhere(away)

    def prefetched_replicas(self) -> BalanceDecision:
        return no_replicas()._replace(replicas=self._copies)

    def place_next_replicas(self) -> None:
        pass

    def __call__(self, counts: IntArray) -> BalanceDecision:
        return self.prefetched_replicas()


def leave_unneeded(world: World, job: Job) -> list[Any]:
    """What is left in the memory that ranks share, after two steps of such copies."""
    run = start_run(job, world)
    for _, moe in run.part.model.expert_layers():
        homes = moe.dispatcher.placement
        moe.balancer = Unneeded(homes.slot_of_expert // homes.slots_per_rank, homes.num_ranks)
        carrier = moe.dispatcher.groups.replica_transport
    samples = RandomSamples(job.model.vocab, job.data.sequence)
    losses = [run.step(samples).loss for _ in range(2)]
    world.barrier()
    assert isinstance(carrier, SharedMemoryAllToAll)
    carrier._receive_pending()
    unread = sum(box.readers for box in carrier._buffers.values())
    waiting = sum(len(one._received) for one in carrier._peers.values())
    run.close()
    return [losses, unread, waiting]


@pytest.mark.parametrize("recompute", [False, True])
def test_replicas_without_rows_are_received(ranks: RankPool, recompute: bool) -> None:
    """Where a layer is computed again, nothing behind its last product is: what nobody receives
    would stay in memory, or stand in the way of what comes after it."""
    tables = {"train": {"recompute": recompute}}
    job = tiny_job(**balanced({**tables, "layout": {"ep": 2}}))
    for losses, unread, waiting in ranks.run(2, leave_unneeded, job):
        assert (unread, waiting) == (0, 0)
        assert losses == pytest.approx([one["loss"] for one in alone(ranks, tables).steps])
