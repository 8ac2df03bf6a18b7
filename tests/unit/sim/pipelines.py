"""Pipelines whose blocks take whole seconds, for tests."""

from __future__ import annotations

from typing import Any, get_args

from moesaic.facts.cluster import Cluster, place
from moesaic.facts.cluster.file import resolve
from moesaic.facts.job.train import Schedule
from moesaic.facts.plan import Plan
from moesaic.facts.workload import STEP, Block, Op, Product, Work
from moesaic.policy.cost.compute import PEAK_SHARE
from moesaic.policy.cost.lanes import Lanes
from moesaic.policy.cost.pipeline import Flow, pipelined
from moesaic.policy.cost.traffic import Traffic
from moesaic.sim.timeline import Timeline, run

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
UNIT = Product(2, 3, 4)
"""A product that takes a second on the devices below, as do those of its gradients."""


def cluster(hosts: int = 1, count: int = 8, latency_s: float = 0.0) -> Cluster:
    """Devices that do nothing but products, and links that have latency alone."""
    speed = UNIT.flops / PEAK_SHARE
    device = {
        "kind": "gpu", "model": "one", "count": count, "memory_bytes": 1e12,
        "memory_bandwidth": 1e30, "call_s": 0.0,
        "matmul": [{"dtype": kind, "flops": speed} for kind in ("fp32", "fp64")],
    }  # fmt: skip
    wire = {"kind": "bus", "latency_s": latency_s, "bandwidth": 1e30}
    host = {
        "name": "a", "replicas": hosts, "memory_bytes": 1e12, "devices": [device], "link": wire,
    }  # fmt: skip
    links = [{"ends": ["*", "*"], **wire}] * (hosts > 1)
    return resolve({"name": "test", "hosts": [host], "links": links}, "test")


def block(name: str, seconds: int = 1, update: Work | None = None) -> Block:
    """A block that takes so many seconds forward and twice as many backward."""
    forward = Op("q", (Product(2, 3, 4, seconds),))
    backward = Op("q", (Product(2, 4, 3, seconds), Product(3, 4, 2, seconds)))
    return Block(name, Work((forward,)), Work((backward,)), update or Work())


def pipeline(
    schedule: Schedule,
    parts: int,
    micro_batches: int,
    *,
    seconds: list[int] | None = None,
    each: int | None = None,
    span: int = 1,
) -> tuple[Plan, Flow, dict[int, list[Block]]]:
    """A plan whose stages have a layer each, which takes `seconds` forward; its flow and work."""
    per_part = each or (2 if schedule == "interleaved" else 1)
    count = parts * per_part
    names = [[f"layers.{index}"] for index in range(count)]
    plan = Plan(
        ranks=parts * span, ep=1, shard=1, pp=parts, schedule=schedule, experts=0,
        stages=names if per_part == (2 if schedule == "interleaved" else 1) else None,
    )  # fmt: skip
    taken = seconds or [1] * count
    work = {
        part * span: [
            *(block(f"layers.{stage}.ffn", taken[stage]) for stage in range(part, count, parts)),
            Block(STEP, Work(), Work(), Work()),
        ]
        for part in range(parts)
    }
    return plan, Flow(names, micro_batches, [0] * plan.ranks), work


def simulate(
    schedule: Schedule, parts: int, micro_batches: int, latency_s: float = 0.0, **how: Any
) -> Timeline:
    """The timeline of such a pipeline, over links of so much latency."""
    plan, flow, work = pipeline(schedule, parts, micro_batches, **how)
    where = cluster(count=plan.ranks, latency_s=latency_s)
    places = place(where, plan.ranks)
    lanes = Lanes(plan, where, places, Traffic(where, places))
    alike = {first: list(range(first, first + plan.span)) for first in work}
    return run(pipelined(lanes, flow, work, alike), plan.ranks)
