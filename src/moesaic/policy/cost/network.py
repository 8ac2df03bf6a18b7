"""Network model: bytes per port of a cluster's links, and the time of the busiest port.

A port is a potential bottleneck: a device's end of the link inside its host, a host's end of a link
to other hosts, or all of a shared link. Groups that run a collective at the same time share ports.
A collective takes its latencies, plus the time of its busiest port for the bytes of all groups.

Sums and gathers use rings, all-to-all pairwise rounds, broadcasts a binomial tree with the longest
edges first. Pipeline stages use sends.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moesaic.facts.cluster import Cluster, Curve, Link, Place, inter_host_link, intra_host_link


class CommRound(NamedTuple):
    """Messages that share their latencies and do not wait for one another otherwise."""

    num_latencies: int
    """Number of successive latencies."""
    size_fraction: float
    """Bytes per edge over the whole round, as a fraction of the collective's size."""
    edges: Sequence[tuple[int, int]] | None
    """Pairs (from, to) as positions in the group; None for all ordered pairs."""


def collective_rounds(operation: str, num_ranks: int) -> list[CommRound]:
    """Return the rounds of `operation` on `num_ranks` ranks; sizes are in
    `CollectiveCall.num_bytes`."""
    if num_ranks < 2:
        return []
    others = num_ranks - 1
    ring = [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]
    if operation == "all_reduce":
        return [CommRound(2 * others, 2 * others / num_ranks, ring)]
    if operation in ("all_gather", "reduce_scatter"):
        return [CommRound(others, others / num_ranks, ring)]
    if operation == "all_to_all":
        return [CommRound(others, 1.0 / num_ranks, None)]
    if operation == "broadcast":
        return [CommRound(1, 1.0, edges) for edges in _broadcast_tree(num_ranks)]
    if operation == "send":
        return [CommRound(1, 1.0, [(0, others)])]
    raise AssertionError(f"no algorithm for {operation}")


def _broadcast_tree(num_ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the rounds of a binomial tree from the first of `num_ranks`.

    In each round, every rank that has the bytes sends them to one that does not.
    """
    span = 1 << (num_ranks - 1).bit_length()
    while span > 1:
        half = span // 2
        yield [(rank, rank + half) for rank in range(0, num_ranks - half, span)]
        span = half


class Port(NamedTuple):
    """A point of a link whose bandwidth limits transfers."""

    link: int
    """Identity of the link."""
    endpoint: Place | str
    """Device inside its host, or host between hosts; empty for all of a shared link."""
    direction: str
    """Either "in" or "out"; empty if both directions share the bandwidth."""


@dataclass(frozen=True)
class CollectiveCost:
    """Cost of a collective for one group, while other groups run the same collective."""

    latency_s: float
    s_per_byte: float
    """Seconds per byte of its size (`CollectiveCall.num_bytes`)."""
    contention: float
    """Slowdown of the bytes relative to a group that runs alone."""
    measured_curve: Curve | None
    """Measured seconds by size of this collective alone, if available."""
    skew_s: float = 0.0
    """Skew of the narrowest link; see `Event.skew_s`."""

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of a collective of `num_bytes`."""
        if self.measured_curve is not None:
            return self.measured_curve.at(max(num_bytes, 1.0) * self.contention)
        return self.latency_s + num_bytes * self.s_per_byte


@dataclass
class PortLoad:
    """Load of one group on ports in one round, per byte of the collective's size."""

    num_latencies: int = 0
    fraction_by_port: dict[Port, float] = field(default_factory=lambda: defaultdict(float))
    latency_s: float = 0.0
    """Latency of the slowest link in use, in seconds."""

    def add(self, latency_s: float, ports: Iterable[Port], size_fraction: float) -> None:
        """Add a load to each port of a link with this latency."""
        self.latency_s = max(self.latency_s, latency_s)
        for port in ports:
            self.fraction_by_port[port] += size_fraction


def link_ports(link: Link, source: Place | str, destination: Place | str) -> tuple[Port, ...]:
    """Return the ports of a link from `source` to `destination`."""
    if link.shared:
        return (Port(id(link), "", ""),)
    out, into = ("out", "in") if link.duplex else ("", "")
    return Port(id(link), source, out), Port(id(link), destination, into)


class NetworkModel:
    """Cost of collectives between the ranks of a cluster."""

    def __init__(self, cluster: Cluster, places: Sequence[Place]) -> None:
        self._cluster, self._places = cluster, places
        self._host_links: dict[tuple[str, str], Link] = {}
        self._cost_cache: dict[object, list[CollectiveCost]] = {}
        """Costs by operation and pattern of groups; see `_pattern`."""
        self._costs_of_groups: dict[object, list[CollectiveCost]] = {}
        """Costs by operation and groups."""
        self._host_keys: dict[str, object] = {}
        networks = [link.ends for link in cluster.links if link.ends[0] != link.ends[1]]
        networks += [link.ends for link in cluster.links if link.ends == ["*", "*"]]
        self._has_equal_pairs = networks in ([], [["*", "*"]])
        """True if the same link joins all pairs of hosts."""
        self._has_shared_links = any(link.shared for link in cluster.links)
        self._bandwidths = {id(link): link.bandwidth for link in cluster.links}
        self._link_indices = {id(link): number for number, link in enumerate(cluster.links)}

    def collective_costs(
        self, operation: str, groups: Sequence[Sequence[int]]
    ) -> list[CollectiveCost]:
        """Return the cost of `operation` for each of `groups`, which run it at the same time."""
        key = operation, tuple(map(tuple, groups))
        if key not in self._costs_of_groups:
            self._costs_of_groups[key] = self._make_costs(operation, groups)
        return self._costs_of_groups[key]

    def _make_costs(self, operation: str, groups: Sequence[Sequence[int]]) -> list[CollectiveCost]:
        found: list[CollectiveCost | None] = [None] * len(groups)
        for members in self._independent(groups):
            own = [groups[at] for at in members]
            key = operation, self._pattern(own)
            if key not in self._cost_cache:
                self._cost_cache[key] = self._group_costs(operation, own)
            for at, cost in zip(members, self._cost_cache[key], strict=True):
                found[at] = cost
        return [cost for cost in found if cost is not None]

    def _independent(self, groups: Sequence[Sequence[int]]) -> Iterable[list[int]]:
        """Return the positions of groups, apart where they have no host and so no port in common.

        All stay together if some link is shared.
        """
        if self._has_shared_links:
            return [list(range(len(groups)))]
        together: dict[str, list[int]] = {}
        """Positions of groups that are linked by hosts, by host."""
        for at, group in enumerate(groups):
            hosts = dict.fromkeys(self._places[rank].host for rank in group)
            merged = list({id(one): one for host in hosts if (one := together.get(host))}.values())
            own = merged[0] if merged else []
            for other in merged[1:]:
                own += other
                moved = [host for host, one in together.items() if one is other]
                together |= dict.fromkeys(moved, own)
            own.append(at)
            together |= dict.fromkeys(hosts, own)
        return [sorted(one) for one in {id(one): one for one in together.values()}.values()]

    def _pattern(self, groups: Sequence[Sequence[int]]) -> object:
        """Return a key that is equal for groups on equally linked devices.

        Hosts of equal links count by their order of appearance where one network joins all.
        """
        hosts: dict[str, object] = {}
        places = [[self._places[rank] for rank in group] for group in groups]
        for place in itertools.chain.from_iterable(places):
            if place.host not in hosts:
                hosts[place.host] = len(hosts) if self._has_equal_pairs else place.host
        pattern = tuple(
            tuple((hosts[place.host], place.device, place.number) for place in group)
            for group in places
        )
        return pattern, tuple(map(self._host_key, hosts))

    def _host_key(self, host: str) -> object:
        """Return a key that is equal for hosts with equal links between their devices."""
        if host not in self._host_keys:
            links = self._cluster.links_of_host[host]
            self._host_keys[host] = tuple(
                link.model_dump_json(exclude={"ends"})
                for link in links
                if link.ends == [host, host]
            )
        return self._host_keys[host]

    def _group_costs(self, operation: str, groups: Sequence[Sequence[int]]) -> list[CollectiveCost]:
        loads_by_group = [self._port_loads(operation, group) for group in groups]
        rounds = itertools.zip_longest(*loads_by_group, fillvalue=PortLoad())
        sums = [_sum_loads(load.fraction_by_port for load in together) for together in rounds]
        return [
            self._group_cost(operation, group, own, sums)
            for group, own in zip(groups, loads_by_group, strict=True)
        ]

    def _port_loads(self, operation: str, group: Sequence[int]) -> list[PortLoad]:
        """Return the load of `group` on ports, round by round."""
        places, found = [self._places[rank] for rank in group], []
        for one_round in collective_rounds(operation, len(group)):
            load = PortLoad(one_round.num_latencies)
            if one_round.edges is None:
                self._add_all_to_all(load, places, one_round.size_fraction)
            else:
                for source, destination in one_round.edges:
                    self._add_send(
                        load, places[source], places[destination], one_round.size_fraction
                    )
            found.append(load)
        return found

    def _group_cost(
        self,
        operation: str,
        group: Sequence[int],
        own_loads: Sequence[PortLoad],
        total_loads: Sequence[Mapping[Port, float]],
    ) -> CollectiveCost:
        if not own_loads:
            return CollectiveCost(0.0, 0.0, 1.0, None)
        link, measured = self._narrowest_link(group, own_loads), None
        for one in link.collectives:
            if (one.name, one.ranks) == (operation, len(group)):
                measured = one.times
        alone_s = sum(
            self._bottleneck_s_per_byte(load, load.fraction_by_port) for load in own_loads
        )
        byte_s = sum(
            self._bottleneck_s_per_byte(load, total)
            for load, total in zip(own_loads, total_loads, strict=False)
        )
        latency_s = sum(load.num_latencies * load.latency_s for load in own_loads)
        slowdown = byte_s / alone_s if alone_s else 1.0
        return CollectiveCost(latency_s, byte_s, slowdown, measured, link.skew_s)

    def _bottleneck_s_per_byte(self, load: PortLoad, total_load: Mapping[Port, float]) -> float:
        """Return seconds per byte at the busiest port that `load` uses, under `total_load`."""
        return max(total_load[port] / self._bandwidths[port.link] for port in load.fraction_by_port)

    def _add_send(
        self, load: PortLoad, source: Place, destination: Place, size_fraction: float
    ) -> None:
        if source.host != destination.host:
            self._add_inter_host(load, source.host, destination.host, size_fraction)
        else:
            link = intra_host_link(self._cluster, source.host)
            load.add(link.latency_s, link_ports(link, source, destination), size_fraction)

    def _add_inter_host(
        self, load: PortLoad, source: str, destination: str, size_fraction: float
    ) -> None:
        """Add bytes from host to host."""
        if (source, destination) not in self._host_links:
            link = inter_host_link(self._cluster, source, destination)
            self._host_links[source, destination] = link
        link = self._host_links[source, destination]
        load.add(link.latency_s, link_ports(link, source, destination), size_fraction)

    def _add_all_to_all(
        self, load: PortLoad, places: Sequence[Place], size_fraction: float
    ) -> None:
        """Add bytes of all ordered pairs; the ranks of a host share its links to other hosts."""
        by_host: dict[str, list[Place]] = {}
        for place in places:
            by_host.setdefault(place.host, []).append(place)
        for host, own in by_host.items():
            if len(own) > 1:
                link = intra_host_link(self._cluster, host)
                fraction = size_fraction * (len(own) - 1)
                for place in own:
                    load.add(link.latency_s, link_ports(link, place, place), fraction)
        for (source, own), (destination, others) in itertools.permutations(by_host.items(), 2):
            self._add_inter_host(load, source, destination, size_fraction * len(own) * len(others))

    def _narrowest_link(self, group: Sequence[int], own_loads: Sequence[PortLoad]) -> Link:
        """Return the narrowest link between the hosts of `group`, or inside its only host."""
        hosts = {self._places[rank].host for rank in group}
        used = {port.link for load in own_loads for port in load.fraction_by_port}
        links = [
            self._cluster.links[number]
            for number in sorted(map(self._link_indices.__getitem__, used))
        ]
        if len(hosts) > 1:
            within = [[host, host] for host in hosts]
            links = [link for link in links if link.ends not in within] or links
        return min(links, key=lambda link: link.bandwidth)


def _sum_loads(loads: Iterable[Mapping[Port, float]]) -> dict[Port, float]:
    total: dict[Port, float] = defaultdict(float)
    for load in loads:
        for port, fraction in load.items():
            total[port] += fraction
    return total
