"""Expert migration: invariants of all decisions, and the distance to the optimum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.facts.balance import BalanceProblem, IntArray, no_replicas
from moesaic.facts.plan import Plan
from moesaic.facts.workload import expert_bytes
from moesaic.policy.balance import (
    LayerBalancer,
    Migration,
    MigrationCosts,
    MigrationFacts,
    can_migrate,
    layer_times,
    migration_costs,
    plan_migration,
)
from moesaic.policy.balance.migration import migration_gain_s
from moesaic.testing.jobs import tiny_job

FREE = MigrationCosts(1.0, 0.0, 0.0)


def migrate(totals: IntArray, slots: Sequence[int], ranks: int, costs: MigrationCosts) -> Migration:
    return plan_migration(MigrationFacts(totals, slots, ranks, costs))


@st.composite
def cases(draw: st.DrawFn) -> tuple[IntArray, list[int], int, MigrationCosts]:
    ranks, each = draw(st.integers(2, 5)), draw(st.integers(1, 5))
    experts = ranks * each
    rows = st.one_of(st.integers(0, 8), st.integers(0, 1000))
    totals = draw(st.lists(rows, min_size=experts, max_size=experts))
    slots = draw(st.permutations(range(experts)))
    seconds = st.floats(0.0, 100.0)
    return (
        np.array(totals),
        slots,
        ranks,
        MigrationCosts(draw(seconds), draw(seconds), draw(seconds)),
    )


def owners_of(slots: list[int] | tuple[int, ...], ranks: int) -> IntArray:
    return np.argsort(slots) // (len(slots) // ranks)


def max_load(totals: IntArray, owners: IntArray, ranks: int) -> int:
    return max(int(totals[owners == rank].sum()) for rank in range(ranks))


@given(cases())
def test_invariants_of_migrations(case: tuple[IntArray, list[int], int, MigrationCosts]) -> None:
    totals, slots, ranks, cost = case
    found = migrate(totals, slots, ranks, cost)
    before, after = owners_of(slots, ranks), owners_of(found.slots, ranks)
    assert sorted(found.slots) == sorted(slots)
    for at, expert in enumerate(slots):
        stays = before[expert] == after[expert]
        assert not stays or found.slots[at] == expert, "an expert that stays keeps its slot"
    changed = [e for e in range(len(slots)) if before[e] != after[e]]
    assert list(found.moves) == [(e, before[e], after[e]) for e in changed]
    left = np.bincount(before[changed], minlength=ranks).max() if changed else 0
    fewer = max_load(totals, before, ranks) - max_load(totals, after, ranks)
    modelled = fewer * cost.token_s - left * cost.expert_s - (cost.exchange_s if changed else 0.0)
    assert found.gain_s == pytest.approx(modelled)
    assert (found.gain_s > 0) == bool(changed), "no expert moves without gain"
    assert migrate(totals, slots, ranks, cost) == found
    mean = totals.sum() / ranks
    if mean:
        assert found.imbalance_before == pytest.approx(max_load(totals, before, ranks) / mean)
        assert found.imbalance_after == pytest.approx(max_load(totals, after, ranks) / mean)
    again = migrate(totals, found.slots, ranks, cost)
    assert again.gain_s <= found.gain_s or not changed


def test_as_few_experts_as_possible_move() -> None:
    totals = np.array([50, 40, 10, 10, 10, 10, 5, 5])
    found = migrate(totals, list(range(8)), 4, FREE)
    assert found.moves == ((0, 0, 3), (6, 3, 0)), "among equals the first"
    assert found.slots == (6, 1, 2, 3, 4, 5, 0, 7)
    expensive = MigrationCosts(1.0, 35.0, 0.1)
    assert not migrate(totals, list(range(8)), 4, expensive).moves, (
        "35 tokens fewer do not pay for 35 seconds"
    )
    assert migrate(totals, list(range(8)), 4, expensive._replace(exchange_s=0.0)).gain_s == 0
    assert migrate(totals, list(range(8)), 4, MigrationCosts(1.0, 34.0, 0.5)).gain_s == 0.5


def assignments(experts: tuple[int, ...], each: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield every partition of experts into equal parts."""
    if not experts:
        yield []
        return
    for part in combinations(experts, each):
        rest = tuple(one for one in experts if one not in part)
        for others in assignments(rest, each):
            yield [part, *others]


@pytest.mark.parametrize(("ranks", "each"), [(2, 2), (2, 3), (2, 4), (3, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize("cost", [FREE, MigrationCosts(1.0, 3.0, 1.0)], ids=["free", "expensive"])
def test_migrations_are_near_the_optimum(ranks: int, each: int, cost: MigrationCosts) -> None:
    """Compare with all assignments: the search finds the optimum nearly always, from few
    candidates."""
    draw, experts = np.random.default_rng(ranks * each), ranks * each
    all_owners = [
        np.argsort([expert for part in parts for expert in part]) // each
        for parts in assignments(tuple(range(experts)), each)
    ]
    saved, possible, hits = 0.0, 0.0, 0
    for _ in range(30):
        totals = draw.integers(0, 60, experts)
        slots = draw.permutation(experts).tolist()
        found = migrate(totals, slots, ranks, cost).gain_s
        best = max(
            migration_gain_s(totals, owners_of(slots, ranks), owners, ranks, cost)
            for owners in all_owners
        )
        assert found <= best
        saved, possible, hits = saved + found, possible + best, hits + (found == best)
    assert saved >= 0.96 * possible, (saved, possible, hits)
    assert hits >= 21, hits


@given(
    st.lists(st.integers(0, 100), min_size=6, max_size=6), st.permutations(range(6)),
    st.floats(0.1, 10.0), st.floats(0.1, 10.0), st.sampled_from([2, 3]),
)  # fmt: skip
def test_gains_agree_with_the_cost_model(
    each: list[int], slots: list[int], expert_tokens_per_s: float, bytes_per_s: float, ranks: int
) -> None:
    """With equal ranks, the gain equals the difference in the layer's predicted time."""
    counts = np.tile(np.array(each), (ranks, 1))
    owners = owners_of(slots, ranks)
    problem = BalanceProblem(
        owners=owners, num_ranks=ranks, expert_tokens_per_s=expert_tokens_per_s,
        token_bytes=2.0, bytes_per_s=bytes_per_s,
        expert_bytes=1.0, gradient_bytes=1.0,
    )  # fmt: skip
    cost = migration_costs(problem, 0.0, 1)
    found = migrate(counts.sum(axis=0), slots, ranks, cost)
    after = problem._replace(owners=owners_of(found.slots, ranks))
    before_s, after_s = (
        layer_times(counts, one, no_replicas()).total_s for one in (problem, after)
    )
    assert found.gain_s == pytest.approx(before_s - after_s, abs=1e-9)
    assert migration_costs(problem, 0.0, 4).token_s == cost.token_s / 4


@pytest.mark.parametrize("policy", ["quota", "eplb"])
def test_replicas_follow_new_owners(policy: str) -> None:
    """Replicas that were kept are planned anew."""
    problem = BalanceProblem(
        owners=np.arange(8) // 4, num_ranks=2, expert_tokens_per_s=1.0,
        token_bytes=0.0, bytes_per_s=1e9,
        expert_bytes=1.0, gradient_bytes=1.0, overlaps=True,
    )  # fmt: skip
    late = {"replan_every": 100} if policy != "quota" else {}
    config = tiny_job(balance={"policy": policy, "min_replica_tokens": 1, **late}).balance
    counts, owners = np.array([[90, 60, 9, 8, 7, 6, 5, 4]] * 2), np.array([1, 0, 0, 0, 0, 1, 1, 1])
    balancer, fresh = (
        LayerBalancer(config, problem),
        LayerBalancer(config, problem._replace(owners=owners)),
    )
    for _ in range(2):
        before = balancer(counts)
        fresh(counts)
    assert (0, 1) in map(tuple, before.replicas.tolist())
    balancer.set_owners(owners)
    found, expected = balancer(counts), fresh(counts)
    assert (0, 1) not in map(tuple, found.replicas.tolist())
    assert np.array_equal(found.replicas, expected.replicas)
    assert np.array_equal(found.rerouted, expected.rerouted)


def test_conditions_under_which_experts_migrate() -> None:
    job = tiny_job(balance={"migrate_every": 2})
    assert can_migrate(job, Plan(ranks=2, ep=2, dp_shard=1, experts=8))
    assert not can_migrate(job, Plan(ranks=2, ep=1, dp_shard=1, experts=8))
    assert not can_migrate(tiny_job(), Plan(ranks=2, ep=2, dp_shard=1, experts=8))


def test_expert_bytes_include_optimizer_moments() -> None:
    plan = Plan(ranks=4, ep=2, tp=2, etp=2, dp_shard=1, experts=8)
    sizes = {"model": {"hidden": 16, "ffn": 24}, "train": {"precision": "fp32"}}
    assert expert_bytes(tiny_job(**sizes), plan) == 3 * 16 * 12 * (4 + 8)
    narrow = tiny_job(**sizes, optimizer={"moments": "bf16"})
    assert expert_bytes(narrow, plan) == 3 * 16 * 12 * (4 + 4)
    lora = tiny_job(**sizes, finetune={"method": "lora", "rank": 2, "targets": ["experts"]})
    adapters = 2 * (3 * 16 + 3 * 12)
    assert expert_bytes(lora, plan) == 3 * 16 * 12 * 4 + adapters * 12
