"""Memory that the ranks of a job need, against what this machine or a cluster has."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.api.launch import is_torchrun
from moesaic.base.host_memory import free_memory_bytes
from moesaic.facts.cluster import Cluster
from moesaic.facts.cluster.file import resolve_cluster
from moesaic.facts.job import Job
from moesaic.facts.job.device_name import is_gpu
from moesaic.facts.plan import Plan

if TYPE_CHECKING:
    from moesaic.policy.cost.memory import RankMemory

_GPU_DRIVERS = ("/proc/driver/nvidia/version", "/dev/kfd")
"""Files that exist where a GPU has a driver; only then torch is imported and asked."""
_DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
_UNKNOWN_SPEED, _UNKNOWN_BYTES = 1e12, 1e18
"""Stand for figures that memory does not depend on."""
_CONTEXT_BYTES = 2**29
"""Memory of the driver's context of a process on a GPU."""
_ABOUT_DEVICE = ("device", "device_memory_bytes", "usable_memory_bytes", "fits")
"""Figures of a plan that are unknown without a device."""


def memory_here(job: Job, plan: Plan, cluster: Cluster | None) -> tuple[RankMemory, dict[str, Any]]:
    """Return the memory of the fullest rank, and whether it fits, as plain data with the keys of a
    plan's figures.

    Args:
        job: the job under `plan`.
        plan: layout of the ranks.
        cluster: cluster to run on; None: this machine, with the memory that is free now.
    """
    from moesaic.policy.cost.memory import tightest_rank
    from moesaic.policy.cost.step import JobCosts

    where = _cluster_here(job, plan) if cluster is None else cluster
    found = tightest_rank(JobCosts.from_job(job, plan, where))
    is_known = found.device.memory_bytes < _UNKNOWN_BYTES
    unknown = dict.fromkeys(() if is_known else _ABOUT_DEVICE)
    figures = {**found.figures(), "device": found.device.model, **unknown}
    remedy = _remedy(job, plan, where) if figures["fits"] is False else None
    return found, {**figures, "remedy": remedy}


def _remedy(job: Job, plan: Plan, cluster: Cluster) -> dict[str, Any] | None:
    from moesaic.policy.plan.remedy import describe_remedy, find_remedy
    from moesaic.policy.plan.search import search_facts

    return describe_remedy(find_remedy(search_facts(job, cluster, plan.ranks)))


def _cluster_here(job: Job, plan: Plan) -> Cluster:
    """Return hosts like this machine for the ranks of a plan, with the memory that is free now."""
    by_host = Counter(place.host for place in plan.places)
    ranks_here = max(by_host.values()) if by_host else plan.ranks
    if is_torchrun():
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks_here))
    kind, model, memory_bytes = _device_here(job, ranks_here)
    hosts = -(-plan.ranks // ranks_here)
    inside = {"latency_s": 1e-5, "bandwidth": _UNKNOWN_SPEED}
    device = {
        "kind": kind, "model": model, "count": ranks_here, "memory_bytes": memory_bytes,
        "memory_bandwidth": _UNKNOWN_SPEED,
        "matmul": [{"dtype": dtype, "flops": _UNKNOWN_SPEED} for dtype in _DTYPES],
    }  # fmt: skip
    host = {
        "name": "here", "replicas": hosts, "memory_bytes": _UNKNOWN_BYTES, "devices": [device],
        "link": {"kind": "inside", **inside},
    }  # fmt: skip
    between = [{"ends": ["*", "*"], "kind": "network", **inside}] if hosts > 1 else []
    raw = {"name": "this machine", "hosts": [host], "links": between}
    return resolve_cluster(raw, "this machine")


def _device_here(job: Job, ranks_here: int) -> tuple[str, str, float]:
    """Return kind and name of the device of a rank, and the memory that the rank may take, with
    that of its context."""
    name, has_gpu = job.train.device, any(Path(path).exists() for path in _GPU_DRIVERS)
    if not is_gpu(name) and (name != "auto" or not has_gpu):
        return "cpu", "this machine", max(free_memory_bytes() // ranks_here, 1)
    if not has_gpu:
        return "gpu", "an unknown GPU", _UNKNOWN_BYTES
    from moesaic.kernels import device as devices

    device = devices.resolve(name)
    kind, free = devices.kind(device), devices.free_bytes(device)
    if kind == "cpu":
        return kind, devices.model(device), free // ranks_here
    # Free memory lacks the driver's context of this process, for which the reserve has room.
    used = devices.memory_bytes(device) - free
    return kind, devices.model(device), free + min(used, _CONTEXT_BYTES)
