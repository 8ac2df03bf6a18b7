"""Mapping of a plan's ranks to the devices of a cluster, in the order of the cluster's file."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.base.errors import ConfigError
from moesaic.facts.cluster import Cluster, Host, device_at, place_ranks
from moesaic.facts.plan import Plan, RankPlace


def max_ranks(cluster: Cluster) -> int:
    """Return the number of accelerators; hosts without any count ranks that share their cores."""
    total = 0
    for host in cluster.hosts:
        accelerators = sum(device.count for device in host.devices if device.kind != "cpu")
        total += accelerators or max(device.count for device in host.devices)
    return total


def only_hosts(cluster: Cluster, hosts: Sequence[Host]) -> Cluster:
    """Return `cluster` with these hosts alone."""
    names = {host.name for host in hosts}
    links = [
        link for link in cluster.links
        if all(names.intersection(cluster.hosts_of_end[end]) for end in link.ends)
    ]  # fmt: skip
    return cluster.model_copy(update={"hosts": list(hosts), "links": links})


def hosts_without_speed(cluster: Cluster, dtype: str) -> list[str]:
    """Return the names of hosts with a rank's device that has no matmul speed for `dtype`."""
    found = list[str]()
    for host in cluster.hosts:
        devices = [one for one in host.devices if one.kind != "cpu"] or host.devices
        if any(all(speed.dtype != dtype for speed in one.matmul) for one in devices):
            found.append(host.name)
    return found


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
