"""Largest model of a job's shape that a cluster can train with expert state on drives.

The shape is fixed, except for the experts per layer. Two methods stand side by side: the capacity
equations of SE-MoE (Shen et al. 2022) for its three tiers, and moesaic's own storage, where a rank
keeps the dense state and few experts in memory. Nothing is measured.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from moesaic.base import keys
from moesaic.base.errors import ConfigError
from moesaic.base.units import format_bytes
from moesaic.facts.cluster import Cluster, Device, device_at, place_ranks
from moesaic.facts.job import Job, ModelConfig
from moesaic.facts.job.model import MAX_EXPERTS
from moesaic.facts.plan import Plan, plan_from_job
from moesaic.facts.workload import STORED_BYTES, count_parameters, parameters, workload
from moesaic.facts.workload.parameters import local_size, moment_bytes
from moesaic.facts.workload.sizes import BIAS_BYTES, LOSS_CHUNK_TOKENS, Sizes
from moesaic.policy.plan.mapping import max_ranks

_RESIDENT_EXPERTS = 2
"""Experts of a rank in memory, at least: one that is computed or updated, one that is read."""
_AUTO_FRACTION = 0.8
"""Part of a rank's memory that `memory.host = "auto"` takes."""
_GPU, _HOST, _RANK, _DRIVE, _NUMBERS = (
    "GPU memory", "host memory", "memory per rank", "drive", "expert numbers",
)  # fmt: skip
_SE_MOE_REMEDIES = {
    _GPU: "add GPUs: they hold the dense state, and a layer's active experts",
    _HOST: "add host memory: it holds the state of all active experts",
    _DRIVE: "add space on the drives",
}


class Capacity(NamedTuple):
    """Bytes over all hosts."""

    gpu_bytes: float | None
    """Memory of GPUs; None: hosts without any."""
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
    """Memory and drive of a rank that keeps expert state on a drive."""

    job: Job
    plan: Plan
    on_cpu: bool
    """True if the rank computes on a CPU."""

    @property
    def element_bytes(self) -> int:
        """Bytes of a stored number."""
        return STORED_BYTES[self.job.train.precision]

    @property
    def expert_size(self) -> int:
        """Parameters of one expert on this rank."""
        return _expert_size(self.job.model) // self.plan.etp

    def drive_bytes(self, experts: int) -> int:
        """Return the bytes on the drive with `experts` per layer: parameters and two moments.

        With `train.clip`, gradients wait there too, until the norm of all is known.
        """
        arrays = 4 if self.job.train.clip else 3
        num_experts = experts // self.plan.ep * len(self.job.model.expert_layers)
        return num_experts * self.expert_size * arrays * self.element_bytes

    def memory_bytes(self, experts: int, micro_batches: int = 1) -> int:
        """Return the least bytes of memory with `experts` per layer.

        `micro_batches` pass through a block together, and the inputs of all blocks are kept.
        """
        resident = _RESIDENT_EXPERTS * 4 * self.expert_size * self.element_bytes
        kept = micro_batches * self.kept_bytes
        return self.dense_bytes(experts) + resident + self._working_bytes + kept

    def dense_bytes(self, experts: int) -> int:
        """Return bytes of dense parameters, gradients and moments; routers grow with `experts`."""
        plan, total = self.plan, 0
        for p in parameters(_with_experts(self.job.model, experts), lambda _: ()):
            if p.kind == "embedding":
                p = p.column_shard(plan.embedding_shards)
            if p.kind == "bias":
                total += p.size * BIAS_BYTES
                continue
            size = local_size(p.tp_shard(plan.tp), plan.dp_shard)
            total += 2 * size * self.element_bytes + sum(moment_bytes(p, size, self.job))
        return total

    @cached_property
    def _sizes(self) -> Sizes:
        return Sizes.of_rank(self.job, self.plan, self.plan.ranks - 1, on_cpu=self.on_cpu)

    @cached_property
    def _saved_bytes(self) -> dict[str, int]:
        """Bytes that autograd saves in each layer, and in embedding and head, per micro-batch."""
        saved = Counter[str]()
        rank = self.plan.ranks - 1  # It has the most samples.
        for block in workload(self.job, self.plan, rank, on_cpu=self.on_cpu):
            saved[block.spec.model_block] += block.saved_bytes
        return saved

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes of one micro-batch between forward and backward: inputs of blocks, and without
        recomputation all activations."""
        if self.plan.recomputes(self.job):
            inputs = self.job.model.layers + 1
            return inputs * self._sizes.stream_elements * self.element_bytes
        return sum(self._saved_bytes.values())

    @cached_property
    def _working_bytes(self) -> int:
        """Bytes of temporaries, of a recomputed layer, and of parameters that FSDP gathers.

        Backward of a layer needs about as many bytes for gradients as forward has saved; the loss
        needs logits of a chunk.
        """
        sizes, largest = self._sizes, max(self._saved_bytes.values())
        logits = 2 * min(sizes.tokens, LOSS_CHUNK_TOKENS) * sizes.vocab * self.element_bytes
        recomputed = largest if self.plan.recomputes(self.job) else 0
        return max(logits, largest) + recomputed + self._gathered_bytes()

    def _gathered_bytes(self) -> int:
        """Return bytes of gathered embedding and head, and of three layers around backward."""
        if self.plan.dp_shard == 1:
            return 0
        groups = Counter[int | None]()
        for p in parameters(self.job.model, lambda _: ()):
            groups[p.layer] += p.tp_shard(self.plan.tp).size * self.element_bytes
        outside = groups.pop(None)
        return outside + 3 * max(groups.values())


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
    places = place_ranks(cluster, plan.ranks)
    devices, hosts = [device_at(cluster, one) for one in places], Counter(p.host for p in places)
    gpu_bytes = sum(device.memory_bytes for device in devices if device.kind != "cpu")
    host_bytes = sum(cluster.by_name[name].memory_bytes for name in hosts)
    capacity = Capacity(gpu_bytes or None, host_bytes, ssd_bytes * len(hosts))
    storage, active = RankStorage(job, plan, not gpu_bytes), active_fraction(job)
    budget = _budget_bytes(job, devices, origin)
    limits = [
        *_se_moe(job.model, capacity, active),
        *_moesaic(storage, budget, ssd_bytes / max(hosts.values())),
    ]
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
        "micro_batches_at_once": _micro_batches_at_once(storage, tightest[1].experts, budget),
        "limits": [_limit_figures(job.model, one) for one in limits],
        "largest": [
            {**_limit_figures(job.model, one), "remedy": remedy}
            for one, remedy in zip(tightest, remedies, strict=True)
        ],
    }  # fmt: skip


def _budget_bytes(job: Job, devices: Sequence[Device], origin: str) -> float:
    """Return the memory that each rank may use."""
    assert job.memory is not None
    smallest = min(devices, key=lambda device: device.memory_bytes)
    given = job.memory.host_bytes
    if given is None:
        return _AUTO_FRACTION * smallest.memory_bytes
    if given > smallest.memory_bytes:
        raise ConfigError(
            f'{origin}: memory.host = "{job.memory.host}" is more than a rank has on '
            f"{smallest.model}, {format_bytes(smallest.memory_bytes)}: lower it, or use fewer ranks"
        )
    return given


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
    counts = range(_expert_step(storage), MAX_EXPERTS, _expert_step(storage))
    in_memory = bisect_right(counts, budget, key=storage.memory_bytes)
    on_drive = bisect_right(counts, ssd_bytes, key=storage.drive_bytes)
    by_resource = {_NUMBERS: len(counts), _RANK: in_memory, _DRIVE: on_drive}
    found = {resource: fitting * counts.step for resource, fitting in by_resource.items()}
    top_k = storage.job.model.top_k
    return [Limit("moesaic", name, n if n >= top_k else 0) for name, n in found.items()]


def _expert_step(storage: RankStorage) -> int:
    """Return the number that divides the experts per layer."""
    return math.lcm(storage.plan.ep, storage.job.model.expert_groups)


def _micro_batches_at_once(storage: RankStorage, experts: int, budget: float) -> int:
    """Return the micro-batches that pass through a block together, 0 if none fits."""
    counts = range(1, storage.job.train.micro_batches + 1)
    return bisect_right(counts, budget, key=lambda n: storage.memory_bytes(experts, n))


def _remedy(storage: RankStorage, tightest: Limit, budget: float) -> str:
    """Return a change with which moesaic trains a larger model."""
    if tightest.resource == _NUMBERS:
        return "raise model.layers or model.ffn: experts of a layer have numbers of two bytes"
    if tightest.resource == _DRIVE:
        copies = storage.plan.ranks // (storage.plan.ep * storage.plan.etp)
        if copies > 1:
            return f"raise layout.ep: each expert is on {copies} ranks"
        return "add space on the drives, or hosts with drives and a larger layout.ep"
    return _memory_remedy(storage, tightest.experts + _expert_step(storage), budget)


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
            bytes_then = RankStorage(changed, plan, storage.on_cpu).memory_bytes(experts)
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
