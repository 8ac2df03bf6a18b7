"""Memory advice: compared with the memory of the changed job."""

from __future__ import annotations

from typing import Any

import pytest

from moesaic.base.config import parse
from moesaic.facts.cluster import Cluster
from moesaic.facts.cluster.file import resolve_cluster
from moesaic.facts.job import Job
from moesaic.facts.job.model import PRESETS
from moesaic.facts.plan import plan_from_job
from moesaic.policy.cost.memory import RankMemory, tightest_rank
from moesaic.policy.cost.step import JobCosts
from moesaic.policy.plan.memory_advice import suggest_memory_changes

RANKS = 16


def cluster(memory_bytes: float) -> Cluster:
    host = {
        "name": "n",
        "preset": "h100-8",
        "replicas": 2,
        "devices": {"memory_bytes": memory_bytes},
    }
    link = {"ends": ["*", "*"], "kind": "ethernet", "latency_s": 1e-5, "bandwidth": 1e10}
    return resolve_cluster({"name": "two", "hosts": [host], "links": [link]}, "here")


def job(**layout: Any) -> Job:
    return parse(
        Job,
        {
            "model": PRESETS["mixtral-8x7b"], "layout": layout,
            "data": {"path": "x", "sequence": 4096},
            "train": {"steps": 1, "batch": 64, "precision": "bf16"},
        },
        "job",
    )  # fmt: skip


def memory_of(job: Job, where: Cluster) -> RankMemory:
    return tightest_rank(JobCosts.from_job(job, plan_from_job(job, RANKS), where))


def advise(job: Job, where: Cluster) -> tuple[dict[str, Any], RankMemory]:
    return suggest_memory_changes(job, RANKS, where, memory_of(job, where))


@pytest.mark.parametrize("layout", [{}, {"ep": 8}, {"ep": 8, "dp_shard": "all"}, {"tp": 2}])
def test_reported_memory_is_that_of_the_changed_job(layout: dict[str, Any]) -> None:
    where = cluster(8e10)
    changes, needs = advise(job(**layout), where)
    assert needs.used_fraction <= 1 < memory_of(job(**layout), where).used_fraction
    changed = job(**layout)
    for key, value in changes.items():
        table, _, name = key.partition(".")
        section = getattr(changed, table).model_copy(update={name: value})
        changed = changed.model_copy(update={table: section})
    assert memory_of(changed, where).memory == needs.memory


def test_insufficient_changes_still_reduce_memory() -> None:
    where = cluster(1e9)
    changes, needs = advise(job(ep=8), where)
    assert changes
    assert 1 < needs.used_fraction < memory_of(job(ep=8), where).used_fraction


def test_no_advice_without_a_useful_change() -> None:
    alone = parse(
        Job,
        {
            "model": PRESETS["tiny-dense"], "data": {"path": "x", "sequence": 16},
            "train": {"steps": 1, "batch": 1, "recompute": True},
        },
        "job",
    )  # fmt: skip
    where = cluster(1e5)
    needs = tightest_rank(JobCosts.from_job(alone, plan_from_job(alone, 1), where))
    assert suggest_memory_changes(alone, 1, where, needs) == ({}, needs)
