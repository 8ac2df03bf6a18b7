"""What copies of experts cost and save, where nobody has measured it: by what a cluster's file says
of devices and links, or as is usual of such devices.

Each says the same each time, so that two runs of a job decide alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from moesaic.facts.job import Job, Prices
from moesaic.facts.plan import Plan
from moesaic.facts.workload import COMPUTED_BYTES, EXPERTS
from moesaic.policy.cost.step import Costs

_FLOPS = {
    "cpu": {"fp64": 2.5e10, "fp32": 5e10, "bf16": 5e10, "fp16": 5e10},
    "other": {"fp64": 2e13, "fp32": 4e13, "bf16": 2e14, "fp16": 2e14},
}
"""Of products in a second, by precision: of a thread of a processor, of another device."""
_BYTES_PER_S = {"cpu": (3e9, 1.1e8), "other": (5e10, 1e10)}
"""That a rank sends within its host, and a host to others: over 1 Gbit/s, and 100."""
_READ_BYTES_PER_S = {"cpu": 5e9, "other": 1e12}
"""Of matrices that products take."""
_LATENCY_S = {"cpu": (1e-4, 5e-4), "other": (3e-5, 5e-5)}
_HANDLING_S = {"cpu": 5e-10, "other": 0.0}
"""Of a processor, that a byte takes which goes through sockets while it computes."""
_MANY_BYTES = 4 << 20
_PRODUCTS = 2
"""That a row takes part in forward."""


class Rank(NamedTuple):
    """Where a rank runs."""

    host: str
    kind: str
    """Of its device: cpu, or another."""
    threads: int
    """That it computes with, if that is a cpu."""


def usual(job: Job, plan: Plan, ranks: Sequence[Rank]) -> Prices:
    """Of devices of such kinds; the slowest counts."""
    on_cpu = any(rank.kind == "cpu" for rank in ranks)
    kind = "cpu" if on_cpu else "other"
    hosts = [len({ranks[rank].host for rank in group}) for group in plan.expert_groups()]
    apart = max(hosts) > 1
    flops = _FLOPS[kind][job.train.precision]
    if on_cpu:
        flops *= min(rank.threads for rank in ranks)
    bytes_per_s = _BYTES_PER_S[kind][apart]
    if apart:  # All of a host send at once.
        bytes_per_s /= max(Counter(rank.host for rank in ranks).values())
    hides = min(hosts) > 1 or not on_cpu
    return Prices(
        rows_per_s=flops / (6 * job.model.hidden * job.model.ffn / plan.etp),
        bytes_per_s=bytes_per_s, latency_s=_LATENCY_S[kind][apart],
        matrices_s=_own_bytes(job, plan) / _READ_BYTES_PER_S[kind],
        hides=hides, handling_s=_HANDLING_S[kind] * hides,
    )  # fmt: skip


def _own_bytes(job: Job, plan: Plan) -> float:
    """Of a rank's own experts, in the type of products."""
    numbers = 3 * job.model.hidden * job.model.ffn / plan.etp
    return plan.experts / plan.ep * numbers * COMPUTED_BYTES[job.train.precision]


def planned(costs: Costs) -> Prices:
    """Of the ranks of a job that is laid over a cluster; the slowest counts."""
    plan = costs.plan
    found = dict[str, tuple[float, float]]()
    for rank in range(plan.ranks):
        model = costs.device(rank).model
        if model not in found:
            computing = _computing_s(costs, rank)
            if computing is not None:  # Others of that model may have experts.
                found[model] = computing
    groups = plan.expert_groups()
    paces = costs.traffic.paces("all_to_all", groups)
    learnt = costs.cluster.calibration
    slower = 1.0 if learnt is None else learnt.messages
    latency_s = slower * max(pace.seconds(1.0) for pace in paces)
    whole_s = slower * max(pace.seconds(_MANY_BYTES) for pace in paces)
    sent = _MANY_BYTES * (plan.ep - 1) / plan.ep
    hosts = (len({costs.places[rank].host for rank in group}) for group in groups)
    hides = costs.hand_ahead or all(number > 1 for number in hosts)
    return Prices(
        rows_per_s=1 / max(row_s for row_s, _ in found.values()),
        matrices_s=max(matrices_s for _, matrices_s in found.values()),
        bytes_per_s=sent / max(whole_s - latency_s, 1e-3 * whole_s),
        latency_s=latency_s, hides=hides,
        handling_s=_HANDLING_S["other" if costs.hand_ahead else "cpu"] * hides,
    )  # fmt: skip


def _computing_s(costs: Costs, rank: int) -> tuple[float, float] | None:
    """Seconds of a row forward, where all experts of `rank` have as many, and of reading matrices,
    which are half of the whole at most; None if it has none."""
    for block in costs.work(rank):
        ops = [op for op in block.forward.ops if op.name == EXPERTS]
        rows = sum(one.rows * one.count for op in ops for one in op.products) / _PRODUCTS
        if rows:
            whole_s = sum(costs.apart_s(rank, ops))
            read_s = _own_bytes(costs.job, costs.plan) / costs.device(rank).memory_bandwidth
            matrices_s = min(read_s, 0.5 * whole_s)
            return (whole_s - matrices_s) / rows, matrices_s
    return None
