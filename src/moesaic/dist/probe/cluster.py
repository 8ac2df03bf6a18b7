"""From what every rank measured to one cluster, and to the few figures that a person reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moesaic.dist.probe.compute import (
    ATTENTIONS,
    CHAIN,
    FUNCTION_ELEMENTS,
    HEAD_DIM,
    HEADS,
    KINDS,
    WAYS,
    Sizes,
)  # fmt: skip
from moesaic.dist.probe.disks import SMALL
from moesaic.dist.probe.links import COLLECTIVES, collective_bytes, message_bytes, pairs
from moesaic.dist.probe.settings import ProbeConfig
from moesaic.dist.probe.timing import Figures, line, medians
from moesaic.facts.cluster import (
    Cluster,
    Collective,
    Curve,
    Device,
    Disk,
    Grid,
    Heads,
    Host,
    Link,
    Matmul,
    Passes,
)  # fmt: skip
from moesaic.facts.workload.ops import PASSED_BYTES

_AT_ONCE = 1.5
"""Both ways at once may take this much longer than one way and still count as duplex."""

_MOST_OF_PCIE = 64e9
"""Bytes a second that 16 lanes of PCIe 5 could carry."""


@dataclass(frozen=True)
class Place:
    """What a rank says of the machine it runs on."""

    host: str
    cpu: str
    """Model."""
    cores: int
    host_bytes: float
    kind: str
    """Of the rank's device."""
    model: str
    device_bytes: float
    fabric: str
    """What joins this host to others."""


def hosts_of(places: Sequence[Place]) -> list[list[int]]:
    """The ranks of every host, hosts in the order of their first ranks."""
    found: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        found.setdefault(place.host, []).append(rank)
    return list(found.values())


@dataclass(frozen=True)
class Assembly:
    """All that does not change between repeats."""

    config: ProbeConfig
    places: Sequence[Place]
    alone: Sizes
    """Of what one rank with all cores of its host measures."""
    shared: Sizes
    """Of what all ranks measure at once."""

    def cluster(self, found: Sequence[Figures]) -> Cluster:
        """The cluster in which rank i measured `found[i]`."""
        hosts = hosts_of(self.places)
        return Cluster(
            name=self.config.name or self.places[0].host,
            hosts=[self._host(ranks, found) for ranks in hosts],
            links=list(self._links(hosts, found)) if self.config.links else [],
        )

    def _host(self, ranks: list[int], found: Sequence[Figures]) -> Host:
        place, own = self.places[ranks[0]], found[ranks[0]]
        threads = max(1, place.cores // len(ranks))
        whole = _device(_with(own, "alone "), self.alone, {
            "kind": "cpu", "model": place.cpu, "threads": place.cores,
            "memory_bytes": place.host_bytes,
        })  # fmt: skip
        each = []
        if place.kind != "cpu" or len(ranks) > 1:
            figures = medians([_with(found[rank], "shared ") for rank in ranks])
            is_cpu = place.kind == "cpu"
            each = [_device(figures, self.shared, {
                "kind": place.kind, "model": place.model, "count": len(ranks),
                "threads": threads if is_cpu else 1,
                "memory_bytes": place.host_bytes / len(ranks) if is_cpu else place.device_bytes,
                "price_per_hour": 0.0 if is_cpu else self.config.gpu_price_per_hour,
            })]  # fmt: skip
        return Host(
            name=place.host, memory_bytes=place.host_bytes, devices=[*each, whole],
            disks=[_disk(path, own) for path in self.config.disks if f"disk {path} read" in own],
            price_per_hour=self.config.price_per_hour,
        )  # fmt: skip

    def _links(self, hosts: list[list[int]], found: Sequence[Figures]) -> Iterator[Link]:
        home = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
        measured: dict[tuple[int, int], list[Figures]] = {}
        for first, second in pairs(hosts):
            figures = _with(found[first], f"{first}-{second} ")
            measured.setdefault((home[first], home[second]), []).append(figures)
        between: list[Link] = []
        for (one, other), several in measured.items():
            inside = one == other
            ranks = hosts[one]
            link = self._link(ranks[0], hosts[other][0], medians(several))
            if inside:
                yield self._with_collectives(link, "within", [found[rank] for rank in ranks])
            else:
                between.append(link)
        slowest = min(between, key=lambda link: link.bandwidth, default=None)
        for link in between:  # The slowest sets the pace of what all hosts do together.
            yield self._with_collectives(link, "across", found) if link is slowest else link

    def _link(self, first: int, second: int, figures: Figures) -> Link:
        one, other = self.places[first], self.places[second]
        one_way, (both,) = figures["one way"], figures["both"]
        sizes = message_bytes(self.config.message_bytes)
        latency_s, a_byte_s = line(sizes, one_way)
        return Link(
            ends=[one.host, other.host],
            kind=one.fabric if one.host != other.host else _joined_by(one.kind, 1 / a_byte_s),
            latency_s=_short(latency_s), bandwidth=_short(1 / a_byte_s),
            duplex=both < _AT_ONCE * one_way[-1], collectives=[_timed("send", 2, sizes, one_way)],
        )  # fmt: skip

    def _with_collectives(self, link: Link, where: str, found: Sequence[Figures]) -> Link:
        figures = medians([{n: v for n, v in one.items() if where in n.split()} for one in found])
        sizes = collective_bytes(len(found), self.config.message_bytes)
        collectives = [
            _timed(name, len(found), sizes, figures[f"{name} {where}"]) for name in COLLECTIVES
        ]
        (skew_s,) = figures[f"skew {where}"]
        together = {"collectives": [*link.collectives, *collectives], "skew_s": _short(skew_s)}
        return link.model_copy(update=together)


def _timed(name: str, ranks: int, sizes: Sequence[int], seconds: Sequence[float]) -> Collective:
    """Times of an operation by its size."""
    times = Curve(bytes=[float(size) for size in sizes], seconds=_shorts(seconds))
    return Collective.model_validate({"name": name, "ranks": ranks, "times": times})


def _joined_by(kind: str, bandwidth: float) -> str:
    """What joins the devices of one host, over which messages travel that fast."""
    if kind == "cpu":
        return "loopback"
    return "nvlink" if bandwidth > _MOST_OF_PCIE else "pcie"


def _with(figures: Figures, prefix: str) -> Figures:
    """The figures whose names open with `prefix`, without it."""
    return {n.removeprefix(prefix): v for n, v in figures.items() if n.startswith(prefix)}


def _device(figures: Figures, sizes: Sizes, about: dict[str, object]) -> Device:
    """`about`, and how fast it is."""
    matmul = [_matmul(dtype, figures, sizes) for dtype in sizes.sides]
    touched = [2 * size for size in sizes.copies]  # A copy reads and writes.
    times, (function_s, pass_s) = figures["copies"], figures["functions"]
    return Device.model_validate(
        about | {
            "memory_bandwidth": _short(touched[-1] / times[-1]),
            "streams": Curve(bytes=list(touched), seconds=_shorts(times)),
            "passes": [_passes(kind, figures[f"passes {kind}"], sizes) for kind in KINDS],
            "call_s": _short(figures["calls"][0] / (2 * CHAIN)),
            "special_s": _short(max(function_s - pass_s, 0.0) / FUNCTION_ELEMENTS),
            "matmul": matmul,
        }
    )  # fmt: skip


def _passes(kind: str, times: list[float], sizes: Sizes) -> Passes:
    touched = [float(PASSED_BYTES[kind] * size) for size in sizes.passed]
    curve = Curve(bytes=touched, seconds=_shorts(times))
    return Passes.model_validate({"kind": kind, "times": curve})


def _matmul(dtype: str, figures: Figures, sizes: Sizes) -> Matmul:
    times = [one / WAYS for one in figures[f"products {dtype}"]]
    ways = {
        way: [_short(one / HEADS) for one in figures[f"attention {way} {dtype}"]]
        for way in ATTENTIONS
    }
    lengths = [float(length) for length in sizes.lengths(dtype)]
    heads = Heads.model_validate({"head_dim": HEAD_DIM, "lengths": lengths, **ways})
    columns = [float(size) for size in sizes.columns(dtype)]
    rows = [float(size) for size in sizes.rows(dtype)]
    grid = Grid(rows=rows, columns=columns, inner=columns, seconds=_shorts(times))
    flops = 2 * rows[-1] * columns[-1] ** 2 / times[-1]
    each = [
        one / WAYS / sizes.slots_of(dtype, *size)
        for one, (_, *size) in zip(
            figures[f"slots {dtype}"], sizes.products_of_slots(dtype), strict=True
        )
    ]
    fewer = [float(size) for size in sizes.rows_of_slots(dtype)]
    slots = Grid(rows=fewer, columns=columns, inner=columns, seconds=_shorts(each))
    return Matmul.model_validate(
        {
            "dtype": dtype, "flops": _short(flops), "products": grid, "slots": slots,
            "attention": heads,
        }
    )  # fmt: skip


def _disk(path: str, figures: Figures) -> Disk:
    rates = {name: _short(values[0]) for name, values in _with(figures, f"disk {path} ").items()}
    return Disk(
        path=os.path.abspath(path), read=rates["read"], write=rates["write"],
        random_read=rates["random read"], random_write=rates["random write"],
        mixed=rates["mixed"], block_bytes=SMALL,
    )  # fmt: skip


def _short(value: float) -> float:
    """As many digits as mean something."""
    return float(f"{value:.4g}")


def _shorts(values: Sequence[float]) -> list[float]:
    return [_short(value) for value in values]


class Headline(NamedTuple):
    """A figure that a person reads."""

    thing: str
    """What it is about: a device, a link, a disk."""
    what: str
    value: float
    unit: str


def headlines(cluster: Cluster) -> Iterator[Headline]:
    """The figures that matter most."""
    for host in cluster.hosts:
        for device in host.devices:
            what = f"{device.count} of them"
            if device.kind == "cpu":  # A way to share its cores.
                threads = f"{device.threads} thread{'s'[: device.threads > 1]}"
                what = f"{device.count} rank{'s'[: device.count > 1]}, {threads} each"
            thing = f"{host.name}: {device.model}, {what}"
            for matmul in device.matmul:
                yield Headline(thing, f"{matmul.dtype} products", matmul.flops, "flop/s")
            yield Headline(thing, "memory", device.memory_bandwidth, "B/s")
            yield Headline(thing, "least operation", device.call_s, "s")
        for disk in host.disks:
            thing = f"{host.name}: disk {disk.path}"
            for name in ("read", "write", "random_read", "random_write", "mixed"):
                yield Headline(thing, name.replace("_", " "), getattr(disk, name), "B/s")
    for link in cluster.links:
        thing = f"{' to '.join(dict.fromkeys(link.ends))}: {link.kind}"
        yield Headline(thing, "latency", link.latency_s, "s")
        yield Headline(thing, "bandwidth", link.bandwidth, "B/s")
        for one in link.collectives:
            size, unit = one.times.num_bytes[-1] / 2**20, "MiB"
            if size < 1:
                size, unit = size * 2**10, "KiB"
            what = f"{one.name.replace('_', '-')} of {size:.0f} {unit}, {one.ranks} ranks"
            yield Headline(thing, what, one.times.seconds[-1], "s")
