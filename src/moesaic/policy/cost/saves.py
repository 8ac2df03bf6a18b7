"""Disks: what a checkpoint brings to them, and until when they have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moesaic.facts.cluster import Cluster, Place
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.workload.share import Share


class Save(NamedTuple):
    """One checkpoint."""

    host_bytes: int
    """Most that one host writes of it."""
    seconds: float | None
    """Until the slowest disk has that; None where a host has no disk in the cluster's file."""


def save(job: Job, plan: Plan, cluster: Cluster, places: Sequence[Place]) -> Save:
    """A checkpoint of `job`, each host's ranks writing to the first of its disks.

    Pieces are shared out evenly among those who own them, so that of each part of a pipeline the
    host of its first rank stands for all.
    """
    firsts = {plan.part(rank): places[rank].host for rank in reversed(range(plan.ranks))}
    by_host = dict.fromkeys(firsts.values(), 0)
    for rank, at in enumerate(places):
        if at.host in by_host:
            by_host[at.host] += Share.of(job, plan, rank).staged_bytes()
    most = max(by_host.values())
    disks = [cluster.by_name[host].disks for host in {at.host for at in places}]
    slowest = min((own[0].write if own else 0.0) for own in disks)
    return Save(most, most / slowest if slowest else None)
