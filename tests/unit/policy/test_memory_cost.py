"""Memory of ranks: the fullest and the tightest rank, compared with all ranks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from moesaic.facts.cluster.file import resolve_cluster
from moesaic.facts.cluster.places import device_at, place_ranks
from moesaic.facts.cluster.presets import PRESETS
from moesaic.facts.plan import plan_from_layout
from moesaic.facts.workload import memory
from moesaic.facts.workload.loads import expert_counts
from moesaic.policy.cost.memory import tightest_rank
from moesaic.policy.cost.step import JobCosts
from moesaic.testing.jobs import tiny_job


@pytest.mark.parametrize(
    ("ranks", "layout", "train"),
    [
        (3, {"dp_shard": "all"}, {"batch": 8}),
        (3, {}, {"batch": 7}),
        (4, {"ep": 4}, {"batch": 6}),
        (8, {"ep": 4, "dp_shard": 8}, {"batch": 12, "micro_batches": 2}),
        (4, {"pp": 2, "ep": 2}, {"batch": 12, "micro_batches": 4}),
        (6, {"tp": 2, "dp_shard": 3}, {"batch": 8}),
        (8, {"pp": 2, "tp": 2, "dp_shard": 2}, {"batch": 6, "micro_batches": 2}),
    ],
)
def test_the_tightest_of_equal_devices_is_the_fullest_rank(
    ranks: int, layout: Mapping[str, object], train: Mapping[str, int]
) -> None:
    job = tiny_job(model={"vocab": 60}, layout=layout, train=train)
    plan = plan_from_layout(job.layout, job.model, ranks)
    peaks = [memory(job, plan, rank).peak_bytes for rank in range(ranks)]
    shares = [{**PRESETS["cpu"]["devices"][0], "count": ranks}]
    host = {"name": "n", "preset": "cpu", "devices": shares}
    cluster = resolve_cluster({"name": "here", "hosts": [host]}, "here")
    needs = tightest_rank(JobCosts.from_job(job, plan, cluster))
    assert needs.memory.peak_bytes == max(peaks) > min(peaks)


def test_tightest_rank_depends_on_device_memory() -> None:
    """Rank 2 has fewer samples than ranks 0 and 1, and half their memory."""
    hosts = [
        {"name": name, "preset": "h100-8", "devices": {"count": count, "memory_bytes": size}}
        for name, count, size in (("large", 2, 2e10), ("small", 1, 1e10))
    ]
    net = {"ends": ["*", "*"], "kind": "ethernet", "latency_s": 5e-5, "bandwidth": 1e9}
    cluster = resolve_cluster({"name": "test", "hosts": hosts, "links": [net]}, "test")
    job = tiny_job(train={"batch": 8}, layout={"dp_shard": "all"})
    plan, places = plan_from_layout(job.layout, job.model, 3), place_ranks(cluster, 3)
    fractions = [
        memory(job, plan, rank, on_cpu=False).peak_bytes / device_at(cluster, at).usable_bytes
        for rank, at in enumerate(places)
    ]
    tightest = tightest_rank(JobCosts.from_job(job, plan, cluster))
    assert tightest.used_fraction == max(fractions)
    assert (tightest.rank, tightest.device.memory_bytes) == (2, 1e10)


def test_tightest_rank_follows_loads() -> None:
    """Only a layer's own load matters; counts by rank give the same result as loads."""
    job = tiny_job(layout={"ep": 4}, train={"batch": 8})
    plan = plan_from_layout(job.layout, job.model, 4)
    where = resolve_cluster({"name": "test", "hosts": [{"name": "a", "preset": "h100-8"}]}, "test")
    even, hot = np.ones(job.model.experts), np.ones(job.model.experts)
    hot[list(plan.experts_of(2, 0))] = 9
    loads = [even, hot]
    tightest = tightest_rank(JobCosts.from_job(job, plan, where, loads))
    assert tightest.rank == 2
    counts = [expert_counts(job, plan, load) for load in loads]
    assert tightest.memory == memory(job, plan, 2, counts, on_cpu=False)
    unloaded = tightest_rank(JobCosts.from_job(job, plan, where)).memory
    assert tightest.memory.peak_bytes > unloaded.peak_bytes
