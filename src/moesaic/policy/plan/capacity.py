"""Largest model of a job's shape that a cluster can train with expert state on drives.

The shape is fixed, except for the experts per layer. Two methods stand side by side: the capacity
equations of SE-MoE (Shen et al. 2022) for its three tiers, and moesaic's own storage, where CPU
ranks keep the dense state and few blocks of experts in memory. Nothing is measured.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from moesaic.base import keys
from moesaic.base.errors import ConfigError
from moesaic.base.units import format_bytes
from moesaic.facts.cluster import Cluster, device_at, place_ranks
from moesaic.facts.expert_blocks import BlockKind
from moesaic.facts.job import Job, ModelConfig
from moesaic.facts.job.model import MAX_EXPERTS
from moesaic.facts.plan import Plan, plan_from_job
from moesaic.facts.workload import count_parameters
from moesaic.policy.plan.budget import (
    BudgetFacts,
    budget_bytes,
    budget_facts,
    divide_budget,
    smallest_budget,
)
from moesaic.policy.plan.mapping import max_ranks

_GPU, _HOST, _RANK, _DRIVE, _NUMBERS, _CPU_RANKS = (
    "GPU memory", "host memory", "memory per rank", "drive", "expert numbers", "CPU ranks",
)  # fmt: skip
_SEARCH_FACTOR = 1.25
"""Ratio of the numbers of experts that the search tries first."""
_LOOKAHEAD = 8
"""Numbers of experts that are tried beyond the first one that does not fit."""
_SE_MOE_REMEDIES = {
    _GPU: "add GPUs: they hold the dense state, and a layer's active experts",
    _HOST: "add host memory: it holds the state of all active experts",
    _DRIVE: "add space on the drives",
}


class Capacity(NamedTuple):
    """Bytes over all hosts."""

    gpu_bytes: float | None
    """Usable memory of GPUs; None: hosts without any."""
    host_bytes: float
    ssd_bytes: float


class Limit(NamedTuple):
    """Largest model that one resource allows."""

    method: str
    resource: str
    experts: int
    """Experts per layer; 0: the dense state alone does not fit."""


def se_moe_limits(
    capacity: Capacity, dense: int, active_fraction: float, num_layers: int
) -> dict[str, float]:
    """Return the most expert parameters by resource, by SE-MoE's capacity equations.

    A parameter has 16 bytes: weight and gradient in fp16 (4), master weight and two moments (12).
    GPUs hold all dense state, and weights and gradients of one layer's active experts. The host
    caches the state of active experts. Drives hold 12 bytes of all experts. Without GPUs, the host
    also has the dense state.

    Args:
        capacity: bytes of each tier, over all hosts.
        dense: dense parameters.
        active_fraction: fraction of the experts that a step uses, above 0.
        num_layers: layers with experts.
    """
    limits, host_bytes = dict[str, float](), capacity.host_bytes
    if capacity.gpu_bytes is None:
        host_bytes -= 16 * dense
    else:
        gpu_bytes = capacity.gpu_bytes - 16 * dense
        limits[_GPU] = gpu_bytes * num_layers / (4 * active_fraction)
    limits[_HOST] = host_bytes / (16 * active_fraction)
    limits[_DRIVE] = capacity.ssd_bytes / 12
    return {resource: max(most, 0.0) for resource, most in limits.items()}


def active_fraction(job: Job) -> float:
    """Return the expected fraction of experts with tokens in a step, under even routing."""
    model, tokens = job.model, job.train.batch * job.data.sequence
    if model.top_k == model.experts:
        return 1.0
    return -math.expm1(tokens * math.log1p(-model.top_k / model.experts))


@dataclass(frozen=True)
class RankStorage:
    """Memory and drive of a CPU rank that keeps expert state on a drive."""

    job: Job
    plan: Plan

    @cached_property
    def bytes_per_expert(self) -> int:
        """Bytes on the drives of all ranks with one more expert per layer."""
        num_blocks = len(BlockKind) * len(self.job.model.expert_layers)
        return num_blocks * self.facts(self.job.model.experts).block_bytes

    def drive_bytes(self, experts: int) -> int:
        """Return the bytes of the scratch file with `experts` per layer."""
        return experts // self.plan.ep * self.bytes_per_expert

    def memory_bytes(self, experts: int) -> int:
        """Return the smallest budget with `experts` per layer."""
        return smallest_budget(self.facts(experts))

    def facts(self, experts: int, host_bytes: float = 0) -> BudgetFacts:
        """Return what training divides a budget by, with `experts` per layer."""
        job = self.job.model_copy(update={"model": _with_experts(self.job.model, experts)})
        plan = plan_from_job(job, self.plan.ranks)
        # The last rank has the most samples.
        return budget_facts(job, plan, plan.ranks - 1, int(host_bytes))


def largest_model(
    job: Job,
    cluster: Cluster,
    ssd_bytes: float,
    num_ranks: int | None = None,
    origin: str = "the job",
) -> dict[str, Any]:
    """Return the largest models of the shape of `job` on `cluster` as plain data.

    Args:
        job: the job, with a `[memory]` table.
        cluster: the cluster.
        ssd_bytes: space on the drive of each host.
        num_ranks: number of ranks; None: all that the cluster has room for.
        origin: prefix of error messages about the job.
    """
    if job.memory is None:
        raise ConfigError(
            f"{origin}: the largest model has expert state on a drive, but [memory] is missing: "
            "add it with a directory, such as --set memory.ssd=/data/scratch"
        )
    plan = plan_from_job(job, num_ranks or max_ranks(cluster), origin)
    if plan.ep * plan.etp != plan.ranks:
        raise ConfigError(
            f"{origin}: layout.ep = {plan.ep} on {plan.ranks} ranks with [memory]: each expert "
            f"must have one owner, set layout.ep = {plan.ranks // plan.etp} or use another "
            "number of ranks"
        )
    places = place_ranks(cluster, plan.ranks)
    devices, hosts = [device_at(cluster, one) for one in places], Counter(p.host for p in places)
    gpu_bytes = sum(device.usable_bytes for device in devices if device.kind != "cpu")
    host_bytes = sum(cluster.by_name[name].memory_bytes for name in hosts)
    capacity = Capacity(gpu_bytes or None, host_bytes, ssd_bytes * len(hosts))
    storage, active = RankStorage(job, plan), active_fraction(job)
    free = min(cluster.by_name[name].memory_bytes / number for name, number in hosts.items())
    budget = _budget_bytes(job, free, origin)
    limits = _se_moe(job.model, capacity, active)
    if capacity.gpu_bytes is None:
        limits += _moesaic(storage, budget, ssd_bytes / max(hosts.values()))
    else:
        limits.append(Limit("moesaic", _CPU_RANKS, 0))
    tightest = [
        min((one for one in limits if one.method == name), key=lambda one: one.experts)
        for name in ("SE-MoE", "moesaic")
    ]
    remedies = [_SE_MOE_REMEDIES[tightest[0].resource], _remedy(storage, tightest[1], budget)]
    return {
        "cluster": cluster.name, "ranks": plan.ranks, "hosts": len(hosts),
        "devices": dict(Counter(device.model for device in devices)),
        "ssd_bytes": ssd_bytes, "budget_bytes": budget, "active_fraction": active,
        "micro_batches": job.train.micro_batches,
        "divided": _divided(storage, tightest[1].experts, budget),
        "limits": [_limit_figures(job.model, one) for one in limits],
        "largest": [
            {**_limit_figures(job.model, one), "remedy": remedy}
            for one, remedy in zip(tightest, remedies, strict=True)
        ],
    }  # fmt: skip


def _budget_bytes(job: Job, free: float, origin: str) -> float:
    """Return the memory that each rank may use, of `free` bytes."""
    assert job.memory is not None
    try:
        return budget_bytes(job.memory, int(free))
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None


def _se_moe(model: ModelConfig, capacity: Capacity, active: float) -> list[Limit]:
    """Return the limits of SE-MoE's equations, with the routers of the job's own experts."""
    num_layers, size = len(model.expert_layers), _expert_size(model)
    dense = count_parameters(model).total - num_layers * model.experts * size
    limits = se_moe_limits(capacity, dense, active, num_layers)
    return [
        Limit("SE-MoE", resource, int(most / (num_layers * size)))
        for resource, most in limits.items()
    ]


def _moesaic(storage: RankStorage, budget: float, ssd_bytes: float) -> list[Limit]:
    """Return the limits of ranks with `budget` bytes of memory and `ssd_bytes` of a drive each."""
    counts = _expert_counts(storage)
    limits = {
        _NUMBERS: len(counts),
        _RANK: _last_fitting(storage, counts, budget),
        _DRIVE: bisect_right(counts, ssd_bytes, key=storage.drive_bytes),
    }
    return [Limit("moesaic", name, counts[n - 1] if n else 0) for name, n in limits.items()]


def _last_fitting(storage: RankStorage, counts: range, budget: float) -> int:
    """Return the place, from 1, of the last of `counts` that fits a budget; 0 if none fits.

    Memory grows with the experts, but not from each number to the next: few experts get more tokens
    each, and a kernel takes as many experts at once as the cache has room for.
    """

    def fits(index: int) -> bool:
        return storage.memory_bytes(counts[index]) <= budget

    tried, index = {0}, 1.0
    while index < len(counts):
        tried.add(int(index))
        index = max(index + 1, _SEARCH_FACTOR * index)
    if storage.job.model.experts in counts:
        tried.add(counts.index(storage.job.model.experts))
    fitting = [index for index in tried if fits(index)]
    if not fitting:
        return 0
    last = max(fitting)
    refused = min((index for index in tried if index > last), default=len(counts))
    found = bisect_left(range(len(counts)), True, last + 1, refused, key=lambda at: not fits(at))
    while near := [at for at in range(found, min(found + _LOOKAHEAD, len(counts))) if fits(at)]:
        found = near[-1] + 1
    return found


def _expert_counts(storage: RankStorage) -> range:
    """Return the numbers of experts per layer that the job's layout and routers allow."""
    model = storage.job.model
    step = math.lcm(storage.plan.ep, model.expert_groups)
    return range(-(-model.top_k // step) * step, MAX_EXPERTS, step)


def _divided(storage: RankStorage, experts: int, budget: float) -> dict[str, int] | None:
    """Return the division of the budget for the largest model, if there is one."""
    return divide_budget(storage.facts(experts, budget))._asdict() if experts else None


def _remedy(storage: RankStorage, tightest: Limit, budget: float) -> str:
    """Return a change with which moesaic trains a larger model."""
    if tightest.resource == _CPU_RANKS:
        return "expert state on a drive is for CPU ranks: give a cluster of hosts without GPUs"
    if tightest.resource == _NUMBERS:
        return "raise model.layers or model.ffn: experts of a layer have numbers of two bytes"
    if tightest.resource == _DRIVE:
        return "add space on the drives, or hosts with drives and a larger layout.ep"
    counts = _expert_counts(storage)
    return _memory_remedy(storage, max(tightest.experts + counts.step, counts.start), budget)


def _memory_remedy(storage: RankStorage, experts: int, budget: float) -> str:
    """Return the change of the job that reduces memory most with `experts` per layer."""
    job, needed = storage.job, storage.memory_bytes(experts)
    micro_batches, remedies = 2 * job.train.micro_batches, list[tuple[int, str]]()
    for key, value in (
        ("train.recompute", True), ("train.micro_batches", micro_batches),
        ("layout.dp_shard", "all"),
    ):  # fmt: skip
        name, _, field = key.partition(".")
        section = getattr(job, name).model_copy(update={field: value})
        changed = job.model_copy(update={name: section})
        if changed.train.batch % changed.train.micro_batches == 0 and _can_shard(changed):
            plan = plan_from_job(changed, storage.plan.ranks)
            bytes_then = RankStorage(changed, plan).memory_bytes(experts)
            remedies.append((bytes_then, f"{key} = {keys.toml(value)}"))
    text = f"more experts need {format_bytes(needed)} of {format_bytes(budget)} per rank"
    least, change = min(remedies, default=(needed, ""))
    if least < needed:
        text += f", {format_bytes(least)} with {change}"
    return text if least <= budget else f"{text}; use fewer ranks per host, or more memory"


def _can_shard(job: Job) -> bool:
    """Return whether the block order allows the job's sharding of dense parameters."""
    return job.layout.dp_shard == 1 or not job.model.tied


def _limit_figures(model: ModelConfig, limit: Limit) -> dict[str, Any]:
    """Return a limit with the parameters of its model."""
    total = count_parameters(_with_experts(model, limit.experts)).total if limit.experts else 0
    return {**limit._asdict(), "parameters": total}


def _with_experts(model: ModelConfig, experts: int) -> ModelConfig:
    return model.model_copy(update={"experts": experts})


def _expert_size(model: ModelConfig) -> int:
    """Return the parameters of one expert: three matrices."""
    return 3 * model.hidden * model.ffn
