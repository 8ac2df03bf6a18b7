"""Sums of gradients under backward: against plain cases, and against taking turns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from moesaic.facts.cluster import Cluster
from moesaic.facts.cluster.file import resolve
from moesaic.facts.job import Job
from moesaic.facts.plan import lay_out
from moesaic.facts.workload.sums import GRADIENTS
from moesaic.policy.cost.event import Event
from moesaic.policy.cost.step import Costs
from moesaic.policy.cost.sums import under_backward
from moesaic.sim.timeline import run
from moesaic.testing.jobs import tiny_job


def event(name: str, phase: str, block: str, seconds: float) -> Event:
    return Event(name, phase, block, np.full(2, seconds), [[0, 1]] if name in GRADIENTS else ())


@dataclass(frozen=True)
class Everywhere:
    hidden: bool
    between: bool = False

    def hides(self, message: Event) -> bool:
        return self.hidden

    def leaves_hosts(self, message: Event) -> bool:
        return self.between


@pytest.mark.parametrize("between", [False, True])
def test_what_a_layer_says_waits_for_sums_on_the_same_way(between: bool) -> None:
    """A sum between hosts holds up what is said there, and one inside a host what is said inside:
    not each other."""

    @dataclass(frozen=True)
    class Some(Everywhere):
        def leaves_hosts(self, message: Event) -> bool:
            return message.name == "dense" or between

    names = ("layers.1", "layers.0", "embed")
    exchange = Event("tokens", "backward", names[1], np.full(2, 0.5), [[0, 1]])
    backward = [event("work", "backward", name, 1.0) for name in names]
    backward.insert(2, exchange)
    backward, rest = under_backward(
        backward, [event("dense", "reduce", names[0], 1.25)], Some(True)
    )
    timeline = run([*backward, *rest], 2)
    assert timeline.step_s == 3.5 + 0.25 * between
    assert timeline.queueing_s(0) == 0.25 * between


def step(computes: float, speaks: float, *, hides: bool) -> float:
    """Seconds of a backward through four blocks, each of which has a bucket, and an update."""
    names = [f"layers.{n}" for n in (3, 2, 1, 0)]
    backward = [event("work", "backward", name, computes) for name in names]
    sums = [event("dense", "reduce", name, speaks) for name in names]
    update = [event("targets", "data", "step", 0.0), *sums, event("adamw", "optimizer", "step", 2)]
    backward, rest = under_backward(backward, update, Everywhere(hides))
    assert [one.name for one in rest if one.phase == "data"] == ["targets"]
    return run([*backward, *rest], 2).step_s


@pytest.mark.parametrize(("computes", "speaks"), [(1.0, 0.25), (0.25, 1.0), (1.0, 1.0)])
def test_all_but_the_last_are_hidden_or_all_but_the_first_block(
    computes: float, speaks: float
) -> None:
    turns = 4 * computes + 4 * speaks + 2
    assert step(computes, speaks, hides=False) == turns
    hidden = computes + 3 * max(computes, speaks) + speaks + 2
    assert step(computes, speaks, hides=True) == hidden < turns


def cluster(hosts: int, kind: str = "cpu", bandwidth: float = 1e9) -> Cluster:
    device = {
        "kind": kind, "model": "one", "count": 4 // hosts, "memory_bytes": 1e10,
        "memory_bandwidth": 1e11, "call_s": 1e-6, "matmul": [{"dtype": "fp32", "flops": 1e11}],
    }  # fmt: skip
    link = {"kind": "bus", "latency_s": 1e-6, "bandwidth": bandwidth}
    some = [
        {"name": name, "memory_bytes": 1e12, "devices": [device], "link": link}
        for name in "abcd"[:hosts]
    ]
    links = [{"ends": ["a", "b"], "kind": "ethernet", "latency_s": 1e-5, "bandwidth": bandwidth}]
    return resolve({"name": "test", "hosts": some, "links": links[: hosts - 1]}, "test")


class AtTheEnd(Costs):
    """All sums when backward is over, as nothing is hidden."""

    def hides(self, message: Event) -> bool:
        del message
        return False


def job(layout: dict[str, Any], micro_batches: int = 1) -> Job:
    sizes = {"hidden": 768, "heads": 6, "head_dim": 128, "kv_heads": 6, "layers": 6, "vocab": 60}
    train = {"precision": "fp32", "micro_batches": micro_batches, "batch": 48}
    return tiny_job(model=sizes, layout=layout, train=train, data={"sequence": 64})


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("layout", [{}, {"ep": 2}, {"shard": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize(("hosts", "kind"), [(2, "cpu"), (1, "gpu"), (2, "gpu")])
def test_nothing_is_lost_and_nothing_is_gained_but_time(
    hosts: int, kind: str, layout: dict[str, Any], micro_batches: int
) -> None:
    one = job(layout, micro_batches)
    plan, where = lay_out(one.layout, one.model, 4), cluster(hosts, kind)
    beside, turns = (of.of(one, plan, where).events() for of in (Costs, AtTheEnd))

    def work(events: list[Event]) -> Counter[tuple[str, str, str, bytes]]:
        return Counter(
            (event.name, event.phase, event.block, event.seconds.tobytes())
            for event in events
            if event.seconds.any()
        )

    assert work(beside) == work(turns)
    assert any(event.beside is not None and event.name in GRADIENTS for event in beside)
    assert run(beside, 4).step_s <= run(turns, 4).step_s


def test_between_hosts_sums_are_hidden_and_inside_one_they_are_not() -> None:
    one = job({})
    plan = lay_out(one.layout, one.model, 4)
    for hosts in (1, 2):
        beside, turns = (kind.of(one, plan, cluster(hosts)).events() for kind in (Costs, AtTheEnd))
        assert any(event.beside is not None for event in beside) == (hosts > 1)
        assert (run(beside, 4).step_s < run(turns, 4).step_s) == (hosts > 1)
