"""The plan search: equal to exhaustive search, with bounds that hold, and true advice."""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections.abc import Sequence
from functools import partial

import pytest
from benchmarks.plan_instances import CachedEstimates, cluster, instance, job

from moesaic.base.config import parse
from moesaic.base.decisions import Decision, decide
from moesaic.base.errors import ClusterError, ConfigError
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, check_plan, job_under_plan
from moesaic.facts.plan.search import SEARCH_KEYS, PlanEstimate, SearchFacts, SearchResult
from moesaic.policy.plan.estimates import SimulatedEstimates
from moesaic.policy.plan.found import chosen_text, predict_found, proof_text, shortfall_text
from moesaic.policy.plan.parts import Part, cheapest_that_fits, cluster_parts
from moesaic.policy.plan.remedy import shortfall
from moesaic.policy.plan.search import search_facts, search_plans
from moesaic.policy.plan.space import Candidate, Space
from moesaic.policy.plan.trials import Trials
from moesaic.policy.plan.work import Work


def search(facts: SearchFacts, **changes: object) -> SearchResult:
    changed = facts.model_copy(update=changes)
    return search_plans(changed, SimulatedEstimates.from_facts(changed))


def open_layouts() -> SearchFacts:
    own = job("tiny-qwen3", embedding="whole", chunks=1, overlap_local=False)
    return search_facts(own, cluster([1e12, 4e12], 1))


def check_instance(facts: SearchFacts) -> None:
    """Compare best-first search with all other methods, and every bound with its plan."""
    estimates = CachedEstimates(SimulatedEstimates.from_facts(facts))
    trials = Trials(facts, estimates)
    space, bounds = trials.space, trials.bounds
    for shape in space.shapes():
        for dispatched in space.children(shape, 0):
            least = max(bounds.seconds(shape, 0), bounds.seconds(dispatched, 1))
            for leaf in space.leaves(dispatched, 1):
                made = trials.plan(leaf)
                if made is None:
                    continue
                check_bounds(trials, leaf, least)
                if bounds.exceeds_memory(shape, 0) or bounds.exceeds_memory(dispatched, 1):
                    assert not estimates.fits(*made), leaf
    found = search_plans(facts, estimates)
    assert found.is_proven
    best_s = found.best.estimate.step_s if found.best is not None else float("inf")
    assert best_s == trials.best_s
    if found.best is not None:
        check_best(found, facts)
        for method in ("hill-climbing", "mcmc", "rule-of-thumb"):
            other = facts.model_copy(update={"method": method, "max_tried": 50})
            best = search_plans(other, estimates).best
            assert best is None or best.estimate.step_s >= best_s


def check_bounds(trials: Trials, leaf: Candidate, least: float) -> None:
    made = trials.plan(leaf)
    assert made is not None
    exact_s = trials.try_candidate(leaf)
    level = len(Space.LEVELS)
    assert max(least, trials.bounds.seconds(leaf, level)) <= exact_s, leaf
    assert trials.bounds.stages_seconds(leaf, made[1].stages or []) <= exact_s, leaf
    if trials.bounds.exceeds_memory(leaf, level):
        assert not trials.estimates.fits(*made), leaf


def check_best(found: SearchResult, facts: SearchFacts) -> None:
    best = found.best
    assert best is not None
    assert best.memory.used_fraction <= 1
    under = job_under_plan(facts.job, best.plan)
    check_plan(best.plan, under, "best")
    for key in facts.pins:
        table, _, name = key.partition(".")
        pinned = getattr(getattr(facts.job, table), name)
        assert best.settings[key] == (best.plan.dp if pinned == "all" else pinned), key


@pytest.mark.parametrize("seed", range(30))
def test_search_equals_exhaustive_search(seed: int) -> None:
    check_instance(instance(seed))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(30, 300))
def test_search_equals_exhaustive_search_at_length(seed: int) -> None:
    check_instance(instance(seed))


@pytest.mark.parametrize(
    ("preset", "speeds", "sizes"),
    [
        ("tiny-qwen3", [1e12, 1e12], {"micro_batches": 2, "layers": 3}),
        ("tiny-deepseek", [4e12, 1e12], {"micro_batches": 4, "batch": 16, "layers": 3}),
        ("tiny-mixtral", [1e12, 1e12], {"micro_batches": 2, "batch": 6, "layers": 2}),
    ],
)
def test_bounds_hold_where_all_is_open(
    preset: str, speeds: list[float], sizes: dict[str, int]
) -> None:
    """Chunks, dispatch through hosts, FSDP beside computing, and all schedules."""
    facts = search_facts(job(preset, **sizes), cluster(speeds, 2, bandwidth=1e9))
    estimates = SimulatedEstimates.from_facts(facts)
    trials, draw = Trials(facts, estimates), random.Random(0)
    space = trials.space
    shapes = list(space.shapes())
    for _ in range(25):
        shape = path = draw.choice(shapes)
        least = max(trials.bounds.seconds(shape, level) for level in (-1, 0))
        least = max(least, trials.bounds.matmul_seconds() or 0.0)
        for level in range(len(Space.LEVELS)):
            path = draw.choice(space.children(path, level))
            least = max(least, trials.bounds.seconds(path, level + 1))
        if trials.plan(path) is not None:
            check_bounds(trials, path, least)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("recompute", [False, True])
def test_memory_bounds_rule_out_only_what_does_not_fit(schedule: str, *, recompute: bool) -> None:
    """Memory between that of parameters and that of a step: shapes, then all that is below them."""
    own = job(
        "tiny-qwen3", layers=6, micro_batches=8, batch=16, sequence=128, pp=2, schedule=schedule,
        chunks=1, overlap_local=False, train={"recompute": recompute},
    )  # fmt: skip
    ruled_out = fitting = 0
    for memory in (1.2e7, 1.25e7, 1.3e7, 1.4e7, 1.6e7, 2e7, 2.3e7, 2.4e7, 2.8e7, 3.2e7):
        facts = search_facts(own, cluster([1e12], 4, memory))
        trials = Trials(facts, SimulatedEstimates.from_facts(facts))
        space, bounds = trials.space, trials.bounds
        for shape in space.shapes():
            is_ruled_out = bounds.exceeds_memory(shape, 0)
            ruled_out += is_ruled_out and bounds.state_fraction(shape) <= 1
            for leaf in space.leaves(shape):
                made = trials.plan(leaf)
                if made is None or not trials.estimates.fits(*made):
                    continue
                fitting += 1
                assert not is_ruled_out, leaf
                assert not bounds.exceeds_memory(leaf, len(Space.LEVELS)), leaf
                assert bounds.seconds(leaf, len(Space.LEVELS)) < float("inf"), leaf
    assert ruled_out
    assert fitting


def test_search_where_some_ranks_have_no_sample() -> None:
    own = job(
        "tiny-qwen3", batch=4, ep=2, tp=2, schedule="1f1b", embedding="whole", chunks=1,
        overlap_local=False,
    )  # fmt: skip
    check_instance(search_facts(own, cluster([1e12, 4e12, 4e12], 2)))


def test_same_facts_give_the_same_result_through_json() -> None:
    facts, log = open_layouts(), list[Decision[SearchFacts, SearchResult]]()
    again = parse(SearchFacts, json.loads(facts.to_json()), "facts")
    policy = partial(search_plans, estimates=SimulatedEstimates.from_facts(facts))
    first = decide(policy, facts, log)
    assert log[0].outcome == first
    assert search(again) == first
    assert parse(SearchResult, json.loads(first.to_json()), "result") == first


def test_search_with_cuts_of_highs_is_not_faster() -> None:
    own = job(layers=4, pp=2, schedule="1f1b", batch=64, sequence=128, train={"recompute": False})
    facts = search_facts(own, cluster([4e12, 2e11], 1, bandwidth=1e10))
    best, other = search(facts).best, search(facts, method="milp").best
    assert best is not None
    assert other is not None
    assert best.settings["stages"] == "balanced"
    assert best.estimate.step_s <= other.estimate.step_s


def test_milp_without_scipy_is_refused_before_the_first_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where no layout has stages."""
    facts = search_facts(job(layers=2, pp=1), cluster([1e12], 2))
    assert search(facts, method="milp").best is not None
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ConfigError, match='method "milp" needs scipy: pip install scipy, or'):
        search(facts, method="milp")


def test_written_keys_are_pins_even_with_default_values() -> None:
    assert search_facts(job(), cluster([1e12], 2)).pins == ["train.micro_batches"]
    written = job(ep=1, schedule="1f1b", dispatch="auto", train={"recompute": False})
    pins = search_facts(written, cluster([1e12], 2)).pins
    assert pins == ["layout.schedule", "layout.ep", "train.recompute", "train.micro_batches"]
    assert set(pins) <= set(SEARCH_KEYS)
    opened = search_facts(job(), cluster([1e12], 2), opens_micro_batches=True)
    assert opened.pins == []


def test_larger_cluster_is_never_slower_with_the_plan_of_the_smaller_as_a_seed() -> None:
    own = job(layers=2, tp=1, schedule="1f1b", train={"recompute": False})
    slow = cluster([1e12, 1e12], 2, bandwidth=1e6)
    small = search_facts(own, slow, 2)
    first = search(small).best
    assert first is not None
    large = search_facts(own, slow, 4).model_copy(update={"seeds": [first.plan]})
    second = search_plans(large, SimulatedEstimates.from_facts(large)).best
    assert second is not None
    assert second.estimate.step_s <= first.estimate.step_s
    assert second.settings["stages"] in ("even", "balanced")


def test_hosts_without_the_precision_are_left_out() -> None:
    where = cluster([1e12, 2e12], 2)
    dtypes = {"h0": "fp32", "h1": "bf16"}
    hosts = [
        host.model_copy(
            update={
                "devices": [
                    device.model_copy(
                        update={
                            "matmul": [
                                one.model_copy(update={"dtype": dtypes[host.name]})
                                for one in device.matmul
                            ]
                        }
                    )
                    for device in host.devices
                ]
            }
        )
        for host in where.hosts
    ]
    where = where.model_copy(update={"hosts": hosts})
    own = job(train={"precision": "bf16"})
    facts = search_facts(own, where)
    assert [host.name for host in facts.cluster.hosts] == ["h1"]
    assert (facts.ranks, facts.left_out) == (2, ["h0"])
    found = search(facts)
    assert found.best is not None
    assert {place.host for place in found.best.plan.places} == {"h1"}
    assert "host h0 is left out: no matmul speed" in predict_found(facts, found).warnings[-1]
    with pytest.raises(ClusterError, match="not for bf16"):
        search(search_facts(own, where, 4))


def test_runners_up_say_what_they_lose() -> None:
    found = search(open_layouts())
    assert found.best is not None
    assert found.runners_up
    for one in found.runners_up:
        assert one.loses_s == one.estimate.step_s - found.best.estimate.step_s
        own, least = one.estimate.seconds_by_kind, found.best.estimate.seconds_by_kind
        assert sum(own.values()) == pytest.approx(one.estimate.step_s, rel=1e-6)
        lost = {kind: seconds - least[kind] for kind, seconds in own.items()}
        assert one.kind_loses_s == max(lost.values()) == lost[one.kind]


def test_chosen_settings_leave_out_what_is_off() -> None:
    best = search(open_layouts()).best
    assert best is not None
    for recompute in (False, True):
        settings = {**best.settings, "train.recompute": recompute}
        text = chosen_text(best.model_copy(update={"settings": settings}), ["layout.ep"])
        assert ("train.recompute = true" in text) == recompute
        assert "ep = " not in text


@pytest.mark.parametrize("limit", [{"max_tried": 1}, {"max_work": 150}])
def test_search_that_ends_early_has_a_gap(limit: dict[str, int]) -> None:
    facts = open_layouts()
    whole, early = search(facts), search(facts, **limit)
    assert whole.best is not None
    assert early.best is not None
    assert not early.is_proven
    assert early.work < whole.work, (early.work, whole.work)
    assert not whole.is_limited
    assert early.is_limited == ("max_work" in limit)
    assert early.bound_s is None or early.bound_s <= whole.best.estimate.step_s
    assert early.gap is None or 0 <= early.gap < 1
    assert ("pin keys to search fewer layouts" in proof_text(early)) == early.is_limited


class SlowEstimates(SimulatedEstimates):
    """Predictions on a machine that is busy."""

    def step(self, job: Job, plan: Plan) -> PlanEstimate:
        time.sleep(0.05)
        return super().step(job, plan)

    def fits(self, job: Job, plan: Plan, stages: Sequence[int] | None = None) -> bool:
        time.sleep(0.01)
        return super().fits(job, plan, stages)


@pytest.mark.parametrize("work", [80, 200])
def test_a_busy_machine_changes_no_result(work: int) -> None:
    facts = open_layouts().model_copy(update={"max_work": work})
    slow = search_plans(facts, SlowEstimates(facts.cluster))
    assert slow == search(facts)
    assert slow.is_limited


def test_an_explanation_has_a_limit_of_work() -> None:
    own = job(layers=2, tp=1, embedding="whole", batch=1024, micro_batches=1)
    facts = search_facts(own, cluster([1e12], 2, memory=1e6))
    ends = []
    for limit in (60.0, 1e9):
        work = Work(limit)
        short = shortfall(facts, SimulatedEstimates.from_facts(facts), lambda *_: None, work)
        assert short is not None
        assert short.remedy is not None
        ends.append((work.done, short.remedy.is_least))
    assert ends[0][0] < 2 * 60 < ends[1][0]
    assert [one[1] for one in ends] == [False, True]


def test_the_searches_of_an_explanation_are_counted() -> None:
    """One that uses up the work ends it, with the plan that was known to fit."""
    own = job(layers=2, tp=1, pp=1, dp_shard=1, embedding="whole", train={"recompute": True})
    facts, limits = search_facts(own, cluster([1e12], 2, memory=7e6)), list[float]()

    def search_in_vain(_: SearchFacts, work: Work) -> None:
        limits.append(work.left)
        work.add(work.left)

    work = Work(1e5)
    short = shortfall(facts, SimulatedEstimates.from_facts(facts), search_in_vain, work)
    assert short is not None
    assert short.remedy is not None
    assert len(limits) == 1
    assert 0 < limits[0] < work.done < 1e5
    assert (short.remedy.fits, short.remedy.is_least) == (True, False)
    assert short.remedy.memory.used_fraction <= 1


def test_a_plan_that_a_method_left_untried_is_no_shortfall() -> None:
    """The rule of thumb tries one layout, which does not fit; the one with least memory does."""
    own = job("tiny-qwen3", layers=6, micro_batches=8, batch=16, sequence=128)
    facts = search_facts(own, cluster([1e12], 4, memory=1.67e7))
    found = search(facts, method="rule-of-thumb", max_work=3000)
    assert found.best is not None
    assert found.best.memory.used_fraction <= 1
    assert (found.is_proven, found.shortfall) == (False, None)
    limited = search(facts, max_work=60)
    assert limited.best is None
    assert limited.shortfall is not None
    assert not limited.is_proven
    text = shortfall_text(limited, limited.shortfall)
    assert re.match(
        "memory: no layout was found that fits, though some were not tried: the nearest one needs "
        r"[0-9.]+ MiB, and rank \d may use 12\.7 MiB of its [^;:]+; ", text,
    ), text  # fmt: skip


def test_shortfall_names_the_missing_bytes_and_a_change_that_is_true() -> None:
    own = job(layers=2, tp=1, pp=1, dp_shard=1, embedding="whole", train={"recompute": True})
    where = cluster([1e12], 2, memory=7e6)
    found = search(search_facts(own, where))
    short = found.shortfall
    assert found.best is None
    assert short is not None
    assert short.memory.short_bytes > 0
    remedy = short.remedy
    assert remedy is not None
    assert remedy.fits
    assert remedy.is_least
    (key,) = remedy.changes
    assert key in ("layout.tp", "layout.pp", "layout.dp_shard")
    table, _, name = key.partition(".")
    section = getattr(own, table).model_copy(update={name: remedy.changes[key]})
    best = search(search_facts(own.model_copy(update={table: section}), where)).best
    assert best is not None
    assert best.memory == remedy.memory


def test_pins_that_exclude_each_other_are_named() -> None:
    found = search(search_facts(job(pp=2, schedule="1f1b", micro_batches=1), cluster([1e12], 2)))
    assert found.best is None
    assert found.shortfall is None
    assert found.conflict is not None
    assert "micro_batches" in found.conflict
    assert "schedule" in found.conflict


def test_only_pins_that_exclude_each_other_are_named() -> None:
    own = job("tiny-qwen3", pp=2, ep=4, dp_shard=1, micro_batches=2)
    found = search(search_facts(own, cluster([1e12], 4)))
    assert found.conflict is not None
    named, _, error = found.conflict.partition(" exclude each other on 4 ranks: ")
    assert named == "layout.pp = 2 and layout.ep = 4"
    assert error.startswith("layout.ep = 4 does not divide 2 ranks of a stage: use 1 or 2")
    for open_key in ("layout.pp", "layout.ep"):
        facts = search_facts(own, cluster([1e12], 4))
        pins = [key for key in facts.pins if key != open_key]
        assert search(facts.model_copy(update={"pins": pins})).conflict is None


def test_a_pin_that_is_never_valid_has_one_error() -> None:
    found = search(search_facts(job(tp=3), cluster([1e12], 4)))
    assert found.conflict is not None
    assert found.conflict.startswith("layout.tp = 3 does not divide 4 ranks")
    assert ";" not in found.conflict


def test_the_cheapest_part_that_fits_is_searched_in_full() -> None:
    """Parts before it get any plan; later ones are not searched."""
    own = job(layers=2, tp=1, schedule="1f1b", embedding="whole", train={"recompute": False})
    where = cluster([1e12, 2e12], 2, memory=7e6)
    prices = {"h0": 1.0, "h1": 1.5}
    hosts = [host.model_copy(update={"price_per_hour": prices[host.name]}) for host in where.hosts]
    parts = cluster_parts(where.model_copy(update={"hosts": hosts}))
    assert [one.price_per_hour for one in parts] == sorted(one.price_per_hour for one in parts)
    facts = search_facts(own, where).model_copy(update={"max_work": 50_000})
    facts = facts.model_copy(update={"explains_shortfall": False})

    def each(part: Part) -> SearchResult:
        return search(facts, cluster=part.cluster, ranks=part.ranks)

    fits = [each(part).best is not None for part in parts]
    first = fits.index(True)
    assert first > 0
    done = cheapest_that_fits(parts, facts, lambda own: search(own))
    assert [one.part for one in done] == parts[: first + 1]
    assert [one.result.best is not None for one in done] == fits[: first + 1]
    fastest = each(parts[first]).best
    best = done[-1].result.best
    assert fastest is not None
    assert best is not None
    assert best.estimate == fastest.estimate
    assert done[-1].result.is_proven


def test_open_micro_batches_are_divisors_of_the_batch() -> None:
    def options(batch: int) -> list[int]:
        return Space(job(batch=batch, micro_batches=1), cluster([1e12], 2), 2, []).micro_batches()

    assert options(225) == [1, 3, 5, 9, 15, 25, 45, 75, 225]
    assert options(256) == [2**power for power in range(9)]
    many = options(720_720)
    assert len(many) <= 20
    assert all(720_720 % one == 0 for one in many)
    assert many == sorted(set(many))
