"""What became of a layer's rows, worked out row by row; and the clock that times it."""

from __future__ import annotations

import math
import time
from itertools import pairwise

import numpy as np
import pytest

from moesaic.dist.clock import Clock, during
from moesaic.facts.balance import Balance, Ints, Setting
from moesaic.policy.balance import quota
from moesaic.policy.balance.yardsticks import top_k_broadcast
from moesaic.report.spreads import COLUMNS
from moesaic.train.spread import BALANCE, Spread

SETTING = Setting(
    homes=np.array([0, 0, 1, 1, 2, 2, 3, 3]), ranks=4, rows_per_s=1e4, row_bytes=64.0,
    bytes_per_s=1e9, expert_bytes=3_000.0, gradient_bytes=6_000.0, latency_s=1e-6,
)  # fmt: skip


def uneven(seed: int) -> Ints:
    random = np.random.default_rng(seed)
    share = 1 / np.arange(1, 9) ** 1.2
    counts: Ints = random.multinomial(500, share / share.sum(), size=4).astype(np.int64)
    return counts


def slowly(counts: Ints, balance: Balance) -> tuple[list[int], list[int]]:
    """Rows by rank at home and as computed, one row after another."""
    before, after, left = [0] * 4, [0] * 4, counts.copy()
    for expert, source, target, number in balance.diverted.tolist():
        for _ in range(number):
            left[source, expert] -= 1
            after[target] += 1
    for source in range(4):
        for expert in range(8):
            home = int(SETTING.homes[expert])
            before[home] += int(counts[source, expert])
            after[home] += int(left[source, expert])
    return before, after


def deviation(rows: list[int]) -> float:
    mean = sum(rows) / len(rows)
    return math.sqrt(sum((one - mean) ** 2 for one in rows) / len(rows))


def test_sums_over_micro_batches() -> None:
    passes = [uneven(seed) for seed in range(3)]
    balances = [quota(passes[0], SETTING), top_k_broadcast(passes[1], SETTING, number=2)]
    balances.append(quota(passes[2], SETTING))
    whole, befores, afters = Spread(planning_s=1.5), [], []
    for counts, balance in zip(passes, balances, strict=True):
        whole = whole.and_then(Spread.of(counts, SETTING, balance, 1))
        before, after = slowly(counts, balance)
        befores.append(before)
        afters.append(after)
    copies = sum(len(balance.copies) for balance in balances)
    row = whole.record(7, 3)
    assert set(row) == set(BALANCE.names)
    assert (row["step"], row["layer"]) == (7, 3)
    assert copies > 6
    assert (row["copies"], row["bytes_moved"]) == (copies, copies * 9_000)
    assert row["planning_s"] == 1.5
    for kind, rows in (("before", befores), ("after", afters)):
        assert row[f"rows_{kind}"] == np.sum(rows, axis=0).tolist()
        busiest = sum(max(one) for one in rows) / (sum(map(sum, rows)) / 4)
        assert row[f"busiest_{kind}"] == pytest.approx(busiest, rel=1e-12)
        assert row[f"std_{kind}"] == pytest.approx(sum(map(deviation, rows)), rel=1e-12)
        worst = max(4 * max(one) / sum(one) for one in rows)
        assert getattr(whole, kind) == pytest.approx(worst, rel=1e-12)
    assert row["modelled_experts_s"] == pytest.approx(3 * sum(a[1] for a in afters) / 1e4)
    assert row["modelled_home_s"] > row["modelled_s"] > row["modelled_experts_s"] > 0
    assert row["modelled_travel_s"] >= row["modelled_exposed_s"] >= 0


def test_what_copies_cost_in_the_model() -> None:
    """Two copies from rank 0, one each to ranks 1 and 2, which move them themselves; rank 3's rows
    still travel."""
    counts = np.zeros((4, 8), np.int64)
    counts[1:, 0] = 40, 60, 10
    balance = Balance(np.array([[0, 1], [0, 2]]), np.array([[0, 1, 1, 40], [0, 2, 2, 60]]))
    told = Spread.of(counts, SETTING._replace(hides=False), balance, 2)
    travel = 2 * 9_000 / 2 / 1e9 + 2e-6
    assert told.modelled_travel_s == pytest.approx(travel)
    assert told.modelled_exposed_s == pytest.approx(travel)
    assert told.modelled_s == pytest.approx(3 * 60 / 1e4 + travel + 4 * (10 * 32 / 1e9 + 1e-6))
    assert told.modelled_home_s == pytest.approx(3 * 110 / 1e4 + 4 * (110 * 32 / 1e9 + 1e-6))
    assert told.modelled_experts_s == pytest.approx(3 * 60 / 1e4)


def test_what_handling_copies_slows_is_computing_and_not_waiting() -> None:
    """Rank 0 sends two copies and ranks 1 and 2 get one each; all that travels is hidden."""
    counts = np.zeros((4, 8), np.int64)
    counts[1:, 0] = 40, 60, 10
    balance = Balance(np.array([[0, 1], [0, 2]]), np.array([[0, 1, 1, 40], [0, 2, 2, 60]]))
    told = [Spread.of(counts, SETTING._replace(handling_s=1e-9), balance, rank) for rank in (0, 2)]
    each = (3_000 + 6_000) * 1e-9
    assert told[0].modelled_experts_s == pytest.approx(3 * 10 / 1e4 + 2 * each)
    assert told[1].modelled_experts_s == pytest.approx(3 * 60 / 1e4 + each)
    assert told[0].modelled_exposed_s == 0
    free = Spread.of(counts, SETTING, balance, 0)
    assert told[0].modelled_s == pytest.approx(free.modelled_s + 2 * each)


def test_rb_is_that_of_pro_prophet() -> None:
    """The example of the paper's search: std of rows before over that after."""
    counts = np.array([[6, 1, 1, 0], [5, 2, 0, 1], [4, 1, 3, 0], [2, 2, 1, 3]])
    setting = SETTING._replace(homes=np.arange(4))
    everyone_but_one = np.array([[0, 1], [0, 2], [0, 3]])
    diverted = np.array([[0, 1, 1, 5], [0, 2, 2, 4], [0, 3, 3, 2]])
    row = Spread.of(counts, setting, Balance(everyone_but_one, diverted), 0).record(1, 0)
    assert (row["rows_before"], row["rows_after"]) == ([17, 6, 5, 4], [6, 11, 9, 6])
    assert row["std_before"] / row["std_after"] == pytest.approx(2.4721, abs=5e-5)


def test_no_rows_are_even() -> None:
    row = Spread.of(np.zeros((4, 8), np.int64), SETTING, quota(uneven(0) * 0, SETTING), 0)
    assert (row.record(1, 0)["busiest_before"], row.before) == (1.0, 1.0)


def test_seconds_are_unknown_without_a_clock() -> None:
    one = Spread.of(uneven(0), SETTING, quota(uneven(0), SETTING), 0)
    assert all(math.isnan(one.record(1, 0)[f"{name}_s"]) for name in (
        "landing", "return", "forward", "backward",
    ))  # fmt: skip
    timed = one.timed({"landing": 0.5, "experts backward": 2.0})
    assert (timed.landing_s, timed.return_s, timed.forward_s, timed.backward_s) == (0.5, 0, 0, 2.0)
    assert timed.exposed_s == 0.5


def test_a_stretch_inside_another_counts_once() -> None:
    clock, marks = Clock(), [time.perf_counter()]
    with clock.during("outer"):
        marks.append(time.perf_counter())
        with clock.during("inner"), clock.during("innermost"):
            time.sleep(0.02)
        with clock.during("inner"):
            time.sleep(0.01)
        marks.append(time.perf_counter())
    marks.append(time.perf_counter())
    seconds = clock.told()
    inside = marks[2] - marks[1]
    assert 0.03 <= seconds["inner"] + seconds["innermost"] <= inside
    assert 0.02 <= seconds["innermost"] <= inside - 0.01
    assert sum(seconds.values()) <= sum(later - one for one, later in pairwise(marks))
    assert sum(seconds.values()) >= inside
    assert clock.told() == {}
    with during(None, "outer"):
        pass


def test_reports_read_what_runs_write() -> None:
    assert {*COLUMNS, "rows_before", "rows_after"} == set(BALANCE.names)
