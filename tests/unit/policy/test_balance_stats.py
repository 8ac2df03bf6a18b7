"""Balance statistics of a layer, and the clock that times it."""

from __future__ import annotations

import math
import time
from itertools import pairwise

import numpy as np
import pytest

from moesaic.base.decisions import Decision, decide
from moesaic.dist.clock import Clock, timed
from moesaic.facts.balance import (
    BalanceDecision,
    BalanceFacts,
    BalanceProblem,
    IntArray,
    no_replicas,
)
from moesaic.policy.balance import BalanceStats, LayerDecision, balance_stats, quota
from moesaic.policy.balance.cost_model import count_rank_tokens
from moesaic.policy.balance.yardsticks import top_k_broadcast
from moesaic.report.loads import BALANCE_COLUMNS
from moesaic.train.lm_stats import BALANCE_SCHEMA

PROBLEM = BalanceProblem(
    owners=np.array([0, 0, 1, 1, 2, 2, 3, 3]), num_ranks=4,
    expert_tokens_per_s=1e4, token_bytes=64.0, bytes_per_s=1e9,
    expert_bytes=3_000.0, gradient_bytes=6_000.0, latency_s=1e-6,
)  # fmt: skip


def skewed_counts(seed: int) -> IntArray:
    random = np.random.default_rng(seed)
    share = 1 / np.arange(1, 9) ** 1.2
    counts: IntArray = random.multinomial(500, share / share.sum(), size=4).astype(np.int64)
    return counts


def stats_of(
    counts: IntArray, balance: BalanceDecision, rank: int = 0, problem: BalanceProblem = PROBLEM
) -> BalanceStats:
    facts = BalanceFacts(problem, counts)
    return balance_stats([Decision(facts, balance, 0.0)], 4, rank)


def test_sums_over_micro_batches() -> None:
    passes = [skewed_counts(seed) for seed in range(3)]
    balances = [quota(passes[0], PROBLEM), top_k_broadcast(passes[1], PROBLEM)]
    balances.append(quota(passes[2], PROBLEM))
    log = list[LayerDecision]()
    decide(lambda facts: balances[0], BalanceFacts(PROBLEM, passes[0], is_ahead=True), log)
    befores, afters = list[list[int]](), list[list[int]]()
    for counts, balance in zip(passes, balances, strict=True):
        assert decide(lambda facts, b=balance: b, BalanceFacts(PROBLEM, counts), log) is balance
        for rows, decision in ((befores, no_replicas()), (afters, balance)):
            rows.append(count_rank_tokens(counts, PROBLEM.owners, decision).computed.tolist())
    found = balance_stats(log, 4, 1)
    num_replicas = sum(len(balance.replicas) for balance in balances)
    assert num_replicas > 4
    assert (found.replicas, found.replica_bytes) == (num_replicas, num_replicas * 9_000)
    assert found.planning_s == sum(decision.seconds for decision in log) > 0
    assert found.tokens_before.tolist() == np.sum(befores, axis=0).tolist()
    for imbalance, rows in (
        (found.imbalance_before, befores), (found.imbalance_after, afters),
    ):  # fmt: skip
        busiest = sum(max(one) for one in rows) / (sum(map(sum, rows)) / 4)
        assert imbalance == pytest.approx(busiest, rel=1e-12)
    assert found.predicted_experts_s == pytest.approx(3 * sum(a[1] for a in afters) / 1e4)
    assert found.predicted_unbalanced_s > found.predicted_s > found.predicted_experts_s > 0
    assert math.isnan(found.replica_wait_s)


def test_predicted_times_of_replicas_without_overlap() -> None:
    """Rank 0 sends one replica each to ranks 1 and 2, without overlap; rank 3's tokens still
    travel."""
    counts = np.zeros((4, 8), np.int64)
    counts[1:, 0] = 40, 60, 10
    balance = BalanceDecision(np.array([[0, 1], [0, 2]]), np.array([[0, 1, 1, 40], [0, 2, 2, 60]]))
    stats = stats_of(counts, balance, 2, PROBLEM._replace(overlaps=False))
    transfer_s = 2 * 9_000 / 2 / 1e9 + 2e-6
    assert stats.predicted_exposed_s == pytest.approx(transfer_s)
    assert stats.predicted_s == pytest.approx(
        3 * 60 / 1e4 + transfer_s + 4 * (10 * 32 / 1e9 + 1e-6)
    )
    assert stats.predicted_unbalanced_s == pytest.approx(
        3 * 110 / 1e4 + 4 * (110 * 32 / 1e9 + 1e-6)
    )
    assert stats.predicted_experts_s == pytest.approx(3 * 60 / 1e4)


def test_cpu_time_of_overlapped_replicas_counts_as_computation() -> None:
    """Rank 0 sends two replicas and ranks 1 and 2 get one each; all transfers overlap."""
    counts = np.zeros((4, 8), np.int64)
    counts[1:, 0] = 40, 60, 10
    balance = BalanceDecision(np.array([[0, 1], [0, 2]]), np.array([[0, 1, 1, 40], [0, 2, 2, 60]]))
    stats = [
        stats_of(counts, balance, rank, PROBLEM._replace(cpu_s_per_byte=1e-9)) for rank in (0, 2)
    ]
    cpu_s = (3_000 + 6_000) * 1e-9
    assert stats[0].predicted_experts_s == pytest.approx(3 * 10 / 1e4 + 2 * cpu_s)
    assert stats[1].predicted_experts_s == pytest.approx(3 * 60 / 1e4 + cpu_s)
    assert stats[0].predicted_exposed_s == 0
    free = stats_of(counts, balance)
    assert stats[0].predicted_s == pytest.approx(free.predicted_s + 2 * cpu_s)


def test_no_tokens_are_balanced() -> None:
    counts = np.zeros((4, 8), np.int64)
    assert stats_of(counts, quota(counts, PROBLEM)).imbalance_before == 1.0


def test_nested_clock_intervals_count_once() -> None:
    clock, marks = Clock(), [time.perf_counter()]
    with clock.timed("outer"):
        marks.append(time.perf_counter())
        with clock.timed("inner"), clock.timed("innermost"):
            time.sleep(0.02)
        with clock.timed("inner"):
            time.sleep(0.01)
        marks.append(time.perf_counter())
    marks.append(time.perf_counter())
    seconds = clock.pop_seconds()
    inside = marks[2] - marks[1]
    assert 0.03 <= seconds["inner"] + seconds["innermost"] <= inside
    assert 0.02 <= seconds["innermost"] <= inside - 0.01
    assert sum(seconds.values()) <= sum(later - one for one, later in pairwise(marks))
    assert sum(seconds.values()) >= inside
    assert clock.pop_seconds() == {}
    with timed(None, "outer"):
        pass


def test_reports_read_all_columns() -> None:
    assert set(BALANCE_COLUMNS) <= set(BALANCE_SCHEMA.names)
