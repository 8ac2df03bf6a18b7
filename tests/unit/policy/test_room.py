"""Room in memories: no rank is passed over."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from moesaic.facts.cluster.file import resolve
from moesaic.facts.cluster.places import device_at, place
from moesaic.facts.plan import lay_out
from moesaic.facts.workload import memory
from moesaic.facts.workload.loads import expert_counts
from moesaic.policy.cost.room import fullest, tightest
from moesaic.testing.jobs import tiny_job


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize(
    ("ranks", "layout", "train"),
    [
        (3, {"shard": "all"}, {"batch": 8}),
        (3, {}, {"batch": 7}),
        (4, {"ep": 4}, {"batch": 6}),
        (8, {"ep": 4, "shard": 8}, {"batch": 12, "micro_batches": 2}),
        (4, {"pp": 2, "ep": 2}, {"batch": 12, "micro_batches": 4}),
        (6, {"tp": 2, "shard": 3}, {"batch": 8}),
        (8, {"pp": 2, "tp": 2, "shard": 2}, {"batch": 6, "micro_batches": 2}),
    ],
)
def test_the_fullest_of_all_ranks(
    ranks: int, layout: Mapping[str, object], train: Mapping[str, int], on_cpu: bool
) -> None:
    job = tiny_job(model={"vocab": 60}, layout=layout, train=train)
    plan = lay_out(job.layout, job.model, ranks)
    all_of_them = [memory(job, plan, rank, on_cpu=on_cpu).peak_bytes for rank in range(ranks)]
    rank, needs = fullest(job, plan, on_cpu=on_cpu)
    assert needs.peak_bytes == all_of_them[rank] == max(all_of_them)
    assert max(all_of_them) > min(all_of_them)


def test_the_tightest_is_not_the_fullest_where_devices_differ() -> None:
    """Rank 2 has fewer samples than ranks 0 and 1 and half their memory."""
    hosts = [
        {"name": name, "preset": "h100-8", "devices": {"count": count, "memory_bytes": size}}
        for name, count, size in (("large", 2, 2e10), ("small", 1, 1e10))
    ]
    net = {"ends": ["*", "*"], "kind": "ethernet", "latency_s": 5e-5, "bandwidth": 1e9}
    cluster = resolve({"name": "test", "hosts": hosts, "links": [net]}, "test")
    job = tiny_job(train={"batch": 8}, layout={"shard": "all"})
    plan, places = lay_out(job.layout, job.model, 3), place(cluster, 3)
    shares = [
        memory(job, plan, rank, on_cpu=False).peak_bytes / device_at(cluster, at).memory_bytes
        for rank, at in enumerate(places)
    ]
    held = tightest(job, plan, cluster, places)
    assert held.share == max(shares)
    assert (held.rank, held.device.memory_bytes) == (2, 1e10)


def test_the_fullest_is_where_the_loads_are() -> None:
    """All that matters of a layer is its own load; counts by rank say the same as loads."""
    job = tiny_job(layout={"ep": 4}, train={"batch": 8})
    plan = lay_out(job.layout, job.model, 4)
    even, hot = np.ones(job.model.experts), np.ones(job.model.experts)
    hot[list(plan.homes(2, 0))] = 9
    loads = [even, hot]
    rank, needs = fullest(job, plan, loads=loads)
    assert rank == 2
    assert needs == memory(job, plan, 2, [expert_counts(job, plan, load) for load in loads])
    assert needs.peak_bytes > fullest(job, plan)[1].peak_bytes
    assert fullest(job, plan, loads=[even] * 2)[1] == fullest(job, plan)[1]
