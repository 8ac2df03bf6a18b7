"""Placement of ranks on devices, links between them, and prices."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from moesaic.base import keys
from moesaic.base.errors import ClusterError
from moesaic.facts.cluster.cluster import Cluster, Device, Host, Link

_MIN_PLAUSIBLE = 1e5
"""Smallest plausible figure in bytes, bytes a second and operations a second."""


class Place(NamedTuple):
    """Host and device of one rank."""

    host: str
    """Name of the host."""
    device: int
    """Index among the host's device entries."""
    number: int
    """Index among the devices of that entry."""


def device_at(cluster: Cluster, place: Place) -> Device:
    """Return the device at `place`."""
    return cluster.by_name[place.host].devices[place.device]


def place_ranks(cluster: Cluster, num_ranks: int) -> list[Place]:
    """Return a place for each rank, filling hosts in their order.

    Hosts with accelerators use only those. A CPU is shared by the ranks on its host.
    """
    places: list[Place] = []
    for host in cluster.hosts:
        places += _place_on_host(host, num_ranks - len(places))
    if len(places) < num_ranks:
        raise ClusterError(
            f"cluster '{cluster.name}' has places for {len(places)} ranks, not for {num_ranks}: "
            "use fewer ranks, or add hosts"
        )
    return places


def device_models(cluster: Cluster, num_ranks: int) -> list[str]:
    """Return the device model of each rank."""
    return [device_at(cluster, one).model for one in place_ranks(cluster, num_ranks)]


def _place_on_host(host: Host, num_wanted: int) -> list[Place]:
    accelerators = (
        Place(host.name, index, number)
        for index, device in enumerate(host.devices)
        if device.kind != "cpu"
        for number in range(device.count)
    )
    if any(device.kind != "cpu" for device in host.devices):
        return list(itertools.islice(accelerators, num_wanted))
    entries = {device.count: index for index, device in enumerate(host.devices)}
    num_ranks = min(num_wanted, max(entries))
    if num_ranks and num_ranks not in entries:
        known = keys.join_words([str(count) for count in sorted(entries)])
        raise ClusterError(
            f"the cores of host '{host.name}' can be shared by {known} ranks, not by {num_ranks}: "
            f"add [[hosts.devices]] of kind cpu with count = {num_ranks}, or use another "
            "number of ranks"
        )
    return [Place(host.name, entries[num_ranks], number) for number in range(num_ranks)]


def intra_host_link(cluster: Cluster, host: str) -> Link:
    """Return the link between the devices of `host`, the widest if there are several."""
    own = [link for link in cluster.links_of_host[host] if link.ends == [host, host]]
    widest = max(own, key=lambda link: link.bandwidth, default=None)
    if widest is None:
        raise ClusterError(
            f"host '{host}' has no link between its devices: give it link = {{ ... }}, or add "
            f'[[links]] with ends = ["{host}", "{host}"]'
        )
    return widest


def inter_host_link(cluster: Cluster, one: str, other: str) -> Link:
    """Return the link between two hosts, the widest if there are several."""
    joining = [link for link in cluster.links_of_host[one] if _joins(cluster, link, one, other)]
    widest = max(joining, key=lambda link: link.bandwidth, default=None)
    if widest is None:
        raise ClusterError(
            f"no link joins the hosts '{one}' and '{other}': add [[links]] with "
            f'ends = ["{one}", "{other}"], or ["*", "*"] for a network of all hosts'
        )
    return widest


def _joins(cluster: Cluster, link: Link, one: str, other: str) -> bool:
    first, second = (cluster.hosts_of_end[end] for end in link.ends)
    return (one in first and other in second) or (one in second and other in first)


def price_per_hour(cluster: Cluster, places: Iterable[Place]) -> float:
    """Return the price of an hour of these places: their devices, and every host that has one."""
    used = list(places)
    hosts = [cluster.by_name[name] for name in sorted({one.host for one in used})]
    devices = [device_at(cluster, one) for one in used]
    return sum(host.price_per_hour for host in hosts) + sum(one.price_per_hour for one in devices)


def unit_warnings(cluster: Cluster) -> list[str]:
    """Return a sentence for each kind of figure that is too small for its unit."""
    warnings: dict[str, str] = {}

    def check(key: str, name: str, value: float, unit: str) -> None:
        if value < _MIN_PLAUSIBLE:
            warnings.setdefault(
                key,
                f"{key} = {value:g} of {name} is read as {value:g} {unit}: check the unit",
            )

    for host in cluster.hosts:
        for device in host.devices:
            check("memory_bytes", f"device '{device.model}'", device.memory_bytes, "bytes")
            check(
                "memory_bandwidth", f"device '{device.model}'", device.memory_bandwidth, "bytes/s"
            )
            for one in device.matmul:
                check("flops", f"{one.dtype} on '{device.model}'", one.flops, "operations a second")
    for link in cluster.links:
        check("bandwidth", f"the link of {link.ends}", link.bandwidth, "bytes/s")
    return list(warnings.values())
