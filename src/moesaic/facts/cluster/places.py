"""Places: which device each rank has, what joins two of them, what they cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moesaic.base import keys
from moesaic.base.errors import ConfigError
from moesaic.facts.cluster.cluster import Cluster, Device, Host, Link


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
        raise ConfigError(
            f"cluster '{cluster.name}' has places for {len(places)} ranks, not for {num_ranks}: "
            "ask for fewer, or add hosts"
        )
    return places


def _fill(host: Host, num_wanted: int) -> list[Place]:
    accelerators = [
        Place(host.name, index, number)
        for index, device in enumerate(host.devices)
        if device.kind != "cpu"
        for number in range(device.count)
    ]
    if accelerators:
        return accelerators[:num_wanted]
    ways = {device.count: index for index, device in enumerate(host.devices)}
    num_ranks = min(num_wanted, max(ways))
    if num_ranks and num_ranks not in ways:
        known = keys.listed([str(count) for count in sorted(ways)])
        raise ConfigError(
            f"the cores of host '{host.name}' are shared by {known} ranks, not by {num_ranks}: add "
            f"[[hosts.devices]] of kind cpu with count = {num_ranks}, or change the number of ranks"
        )
    return [Place(host.name, ways[num_ranks], number) for number in range(num_ranks)]


def path(cluster: Cluster, a: Place, b: Place) -> list[Link]:
    """The links from `a` to `b`: as few as can be, and of those ways the widest.

    None for a place and itself, one for two of a host.
    """
    if a == b:
        return []
    if a.host == b.host:
        inside = [link for link in cluster.links if link.ends == [a.host, a.host]]
        found = max(inside, key=lambda link: link.bandwidth, default=None)
        if found is None:
            raise ConfigError(
                f"nothing joins the devices of host '{a.host}': give it link = {{ ... }}, or add "
                f'[[links]] with ends = ["{a.host}", "{a.host}"]'
            )
        return [found]
    reached: dict[str, list[Link]] = {a.host: []}
    edge = reached
    while edge and b.host not in reached:
        edge = _beyond(cluster, edge, reached)
        reached = {**reached, **edge}
    if b.host not in reached:
        raise ConfigError(
            f"no links lead from host '{a.host}' to host '{b.host}': add [[links]] with "
            f'ends = ["{a.host}", "{b.host}"], or ["*", "*"] for a network of all'
        )
    return reached[b.host]


def _beyond(
    cluster: Cluster, edge: dict[str, list[Link]], reached: dict[str, list[Link]]
) -> dict[str, list[Link]]:
    """The widest ways to all hosts that are one link further than those of `edge`."""
    found: dict[str, list[Link]] = {}
    for here, way in edge.items():
        for link in cluster.links:
            first, second = (cluster.matches[end] for end in link.ends)
            there = [*(second if here in first else ()), *(first if here in second else ())]
            longer = [*way, link]
            for host in there:
                if host not in reached and _width(longer) > _width(found.get(host, ())):
                    found[host] = longer
    return found


def _width(way: Sequence[Link]) -> float:
    """Bytes a second of a way's narrowest link."""
    return min((link.bandwidth for link in way), default=0.0)


def price_per_hour(cluster: Cluster, places: Iterable[Place]) -> float:
    """What an hour of these places costs: their devices, and every host that has one of them."""
    taken = list(places)
    hosts = [cluster.by_name[name] for name in sorted({one.host for one in taken})]
    devices = [device_at(cluster, one) for one in taken]
    return sum(host.price_per_hour for host in hosts) + sum(one.price_per_hour for one in devices)
