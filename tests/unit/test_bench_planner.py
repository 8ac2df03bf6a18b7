"""Theme `planner`: spaces of its jobs, what its rows say, steps in turn on two ranks."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks import planner, planner_choice, planner_cuts, planner_published, planner_search
from benchmarks.plan_instances import instance
from benchmarks.planner_choice import JOBS, Judged, any_cluster, job_of
from benchmarks.planner_layouts import Timed, find, index_of, layouts, split, take_turns

from moesaic.facts.cluster.presets import PUBLISHED, PUBLISHED_PRESETS
from moesaic.policy.cost.calibrate import KINDS, UNCALIBRATED, fit_factors
from moesaic.testing.ranks import RankPool

TINY = (
    {"family": "mixtral", "vocab": 64, "hidden": 32, "layers": 2, "heads": 2, "kv_heads": 2,
     "head_dim": 16, "ffn": 32, "experts": 4, "top_k": 2}, 4, 16, 2,
)  # fmt: skip


def judged(name: str, seconds: np.ndarray) -> Judged:
    """Return a job whose layouts took these multiples of their predicted seconds."""
    cluster, job = any_cluster(), job_of(TINY)
    among = layouts(job, cluster)
    predicted = np.array([one.estimate.step_s for one in find(job, cluster, "exhaustive")])
    own = Timed(predicted[:, None] * seconds[: len(among)], cluster, 1.0, 0)
    return Judged(name, among, own, 0, 1, planner_choice.observed(among, own))


def test_a_job_has_at_most_twelve_layouts_with_the_chosen_one_and_the_rule_of_thumb() -> None:
    total = 0
    for name, shape in JOBS.items():
        job, cluster = job_of(shape), any_cluster()
        among = layouts(job, cluster)
        assert len({one.name for one in among}) == len(among) <= 12, name
        assert index_of(find(job, cluster)[0].plan, among) == 0
        assert index_of(find(job, cluster, "rule-of-thumb")[0].plan, among) >= 0
        total += len(among)
    assert total >= 24


def test_rows_of_choices_orders_and_errors() -> None:
    seconds = 1 + np.tile([0.0, 0.01, -0.01, 0.0], (12, 1))
    seconds[1:] += 0.5
    exact = judged("exact", seconds)
    assert split(exact.timed.seconds)[0].shape[1] == 2
    median, worst, rule, detail = planner_choice.choice_rows([exact])
    assert (median.value, worst.value) == (1.0, 1.0)
    assert rule.value is not None
    assert rule.value < 1
    assert exact.among[0].name in detail.against
    assert planner_choice.order_row([exact], UNCALIBRATED).value == 1.0
    rows = list(planner_choice.error_rows([exact], fit_factors(exact.steps)))
    assert [row.bar for row in rows] == ["<= 0.06", "<= 0.18", "", "", ""]
    assert rows[3].value == pytest.approx(1 / 3, rel=0.05)
    for row in (median, worst, rule, detail, *rows):
        assert row.interval is not None
        assert row.interval[0] <= (row.value or 0.0) <= row.interval[1]


def test_layouts_take_turns_on_the_same_ranks(ranks: RankPool) -> None:
    every = layouts(job_of(TINY), any_cluster())
    names = ("pp 2, even stages", "tp 2", "ep 2, dedup")
    among = [one for one in every if one.name in names]
    assert len(among) == len(names)
    halves, references = ranks.run(2, take_turns, among, 2, None, 0, 0.0)[0]
    assert [half.rounds for half in halves] == [1, 1]
    assert all(set(half.seconds) == {one.name for one in among} for half in halves)
    assert len(references) == 3


def test_cuts_are_all_tried_and_the_even_one_is_named() -> None:
    job, cluster = planner_cuts.pipeline_job(), any_cluster()
    most = planner_cuts.ceiling(job)
    assert most >= planner_cuts.CEILING
    plan = find(job, cluster)[0].plan
    among = planner_cuts.every_cut(job, plan)
    assert len(among) == job.model.layers + 1
    seconds = np.ones((len(among), 4))
    seconds[4] = 1.2
    own = Timed(seconds, cluster, 1.0, 0)
    claim, even, best = planner_cuts.cut_rows(job, among, index_of(plan, among), own, most)
    assert (claim.holds, claim.bar) == (True, ">= 1")
    assert (even.value, best.value) == (pytest.approx(1.2), 1.0)
    assert "5 blocks first" in even.against


def test_small_instances_are_compared_with_all_methods() -> None:
    rows = list(planner_search.instance_rows([instance(seed) for seed in (1, 3)]))
    assert (rows[0].value, rows[0].holds) == (2, True)
    assert len(rows) == 1 + len(planner_search.OTHERS)


def test_published_layouts_are_pinned() -> None:
    assert set(planner.PARTS) == {"choice", "peaks", "cuts", "clusters", "instances", "published"}
    for published in (planner_search.QWEN, planner_search.DEEPSEEK):
        layout = published.job(**published.layout).layout
        assert {key: getattr(layout, key) for key in published.layout} == published.layout


def test_presets_carry_the_ratios_of_published_runs() -> None:
    runs = planner_published.RUNS
    worst, *rest = list(planner_published.published(1))
    ratios = [float(row.value or 0.0) for row in rest]
    assert PUBLISHED["runs"] == len(runs) == len(ratios)
    assert PUBLISHED["ratios"] == pytest.approx([min(ratios), max(ratios)], abs=0.006)
    assert worst.value == max(max(one, 1 / one) for one in ratios)
    assert [PUBLISHED[kind] for kind in KINDS] == [1.0] * len(KINDS)
    devices = {run.cluster().hosts[0].devices[0].model for run in runs}
    assert PUBLISHED["devices"] == sorted(devices)
    assert {run.host for run in runs} == PUBLISHED_PRESETS
    assert all(run.source.startswith("https://") for run in runs)
