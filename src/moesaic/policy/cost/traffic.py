"""What operations bring to each port of a cluster's links, and how long the fullest is at it.

A port is where bytes are held up: a device's end of the link inside its host, a host's end of a
link to others, or all of a link that is shared. Groups that do the same thing at the same time use
ports together. An operation takes its turns' latencies, and as long as the fullest of its ports is
busy with the bytes of all.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moesaic.facts.cluster import Cluster, Curve, Link, Place, inside, route
from moesaic.policy.cost.communication import bursts


class Port(NamedTuple):
    """Where bytes are held up."""

    link: int
    """The link's identity."""
    at: Place | str
    """A device inside its host, a host between hosts; empty: all of a shared link."""
    way: str
    """in or out; empty where both ways are one."""


@dataclass(frozen=True)
class Pace:
    """How long an operation takes a group, while others do the same."""

    latency_s: float
    byte_s: float
    """Seconds for each byte of its size (`Message.num_bytes`)."""
    sharing: float
    """How many times as long the bytes take as they would with no other group about."""
    measured: Curve | None
    """Seconds by size of this operation alone, where they were measured."""
    skew_s: float = 0.0
    """As the narrowest link has it."""

    def seconds(self, num_bytes: float) -> float:
        """Seconds of an operation of that size."""
        if self.measured is not None:
            return self.measured.at(max(num_bytes, 1.0) * self.sharing)
        return self.latency_s + num_bytes * self.byte_s


@dataclass
class Demand:
    """What one group brings to ports in one burst, for each byte of the operation's size."""

    turns: int = 0
    shares: dict[Port, float] = field(default_factory=lambda: defaultdict(float))
    turn_s: float = 0.0
    """Latency of the slowest way that it uses."""

    def slower(self, turn_s: float) -> None:
        """A way with this latency is used too."""
        self.turn_s = max(self.turn_s, turn_s)

    def over(self, ports: Iterable[Port], share: float) -> None:
        """Bytes pass those ports."""
        for port in ports:
            self.shares[port] += share


def ports(link: Link, here: Place | str, there: Place | str) -> tuple[Port, ...]:
    """Those of a link from `here` to `there`."""
    if link.shared:
        return (Port(id(link), "", ""),)
    out, into = ("out", "in") if link.duplex else ("", "")
    return Port(id(link), here, out), Port(id(link), there, into)


class Way(NamedTuple):
    """From host to host."""

    latency_s: float
    ports: list[Port]
    """Of all links on the way."""


class Traffic:
    """Demands and paces of operations between the ranks of a cluster."""

    def __init__(self, cluster: Cluster, places: Sequence[Place]) -> None:
        self._cluster, self._places = cluster, places
        self._ways: dict[tuple[str, str], Way] = {}
        self._known: dict[tuple[str, tuple[tuple[int, ...], ...]], list[Pace]] = {}
        self._bandwidths = {id(link): link.bandwidth for link in cluster.links}
        self._numbers = {id(link): number for number, link in enumerate(cluster.links)}

    def paces(self, operation: str, groups: Sequence[Sequence[int]]) -> list[Pace]:
        """How long `operation` takes each of `groups`, all of which do it at the same time."""
        key = operation, tuple(map(tuple, groups))
        if key not in self._known:
            self._known[key] = self._paces(operation, groups)
        return self._known[key]

    def _paces(self, operation: str, groups: Sequence[Sequence[int]]) -> list[Pace]:
        demands = [self.demands(operation, group) for group in groups]
        bursts_of_all = itertools.zip_longest(*demands, fillvalue=Demand())
        sums = [_sum(demand.shares for demand in together) for together in bursts_of_all]
        return [
            self._pace(operation, group, own, sums)
            for group, own in zip(groups, demands, strict=True)
        ]

    def demands(self, operation: str, group: Sequence[int]) -> list[Demand]:
        """What `group` brings to ports, burst by burst."""
        places, found = [self._places[rank] for rank in group], []
        for burst in bursts(operation, len(group)):
            demand = Demand(burst.turns)
            if burst.edges is None:
                self._exchange(demand, places, burst.share)
            else:
                for here, there in burst.edges:
                    self._send(demand, places[here], places[there], burst.share)
            found.append(demand)
        return found

    def _pace(
        self,
        operation: str,
        group: Sequence[int],
        own: Sequence[Demand],
        sums: Sequence[Mapping[Port, float]],
    ) -> Pace:
        if not own:
            return Pace(0.0, 0.0, 1.0, None)
        link, measured = self._narrowest(group, own), None
        along = {port.link for demand in own for port in demand.shares}
        for one in link.collectives:
            # A message was measured from end to end of the link, operations of all ranks whole.
            whole = operation != "send" or along == {id(link)}
            if (one.name, one.ranks) == (operation, len(group)) and whole:
                measured = one.times
        alone = sum(self._busy(demand, demand.shares) for demand in own)
        byte_s = sum(self._busy(demand, total) for demand, total in zip(own, sums, strict=False))
        latency_s = sum(demand.turns * demand.turn_s for demand in own)
        sharing = byte_s / alone if alone else 1.0
        return Pace(latency_s, byte_s, sharing, measured, link.skew_s)

    def _busy(self, demand: Demand, among: Mapping[Port, float]) -> float:
        """Seconds a byte of the fullest port that `demand` uses, when all bring `among`."""
        return max(among[port] / self._bandwidths[port.link] for port in demand.shares)

    def _send(self, demand: Demand, here: Place, there: Place, share: float) -> None:
        if here.host != there.host:
            self._travel(demand, here.host, there.host, share)
        else:
            link = inside(self._cluster, here.host)
            demand.slower(link.latency_s)
            demand.over(ports(link, here, there), share)

    def _travel(self, demand: Demand, here: str, there: str, share: float) -> None:
        """Bytes from host to host, over all links on their way."""
        way = self._way(here, there)
        demand.slower(way.latency_s)
        demand.over(way.ports, share)

    def _exchange(self, demand: Demand, places: Sequence[Place], share: float) -> None:
        """From each to each other: a host's ranks share its end of the links to other hosts."""
        by_host: dict[str, list[Place]] = {}
        for place in places:
            by_host.setdefault(place.host, []).append(place)
        for host, own in by_host.items():
            if len(own) > 1:
                link = inside(self._cluster, host)
                demand.slower(link.latency_s)
                for place in own:
                    demand.over(ports(link, place, place), share * (len(own) - 1))
        for (here, own), (there, others) in itertools.permutations(by_host.items(), 2):
            self._travel(demand, here, there, share * len(own) * len(others))

    def _way(self, here: str, there: str) -> Way:
        if (here, there) not in self._ways:
            hops = route(self._cluster, here, there)
            along = [port for hop in hops for port in ports(hop.link, hop.here, hop.there)]
            self._ways[here, there] = Way(sum(hop.link.latency_s for hop in hops), along)
        return self._ways[here, there]

    def _narrowest(self, group: Sequence[int], own: Sequence[Demand]) -> Link:
        """The narrowest link between the hosts of `group`, or inside one."""
        hosts = {self._places[rank].host for rank in group}
        used = {port.link for demand in own for port in demand.shares}
        links = [
            self._cluster.links[number] for number in sorted(map(self._numbers.__getitem__, used))
        ]
        if len(hosts) > 1:
            within = [[host, host] for host in hosts]
            links = [link for link in links if link.ends not in within] or links
        return min(links, key=lambda link: link.bandwidth)


def _sum(demands: Iterable[Mapping[Port, float]]) -> dict[Port, float]:
    total: dict[Port, float] = defaultdict(float)
    for demand in demands:
        for port, share in demand.items():
            total[port] += share
    return total
