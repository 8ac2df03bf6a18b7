"""A policy as a job asks for it: when copies are decided on anew, and who is asked at all."""

from __future__ import annotations

from pathlib import Path

import numba
import numpy as np
import pytest

from moesaic.base.errors import ConfigError
from moesaic.facts.balance import Ints, Setting
from moesaic.facts.job import BalanceConfig
from moesaic.facts.job.balance import YardstickConfig
from moesaic.facts.plan import planned
from moesaic.policy.balance import (
    Asked,
    at_copies,
    balances,
    compiling,
    drift,
    evenly,
    pro_prophet,
    stands_aside,
)
from moesaic.policy.balance.compiled import compiled, heard
from moesaic.policy.balance.yardsticks import asked as asked_of
from moesaic.policy.balance.yardsticks import levelled
from moesaic.testing.jobs import tiny_job

LONG = {"data": {"sequence": 512}}
SETTING = Setting(np.arange(8) // 2, 4, 1e4, 8.0, 1e9, 1e3, 1e3)


def hot(expert: int, share: float = 0.5) -> Ints:
    """1,000 rows of each of four ranks, of which one expert has so many and the others alike."""
    each = round(1000 * (1 - share) / 7)
    counts = np.full((4, 8), each, np.int64)
    counts[:, expert] = 1000 - 7 * each
    return counts


def told(config: BalanceConfig, passes: list[Ints]) -> list[list[list[int]]]:
    """The copies of each pass."""
    asked, found = Asked(config, SETTING), list[list[list[int]]]()
    for counts in passes:
        copies = asked.ahead().copies
        balance = asked(counts)
        if len(found) % 2:  # Whether or not there is time to think of the next one now.
            asked.think()
        assert np.array_equal(copies, balance.copies)
        found.append(copies.tolist())
    return found


def config(**values: object) -> BalanceConfig:
    return BalanceConfig.model_validate(values)


@pytest.mark.parametrize(
    "who", [{"policy": "pro-prophet"}, {"policy": "eplb"}, {"policy": "quota", "early": True}]
)
def test_copies_are_decided_on_anew_when_what_is_hot_moves_and_not_otherwise(
    who: dict[str, object],
) -> None:
    draw = np.random.default_rng(0)
    still = [hot(2) + draw.integers(0, 30, (4, 8)) for _ in range(5)]
    moved = [hot(5)] * 4
    found = told(config(**who, replan_every=1000, replan_drift=0.1), still + moved)
    assert found[0] == []
    assert any(expert == 2 for expert, _ in found[1])
    assert all(copies == found[1] for copies in found[1:6])  # The sixth knows of nothing yet.
    assert any(expert == 5 for expert, _ in found[6])
    assert all(copies == found[6] for copies in found[6:])
    assert found[1] != found[6]


@pytest.mark.parametrize("drifted", [None, 0.9])
def test_copies_are_kept_for_so_many_micro_batches(drifted: float | None) -> None:
    passes = [hot(number % 8) for number in range(10)]
    kept = told(config(policy="eplb", replan_every=3, replan_drift=drifted), passes)
    each = told(config(policy="eplb"), passes)
    assert kept[0] == []
    assert kept[1:] == [each[1]] * 3 + [each[4]] * 3 + [each[7]] * 3
    assert each[1] != each[4] != each[7]


def test_each_time_is_what_it_was_without_a_word_of_it() -> None:
    passes = [hot(number % 8) for number in range(6)]
    found = told(config(policy="pro-prophet"), passes)
    wanted = [pro_prophet(counts, SETTING).copies.tolist() for counts in passes]
    assert found == [[], *wanted[:-1]]


def test_rows_at_hand_are_split_over_copies_that_are_kept() -> None:
    lp = asked_of(YardstickConfig(policy="lp", replan_every=9), SETTING)
    eplb = Asked(config(policy="eplb", replan_every=9), SETTING)
    for asked, spread in ((lp, levelled), (eplb, evenly)):
        asked(hot(2))
        copies = asked.ahead().copies
        found = asked(hot(2, 0.7))
        assert found.diverted.tolist() == spread(hot(2, 0.7), SETTING, copies).diverted.tolist()
    prophet = Asked(config(policy="pro-prophet", replan_every=9), SETTING)
    prophet(hot(2))
    copies = prophet.ahead().copies
    assert prophet(hot(3)).diverted.tolist() == at_copies(hot(3), copies).diverted.tolist()


@pytest.mark.parametrize("policy", ["eplb", "faster-moe", "pro-prophet"])
def test_copies_that_cost_more_than_they_save_are_made_only_as_published(policy: str) -> None:
    dear = {
        "faster-moe": {"hides": False, "latency_s": 1.0},  # Of which it knows nothing.
        "pro-prophet": {"hides": True, "handling_s": 1.0},  # Nor does it of this.
    }
    setting = SETTING._replace(**dear.get(policy, {"expert_bytes": 1e9}))
    made = list[int]()
    for how in ({"as_published": True}, {}):
        asked = Asked(config(policy=policy, **how), setting)
        asked(hot(2))
        made.append(len(asked(hot(2)).copies))
        cheap = Asked(config(policy=policy, **how), SETTING)
        cheap(hot(2))
        assert len(cheap(hot(2)).copies) > 0
    assert made[0] > 0
    assert made[1] == 0


def test_early_copies_are_looked_at_with_rows_as_they_will_be_spread() -> None:
    """All rows of the hottest expert are of its home: each rank's own spread over copies would save
    nothing, and they cost a processor's time."""
    counts = np.full((4, 8), 50, np.int64)
    counts[:, 2] = 0
    counts[1, 2] = 1000
    setting = SETTING._replace(handling_s=1e-8)
    for early in (True, False):
        asked = asked_of(YardstickConfig(policy="top-k-broadcast", early=early), setting)
        asked(counts)
        found = asked(counts)
        assert (len(found.copies) > 0) == early
        assert (found.diverted[:, 3].sum() > 0) == early


def test_drift_is_the_part_of_rows_that_went_over_to_other_experts() -> None:
    one = np.array([[10, 0, 30], [10, 30, 20]])
    assert drift(one, 3 * one) == 0.0
    assert drift(one, one[::-1]) == 0.0  # Of other ranks, but of the same experts.
    assert drift(one, np.array([[0, 10, 30], [0, 40, 20]])) == pytest.approx(0.2)
    assert drift(np.zeros_like(one), np.zeros_like(one)) == 0.0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"policy": "eplb", "replan_drift": 0.1}, "drift = 0.1 with balance.replan_every = 1"),
        ({"policy": "quota", "replan_every": 4}, "say balance.early = true"),
        ({"policy": "pro-prophet", "copies_sent": 2}, "copies_sent = 2 with balance.policy"),
        ({"policy": "lp"}, '^tiny job: balance.policy = "lp" is a yardstick for replay; training '
         "takes none, quota, pro-prophet, eplb or faster-moe$"),
        ({"policy": "auto"}, 'balance.policy = "auto" is not known: give "none", "quota"'),
        ({"hottest": 2}, "unknown key 'balance.hottest'"),
    ],
)  # fmt: skip
def test_mistakes(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_job(balance=values)


@pytest.mark.parametrize(
    ("policy", "tables", "wanted", "why"),
    [
        ("quota", LONG, True, None),
        ("quota", {"data": {"sequence": 8}}, False, "copies may pay from 256"),
        ("eplb", {"data": {"sequence": 8}}, True, None),
        ("none", LONG, False, None),
        ("quota", {"layout": {"ep": 1}}, False, None),
        ("quota", {**LONG, "finetune": {"method": "lora", "targets": ["experts"]}}, False,
         "experts have adapters"),
        ("quota", {**LONG, "finetune": {"method": "lora", "targets": ["attention"]}}, True, None),
    ],
)  # fmt: skip
def test_who_is_asked_at_all(
    policy: str, tables: dict[str, object], wanted: bool, why: str | None
) -> None:
    job = tiny_job(**{"layout": {"ep": 2}, **tables, "balance": {"policy": policy}})
    assert balances(job, planned(job, 2)) is wanted
    said = stands_aside(job, planned(job, 2))
    assert said is None if why is None else why in str(said)


def test_nobody_is_asked_who_has_no_room() -> None:
    """Deciding on no copies takes as long as on any."""
    for policy in ("quota", "eplb"):
        tables = {"layout": {"ep": 2}, **LONG}
        job = tiny_job(**tables, balance={"policy": policy, "copies": 0})
        assert not balances(job, planned(job, 2))
        said = stands_aside(job, planned(job, 2))
        assert said == "for there is no room for any (balance.copies = 0)"
        room = tiny_job(**tables, balance={"policy": policy, "copies": 1})
        assert balances(room, planned(room, 2))
    none = tiny_job(**tables, balance={"policy": "none", "copies": 0})
    assert stands_aside(none, planned(none, 2)) is None


@pytest.mark.parametrize("follows", [True, False])
def test_what_attention_has_no_time_for_leaves_sooner(follows: bool) -> None:
    who = config(policy="faster-moe", early=True)
    asked = Asked(who, SETTING._replace(beside_s=2e-6), follows=follows)
    asked(hot(2))
    early = asked.ahead()
    assert len(early.copies) == 3  # Of which the home sends two in that time.
    assert (early.ahead is not None and early.ahead.tolist() == [False, False, True]) == follows
    found = asked(hot(2))
    assert (found.ahead is None) != follows
    if found.ahead is not None and early.ahead is not None:
        ahead = found.copies[found.ahead]
        assert ahead.tolist() == early.copies[early.ahead].tolist()


def test_what_is_compiled_is_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one function, before it is; not if it is on disk, or in memory; and whether it is kept."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def double(x: int) -> int:
        return 2 * x

    for expected in ([True], []):
        begun, function = list[bool](), compiled(double)
        with heard(begun.append):
            assert function(4) == 8
            assert function(5) == 10
        assert begun == expected
    without = numba.njit

    def nowhere(cache: object = False) -> object:
        if isinstance(cache, bool) and cache:
            raise RuntimeError("cannot cache function: no locator available")
        return without(cache)

    monkeypatch.setattr("moesaic.policy.balance.compiled.njit", nowhere)
    function = compiled(double)
    for expected in ([False], []):
        begun = []
        with heard(begun.append):
            assert function(4) == 8
        assert begun == expected
    assert "at each start" in compiling(kept=False)
