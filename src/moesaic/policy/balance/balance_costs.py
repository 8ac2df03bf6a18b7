"""Predicted costs of expert replicas, for runs without measured costs.

They follow from the cluster's file, or from typical figures of such devices. They are
deterministic, so that two runs of a job decide alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from moesaic.facts.job import BalanceCosts, Job
from moesaic.facts.plan import Plan
from moesaic.facts.workload import COMPUTED_BYTES, EXPERTS
from moesaic.facts.workload.sizes import FloatType
from moesaic.policy.cost.step import JobCosts

_FLOPS = {
    "cpu": {"fp64": 2.5e10, "fp32": 5e10, "bf16": 5e10, "fp16": 5e10},
    "other": {"fp64": 2e13, "fp32": 4e13, "bf16": 2e14, "fp16": 2e14},
}
"""Matmul flops per second by precision: of one CPU thread, and of another device."""
_BYTES_PER_S = {"cpu": (3e9, 1.1e8), "other": (5e10, 1e10)}
"""Bytes per second: of a rank within its host, and of a host to others (1 and 100 Gbit/s)."""
_READ_BYTES_PER_S = {"cpu": 5e9, "other": 1e12}
"""Bytes per second at which matmuls read weights."""
_LATENCY_S = {"cpu": (1e-4, 5e-4), "other": (3e-5, 5e-5)}
_CPU_S_PER_BYTE = {"cpu": 5e-10, "other": 0.0}
"""CPU seconds per byte that passes a socket while ranks compute."""
_LARGE_MESSAGE_BYTES = 4 << 20
_MAX_LATENCY_SHARE = 0.9
"""Limit of the latency over the time of a large message: noise can make small messages slower."""
_MATMULS_PER_TOKEN = 2
"""Matmuls per routed token in forward."""


class RankDevice(NamedTuple):
    """Host and device of a rank."""

    host: str
    kind: str
    """Kind of device: "cpu" or another one."""
    num_threads: int
    """Threads that compute, on a CPU."""


class BalanceCostFacts(NamedTuple):
    """Facts of the costs of replicas on ranks without a cluster file."""

    ranks: list[RankDevice]
    """Host and device of each rank."""
    ep_groups: list[list[int]]
    """Ranks of each expert-parallel group."""
    expert_elements: float
    """Elements of one expert on one expert TP rank."""
    experts_per_rank: float
    """Experts that one rank owns in a layer."""
    precision: FloatType
    """Precision of training, `train.precision`."""

    @classmethod
    def of_job(cls, job: Job, plan: Plan, ranks: Sequence[RankDevice]) -> BalanceCostFacts:
        """Return the facts of `job` under `plan` on `ranks`."""
        elements = 3 * job.model.hidden * job.model.ffn / plan.etp
        return cls(
            list(ranks),
            list(plan.ep_groups()),
            elements,
            plan.experts / plan.ep,
            job.train.precision,
        )

    @property
    def weight_bytes(self) -> float:
        """Bytes of a rank's own experts in the dtype of matmuls."""
        return self.experts_per_rank * self.expert_elements * COMPUTED_BYTES[self.precision]


def default_balance_costs(facts: BalanceCostFacts) -> BalanceCosts:
    """Return typical costs for ranks on such devices; the slowest one counts."""
    ranks = facts.ranks
    on_cpu = any(rank.kind == "cpu" for rank in ranks)
    kind = "cpu" if on_cpu else "other"
    hosts = [len({ranks[rank].host for rank in group}) for group in facts.ep_groups]
    spans_hosts = max(hosts) > 1
    flops = _FLOPS[kind][facts.precision]
    if on_cpu:
        flops *= min(rank.num_threads for rank in ranks)
    bytes_per_s = _BYTES_PER_S[kind][spans_hosts]
    if spans_hosts:  # All ranks of a host send at once.
        bytes_per_s /= max(Counter(rank.host for rank in ranks).values())
    overlaps = min(hosts) > 1 or not on_cpu
    return BalanceCosts(
        expert_tokens_per_s=flops / (2 * facts.expert_elements),
        bytes_per_s=bytes_per_s, latency_s=_LATENCY_S[kind][spans_hosts],
        weight_read_s=facts.weight_bytes / _READ_BYTES_PER_S[kind],
        overlaps=overlaps, cpu_s_per_byte=_CPU_S_PER_BYTE[kind] * overlaps,
    )  # fmt: skip


def predict_balance_costs(costs: JobCosts) -> BalanceCosts:
    """Return the costs that the cluster's file implies; the slowest rank counts."""
    plan = costs.plan
    found = dict[str, tuple[float, float]]()
    for rank in range(plan.ranks):
        model = costs.device(rank).model
        if model not in found:
            rates = _expert_compute_s(costs, rank)
            if rates is not None:  # Other ranks with that model may have experts.
                found[model] = rates
    groups = plan.ep_groups()
    costs_by_group = costs.network.collective_costs("all_to_all", groups)
    calibration = costs.cluster.calibration
    factor = 1.0 if calibration is None else calibration.collectives
    latency_s = factor * max(cost.seconds(1.0) for cost in costs_by_group)
    total_s = factor * max(cost.seconds(_LARGE_MESSAGE_BYTES) for cost in costs_by_group)
    latency_s = min(latency_s, _MAX_LATENCY_SHARE * total_s)
    sent = _LARGE_MESSAGE_BYTES * (plan.ep - 1) / plan.ep
    hosts = (len({costs.places[rank].host for rank in group}) for group in groups)
    overlaps = costs.has_async_devices or all(number > 1 for number in hosts)
    return BalanceCosts(
        expert_tokens_per_s=1 / max(token_s for token_s, _ in found.values()),
        weight_read_s=max(weights_s for _, weights_s in found.values()),
        bytes_per_s=sent / (total_s - latency_s),
        latency_s=latency_s, overlaps=overlaps,
        cpu_s_per_byte=_CPU_S_PER_BYTE["other" if costs.has_async_devices else "cpu"] * overlaps,
    )  # fmt: skip


def _expert_compute_s(costs: JobCosts, rank: int) -> tuple[float, float] | None:
    """Return seconds per routed token in forward, and seconds of reading weights, at most half of
    the total.

    The rate holds for an even load. The result is None if `rank` has no experts.
    """
    for block in costs.blocks(rank):
        ops = [op for op in block.forward.ops if op.name == EXPERTS]
        rows = sum(one.rows * one.count for op in ops for one in op.matmuls) / _MATMULS_PER_TOKEN
        if rows:
            total_s = sum(costs.matmul_and_elementwise_s(rank, ops))
            facts = BalanceCostFacts.of_job(costs.job, costs.plan, ())
            read_s = facts.weight_bytes / costs.device(rank).memory_bandwidth
            weights_s = min(read_s, 0.5 * total_s)
            return (total_s - weights_s) / rows, weights_s
    return None
