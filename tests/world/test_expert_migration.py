"""Expert migration: the results of one process, moments included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layouts import (
    SIGMOID,
    Outcome,
    assert_same,
    outcome,
    put_together,
    reference,
    sparing,
    worst_element,
)  # fmt: skip

from moesaic.api.replay import ReplayConfig, replay_run
from moesaic.dist.checkpoint import Checkpoint
from moesaic.dist.state import EXPERT_TOKENS
from moesaic.dist.world import World
from moesaic.facts.plan import Plan
from moesaic.facts.workload import expert_bytes
from moesaic.policy.balance.balancer import expert_owners
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import RankPool
from moesaic.testing.runs import start_run, train_text
from moesaic.testing.states import live_values, read_checkpoint
from moesaic.train import expert_migration

STEPS = 5
FREE = {"expert_tokens_per_s": 1.0, "bytes_per_s": 1e30, "latency_s": 0.0, "overlaps": True}
"""Costs at which every token that leaves a busy rank pays."""
PLACEMENTS = {2: [[5, 2, 7, 0], [1, 6, 4, 3]], 4: [[5, 2], [7, 0], [1, 6], [4, 3]]}
DROPS = {
    "model": {"top_k": 2},
    "routing": {"router": "gshard", "capacity_factor": 1.5, "balance_loss": 1.0},
}
LORA = {"finetune": {"method": "lora", "targets": ["attention", "experts"], "router": "train"}}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "four, dedup": (4, {"ep": 4, "dispatch": "dedup"}, DROPS),
    "replicas": (4, {"ep": 2}, {}),
    "overlap_local": (4, {"ep": 4, "dispatch": "dedup", "overlap_local": True}, {}),
    "hosts": (4, {"ep": 4, "dispatch": "dedup", "dispatch_hosts": 2, "chunks": 2}, {}),
    "sharded": (4, {"ep": 2, "dp_shard": 4}, {"train": {"recompute": True}}),
    "tp": (4, {"ep": 2, "tp": 2, "etp": 2}, {"model": {"vocab": 64}}),
    "pipeline": (
        4, {"ep": 2, "pp": 2, "schedule": "1f1b"}, {**SIGMOID, "train": {"micro_batches": 4}},
    ),
    "adapters": (2, {"ep": 2}, LORA),
}  # fmt: skip


def with_migration(tables: dict[str, Any], every: int = 2, policy: str = "none") -> dict[str, Any]:
    balance = {"policy": policy, "migrate_every": every, "costs": FREE, "min_replica_tokens": 1}
    return {**tables, "balance": balance}


def without_counts(found: Outcome) -> Outcome:
    """Remove expert token counts from the state: only runs with migration have them."""
    state = {
        key: one for key, one in found.state.items() if not key.startswith(f"{EXPERT_TOKENS}/")
    }
    assert len(state) < len(found.state)
    return Outcome(found.steps, found.gradients, state)


def assert_migrated(found: Outcome) -> None:
    """Check that experts migrate in steps 2 and 4 only."""
    assert [bool(step["migrations"]) for step in found.steps] == [False, True, False, True, False]


@pytest.mark.parametrize("name", LAYOUTS)
def test_migration_equals_one_process(ranks: RankPool, name: str) -> None:
    size, layout, tables = LAYOUTS[name]
    job = tiny_job(**with_migration({**tables, "layout": layout}))
    found = outcome(ranks, size, job, STEPS, placement=PLACEMENTS[layout["ep"]])
    assert_migrated(found)
    assert_same(without_counts(found), reference(ranks, STEPS, **tables))


@pytest.mark.parametrize("name", ["tp", "pipeline"])
def test_migration_with_random_replicas(ranks: RankPool, name: str) -> None:
    size, layout, tables = LAYOUTS[name]
    job = tiny_job(**with_migration({**tables, "layout": layout}))
    found = outcome(ranks, size, job, STEPS, replica_seed=3)
    assert_migrated(found)
    assert_same(without_counts(found), reference(ranks, STEPS, **tables))


@pytest.mark.parametrize("policy", ["quota", "pro-prophet", "eplb"])
def test_migration_with_a_balance_policy(ranks: RankPool, policy: str) -> None:
    """Migration ends replicas that a policy would keep longer."""
    tables = with_migration({"layout": {"ep": 4}}, policy=policy)
    kept = {"replan_every": 100} if policy == "eplb" else {}
    job = tiny_job(**{**tables, "balance": {**tables["balance"], **kept}})
    found = outcome(ranks, 4, job, STEPS)
    assert_migrated(found)
    assert sum(step["replicas"] for step in found.steps) > 0
    assert_same(without_counts(found), reference(ranks, STEPS))


def migrate(world: World, tables: dict[str, Any], layout: dict[str, Any]) -> Any:
    """Train; return the state as bits, the experts of every layer, and the bytes sent."""
    job = tiny_job(**{**tables, "layout": layout})
    run = start_run(job, world)
    samples, moved = RandomSamples(job.model.vocab, job.data.sequence), []
    sent = list[int]()
    exchange = expert_migration._exchange

    def counted(transport: Any, moves: Any, leaving: Any, device: Any) -> Any:
        arrived = exchange(transport, moves, leaving, device)
        sent.append(arrived.nbytes)
        return arrived

    expert_migration._exchange = counted
    try:
        for _ in range(STEPS):
            moved += run.step(samples).migrations
    finally:
        expert_migration._exchange = exchange
    state = [
        (
            shard.key,
            shard.shape,
            shard.offset,
            live_values(shard).view(live_values(shard).dtype).numpy().copy(),
        )
        for shard in run.state().shards
        if shard.kind != EXPERT_TOKENS
    ]
    experts = {layer: list(moe.bank.experts) for layer, moe in run.part.model.expert_layers()}
    for layer, moe in run.part.model.expert_layers() if len(run.plan.expert_placement) > 1 else ():
        assert moe.balancer.problem.owners.tolist() == expert_owners(run.plan, layer).tolist()
    planned = {layer: list(run.plan.experts_of(world.rank, layer)) for layer in experts}
    run.close()
    return (
        state,
        (experts, planned),
        (sum(sent), [one.num_bytes for one in moved], expert_bytes(job, run.plan)),
    )


@pytest.mark.parametrize("layout", [{"ep": 2, "dp_shard": 4}, {"ep": 4}])
def test_8bit_moments_are_bit_identical(ranks: RankPool, layout: dict[str, Any]) -> None:
    """Each row is quantized alone, so all codes equal those of one process."""
    tables = {
        "model": {"hidden": 136, "ffn": 20, "heads": 4, "kv_heads": 2, "head_dim": 8},
        "optimizer": {"moments": "8bit", "lr": 0.01}, "train": {"micro_batches": 2},
    }  # fmt: skip
    size = layout.get("dp_shard", layout["ep"])
    results = ranks.run(size, migrate, with_migration(tables, policy="quota"), layout)
    found = put_together([state for state, _, _ in results])
    (single,) = ranks.run(1, migrate, tables, {})
    expected = put_together([single[0]])
    assert found.keys() == expected.keys()
    codes = [key for key in found if found[key].dtype in (np.int8, np.uint8)]
    assert sum(".experts." in key for key in codes) == 2 * 8 * 3 * 2
    assert all(np.array_equal(found[key], expected[key]) for key in codes)
    scales = [key for key in found if found[key].dtype == np.float32]
    assert all(np.allclose(found[key], expected[key], rtol=1e-6, atol=0) for key in scales)
    rest = found.keys() - {*codes, *scales}
    assert worst_element({k: found[k] for k in rest}, {k: expected[k] for k in rest}) < 1e-9
    for _, (experts, planned), _ in results:
        assert experts == planned
    each = results[0][2]
    assert sum(sent for _, _, (sent, _, _) in results) == sum(each[1]) > 0
    assert not sum(each[1]) % each[2]


def run_job(
    world: World, text: str, out: str, layout: dict[str, Any], resume: str | None,
    changes: dict[str, Any], plan: dict[str, Any] | None = None,
) -> tuple[list[float], list[str]]:  # fmt: skip
    """Train on one rank; return its losses and messages."""
    tables: dict[str, Any] = {
        "layout": layout, "train": {"steps": 6, "precision": "fp32"}, "checkpoint": {"keep": 9},
        "balance": {"policy": "none", "migrate_every": 3, "costs": FREE},
    }  # fmt: skip
    for table, keys in changes.items():
        tables[table] = {**tables.get(table, {}), **keys}
    given = None if plan is None else Plan.model_validate(plan)
    progress = train_text(world, Path(text), Path(out), resume, given, **tables)
    return progress.losses, progress.messages


def at(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:08d}"


def everything(path: Path) -> dict[str, Any]:
    """Return every tensor of a checkpoint, unsharded, and its expert placement by layer."""
    facts = Checkpoint.open(path).facts
    return {**read_checkpoint(path), "placement": facts["plan"]["expert_placement_by_layer"]}


def events(out: Path, name: str) -> list[dict[str, Any]]:
    lines = (out / "events" / "rank-0.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["event"] == name]


def assert_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert np.array_equal(value, b[key]) if key != "placement" else value == b[key], key


@pytest.mark.parametrize(
    ("name", "moments"),
    sparing(
        [[name, moments] for name in ("sharded", "pipeline") for moments in ("8bit", "full")],
        2,
    ),
)
def test_resume_is_bit_identical(
    ranks: RankPool, text: Path, tmp_path: Path, name: str, moments: str
) -> None:
    """Resume before the first migration, with its token counts so far, and before the second."""
    size, layout, tables = LAYOUTS[name]
    more = {"optimizer": {"moments": moments}, **{k: v for k, v in tables.items() if k != "train"}}
    straight = tmp_path / "straight"
    whole = ranks.run(size, run_job, str(text), str(straight), layout, None, more)
    expected = everything(at(straight, 6))
    assert expected["placement"]
    assert everything(at(straight, 2))["placement"] == {}
    assert everything(at(straight, 4))["placement"] not in ({}, expected["placement"])
    for step in (2, 4):
        out = tmp_path / str(step)
        start = str(at(straight, step))
        rest = ranks.run(size, run_job, str(text), str(out), layout, start, more)
        assert rest[0][0] == whole[0][0][step:]
        assert_equal(everything(at(out, 6)), expected)


def test_another_layout_resumes_with_the_same_results(
    ranks: RankPool, text: Path, tmp_path: Path
) -> None:
    exact = {"train": {"precision": "fp64"}}
    ((losses, _),) = ranks.run(1, run_job, str(text), str(tmp_path / "one"), {}, None, exact)
    first = tmp_path / "first"
    ranks.run(4, run_job, str(text), str(first), {"ep": 2}, None, exact)
    plain, expected = (everything(at(tmp_path / name, 6)) for name in ("one", "first"))
    counts = {key for key in expected if key.startswith(f"{EXPERT_TOKENS}/")}
    assert counts
    for number, (size, layout) in enumerate([(4, {"ep": 4}), (2, {"ep": 2}), (1, {})]):
        out, start = tmp_path / str(number), str(at(first, 4))
        rest = ranks.run(size, run_job, str(text), str(out), layout, start, exact)
        assert rest[0][0] == pytest.approx(losses[4:], rel=1e-9)
        found = everything(at(out, 6))
        same = found.keys() - counts - {"placement"}
        assert same == plain.keys() - {"placement"}
        assert worst_element({k: found[k] for k in same}, {k: plain[k] for k in same}) < 1e-9


def test_a_run_logs_its_migrations(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    (_, messages), *_ = ranks.run(4, run_job, str(text), str(out), {"ep": 2, "pp": 2}, None, {})
    decisions = events(out, "decisions")
    assert [one["step"] for one in decisions] == [3, 6]
    migrations = [one for event in decisions for one in event["migration"]]
    assert {one["layer"] for one in migrations} == {0, 1}
    for one in migrations:
        assert all(source != target for _, source, target in one["moves"])
        assert one["gain_s"] > 0
        assert sum(one["expert_tokens"]) > 0
        assert one["imbalance_after"] < one["imbalance_before"]
        assert (one["seconds"] is None) == (one["layer"] == 1), "rank 0 has the first layer"
        assert one["bytes"] > 0
    lines = [line for line in messages if "migrated" in line]
    assert [line.partition(":")[0] for line in lines] == ["step 3", "step 6"]
    begins = "balance: no replicas; experts may migrate every 3"
    assert any(line.startswith(begins) for line in messages)


def test_the_placement_of_a_resumed_run(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    """It is that of the checkpoint, unless a plan sets another and migration is off."""
    out = tmp_path / "first"
    ranks.run(2, run_job, str(text), str(out), {"ep": 2}, None, {})
    left = everything(at(out, 4))["placement"]
    kept = Checkpoint.open(at(out, 4)).facts["plan"]
    given = {**kept, "expert_placement": PLACEMENTS[2], "expert_placement_by_layer": {}}
    still = {"balance": {"migrate_every": 0}}
    for number, (more, plan_, expected) in enumerate((
        ({}, None, left), (still, None, left), ({}, given, left), (still, given, {}),
    )):  # fmt: skip
        here = tmp_path / str(number)
        start = str(at(out, 4))
        ranks.run(2, run_job, str(text), str(here), {"ep": 2}, start, more, plan_)
        (began,) = events(here, "run_start")
        assert began["plan"]["expert_placement_by_layer"] == expected
        outcomes = [one["outcome"] for one in began["decisions"]]
        assert outcomes == [{"dispatch": "all_to_all", "dispatch_hosts": 1}] * (plan_ is None)
        if more is still:
            assert everything(at(here, 6))["placement"] == expected
            assert not events(here, "decisions")


def test_a_checkpoint_without_counts_starts_at_zero(
    ranks: RankPool, text: Path, tmp_path: Path
) -> None:
    """Migration then goes by the tokens since the resume."""
    out, later = tmp_path / "first", tmp_path / "later"
    still = {"balance": {"migrate_every": 0}}
    ranks.run(2, run_job, str(text), str(out), {"ep": 2}, None, still)
    assert not any(key.startswith(EXPERT_TOKENS) for key in everything(at(out, 4)))
    ranks.run(2, run_job, str(text), str(later), {"ep": 2}, str(at(out, 4)), {})
    assert [one["step"] for one in events(later, "decisions")] == [6]


def test_replay_of_a_run_without_costs_uses_typical_ones(
    ranks: RankPool, text: Path, tmp_path: Path
) -> None:
    """They are typical of the devices in its log."""
    results = []
    for every in (6, 0):
        out, balance = tmp_path / str(every), {"costs": None, "migrate_every": every}
        more = {"balance": balance, "log": {"loads_every": 1, "tensorboard": False}}
        ranks.run(2, run_job, str(text), str(out), {"ep": 2}, None, more)
        results.append(replay_run(out, ReplayConfig(policy="quota")))
    assert results[0]["costs"] == results[1]["costs"]
