"""Conversion of the figures of all ranks to a cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moesaic.dist.probe.compute import (  # fmt: skip
    ATTENTION_KINDS,
    CHAIN_LENGTH,
    ELEMENTWISE_KINDS,
    FUNCTION_ELEMENTS,
    HEADS,
    MATMULS_PER_LAYER,
    Sizes,
)
from moesaic.dist.probe.disks import SMALL_BLOCK_BYTES
from moesaic.dist.probe.links import COLLECTIVES, collective_bytes, link_pairs, message_bytes
from moesaic.dist.probe.settings import ProbeConfig
from moesaic.dist.probe.timing import Figures, fit_line, medians
from moesaic.facts.cluster import (  # fmt: skip
    AttentionTimes,
    Cluster,
    Collective,
    Curve,
    Device,
    Disk,
    ElementwiseKernel,
    Grid,
    Host,
    Link,
    Matmul,
)
from moesaic.facts.workload.ops import TRAFFIC_FACTOR

_DUPLEX_FACTOR = 1.5
"""Maximum ratio of the time both ways to the time one way for a link to count as duplex."""

_MAX_PCIE_BANDWIDTH = 64e9
"""Bytes per second of PCIe 5 with 16 lanes."""


@dataclass(frozen=True)
class RankHardware:
    """Hardware of a rank's host and device."""

    host: str
    cpu: str
    """Model name of the CPU."""
    cores: int
    host_bytes: float
    kind: str
    """Device kind, as in cluster.toml."""
    model: str
    device_bytes: float
    fabric: str
    """Network between this host and others."""


def ranks_by_host(hardware_by_rank: Sequence[RankHardware]) -> list[list[int]]:
    """Return the ranks of every host, hosts ordered by their first rank."""
    ranks: dict[str, list[int]] = {}
    for rank, hardware in enumerate(hardware_by_rank):
        ranks.setdefault(hardware.host, []).append(rank)
    return list(ranks.values())


@dataclass(frozen=True)
class ClusterBuilder:
    """Builder of clusters from measured figures; the same for all repeats."""

    config: ProbeConfig
    hardware_by_rank: Sequence[RankHardware]
    one_rank_sizes: Sizes
    """Sizes measured by one rank with all cores of its host."""
    all_ranks_sizes: Sizes
    """Sizes measured by all ranks at once."""

    def build(self, figures: Sequence[Figures]) -> Cluster:
        """Return the cluster in which rank i measured `figures[i]`."""
        hosts = ranks_by_host(self.hardware_by_rank)
        return Cluster(
            name=self.config.name or self.hardware_by_rank[0].host,
            hosts=[self._host(ranks, figures) for ranks in hosts],
            links=list(self._links(hosts, figures)) if self.config.links else [],
        )

    def _host(self, ranks: list[int], figures_by_rank: Sequence[Figures]) -> Host:
        hardware, own = self.hardware_by_rank[ranks[0]], figures_by_rank[ranks[0]]
        threads = max(1, hardware.cores // len(ranks))
        devices, alone = [], _select(own, "alone ")
        cpu = [_device(alone, self.one_rank_sizes, {
            "kind": "cpu", "model": hardware.cpu, "threads": hardware.cores,
            "memory_bytes": hardware.host_bytes,
        })] if alone else []  # fmt: skip
        if hardware.kind != "cpu" or len(ranks) > 1:
            figures = medians([_select(figures_by_rank[rank], "shared ") for rank in ranks])
            is_cpu = hardware.kind == "cpu"
            devices = [_device(figures, self.all_ranks_sizes, {
                "kind": hardware.kind, "model": hardware.model, "count": len(ranks),
                "threads": threads if is_cpu else 1,
                "memory_bytes": (
                    hardware.host_bytes / len(ranks) if is_cpu else hardware.device_bytes
                ),
                "price_per_hour": 0.0 if is_cpu else self.config.gpu_price_per_hour,
            })]  # fmt: skip
        return Host(
            name=hardware.host, memory_bytes=hardware.host_bytes, devices=[*devices, *cpu],
            disks=[_disk(path, own) for path in self.config.disks if f"disk {path} read" in own],
            price_per_hour=self.config.price_per_hour,
        )  # fmt: skip

    def _links(self, hosts: list[list[int]], figures_by_rank: Sequence[Figures]) -> Iterator[Link]:
        host_of = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
        measured: dict[tuple[int, int], list[Figures]] = {}
        for first, second in link_pairs(hosts):
            figures = _select(figures_by_rank[first], f"{first}-{second} ")
            measured.setdefault((host_of[first], host_of[second]), []).append(figures)
        between: list[Link] = []
        for (one, other), several in measured.items():
            ranks = hosts[one]
            link = self._link(ranks[0], hosts[other][0], medians(several))
            if one == other:
                yield self._with_collectives(
                    link, "within", [figures_by_rank[rank] for rank in ranks]
                )
            else:
                between.append(link)
        slowest = min(between, key=lambda link: link.bandwidth, default=None)
        for link in between:  # Collectives over all hosts run at the speed of the slowest link.
            yield (
                self._with_collectives(link, "across", figures_by_rank) if link is slowest else link
            )

    def _link(self, first: int, second: int, figures: Figures) -> Link:
        one, other = self.hardware_by_rank[first], self.hardware_by_rank[second]
        one_way, (both,) = figures["one way"], figures["both"]
        sizes = message_bytes(self.config.message_bytes)
        latency_s, byte_s = fit_line(sizes, one_way)
        return Link(
            ends=[one.host, other.host],
            kind=one.fabric if one.host != other.host else _link_kind(one.kind, 1 / byte_s),
            latency_s=_round(latency_s), bandwidth=_round(1 / byte_s),
            duplex=both < _DUPLEX_FACTOR * one_way[-1],
            collectives=[_collective("send", 2, sizes, one_way)],
        )  # fmt: skip

    def _with_collectives(self, link: Link, scope: str, figures_by_rank: Sequence[Figures]) -> Link:
        figures = medians(
            [
                {name: times for name, times in figures.items() if scope in name.split()}
                for figures in figures_by_rank
            ]
        )
        sizes = collective_bytes(len(figures_by_rank), self.config.message_bytes)
        collectives = [
            _collective(name, len(figures_by_rank), sizes, figures[f"{name} {scope}"])
            for name in COLLECTIVES
        ]
        (skew_s,) = figures[f"skew {scope}"]
        update = {"collectives": [*link.collectives, *collectives], "skew_s": _round(skew_s)}
        return link.model_copy(update=update)


def _collective(
    name: str, ranks: int, sizes: Sequence[int], seconds: Sequence[float]
) -> Collective:
    """Return the measured seconds of a collective by its bytes."""
    times = Curve(bytes=[float(size) for size in sizes], seconds=_round_all(seconds))
    return Collective.model_validate({"name": name, "ranks": ranks, "times": times})


def _link_kind(kind: str, bandwidth: float) -> str:
    """Return the kind of the link inside a host that has this bandwidth, in bytes per second."""
    if kind == "cpu":
        return "loopback"
    return "nvlink" if bandwidth > _MAX_PCIE_BANDWIDTH else "pcie"


def _select(figures: Figures, prefix: str) -> Figures:
    """Return the figures whose names start with `prefix`, without it."""
    return {
        name.removeprefix(prefix): values
        for name, values in figures.items()
        if name.startswith(prefix)
    }


def _device(figures: Figures, sizes: Sizes, description: dict[str, object]) -> Device:
    """Return a device of this `description` with its measured speeds."""
    matmul = [_matmul(dtype, figures, sizes) for dtype in sizes.matrix_sides]
    touched = [2 * size for size in sizes.copy_bytes]  # A copy reads and writes.
    times, (function_s, pass_s) = figures["copies"], figures["functions"]
    return Device.model_validate(
        description | {
            "memory_bandwidth": _round(touched[-1] / times[-1]),
            "memory_times": Curve(bytes=list(touched), seconds=_round_all(times)),
            "elementwise": [
                _elementwise(kind, figures[f"elementwise {kind}"], sizes)
                for kind in ELEMENTWISE_KINDS
            ],
            "launch_s": _round(figures["calls"][0] / (2 * CHAIN_LENGTH)),
            "reference_s": _round(figures["reference"][0]),
            "transcendental_s": _round(max(function_s - pass_s, 0.0) / FUNCTION_ELEMENTS),
            "matmul": matmul,
        }
    )  # fmt: skip


def _elementwise(kind: str, times: list[float], sizes: Sizes) -> ElementwiseKernel:
    touched = [float(TRAFFIC_FACTOR[kind] * size) for size in sizes.elementwise_bytes]
    curve = Curve(bytes=touched, seconds=_round_all(times))
    return ElementwiseKernel.model_validate({"kind": kind, "times": curve})


def _matmul(dtype: str, figures: Figures, sizes: Sizes) -> Matmul:
    times = [total_s / MATMULS_PER_LAYER for total_s in figures[f"matmul {dtype}"]]
    head_times = {
        kind: [_round(total_s / HEADS) for total_s in figures[f"attention {kind} {dtype}"]]
        for kind in ATTENTION_KINDS
    }
    axes = sizes.axes(dtype)
    lengths = [float(length) for length in axes.lengths]
    attention = AttentionTimes.model_validate(
        {"head_dim": axes.head_dim, "lengths": lengths, **head_times}
    )
    columns = [float(size) for size in axes.columns]
    rows = [float(size) for size in axes.rows]
    grid = Grid(rows=rows, columns=columns, inner=columns, seconds=_round_all(times))
    flops = 2 * rows[-1] * columns[-1] ** 2 / times[-1]
    group_times = [
        total_s / MATMULS_PER_LAYER / sizes.num_groups(dtype, *size)
        for total_s, (_, *size) in zip(
            figures[f"grouped matmul {dtype}"], sizes.grouped_matmul_shapes(dtype), strict=True
        )
    ]
    group_rows = [float(size) for size in axes.grouped_rows]
    grouped = Grid(rows=group_rows, columns=columns, inner=columns, seconds=_round_all(group_times))
    return Matmul.model_validate(
        {
            "dtype": dtype, "flops": _round(flops), "times": grid, "grouped_times": grouped,
            "attention": attention,
        }
    )  # fmt: skip


def _disk(path: str, figures: Figures) -> Disk:
    rates = {name: _round(values[0]) for name, values in _select(figures, f"disk {path} ").items()}
    return Disk(
        path=os.path.abspath(path), read=rates["read"], write=rates["write"],
        random_read=rates["random read"], random_write=rates["random write"],
        mixed=rates["mixed"], block_bytes=SMALL_BLOCK_BYTES,
    )  # fmt: skip


def _round(value: float) -> float:
    """Return `value` with four significant digits."""
    return float(f"{value:.4g}")


def _round_all(values: Sequence[float]) -> list[float]:
    return [_round(value) for value in values]
