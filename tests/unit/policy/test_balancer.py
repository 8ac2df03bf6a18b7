"""Layer balancer: when replicas are planned anew, and when a policy runs at all."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.base.errors import ConfigError
from moesaic.facts.balance import BalanceProblem, IntArray
from moesaic.facts.job import BalanceConfig
from moesaic.facts.job.balance import YardstickConfig
from moesaic.facts.plan import plan_from_job
from moesaic.policy.balance import (
    LayerBalancer,
    reason_not_to_balance,
    should_balance,
)
from moesaic.policy.balance.balancer import prefetch_mask
from moesaic.policy.balance.cost_model import use_local_replicas
from moesaic.policy.balance.eplb import assign_evenly
from moesaic.policy.balance.yardsticks import make_balancer, split_optimally
from moesaic.testing.jobs import tiny_job

LONG = {"data": {"sequence": 512}}
PROBLEM = BalanceProblem(np.arange(8) // 2, 4, 1e4, 8.0, 1e9, 1e3, 1e3)


def hot(expert: int, share: float = 0.5) -> IntArray:
    """Return 1,000 routed tokens on each of four ranks; one expert has the fraction `share`."""
    each = round(1000 * (1 - share) / 7)
    counts = np.full((4, 8), each, np.int64)
    counts[:, expert] = 1000 - 7 * each
    return counts


def replan(config: BalanceConfig, passes: list[IntArray]) -> list[list[list[int]]]:
    """Return the replicas of each pass."""
    balancer, found = LayerBalancer(config, PROBLEM), list[list[list[int]]]()
    for counts in passes:
        replicas = balancer.prefetched_replicas().replicas
        balance = balancer(counts)
        if len(found) % 2:  # Planning early must not change the result.
            balancer.place_next_replicas()
        assert np.array_equal(replicas, balance.replicas)
        found.append(replicas.tolist())
    return found


def config(**values: object) -> BalanceConfig:
    return BalanceConfig.model_validate(values)


@pytest.mark.parametrize(
    "settings",
    [{"policy": "pro-prophet"}, {"policy": "eplb"}, {"policy": "quota", "prefetch": True}],
)
def test_replicas_are_replanned_only_when_loads_drift(
    settings: dict[str, object],
) -> None:
    draw = np.random.default_rng(0)
    still = [hot(2) + draw.integers(0, 30, (4, 8)) for _ in range(5)]
    moved = [hot(5)] * 4
    found = replan(config(**settings, replan_every=1000, replan_drift=0.1), still + moved)
    assert found[0] == []
    assert any(expert == 2 for expert, _ in found[1])
    # The sixth pass does not know the new loads yet.
    assert all(replicas == found[1] for replicas in found[1:6])
    assert any(expert == 5 for expert, _ in found[6])
    assert all(replicas == found[6] for replicas in found[6:])
    assert found[1] != found[6]


@pytest.mark.parametrize("drifted", [None, 0.9])
def test_replicas_are_kept_for_replan_every_micro_batches(drifted: float | None) -> None:
    passes = [hot(number % 8) for number in range(10)]
    kept = replan(config(policy="eplb", replan_every=3, replan_drift=drifted), passes)
    each = replan(config(policy="eplb"), passes)
    assert kept[0] == []
    assert kept[1:] == [each[1]] * 3 + [each[4]] * 3 + [each[7]] * 3
    assert each[1] != each[4] != each[7]


def test_current_tokens_are_split_over_kept_replicas() -> None:
    lp = make_balancer(YardstickConfig(policy="lp", replan_every=9), PROBLEM)
    eplb = LayerBalancer(config(policy="eplb", replan_every=9), PROBLEM)
    for balancer, spread in ((lp, split_optimally), (eplb, assign_evenly)):
        balancer(hot(2))
        replicas = balancer.prefetched_replicas().replicas
        found = balancer(hot(2, 0.7))
        assert found.rerouted.tolist() == spread(hot(2, 0.7), PROBLEM, replicas).rerouted.tolist()
    prophet = LayerBalancer(config(policy="pro-prophet", replan_every=9), PROBLEM)
    prophet(hot(2))
    replicas = prophet.prefetched_replicas().replicas
    assert (
        prophet(hot(3)).rerouted.tolist() == use_local_replicas(hot(3), replicas).rerouted.tolist()
    )


@pytest.mark.parametrize("policy", ["eplb", "faster-moe", "pro-prophet"])
def test_replicas_that_do_not_pay_are_made_only_as_published(policy: str) -> None:
    expensive = {
        "faster-moe": {"overlaps": False, "latency_s": 1.0},  # FasterMoE's model ignores both.
        # Pro-Prophet's model ignores this.
        "pro-prophet": {"overlaps": True, "cpu_s_per_byte": 1.0},
    }
    problem = PROBLEM._replace(**expensive.get(policy, {"expert_bytes": 1e9}))
    made = list[int]()
    for settings in ({"as_published": True}, {}):
        balancer = LayerBalancer(config(policy=policy, **settings), problem)
        balancer(hot(2))
        made.append(len(balancer(hot(2)).replicas))
        cheap = LayerBalancer(config(policy=policy, **settings), PROBLEM)
        cheap(hot(2))
        assert len(cheap(hot(2)).replicas) > 0
    assert made[0] > 0
    assert made[1] == 0


def test_early_replicas_are_rated_with_their_assigned_tokens() -> None:
    """All tokens of the hottest expert are on its owner rank.

    An assignment of local tokens only would save nothing, and replicas cost CPU time.
    """
    counts = np.full((4, 8), 50, np.int64)
    counts[:, 2] = 0
    counts[1, 2] = 1000
    problem = PROBLEM._replace(cpu_s_per_byte=1e-8)
    for early in (True, False):
        balancer = make_balancer(YardstickConfig(policy="top-k-broadcast", prefetch=early), problem)
        balancer(counts)
        found = balancer(counts)
        assert (len(found.replicas) > 0) == early
        assert (found.rerouted[:, 3].sum() > 0) == early


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"policy": "eplb", "replan_drift": 0.1}, "drift = 0.1 with balance.replan_every = 1"),
        ({"policy": "quota", "replan_every": 4}, "or set balance.prefetch = true"),
        ({"policy": "pro-prophet", "max_replicas_sent": 2}, "max_replicas_sent = 2 with balance"),
        ({"policy": "llep"}, '^tiny job: balance.policy = "llep" is not known: '),
        ({"policy": "auto"}, 'balance.policy = "auto" is not known: give "none", "quota"'),
        ({"num_broadcast_experts": 2}, "unknown key 'balance.num_broadcast_experts'"),
    ],
)  # fmt: skip
def test_invalid_settings_are_rejected(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_job(balance=values)


@pytest.mark.parametrize(
    ("balance", "tables", "wanted", "why"),
    [
        ({}, LONG, True, None),
        ({}, {"data": {"sequence": 8}}, False, "replicas pay off from 256"),
        ({"policy": "eplb"}, {"data": {"sequence": 8}}, True, None),
        ({"policy": "none"}, LONG, False, None),
        ({"policy": "none", "max_replicas": 0}, LONG, False, None),
        ({"max_replicas": 0}, LONG, False, "balance.max_replicas = 0 leaves no room"),
        ({"policy": "eplb", "max_replicas": 0}, LONG, False, "balance.max_replicas = 0 leaves"),
        ({"max_replicas": 1}, LONG, True, None),
        ({}, {"layout": {"ep": 1}}, False, None),
        ({}, {**LONG, "finetune": {"method": "lora", "targets": ["experts"]}}, False,
         "LoRA adapters"),
        ({}, {**LONG, "finetune": {"method": "lora", "targets": ["attention"]}}, True, None),
    ],
)  # fmt: skip
def test_conditions_under_which_a_policy_runs(
    balance: dict[str, object], tables: dict[str, object], wanted: bool, why: str | None
) -> None:
    balance = {"policy": "quota", **balance}
    job = tiny_job(**{"layout": {"ep": 2}, **tables, "balance": balance})
    assert should_balance(job, plan_from_job(job, 2)) is wanted
    reason = reason_not_to_balance(job, plan_from_job(job, 2))
    assert reason is None if why is None else why in str(reason)


EACH_S = 0.25
PREFETCH = BalanceProblem(
    owners=np.array([0, 0, 0, 1, 1, 1, 2, 2, 2]), num_ranks=3,
    expert_tokens_per_s=1.0, token_bytes=1.0,
    bytes_per_s=8.0, expert_bytes=1.0, gradient_bytes=1.0, latency_s=EACH_S - 1 / 8,
)  # fmt: skip


@given(st.integers(0, 2**32 - 1), st.floats(0, 3))
def test_replicas_that_fit_under_dense_layers_are_not_sent_earlier(
    seed: int, overlapped_s: float
) -> None:
    rng = np.random.default_rng(seed)
    chosen = rng.random((9, 3)) < rng.random()
    chosen[np.arange(9), PREFETCH.owners] = False
    replicas = np.argwhere(chosen)
    early = prefetch_mask(replicas, PREFETCH._replace(dense_compute_s=overlapped_s))
    fits = int(overlapped_s / EACH_S)
    for column in (PREFETCH.owners[replicas[:, 0]], replicas[:, 1]):
        assert max(Counter(column[~early].tolist()).values(), default=0) <= fits
    for expert, rank in replicas[early].tolist():  # No replica is sent early without need.
        late = replicas[~early]
        owner = PREFETCH.owners[expert]
        same = (
            Counter(PREFETCH.owners[late[:, 0]].tolist())[owner],
            Counter(late[:, 1].tolist())[rank],
        )
        assert max(same) == fits


def test_without_overlap_no_replica_is_sent_earlier() -> None:
    replicas = np.array([[0, 1], [3, 0]])
    assert prefetch_mask(replicas, PREFETCH).all()
    assert not prefetch_mask(replicas, PREFETCH._replace(overlaps=False)).any()
    assert not prefetch_mask(replicas[:0], PREFETCH).any()


@pytest.mark.parametrize("follows", [True, False])
def test_replicas_that_do_not_fit_under_attention_are_sent_earlier(follows: bool) -> None:
    settings = config(policy="faster-moe", prefetch=True)
    balancer = LayerBalancer(
        settings, PROBLEM._replace(dense_compute_s=2e-6), follows_expert_layer=follows
    )
    balancer(hot(2))
    early = balancer.prefetched_replicas()
    assert len(early.replicas) == 3  # The owner sends two of them in that time.
    assert (
        early.prefetched is not None and early.prefetched.tolist() == [False, False, True]
    ) == follows
    found = balancer(hot(2))
    assert (found.prefetched is None) != follows
    if found.prefetched is not None and early.prefetched is not None:
        early_pairs = found.replicas[found.prefetched]
        assert early_pairs.tolist() == early.replicas[early.prefetched].tolist()
