"""Folded simulations equal those of every rank and every micro-batch, on random plans."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import numpy as np
from pipelines import SCHEDULES
from slow_timeline import SlowTimeline, run_all

from moesaic.base.errors import ConfigError
from moesaic.facts.cluster import Cluster
from moesaic.facts.cluster.file import resolve_cluster
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, plan_from_job
from moesaic.policy.cost.step import JobCosts
from moesaic.policy.cost.timeline import Timeline, simulate_step
from moesaic.testing.clusters import make_device
from moesaic.testing.jobs import tiny_job

EXPERTS = 8
NOTHING = 1e-12
"""Seconds that may come from rounding."""


def random_cluster(draw: Random, ranks: int) -> Cluster:
    """Return hosts for `ranks` ranks, equal ones or with unlike devices and links."""
    kind, hosts, left = draw.choice(["gpu", "cpu"]), list[dict[str, Any]](), ranks
    is_even, seed = draw.random() < 0.5, draw.random()
    while left:
        draw = Random(seed) if is_even else draw
        count, speed = min(draw.choice([1, 2, 4, 8]), left), draw.choice([1.0, 0.6])
        left -= count
        device = make_device(
            kind=kind, count=count, memory_bandwidth=1e11 * speed,
            matmul=[{"dtype": "fp64", "flops": 1e9 * speed}],
        )  # fmt: skip
        link = {
            "kind": "bus", "latency_s": 1e-5, "bandwidth": draw.choice([1e8, 1e10]),
            "skew_s": draw.choice([0.0, 0.01]), "shared": draw.random() < 0.5,
        }  # fmt: skip
        name = f"h{len(hosts)}"
        hosts.append({"name": name, "memory_bytes": 1e12, "devices": [device], "link": link})
    net = {
        "ends": ["*", "*"], "kind": "ethernet", "latency_s": 5e-5,
        "bandwidth": draw.choice([1e7, 1e9]), "skew_s": draw.choice([0.0, 0.02]),
    }  # fmt: skip
    links = [net] * (len(hosts) > 1)
    return resolve_cluster({"name": "test", "hosts": hosts, "links": links}, "test")


def random_plan(draw: Random, pp: int) -> tuple[Job, Plan]:
    """Return a job with a plan; try until one is valid."""
    ranks = pp * draw.choice([1, 2, 4, 8] if pp == 1 else [1, 2, 4])
    stage = ranks // pp
    tp = draw.choice([size for size in (1, 2) if stage % size == 0])
    etp = draw.choice([1, tp])
    ep = draw.choice([size for size in (1, 2, 4) if stage % (size * etp) == 0])
    layout = {
        "pp": pp, "tp": tp, "etp": etp, "ep": ep, "dp_shard": draw.choice([1, stage // tp]),
        "schedule": draw.choice(SCHEDULES) if pp > 1 else "1f1b",
        "dispatch": draw.choice(["all_to_all", "dedup"]),
        "dispatch_hosts": draw.choice([1, 2]) if ep == 4 else 1,
        "chunks": draw.choice([1, 2]) if ep > 1 else 1,
        "overlap_local": ep > 1 and draw.random() < 0.5,
        "embedding": draw.choice(["whole", "columns"]) if tp == 1 else "whole",
    }  # fmt: skip
    micro_batches = draw.choice([1, 2, 4, 8] if pp == 1 else [4, 8])
    samples = draw.choice([stage // tp, 2 * (stage // tp), 3])
    train = {
        "micro_batches": micro_batches, "batch": micro_batches * samples,
        "recompute": draw.random() < 0.5,
    }  # fmt: skip
    try:
        job = tiny_job(model={"layers": 2 * pp, "vocab": 64}, layout=layout, train=train)
        return job, plan_from_job(job, ranks)
    except ConfigError:
        return random_plan(draw, pp)


def assert_equal(found: Timeline, slow: SlowTimeline, ranks: int) -> None:
    close = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
    close(found.end_s, slow.end_s)
    waits = np.array([slow.waiting_s(rank) for rank in range(ranks)])
    last = slow.end_s >= slow.step_s * (1 - 1e-12)
    close(waits[found.critical_rank], waits[last].min())
    close(found.bubble_fraction(), slow.bubble_fraction())
    for rank in {0, ranks // 2, ranks - 1}:
        for name in ("overlapped_s", "waiting_s", "queueing_s", "communication_s"):
            one, other = (getattr(timeline, name)(rank) for timeline in (found, slow))
            close(one, other, err_msg=name)
        for sums, others in (
            (found.seconds_by_phase(rank), slow.seconds_by_phase(rank)),
            (found.seconds_by_block(rank), slow.seconds_by_block(rank)),
            (found.max_seconds_by_block(), slow.max_seconds_by_block()),
        ):
            assert sums.keys() == others.keys()
            close([sums[name] for name in others], [*others.values()])
        spans = [(span.arrive_s, span.begin_s, span.end_s) for span in found.spans(rank)]
        expected = [(one.arrive_s[rank], one.begin_s[rank], one.end_s[rank]) for one in slow.spans]
        close(*([s for s in each if s[2] > s[0] + NOTHING] for each in (spans, expected)))


def test_folded_equals_unfolded_on_random_plans() -> None:
    for seed in range(100):
        draw = Random(seed)
        job, plan = random_plan(draw, draw.choice([1, 2, 4]))
        loads = [
            [float(draw.randint(1, 9)) for _ in range(EXPERTS)] for _ in range(job.model.layers)
        ]
        cluster = random_cluster(draw, plan.ranks)
        step = JobCosts.from_job(job, plan, cluster, draw.choice([None, loads])).step()
        assert_equal(simulate_step(step, plan.ranks), run_all(step, plan.ranks), plan.ranks)
