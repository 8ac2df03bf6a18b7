"""Mapping of a plan's ranks to the devices of a cluster, in the order of the cluster's file."""

from __future__ import annotations

from moesaic.base.errors import ConfigError
from moesaic.facts.cluster import Cluster, device_at, place_ranks
from moesaic.facts.plan import Plan, RankPlace


def max_ranks(cluster: Cluster) -> int:
    """Return the number of accelerators; hosts without any count ranks that share their cores."""
    total = 0
    for host in cluster.hosts:
        accelerators = sum(device.count for device in host.devices if device.kind != "cpu")
        total += accelerators or max(device.count for device in host.devices)
    return total


def assign_places(plan: Plan, cluster: Cluster) -> Plan:
    """Return `plan` with a host and device of `cluster` for each rank."""
    places = []
    for rank, place in enumerate(place_ranks(cluster, plan.ranks)):
        device = device_at(cluster, place)
        places.append(RankPlace(host=place.host, device=device.model, kind=device.kind))
        if plan.experts and plan.grouped_mm not in ("auto", "torch") and device.kind == "cpu":
            raise ConfigError(
                f'kernels.grouped_mm = "{plan.grouped_mm}" needs GPUs, but rank {rank} is on '
                f"{device.model} in cluster '{cluster.name}': remove it"
            )
    return plan.model_copy(update={"places": places})
