"""Experts that are computed elsewhere for a step: the numbers of one process, whoever decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layouts import (
    ASKING,
    IN_PARTS,
    SIGMOID,
    assert_same,
    first_gradients,
    outcome,
    place_random_replicas,
    plain,
    put_together,
    reference,
    worst_element,
    worst_tensor,
)

from moesaic.dist.shm_all_to_all import SharedMemoryAllToAll
from moesaic.dist.world import World
from moesaic.facts.balance import BalanceDecision, IntArray, no_replicas
from moesaic.facts.job import BalanceConfig, Job
from moesaic.policy.balance import LayerBalancer
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import RankPool
from moesaic.testing.runs import start_run
from moesaic.train.balancing import take_layer_balance

STEPS = 2
DROPS = {
    "model": {"top_k": 2},
    "routing": {"router": "gshard", "capacity_factor": 1.5, "balance_loss": 1.0},
}
SWITCH = {"model": {"top_k": 1}, "routing": {"router": "switch", "noise": 0.1}}
EARLY = {"balance": {**ASKING, "prefetch": True}}
MANY = {"model": {"experts": 64, "top_k": 3}}
ONE_EACH = {"train": {"micro_batches": 8}, "data": {"sequence": 3}}
"""Micro-batches of a sample, which all ranks but one have nothing of."""
FEW = {"data": {"sequence": 2}, "train": {"micro_batches": 2}}
"""Two tokens each."""
GPIPE: tuple[int, dict[str, Any], dict[str, Any]] = (
    4, {"ep": 2, "pp": 2, "schedule": "gpipe", "dispatch": "dedup", "overlap_local": True},
    {"train": {"micro_batches": 4, "recompute": True}},
)  # fmt: skip
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
    (4, {"ep": 4, "dispatch": "dedup", "chunks": 2, "overlap_local": True}, ONE_EACH),
    (4, {"ep": 2}, {**ONE_EACH, "train": {"micro_batches": 8, "recompute": True}}),
    (
        4, {"ep": 4, "dispatch": "dedup", "dispatch_hosts": 2, "chunks": 3, "overlap_local": True},
        FEW,
    ),
    (4, {"ep": 4, "dispatch_hosts": 2, "dispatch": "dedup"}, MANY),
    (4, {"ep": 2}, {"train": {"clip": 1e-3, "micro_batches": 2}}),
    (
        4, {"ep": 2, "pp": 2, "schedule": "interleaved"},
        {"model": {"layers": 4}, "train": {"micro_batches": 4, "recompute": True}},
    ),
    (
        4, {"ep": 2, "pp": 2, "schedule": "zero-bubble"},
        {
            "train": {"micro_batches": 4},
            "finetune": {"method": "lora", "targets": ["attention"], "router": "train"},
        },
    ),
    GPIPE,
]  # fmt: skip
DEEP: dict[str, Any] = {"model": {"layers": 8}, "train": {"micro_batches": 4}}
LONG_STAGES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "1f1b": (4, {"ep": 2, "pp": 2, "schedule": "1f1b"}, DEEP),
    "zero bubble": (4, {"ep": 2, "pp": 2, "schedule": "zero-bubble", "chunks": 2}, DEEP),
    "interleaved": (
        4, {"ep": 2, "pp": 2, "schedule": "interleaved"}, {**DEEP, "model": {"layers": 16}},
    ),
}  # fmt: skip
"""Of four expert layers each."""
HOMES = {2: [[5, 2, 7, 0], [1, 6, 4, 3]], 4: [[5, 2], [7, 0], [1, 6], [4, 3]]}


def balanced(tables: dict[str, Any], policy: str = "quota") -> dict[str, Any]:
    return {**tables, "balance": {**ASKING, "policy": policy}}


@pytest.mark.parametrize(("size", "layout", "tables"), WAYS)
def test_copies_at_random(
    ranks: RankPool, size: int, layout: dict[str, Any], tables: dict[str, Any]
) -> None:
    # quota makes no replicas for so few tokens as some have.
    job = tiny_job(**balanced({**tables, "layout": layout}, "faster-moe"))
    placement = None if tables is MANY else HOMES.get(layout["ep"])
    several = outcome(ranks, size, job, STEPS, replica_seed=3, placement=placement)
    assert_same(several, reference(ranks, STEPS, **tables))
    if "pp" not in layout:  # Rank 0, which is asked, has few of a pipeline's layers.
        assert sum(step["replicas"] for step in several.steps) > 0


@pytest.mark.parametrize(
    ("size", "layout", "tables"),
    [
        (4, {"ep": 4}, {**SWITCH, "train": {"micro_batches": 2}}),
        (4, {"ep": 4}, {**SWITCH, "train": {"micro_batches": 2, "recompute": True}}),
        GPIPE,
    ],
)
def test_copies_that_leave_early(
    ranks: RankPool, size: int, layout: dict[str, Any], tables: dict[str, Any]
) -> None:
    several = outcome(ranks, size, tiny_job(**tables, layout=layout, **EARLY), STEPS)
    assert_same(several, reference(ranks, STEPS, **tables))
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
    assert_same(several, reference(ranks, STEPS, **tables))
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
    several, one = outcome(ranks, 4, job, 1, replica_seed=5), reference(ranks, STEPS, **tables)
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
        assert losses == pytest.approx(
            [one["loss"] for one in reference(ranks, STEPS, **tables).steps]
        )


@pytest.mark.parametrize("name", ["1f1b", "zero bubble"])
def test_copies_at_random_in_long_stages(ranks: RankPool, name: str) -> None:
    """Of two of three layers they leave early, in two parts where the layer before is in the same
    stage."""
    size, layout, tables = LONG_STAGES[name]
    job = tiny_job(**tables, layout=layout, balance=ASKING)
    several = outcome(ranks, size, job, STEPS, replica_seed=11)
    assert_same(several, reference(ranks, STEPS, **tables))
    last = several.steps[-1]
    assert last["replicas"] > last["prefetched"] > 0
    assert last["not_prefetched"] > 0


@pytest.mark.parametrize("name", ["zero bubble", "interleaved"])
def test_copies_in_two_parts_in_long_stages(ranks: RankPool, name: str) -> None:
    size, layout, tables = LONG_STAGES[name]
    job = tiny_job(**tables, layout=layout, balance=IN_PARTS)
    several = outcome(ranks, size, job, STEPS)
    assert_same(several, reference(ranks, STEPS, **tables))
    last = several.steps[-1]
    assert last["prefetched"] > 0
    assert last["not_prefetched"] > 0


class ToOne:
    """Recorded routing, by which every token goes to one expert."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def read_expert_ids(self, step: int, samples: torch.Tensor) -> dict[int, torch.Tensor]:
        tokens = len(samples) * self._job.data.sequence
        return {
            layer: torch.full((tokens, 1), (step + layer) % self._job.model.experts)
            for layer in range(self._job.model.layers)
        }


def one_expert(world: World, job: Job, replica_seed: int | None) -> Any:
    """Gradients, and losses of steps."""
    run, samples = start_run(job, world), RandomSamples(job.model.vocab, job.data.sequence)
    place_random_replicas(run, replica_seed)
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
    (alone,) = ranks.run(1, one_expert, tiny_job(**tables), None)
    layout = {"ep": 4, "chunks": 3}
    job = tiny_job(**tables, layout=layout, balance={**ASKING, **balance})
    several = ranks.run(4, one_expert, job, replica_seed)
    assert all(one[0] == pytest.approx(alone[0], rel=1e-9) for one in several)
    for part in (1, 2):
        expected = put_together([alone[part]])
        assert worst_element(put_together([one[part] for one in several]), expected) < 1e-9
    assert replica_seed or several[0][3] > 0


def judged(world: World, job: Job, replica_seed: int | None) -> list[float]:
    """Losses of steps, and before each of validation, of which no policy hears anything."""
    run, samples = start_run(job, world), RandomSamples(job.model.vocab, job.data.sequence)
    place_random_replicas(run, replica_seed)
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
    (alone,) = ranks.run(1, judged, tiny_job(**tables), None)
    for losses in ranks.run(4, judged, tiny_job(**tables, layout=layout, **EARLY), replica_seed):
        assert losses == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize(("precision", "early"), [("fp32", True), ("bf16", True), ("fp16", False)])
def test_routing_replayed_among_copies(
    ranks: RankPool, tmp_path: Path, precision: str, early: bool
) -> None:
    """What ranks with copies record is what one process has, and leads one process, and others."""
    tables: dict[str, Any] = {"train": {"micro_batches": 2, "precision": precision}}
    job = tiny_job(**tables, layout={"ep": 4}, balance={**ASKING, "prefetch": early})
    path = str(tmp_path / "routes")
    first = outcome(ranks, 4, job, STEPS, record=path)
    alone = outcome(ranks, 1, tiny_job(**tables), STEPS, replay=path)
    again = outcome(ranks, 4, job, STEPS, replay=path)
    assert sum(step["replicas"] for step in first.steps) > 0
    bound = {"fp32": 1e-5, "bf16": 0.06, "fp16": 0.01}[precision]
    for other in (alone, again):
        assert [a["counts"] for a in first.steps] == [b["counts"] for b in other.steps]
        assert worst_tensor(first.gradients, other.gradients) < bound
    assert all(np.array_equal(again.state[key], first.state[key]) for key in first.state)
    assert sum(step["num_replay_mismatches"] for step in again.steps) == 0
