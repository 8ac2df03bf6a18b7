"""What would make a job fit, against every change of one key."""

from __future__ import annotations

from typing import Any

import pytest

from moesaic.base.config import parse
from moesaic.facts.cluster import Cluster, place
from moesaic.facts.cluster.file import resolve
from moesaic.facts.job import Job
from moesaic.facts.job.model import PRESETS
from moesaic.facts.plan import planned
from moesaic.policy.cost.room import Held, tightest
from moesaic.policy.relief import relief

RANKS = 16


def cluster(memory_bytes: float) -> Cluster:
    host = {
        "name": "n",
        "preset": "h100-8",
        "replicas": 2,
        "devices": {"memory_bytes": memory_bytes},
    }
    link = {"ends": ["*", "*"], "kind": "ethernet", "latency_s": 1e-5, "bandwidth": 1e10}
    return resolve({"name": "two", "hosts": [host], "links": [link]}, "here")


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


def held(job: Job, where: Cluster) -> Held:
    return tightest(job, planned(job, RANKS), where, place(where, RANKS))


def sought(job: Job, where: Cluster) -> tuple[dict[str, Any], Held]:
    return relief(job, RANKS, where, place(where, RANKS), held(job, where))


@pytest.mark.parametrize("layout", [{}, {"ep": 8}, {"ep": 8, "shard": "all"}, {"tp": 2}])
def test_what_is_found_is_what_the_changed_job_needs(layout: dict[str, Any]) -> None:
    where = cluster(8e10)
    changes, needs = sought(job(**layout), where)
    assert needs.share <= 1 < held(job(**layout), where).share
    changed = job(**layout)
    for key, value in changes.items():
        table, _, name = key.partition(".")
        section = getattr(changed, table).model_copy(update={name: value})
        changed = changed.model_copy(update={table: section})
    assert held(changed, where).needs == needs.needs


def test_where_nothing_suffices_it_comes_as_near_as_it_can() -> None:
    where = cluster(1e9)
    changes, needs = sought(job(ep=8), where)
    assert changes
    assert 1 < needs.share < held(job(ep=8), where).share


def test_a_job_that_cannot_be_helped_is_left_alone() -> None:
    alone = parse(
        Job,
        {
            "model": PRESETS["tiny-dense"], "data": {"path": "x", "sequence": 16},
            "train": {"steps": 1, "batch": 1, "recompute": True},
        },
        "job",
    )  # fmt: skip
    where = cluster(1e5)
    needs = tightest(alone, planned(alone, 1), where, place(where, 1))
    assert relief(alone, 1, where, place(where, 1), needs) == ({}, needs)
