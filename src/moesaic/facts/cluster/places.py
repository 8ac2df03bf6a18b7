"""Placement of ranks on devices, routes between them, and prices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
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


class Hop(NamedTuple):
    """One link of a route between hosts."""

    link: Link
    source: str
    """Host that traffic leaves."""
    target: str
    """Host that traffic reaches."""


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


def route(cluster: Cluster, source: str, target: str) -> list[Hop]:
    """Return the route between two hosts: the fewest links, and of those routes the widest."""
    direct = [
        link for link in cluster.links_of_host[source] if _connects(cluster, link, source, target)
    ]
    if direct:
        return [Hop(max(direct, key=lambda link: link.bandwidth), source, target)]
    reached: dict[str, list[Hop]] = {source: []}
    edge = reached
    while edge and target not in reached:
        edge = _extend_routes(cluster, edge, reached)
        reached = {**reached, **edge}
    if target not in reached:
        raise ClusterError(
            f"no links lead from host '{source}' to host '{target}': add [[links]] with "
            f'ends = ["{source}", "{target}"], or ["*", "*"] for a network of all hosts'
        )
    return reached[target]


def links_between(cluster: Cluster, a: Place, b: Place) -> list[Link]:
    """Return the links from `a` to `b`: none for the same place, one inside a host."""
    if a == b:
        return []
    if a.host == b.host:
        return [intra_host_link(cluster, a.host)]
    return [hop.link for hop in route(cluster, a.host, b.host)]


def _connects(cluster: Cluster, link: Link, source: str, target: str) -> bool:
    first, second = (cluster.hosts_of_end[end] for end in link.ends)
    return source != target and (
        (source in first and target in second) or (source in second and target in first)
    )


def _extend_routes(
    cluster: Cluster, edge: dict[str, list[Hop]], reached: dict[str, list[Hop]]
) -> dict[str, list[Hop]]:
    """Return the widest routes to all hosts that are one link beyond those of `edge`."""
    routes: dict[str, list[Hop]] = {}
    for source, hops in edge.items():
        for link in cluster.links_of_host[source]:
            first, second = (cluster.hosts_of_end[end] for end in link.ends)
            ends = [*(second if source in first else ()), *(first if source in second else ())]
            width = min(_bandwidth(hops), link.bandwidth)
            for target in ends:
                if target not in reached and width > (
                    _bandwidth(routes[target]) if target in routes else 0
                ):
                    routes[target] = [*hops, Hop(link, source, target)]
    return routes


def _bandwidth(hops: Sequence[Hop]) -> float:
    """Return the bytes a second of a route's narrowest link."""
    return min((hop.link.bandwidth for hop in hops), default=math.inf)


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
