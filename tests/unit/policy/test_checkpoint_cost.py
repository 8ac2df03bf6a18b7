"""Cost of checkpoints: bytes per host, and seconds on its disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from moesaic.facts.cluster import place_ranks
from moesaic.facts.cluster.file import resolve_cluster
from moesaic.facts.plan import plan_from_layout
from moesaic.facts.workload import count_parameters
from moesaic.policy.cost.memory import checkpoint_cost
from moesaic.testing.jobs import tiny_job

DEVICE = {
    "kind": "gpu", "model": "one", "count": 2, "memory_bytes": 1e10, "memory_bandwidth": 1e11,
    "matmul": [{"dtype": "fp64", "flops": 1e12}],
}  # fmt: skip
LINK = {"kind": "cable", "latency_s": 1e-6, "bandwidth": 1e9}


def disk(write: float) -> dict[str, Any]:
    others = dict.fromkeys(("read", "random_read", "random_write", "mixed"), 1e9)
    return {"path": "/", "write": write, **others}


def cluster(*writes: float | None, counts: Sequence[int] = (2, 2, 2)) -> Any:
    hosts = [
        {
            "name": f"h{index}", "memory_bytes": 1e10, "link": LINK,
            "devices": [{**DEVICE, "count": counts[index]}],
            "disks": [] if write is None else [disk(write), disk(1.0)],
        }
        for index, write in enumerate(writes)
    ]  # fmt: skip
    links = [{"ends": ["*", "*"], **LINK}]
    return resolve_cluster({"name": "any", "hosts": hosts, "links": links}, "test")


@pytest.mark.parametrize("layout", [{"ep": 4}, {"dp_shard": 2, "ep": 2}, {"pp": 2}])
def test_hosts_write_the_whole_checkpoint(layout: dict[str, int]) -> None:
    """Each element is written once: parameters and two moments in fp64."""
    job = tiny_job(layout=layout, train={"micro_batches": 2})
    plan, where = plan_from_layout(job.layout, job.model, 4), cluster(1e6, 2e6)
    found = checkpoint_cost(job, plan, where, place_ranks(where, 4))
    total = 3 * 8 * count_parameters(job.model).total
    assert found.host_bytes == pytest.approx(total / 2, rel=0.35)
    if "pp" not in layout:
        assert found.host_bytes == pytest.approx(total / 2, rel=0.02)
        assert found.seconds == pytest.approx(found.host_bytes / 1e6)


def test_the_slowest_disk_sets_the_time() -> None:
    """Hosts of one device and of seven; each host writes its bytes to its own disk."""
    job = tiny_job(layout={"dp_shard": 8}, train={"batch": 8})
    plan = plan_from_layout(job.layout, job.model, 8)
    for first, second in ((1e6, 1e7), (1e6, 1e4)):
        where = cluster(first, second, counts=(1, 7))
        found = checkpoint_cost(job, plan, where, place_ranks(where, 8))
        slowest = max(found.host_bytes / 7 / first, found.host_bytes / second)
        assert found.seconds == pytest.approx(slowest)


def test_time_is_unknown_for_hosts_without_disks() -> None:
    job, where = tiny_job(layout={"ep": 2}), cluster(1e6, None)
    plan = plan_from_layout(job.layout, job.model, 4)
    assert checkpoint_cost(job, plan, where, place_ranks(where, 4)).seconds is None
    alone = plan_from_layout(job.layout, job.model, 2)
    assert checkpoint_cost(job, alone, where, place_ranks(where, 2)).seconds is not None
