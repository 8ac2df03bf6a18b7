"""Experts that are computed elsewhere for a step: the numbers of one process, whoever decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layouts import ASKING, SIGMOID, assert_same, outcome, reference, worst_tensor

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
    (4, {"ep": 2}, {"model": {"top_k": 8}}),
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


def balanced_job(tables: dict[str, Any], **balance: Any) -> Job:
    return tiny_job(**tables, balance={**ASKING, **balance})


@pytest.mark.parametrize(("size", "layout", "tables"), WAYS)
def test_random_replicas(
    ranks: RankPool, size: int, layout: dict[str, Any], tables: dict[str, Any]
) -> None:
    job = balanced_job({**tables, "layout": layout})
    several = outcome(ranks, size, job, STEPS, replica_seed=3, placement=HOMES.get(layout["ep"]))
    assert_same(several, reference(ranks, STEPS, **tables))
    if "pp" not in layout:  # Rank 0, which reports, has few of a pipeline's layers.
        assert several.steps[-1]["replicas"] > 0


@pytest.mark.parametrize(
    ("recompute", "balance"),
    [
        (False, {"prefetch": True}),
        (True, {"prefetch": True}),
        (False, {"policy": "eplb", "replan_every": 3, "replan_drift": 0.9}),
    ],
)
def test_replicas_of_a_policy(ranks: RankPool, recompute: bool, balance: dict[str, Any]) -> None:
    tables = {**SWITCH, "train": {"micro_batches": 2, "recompute": recompute}}
    job = balanced_job({**tables, "layout": {"ep": 4}}, **balance)
    several = outcome(ranks, 4, job, STEPS)
    assert_same(several, reference(ranks, STEPS, **tables))
    assert sum(step["replicas"] for step in several.steps) > 0


def next_layers(world: World, job: Job) -> list[list[int]]:
    """Return the layers whose replicas may be sent during the experts of each layer."""
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
def test_replicas_are_prefetched_by_the_layer_before(
    ranks: RankPool, layout: dict[str, Any], recompute: bool, expected: list[list[int]]
) -> None:
    train = {"recompute": recompute, "micro_batches": 2}
    tables = {"model": {"layers": 4}, "layout": layout, "train": train}
    assert ranks.run(2, next_layers, balanced_job(tables, policy="eplb")) == [expected] * 2


def test_two_runs_with_default_costs_decide_alike(ranks: RankPool) -> None:
    tables = {
        "model": {"hidden": 256, "ffn": 512, "top_k": 1}, "layout": {"ep": 2},
        "data": {"sequence": 64}, "train": {"precision": "fp32", "batch": 16, "micro_batches": 2},
    }  # fmt: skip
    job = tiny_job(**tables).model_copy(update={"balance": BalanceConfig()})
    one, other = (outcome(ranks, 2, job, 2) for _ in range(2))
    for key, values in one.state.items():
        assert np.array_equal(other.state[key], values), key
    assert sum(step["replicas"] for step in one.steps) > 0


def test_bf16_replicas_stay_close(ranks: RankPool) -> None:
    tables = {"train": {"precision": "bf16"}, "routing": {"router": "balanced"}}
    job = balanced_job({**tables, "layout": {"ep": 4}})
    several, one = outcome(ranks, 4, job, 1, replica_seed=5), reference(ranks, STEPS, **tables)
    assert several.steps[-1]["replicas"] > 0
    assert worst_tensor(several.gradients, one.gradients) < 0.05


class UnusedReplicas:
    """Replicas of all experts on all ranks, without tokens."""

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


def train_with_unused_replicas(world: World, job: Job) -> list[Any]:
    """Return losses, unread buffers and unread messages of two steps."""
    run = start_run(job, world)
    for _, moe in run.part.model.expert_layers():
        homes = moe.dispatcher.placement
        moe.balancer = UnusedReplicas(homes.slot_of_expert // homes.slots_per_rank, homes.num_ranks)
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
    """A recomputed layer stops after its last matmul; an unreceived message would block others."""
    tables = {"train": {"recompute": recompute}}
    expected = [step["loss"] for step in reference(ranks, STEPS, **tables).steps]
    job = balanced_job({**tables, "layout": {"ep": 2}})
    for losses, unread, waiting in ranks.run(2, train_with_unused_replicas, job):
        assert (unread, waiting) == (0, 0)
        assert losses == pytest.approx(expected)
