"""Memory of ranks, and the cost of checkpoints on the disks of hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from moesaic.facts.cluster import Cluster, Device, Place
from moesaic.facts.expert_blocks import MIN_BLOCKS
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.workload import Memory, job_parts, memory, memory_of_parts
from moesaic.policy.cost.step import JobCosts
from moesaic.policy.plan.budget import budget_bytes, budget_facts, divide_budget


class RankMemory(NamedTuple):
    """Memory of one rank and its device."""

    rank: int
    memory: Memory
    device: Device

    @property
    def used_fraction(self) -> float:
        """Peak as a fraction of the device's usable memory; above 1 the rank does not fit."""
        return self.memory.peak_bytes / self.device.usable_bytes

    def figures(self) -> dict[str, Any]:
        """Return memory by kind and whether it fits, with the keys of a plan's figures."""
        return {
            "memory_per_rank": {**self.memory.by_kind(), "peak_bytes": self.memory.peak_bytes},
            "device_memory_bytes": self.device.memory_bytes,
            "usable_memory_bytes": self.device.usable_bytes,
            "fits": self.used_fraction <= 1,
        }


def tightest_rank(costs: JobCosts) -> RankMemory:
    """Return the rank with the largest fraction of its device's usable memory in use.

    The first of ranks with equal work stands for all of them: its shards are the largest.
    """
    return max(_memory_of_ranks(costs), key=lambda one: one[0].used_fraction)[0]


def mean_peak_bytes(costs: JobCosts) -> float:
    """Return the mean of the ranks' peaks, which stages of a pipeline may have apart."""
    total = sum(one.memory.peak_bytes * number for one, number in _memory_of_ranks(costs))
    return total / costs.plan.ranks


def _memory_of_ranks(costs: JobCosts) -> Iterator[tuple[RankMemory, int]]:
    """Yield the memory of a rank and the number of ranks with equal work."""
    parts = job_parts(costs.job, costs.plan)
    for rank, equal in costs.equal_ranks(in_memory=True).items():
        device = costs.device(rank)
        on_cpu = device.kind == "cpu"
        if costs.job.memory is None:
            needs = memory_of_parts(parts, rank, costs.loads, on_cpu=on_cpu, threads=device.threads)
        else:
            needs = _with_budget(costs.job, costs.plan, rank, int(device.usable_bytes))
        yield RankMemory(rank, needs, device), len(equal)


def _with_budget(job: Job, plan: Plan, rank: int, free_bytes: int) -> Memory:
    """Return the memory of `rank` under its budget, with the expert state that fits."""
    assert job.memory is not None
    facts = budget_facts(job, plan, rank, budget_bytes(job.memory, free_bytes))
    budget = divide_budget(facts)
    needs = memory(job, plan, rank, group_size=budget.group_size)
    beyond_tensors = facts.other_bytes[budget.group_size] - needs.peak_bytes
    return replace(
        needs,
        working_bytes=needs.working_bytes + beyond_tensors,
        experts_bytes=max(budget.num_blocks, MIN_BLOCKS) * facts.block_bytes,
    )


class CheckpointCost(NamedTuple):
    """Cost of one checkpoint."""

    host_bytes: int
    """Bytes that one host writes, at most over hosts."""
    seconds: float | None
    """Seconds until the slowest disk is done; None if the cluster's file lists no disk for some
    host."""


def checkpoint_cost(
    job: Job, plan: Plan, cluster: Cluster, places: Sequence[Place]
) -> CheckpointCost:
    """Return the cost of a checkpoint of `job`; all ranks of a host write to its first disk.

    The first rank of each pipeline rank stands for the others.
    """
    parts = job_parts(job, plan)
    bytes_of_rank = [
        sum(part.checkpoint_bytes(pp_rank * plan.ranks_per_stage) for part in parts)
        for pp_rank in range(plan.pp)
    ]
    by_host: Counter[str] = Counter()
    for rank, place in enumerate(places):
        by_host[place.host] += bytes_of_rank[plan.pp_rank(rank)]
    disks = {host: cluster.by_name[host].disks for host in by_host}
    seconds = [by_host[host] / own[0].write for host, own in disks.items() if own]
    slowest = max(seconds) if len(seconds) == len(disks) else None
    return CheckpointCost(max(by_host.values()), slowest)
