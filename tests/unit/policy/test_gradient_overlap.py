"""Gradient reductions during backward: simple cases by hand, and a comparison with sequential
execution."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from slow_timeline import simulate_events, unfold

from moesaic.facts.cluster import Cluster
from moesaic.facts.job import Job
from moesaic.facts.plan import plan_from_layout
from moesaic.facts.workload.gradient_reduction import OVERLAPPED_REDUCTIONS
from moesaic.policy.cost.event import Event
from moesaic.policy.cost.gradient_reduction import overlap_reductions
from moesaic.policy.cost.step import JobCosts
from moesaic.testing.clusters import make_cluster
from moesaic.testing.jobs import tiny_job


def event(name: str, phase: str, block: str, seconds: float) -> Event:
    return Event(
        name, phase, block, np.full(2, seconds), [[0, 1]] if name in OVERLAPPED_REDUCTIONS else ()
    )


@dataclass(frozen=True)
class UniformNetwork:
    hidden: bool
    between: bool = False

    def overlaps(self, event: Event) -> bool:
        return self.hidden

    def is_inter_host(self, event: Event) -> bool:
        return self.between


@pytest.mark.parametrize("between", [False, True])
def test_collectives_wait_for_reductions_on_the_same_channel(between: bool) -> None:
    """A reduction between hosts delays collectives between hosts only; likewise inside hosts."""

    @dataclass(frozen=True)
    class DenseBetweenHosts(UniformNetwork):
        def is_inter_host(self, event: Event) -> bool:
            return event.name == "dense gradients" or between

    names = ("layers.1", "layers.0", "embed")
    exchange = Event("tokens", "backward", names[1], np.full(2, 0.5), [[0, 1]])
    backward = [event("work", "backward", name, 1.0) for name in names]
    backward.insert(2, exchange)
    backward, rest = overlap_reductions(
        backward, [event("dense gradients", "reduce", names[0], 1.25)], DenseBetweenHosts(True)
    )
    timeline = simulate_events([*backward, *rest], 2)
    assert timeline.step_s == 3.5 + 0.25 * between
    assert timeline.queueing_s(0) == 0.25 * between


def step(compute_s: float, collective_s: float, *, overlaps: bool) -> float:
    """Return seconds of a backward through four blocks with a bucket each, and of an update."""
    names = [f"layers.{n}" for n in (3, 2, 1, 0)]
    backward = [event("work", "backward", name, compute_s) for name in names]
    reductions = [event("dense gradients", "reduce", name, collective_s) for name in names]
    update = [
        event("targets", "data", "step", 0.0),
        *reductions,
        event("adamw", "optimizer", "step", 2),
    ]
    backward, rest = overlap_reductions(backward, update, UniformNetwork(overlaps))
    assert [one.name for one in rest if one.phase == "data"] == ["targets"]
    return simulate_events([*backward, *rest], 2).step_s


@pytest.mark.parametrize(("compute_s", "collective_s"), [(1.0, 0.25), (0.25, 1.0), (1.0, 1.0)])
def test_exposed_time_is_the_last_reduction_or_the_first_block(
    compute_s: float, collective_s: float
) -> None:
    sequential = 4 * compute_s + 4 * collective_s + 2
    assert step(compute_s, collective_s, overlaps=False) == sequential
    hidden = compute_s + 3 * max(compute_s, collective_s) + collective_s + 2
    assert step(compute_s, collective_s, overlaps=True) == hidden < sequential


def cluster(hosts: int, kind: str = "cpu", bandwidth: float = 1e9) -> Cluster:
    speed = [{"dtype": "fp32", "flops": 1e11}]
    bus, network = ({"latency_s": s, "bandwidth": bandwidth} for s in (1e-6, 1e-5))
    devices = [{"kind": kind, "count": 4 // hosts, "matmul": speed}] * hosts
    return make_cluster(*devices, bus=bus, network=network)


class WithoutOverlap(JobCosts):
    """All reductions after backward, since nothing overlaps."""

    def overlaps(self, event: Event) -> bool:
        del event
        return False


def job(layout: dict[str, Any], micro_batches: int = 1) -> Job:
    sizes = {"hidden": 768, "heads": 6, "head_dim": 128, "kv_heads": 6, "layers": 6, "vocab": 60}
    train = {"precision": "fp32", "micro_batches": micro_batches, "batch": 48}
    return tiny_job(model=sizes, layout=layout, train=train, data={"sequence": 64})


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("layout", [{}, {"ep": 2}, {"dp_shard": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize(("hosts", "kind"), [(2, "cpu"), (1, "gpu"), (2, "gpu")])
def test_overlap_changes_only_the_time(
    hosts: int, kind: str, layout: dict[str, Any], micro_batches: int
) -> None:
    one = job(layout, micro_batches)
    plan, where = plan_from_layout(one.layout, one.model, 4), cluster(hosts, kind)
    overlapped, sequential = (
        unfold(kind.from_job(one, plan, where).step()) for kind in (JobCosts, WithoutOverlap)
    )

    def work(events: list[Event]) -> Counter[tuple[str, str, str, bytes]]:
        return Counter(
            (event.name, event.phase, event.block, event.seconds.tobytes())
            for event in events
            if event.seconds.any()
        )

    assert work(overlapped) == work(sequential)
    assert any(
        event.launches is not None and event.name in OVERLAPPED_REDUCTIONS for event in overlapped
    )
    assert simulate_events(overlapped, 4).step_s <= simulate_events(sequential, 4).step_s


def test_reductions_overlap_between_hosts_only() -> None:
    one = job({})
    plan = plan_from_layout(one.layout, one.model, 4)
    for hosts in (1, 2):
        overlapped, sequential = (
            unfold(kind.from_job(one, plan, cluster(hosts)).step())
            for kind in (JobCosts, WithoutOverlap)
        )
        assert any(event.launches is not None for event in overlapped) == (hosts > 1)
        assert (simulate_events(overlapped, 4).step_s < simulate_events(sequential, 4).step_s) == (
            hosts > 1
        )
