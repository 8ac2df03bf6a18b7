"""Test pipelines whose blocks take whole seconds."""

from __future__ import annotations

from typing import Any, get_args

from moesaic.facts.cluster import Cluster, place_ranks
from moesaic.facts.job.train import PipelineSchedule
from moesaic.facts.plan import Plan
from moesaic.facts.workload import STEP, Block, BlockSpec, BlockWork, MatmulShape, Op
from moesaic.policy.cost.cluster_costs import ClusterCosts
from moesaic.policy.cost.compute import PEAK_FRACTION
from moesaic.policy.cost.network import NetworkModel
from moesaic.policy.cost.pipeline import PipelineTraffic, pipeline_step
from moesaic.policy.cost.timeline import Timeline, simulate_step
from moesaic.testing.clusters import make_cluster

SCHEDULES: tuple[PipelineSchedule, ...] = get_args(PipelineSchedule)
UNIT = MatmulShape(2, 3, 4)
"""Matmul that takes one second on these devices, as do the matmuls of its gradients."""


def cluster(hosts: int = 1, count: int = 8, latency_s: float = 0.0) -> Cluster:
    """Return devices that only compute matmuls, with links that have latency only."""
    speed = [{"dtype": kind, "flops": UNIT.flops / PEAK_FRACTION} for kind in ("fp32", "fp64")]
    device = {"count": count, "memory_bandwidth": 1e30, "launch_s": 0.0, "matmul": speed}
    wire = {"latency_s": latency_s, "bandwidth": 1e30}
    return make_cluster(*[device] * hosts, bus=wire, network=wire)


def block(name: str, seconds: int = 1, update: BlockWork | None = None) -> Block:
    """Return a block that takes `seconds` forward and twice as long backward."""
    forward = Op("q", (MatmulShape(2, 3, 4, seconds),))
    weight_gradient = MatmulShape(3, 4, 2, seconds, is_weight_gradient=True)
    backward = Op("q", (MatmulShape(2, 4, 3, seconds), weight_gradient))
    return Block(
        BlockSpec(name, "other"),
        BlockWork((forward,)),
        BlockWork((backward,)),
        update or BlockWork(),
    )


def pipeline(
    schedule: PipelineSchedule,
    num_ranks: int,
    micro_batches: int,
    *,
    seconds: list[int] | None = None,
    each: int | None = None,
    span: int = 1,
) -> tuple[Plan, PipelineTraffic, dict[int, list[Block]]]:
    """Return a plan with one layer per stage that takes `seconds` forward, its traffic and its
    blocks."""
    stages_per_rank = each or (2 if schedule == "interleaved" else 1)
    count = num_ranks * stages_per_rank
    names = [[f"layers.{index}"] for index in range(count)]
    plan = Plan(
        ranks=num_ranks * span, ep=1, dp_shard=1, pp=num_ranks, schedule=schedule, experts=0,
        stages=names if stages_per_rank == (2 if schedule == "interleaved" else 1) else None,
    )  # fmt: skip
    taken = seconds or [1] * count
    work = {
        rank * span: [
            *(
                block(f"layers.{stage}.ffn", taken[stage])
                for stage in range(rank, count, num_ranks)
            ),
            Block(BlockSpec(STEP, "other")),
        ]
        for rank in range(num_ranks)
    }
    return plan, PipelineTraffic(names, micro_batches, [0] * plan.ranks), work


def simulate(
    schedule: PipelineSchedule,
    num_ranks: int,
    micro_batches: int,
    latency_s: float = 0.0,
    **options: Any,
) -> Timeline:
    """Return the timeline of such a pipeline."""
    plan, traffic, work = pipeline(schedule, num_ranks, micro_batches, **options)
    where = cluster(count=plan.ranks, latency_s=latency_s)
    places = place_ranks(where, plan.ranks)
    costs = ClusterCosts(plan, where, places, NetworkModel(where, places))
    equal_ranks = {first: list(range(first, first + plan.ranks_per_stage)) for first in work}
    return simulate_step(pipeline_step(costs, traffic, work, equal_ranks), plan.ranks)
