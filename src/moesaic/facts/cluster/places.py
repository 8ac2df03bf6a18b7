"""Places: which device each rank has, what joins two of them, what they cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moesaic.base import keys
from moesaic.base.errors import ClusterError
from moesaic.facts.cluster.cluster import Cluster, Device, Host, Link

_SMALL = 1e5
"""Of bytes, bytes a second and operations a second: no machine of today has so few."""


class Place(NamedTuple):
    """Where a rank runs."""

    host: str
    """The host's name."""
    device: int
    """Which entry of the host's devices."""
    number: int
    """Which of the devices of that entry, from 0."""


def device_at(cluster: Cluster, place: Place) -> Device:
    """What a rank at `place` computes with."""
    return cluster.by_name[place.host].devices[place.device]


def place(cluster: Cluster, num_ranks: int) -> list[Place]:
    """A place for each rank, filling the hosts in their order.

    A host with accelerators gives those; a CPU is shared by as many ranks as come to it.
    """
    places: list[Place] = []
    for host in cluster.hosts:
        places += _fill(host, num_ranks - len(places))
    if len(places) < num_ranks:
        raise ClusterError(
            f"cluster '{cluster.name}' has places for {len(places)} ranks, not for {num_ranks}: "
            "ask for fewer, or add hosts"
        )
    return places


def device_models(cluster: Cluster, num_ranks: int) -> list[str]:
    """By rank, the model of its device."""
    return [device_at(cluster, one).model for one in place(cluster, num_ranks)]


def _fill(host: Host, num_wanted: int) -> list[Place]:
    accelerators = (
        Place(host.name, index, number)
        for index, device in enumerate(host.devices)
        if device.kind != "cpu"
        for number in range(device.count)
    )
    if any(device.kind != "cpu" for device in host.devices):
        return list(itertools.islice(accelerators, num_wanted))
    ways = {device.count: index for index, device in enumerate(host.devices)}
    num_ranks = min(num_wanted, max(ways))
    if num_ranks and num_ranks not in ways:
        known = keys.listed([str(count) for count in sorted(ways)])
        raise ClusterError(
            f"the cores of host '{host.name}' are shared by {known} ranks, not by {num_ranks}: add "
            f"[[hosts.devices]] of kind cpu with count = {num_ranks}, or change the number of ranks"
        )
    return [Place(host.name, ways[num_ranks], number) for number in range(num_ranks)]


class Hop(NamedTuple):
    """One link on the way from host to host."""

    link: Link
    here: str
    """The host that it leaves."""
    there: str
    """The host that it comes to."""


def inside(cluster: Cluster, host: str) -> Link:
    """What joins the devices of `host`: the widest, if there are several."""
    own = [link for link in cluster.touching[host] if link.ends == [host, host]]
    found = max(own, key=lambda link: link.bandwidth, default=None)
    if found is None:
        raise ClusterError(
            f"nothing joins the devices of host '{host}': give it link = {{ ... }}, or add "
            f'[[links]] with ends = ["{host}", "{host}"]'
        )
    return found


def route(cluster: Cluster, here: str, there: str) -> list[Hop]:
    """The links from one host to another: as few as can be, and of those ways the widest."""
    direct = [link for link in cluster.touching[here] if _joins(cluster, link, here, there)]
    if direct:
        return [Hop(max(direct, key=lambda link: link.bandwidth), here, there)]
    reached: dict[str, list[Hop]] = {here: []}
    edge = reached
    while edge and there not in reached:
        edge = _beyond(cluster, edge, reached)
        reached = {**reached, **edge}
    if there not in reached:
        raise ClusterError(
            f"no links lead from host '{here}' to host '{there}': add [[links]] with "
            f'ends = ["{here}", "{there}"], or ["*", "*"] for a network of all'
        )
    return reached[there]


def path(cluster: Cluster, a: Place, b: Place) -> list[Link]:
    """The links from `a` to `b`: none for a place and itself, one for two of a host."""
    if a == b:
        return []
    if a.host == b.host:
        return [inside(cluster, a.host)]
    return [hop.link for hop in route(cluster, a.host, b.host)]


def _joins(cluster: Cluster, link: Link, here: str, there: str) -> bool:
    first, second = (cluster.matches[end] for end in link.ends)
    return here != there and (
        (here in first and there in second) or (here in second and there in first)
    )


def _beyond(
    cluster: Cluster, edge: dict[str, list[Hop]], reached: dict[str, list[Hop]]
) -> dict[str, list[Hop]]:
    """The widest ways to all hosts that are one link further than those of `edge`."""
    found: dict[str, list[Hop]] = {}
    for here, way in edge.items():
        for link in cluster.touching[here]:
            first, second = (cluster.matches[end] for end in link.ends)
            ends = [*(second if here in first else ()), *(first if here in second else ())]
            width = min(_width(way), link.bandwidth)
            for there in ends:
                if there not in reached and width > (_width(found[there]) if there in found else 0):
                    found[there] = [*way, Hop(link, here, there)]
    return found


def _width(way: Sequence[Hop]) -> float:
    """Bytes a second of a way's narrowest link."""
    return min((hop.link.bandwidth for hop in way), default=math.inf)


def price_per_hour(cluster: Cluster, places: Iterable[Place]) -> float:
    """What an hour of these places costs: their devices, and every host that has one of them."""
    taken = list(places)
    hosts = [cluster.by_name[name] for name in sorted({one.host for one in taken})]
    devices = [device_at(cluster, one) for one in taken]
    return sum(host.price_per_hour for host in hosts) + sum(one.price_per_hour for one in devices)


def doubtful(cluster: Cluster) -> list[str]:
    """A sentence for each kind of figure that is so small that it may be in another unit."""
    found: dict[str, str] = {}

    def look(key: str, of: str, value: float, unit: str) -> None:
        if value < _SMALL:
            found.setdefault(
                key, f"{key} = {value:g} of {of} is read as {value:g} {unit}: is it meant so?"
            )

    for host in cluster.hosts:
        for device in host.devices:
            look("memory_bytes", f"device '{device.model}'", device.memory_bytes, "bytes")
            look("memory_bandwidth", f"device '{device.model}'", device.memory_bandwidth, "bytes/s")
            for one in device.matmul:
                look("flops", f"{one.dtype} on '{device.model}'", one.flops, "operations a second")
    for link in cluster.links:
        look("bandwidth", f"the link of {link.ends}", link.bandwidth, "bytes/s")
    return list(found.values())
