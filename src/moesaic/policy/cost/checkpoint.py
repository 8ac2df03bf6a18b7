"""Cost of a checkpoint: bytes per host and seconds on its disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moesaic.facts.cluster import Cluster, Place
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.workload.rank_params import RankParams


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

    Shards are spread evenly over their owners. So one host stands for all hosts with equal disks
    and equally many ranks of each pipeline rank.
    """
    ranks: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(place.host, []).append(rank)
    kinds: dict[tuple[object, ...], str] = {}
    for host, own in ranks.items():
        pp_ranks = tuple(map(plan.pp_rank, own))
        kinds.setdefault(
            (pp_ranks, *(disk.write for disk in cluster.by_name[host].disks[:1])), host
        )
    found = {
        host: sum(RankParams.of_rank(job, plan, rank).checkpoint_bytes() for rank in ranks[host])
        for host in kinds.values()
    }
    disks = {host: cluster.by_name[host].disks for host in found}
    times = [found[host] / own[0].write for host, own in disks.items() if own]
    return CheckpointCost(max(found.values()), max(times) if len(times) == len(disks) else None)
