"""Balance statistics of a layer, checked token by token, and the clock that times it."""

from __future__ import annotations

import math
import time
from itertools import pairwise

import numpy as np
import pytest

from moesaic.dist.clock import Clock, timed
from moesaic.facts.balance import BalanceDecision, BalanceProblem, IntArray
from moesaic.policy.balance import quota
from moesaic.policy.balance.yardsticks import top_k_broadcast
from moesaic.report.balance_stats import COLUMNS
from moesaic.train.balance_stats import BALANCE_SCHEMA, BalanceStats

SETTING = BalanceProblem(
    owners=np.array([0, 0, 1, 1, 2, 2, 3, 3]), num_ranks=4,
    expert_tokens_per_s=1e4, token_bytes=64.0, bytes_per_s=1e9,
    expert_bytes=3_000.0, gradient_bytes=6_000.0, latency_s=1e-6,
)  # fmt: skip


def skewed_counts(seed: int) -> IntArray:
    random = np.random.default_rng(seed)
    share = 1 / np.arange(1, 9) ** 1.2
    counts: IntArray = random.multinomial(500, share / share.sum(), size=4).astype(np.int64)
    return counts


def count_slowly(counts: IntArray, balance: BalanceDecision) -> tuple[list[int], list[int]]:
    """Return tokens per rank on owner ranks and as computed, one token at a time."""
    before, after, left = [0] * 4, [0] * 4, counts.copy()
    for expert, source, target, number in balance.rerouted.tolist():
        for _ in range(number):
            left[source, expert] -= 1
            after[target] += 1
    for source in range(4):
        for expert in range(8):
            owner = int(SETTING.owners[expert])
            before[owner] += int(counts[source, expert])
            after[owner] += int(left[source, expert])
    return before, after


def deviation(rows: list[int]) -> float:
    mean = sum(rows) / len(rows)
    return math.sqrt(sum((one - mean) ** 2 for one in rows) / len(rows))


def test_sums_over_micro_batches() -> None:
    passes = [skewed_counts(seed) for seed in range(3)]
    balances = [quota(passes[0], SETTING), top_k_broadcast(passes[1], SETTING, num_experts=2)]
    balances.append(quota(passes[2], SETTING))
    whole, befores, afters = BalanceStats(planning_s=1.5), [], []
    for counts, balance in zip(passes, balances, strict=True):
        whole = whole.combine(BalanceStats.from_balance(counts, SETTING, balance, 1))
        before, after = count_slowly(counts, balance)
        befores.append(before)
        afters.append(after)
    num_replicas = sum(len(balance.replicas) for balance in balances)
    row = whole.to_row(7, 3)
    assert set(row) == set(BALANCE_SCHEMA.names)
    assert (row["step"], row["layer"]) == (7, 3)
    assert num_replicas > 6
    assert (row["replicas"], row["replica_bytes"]) == (num_replicas, num_replicas * 9_000)
    assert row["planning_s"] == 1.5
    for kind, rows in (("before", befores), ("after", afters)):
        assert row[f"tokens_{kind}"] == np.sum(rows, axis=0).tolist()
        busiest = sum(max(one) for one in rows) / (sum(map(sum, rows)) / 4)
        assert row[f"imbalance_{kind}"] == pytest.approx(busiest, rel=1e-12)
        assert row[f"std_{kind}"] == pytest.approx(sum(map(deviation, rows)), rel=1e-12)
        worst = max(4 * max(one) / sum(one) for one in rows)
        assert getattr(whole, f"imbalance_{kind}") == pytest.approx(worst, rel=1e-12)
    assert row["predicted_experts_s"] == pytest.approx(3 * sum(a[1] for a in afters) / 1e4)
    assert row["predicted_unbalanced_s"] > row["predicted_s"] > row["predicted_experts_s"] > 0
    assert row["predicted_transfer_s"] >= row["predicted_exposed_s"] >= 0


def test_predicted_times_of_replicas_without_overlap() -> None:
    """Rank 0 sends one replica each to ranks 1 and 2, without overlap; rank 3's tokens still
    travel."""
    counts = np.zeros((4, 8), np.int64)
    counts[1:, 0] = 40, 60, 10
    balance = BalanceDecision(np.array([[0, 1], [0, 2]]), np.array([[0, 1, 1, 40], [0, 2, 2, 60]]))
    stats = BalanceStats.from_balance(counts, SETTING._replace(overlaps=False), balance, 2)
    transfer_s = 2 * 9_000 / 2 / 1e9 + 2e-6
    assert stats.predicted_transfer_s == pytest.approx(transfer_s)
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
        BalanceStats.from_balance(counts, SETTING._replace(cpu_s_per_byte=1e-9), balance, rank)
        for rank in (0, 2)
    ]
    cpu_s = (3_000 + 6_000) * 1e-9
    assert stats[0].predicted_experts_s == pytest.approx(3 * 10 / 1e4 + 2 * cpu_s)
    assert stats[1].predicted_experts_s == pytest.approx(3 * 60 / 1e4 + cpu_s)
    assert stats[0].predicted_exposed_s == 0
    free = BalanceStats.from_balance(counts, SETTING, balance, 0)
    assert stats[0].predicted_s == pytest.approx(free.predicted_s + 2 * cpu_s)


def test_rb_metric_of_pro_prophet() -> None:
    """Reproduce the example of the paper: std of tokens before over that after balancing."""
    counts = np.array([[6, 1, 1, 0], [5, 2, 0, 1], [4, 1, 3, 0], [2, 2, 1, 3]])
    setting = SETTING._replace(owners=np.arange(4))
    everyone_but_one = np.array([[0, 1], [0, 2], [0, 3]])
    diverted = np.array([[0, 1, 1, 5], [0, 2, 2, 4], [0, 3, 3, 2]])
    row = BalanceStats.from_balance(
        counts, setting, BalanceDecision(everyone_but_one, diverted), 0
    ).to_row(1, 0)
    assert (row["tokens_before"], row["tokens_after"]) == ([17, 6, 5, 4], [6, 11, 9, 6])
    assert row["std_before"] / row["std_after"] == pytest.approx(2.4721, abs=5e-5)


def test_no_tokens_are_balanced() -> None:
    row = BalanceStats.from_balance(
        np.zeros((4, 8), np.int64), SETTING, quota(skewed_counts(0) * 0, SETTING), 0
    )
    assert (row.to_row(1, 0)["imbalance_before"], row.imbalance_before) == (1.0, 1.0)


def test_seconds_are_unknown_without_a_clock() -> None:
    one = BalanceStats.from_balance(skewed_counts(0), SETTING, quota(skewed_counts(0), SETTING), 0)
    assert all(math.isnan(one.to_row(1, 0)[f"{name}_s"]) for name in (
        "replica_wait", "gradient_wait", "forward", "backward",
    ))  # fmt: skip
    timed = one.with_times({"forward exchange": 0.5, "experts backward": 2.0})
    assert (timed.replica_wait_s, timed.gradient_wait_s, timed.forward_s, timed.backward_s) == (
        0.5,
        0,
        0,
        2.0,
    )
    assert timed.exposed_s == 0.5


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
    assert set(COLUMNS) <= set(BALANCE_SCHEMA.names)
