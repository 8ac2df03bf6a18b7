"""Memory that the ranks of a job need, against what this machine or a cluster has."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.api.launch import is_torchrun
from moesaic.api.plan_search import search_remedy
from moesaic.base.errors import DoesNotFitError
from moesaic.base.host_memory import free_memory_bytes, memory_limit_bytes
from moesaic.base.units import format_bytes, format_used_bytes
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
_BARELY = 0.98
"""Share of the usable memory above which a plan barely fits: predicted memory is within 2%."""
_CONTEXT_BYTES = 2**29
"""Memory of the driver's context of a process on a GPU."""
_ABOUT_DEVICE = ("device", "device_memory_bytes", "usable_memory_bytes", "fits")
"""Figures of a plan that are unknown without a device."""
_RESERVE_USES = "driver, collectives and fragmentation"


def memory_here(
    job: Job, plan: Plan, cluster: Cluster | None, *, is_shown: bool = False
) -> tuple[RankMemory, dict[str, Any]]:
    """Return the memory of the fullest rank, and whether it fits, as plain data with the keys of a
    plan's figures.

    Args:
        job: the job under `plan`.
        plan: layout of the ranks.
        cluster: cluster to run on; None: this machine, with the memory that is free now.
        is_shown: show the progress of the search for a remedy on a terminal.
    """
    from moesaic.policy.cost.memory import tightest_rank
    from moesaic.policy.cost.step import JobCosts

    where = _cluster_here(job, plan) if cluster is None else cluster
    found = tightest_rank(JobCosts.from_job(job, plan, where))
    is_known = found.device.memory_bytes < _UNKNOWN_BYTES
    unknown = dict.fromkeys(() if is_known else _ABOUT_DEVICE)
    figures = {**found.figures(), "device": found.device.model, **unknown}
    remedy = None
    if figures["fits"] is False:
        from moesaic.policy.plan.search import search_facts

        remedy = search_remedy(search_facts(job, where, plan.ranks), is_shown=is_shown)
    return found, {**figures, "remedy": remedy, "is_free_now": cluster is None}


def describe_fit(figures: Mapping[str, Any], advice: str = "") -> str:
    """Return whether the fullest rank fits, and if not, its remedy; `advice` stands for one."""
    used, usable = figures["memory_per_rank"]["peak_bytes"], figures["usable_memory_bytes"]
    if figures["fits"] is None:
        return (
            f"fits: unknown, {format_bytes(used)} per rank; this machine has no GPU of the job "
            "(moesaic plan JOB.toml --cluster h100-8 takes another)"
        )
    free = " free" * bool(figures.get("is_free_now"))
    sizes = f"{format_used_bytes(used, usable)}{free} per rank{_reserve_text(figures)}"
    if figures["fits"]:
        return f"fits{', barely' * (used > _BARELY * usable)}: {sizes}"
    if not advice:
        from moesaic.policy.plan.remedy import remedy_text

        advice = remedy_text(figures["remedy"])
    return f"DOES NOT FIT: {sizes}; {advice}"


def _reserve_text(figures: Mapping[str, Any]) -> str:
    """Return how much of a device is kept from plans, if any."""
    total = figures["device_memory_bytes"]
    reserved = total - figures["usable_memory_bytes"]
    if not reserved:
        return ""
    return f" ({format_used_bytes(reserved, total)} are kept for {_RESERVE_USES})"


def warn_of_memory(job: Job, plan: Plan, *, is_shown: bool) -> list[str]:
    """Return a warning if the job exceeds the memory that is free on this machine now.

    Raise DoesNotFitError if it exceeds all of its memory. `is_shown` shows the progress of the
    search for a remedy on a terminal. A job with `[memory]` adapts to what is free, and a GPU is
    not asked: that would take memory from its ranks.
    """
    if job.memory is not None or _may_use_gpu(job):
        return []
    from moesaic.policy.cost.memory import mean_peak_bytes, tightest_rank
    from moesaic.policy.cost.step import JobCosts

    costs = JobCosts.from_job(job, plan, _cluster_here(job, plan))
    if tightest_rank(costs).used_fraction <= 1:
        return []
    text = describe_fit(memory_here(job, plan, None, is_shown=is_shown)[1])
    room = memory_limit_bytes() // _ranks_here(plan)
    if mean_peak_bytes(costs) > room:
        raise DoesNotFitError(text)
    return [f"{text}. Training starts: {format_bytes(room)} per rank are there if others end"]


def _cluster_here(job: Job, plan: Plan) -> Cluster:
    """Return hosts like this machine for the ranks of a plan, with the memory that is free now."""
    ranks_here = _ranks_here(plan)
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


def _ranks_here(plan: Plan) -> int:
    """Return the ranks of a plan on this machine."""
    by_host = Counter(place.host for place in plan.places)
    ranks = max(by_host.values()) if by_host else plan.ranks
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if is_torchrun() else ranks


def _has_gpu() -> bool:
    return any(Path(path).exists() for path in _GPU_DRIVERS)


def _may_use_gpu(job: Job) -> bool:
    """Return whether the job names a GPU, or takes one that is here."""
    return is_gpu(job.train.device) or (job.train.device == "auto" and _has_gpu())


def _device_here(job: Job, ranks_here: int) -> tuple[str, str, float]:
    """Return kind and name of the device of a rank, and the memory that the rank may take, with
    that of its context."""
    name = job.train.device
    if not _may_use_gpu(job):
        return "cpu", "this machine", max(free_memory_bytes() // ranks_here, 1)
    if not _has_gpu():
        return "gpu", "an unknown GPU", _UNKNOWN_BYTES
    from moesaic.kernels import device as devices

    device = devices.resolve(name)
    kind, free = devices.kind(device), devices.free_bytes(device)
    if kind == "cpu":
        return kind, devices.model(device), free // ranks_here
    # Free memory lacks the driver's context of this process, for which the reserve has room.
    used = devices.memory_bytes(device) - free
    return kind, devices.model(device), free + min(used, _CONTEXT_BYTES)
