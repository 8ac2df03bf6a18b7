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
    """Until the last disk has its host's; None where a host has no disk in the cluster's file."""


def save(job: Job, plan: Plan, cluster: Cluster, places: Sequence[Place]) -> Save:
    """A checkpoint of `job`, each host's ranks writing to the first of its disks.

    Pieces are shared out evenly among those who own them: of hosts that have equally many ranks of
    each part of a pipeline, and equal disks, the first one stands for all.
    """
    ranks: dict[str, list[int]] = {}
    for rank, at in enumerate(places):
        ranks.setdefault(at.host, []).append(rank)
    kinds: dict[tuple[object, ...], str] = {}
    for host, own in ranks.items():
        parts = tuple(map(plan.part, own))
        kinds.setdefault((parts, *(disk.write for disk in cluster.by_name[host].disks[:1])), host)
    found = {
        host: sum(Share.of(job, plan, rank).staged_bytes() for rank in ranks[host])
        for host in kinds.values()
    }
    disks = {host: cluster.by_name[host].disks for host in found}
    times = [found[host] / own[0].write for host, own in disks.items() if own]
    return Save(max(found.values()), max(times) if len(times) == len(disks) else None)
