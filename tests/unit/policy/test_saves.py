"""What hosts write of a checkpoint, and how long their disks take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from moesaic.facts.cluster import place
from moesaic.facts.cluster.file import resolve
from moesaic.facts.plan import lay_out
from moesaic.facts.workload import count
from moesaic.facts.workload.share import Share
from moesaic.policy.cost.saves import save
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
    return resolve({"name": "any", "hosts": hosts, "links": links}, "test")


@pytest.mark.parametrize("layout", [{"ep": 4}, {"shard": 2, "ep": 2}, {"pp": 2}])
def test_hosts_write_all_of_it_between_them(layout: dict[str, int]) -> None:
    """Each number once: parameters and two moments, in fp64; what hosts have differs by little."""
    job = tiny_job(layout=layout, train={"micro_batches": 2})
    plan, where = lay_out(job.layout, job.model, 4), cluster(1e6, 2e6)
    found = save(job, plan, where, place(where, 4))
    whole = 3 * 8 * count(job.model).total
    staged = [Share.of(job, plan, rank).staged_bytes() for rank in range(4)]
    by_host = [sum(staged[:2]), sum(staged[2:])]
    assert sum(by_host) == whole
    assert found.host_bytes == (max(by_host) if "pp" in layout else by_host[0])
    assert found.host_bytes == pytest.approx(whole / 2, rel=0.35)
    assert found.seconds == pytest.approx(max(by_host[0] / 1e6, by_host[1] / 2e6))


def test_the_last_disk_decides_whatever_hosts_are_like() -> None:
    """A host of one device and one of seven; each host's bytes on its own disk."""
    job = tiny_job(layout={"shard": 8}, train={"batch": 8})
    plan = lay_out(job.layout, job.model, 8)
    staged = [Share.of(job, plan, rank).staged_bytes() for rank in range(8)]
    for writes in ((1e6, 1e7), (1e6, 1e4)):
        where = cluster(*writes, counts=(1, 7))
        found = save(job, plan, where, place(where, 8))
        assert found.host_bytes == sum(staged[1:])
        assert found.seconds == max(staged[0] / writes[0], sum(staged[1:]) / writes[1])


def test_a_host_without_a_disk_leaves_it_open() -> None:
    job, where = tiny_job(layout={"ep": 2}), cluster(1e6, None)
    plan = lay_out(job.layout, job.model, 4)
    assert save(job, plan, where, place(where, 4)).seconds is None
    alone = lay_out(job.layout, job.model, 2)
    assert save(job, alone, where, place(where, 2)).seconds is not None
