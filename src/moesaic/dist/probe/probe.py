"""Entry point of the probe: runs all measurements on all ranks, several times."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.distributed import PrefixStore

from moesaic.base.errors import StoreError
from moesaic.dist.probe import compute, disks, links
from moesaic.dist.probe.cluster import ClusterBuilder, RankHardware, ranks_by_host
from moesaic.dist.probe.compute import Axes, Sizes
from moesaic.dist.probe.settings import ProbeConfig
from moesaic.dist.probe.timing import Figures, medians, relative_range
from moesaic.dist.world import World
from moesaic.facts.cluster import Cluster
from moesaic.kernels import device as devices

PhaseCallback = Callable[[str], None]
"""Callback at the start of each phase, with its name."""
_MAX_MEDIAN_RANGE, _MAX_P90_RANGE = 0.2, 0.5
"""Relative ranges of repeats, at the median and at the 90th percentile, that cause a warning."""
_PHASES = ("one rank with all cores", "all ranks at once", "links", "disks")


@dataclass(frozen=True)
class ProbeResult:
    """Result of a probe."""

    cluster: Cluster
    """Cluster from the medians of all repeats."""
    median_range: float
    """Median over all measured numbers of their range over the repeats, relative to the median."""
    p90_range: float
    """90th percentile of these ranges."""
    notes: list[str]
    """Sentences on what could not be measured, or may be wrong."""


def collective_timeout(config: ProbeConfig) -> timedelta:
    """Return how long a rank waits for others that measure."""
    return timedelta(seconds=120 + 10 * config.seconds)


def num_phases(config: ProbeConfig) -> int:
    """Return the number of calls of the phase callback."""
    return len(_PHASES) * config.repeats


def probe(
    world: World, config: ProbeConfig, on_phase: PhaseCallback, job: Axes | None = None
) -> ProbeResult | None:
    """Measure the hardware and return the result on rank 0, None elsewhere. Collective over the
    world.

    With the sizes of a `job`, measure these, and CPUs only as the ranks use them.
    """
    store_gather = _StoreGather(world)
    hardware = [
        RankHardware(**fields) for fields in store_gather.gather(asdict(_rank_hardware(world)))
    ]
    hosts = ranks_by_host(hardware)
    own_sizes = _choose_sizes(world, config, len(hosts[0]))
    sizes = store_gather.gather([asdict(item) for item in own_sizes])[0]
    one_rank, all_ranks = (replace(Sizes.from_plain(fields), job=job) for fields in sizes)
    builder = ClusterBuilder(config, hardware, one_rank, all_ranks)
    rank_probe = _RankProbe(world, config, hosts, store_gather, builder, on_phase)
    threads = torch.get_num_threads()
    try:
        repeats = [rank_probe.measure() for _ in range(config.repeats)]
    finally:
        torch.set_num_threads(threads)
    notes = store_gather.gather(rank_probe.notes)
    if not world.is_rank_zero:
        return None
    by_rank = [medians([repeat[rank] for repeat in repeats]) for rank in range(world.size)]
    ranges = sorted(_relative_ranges(repeats))
    median_range, p90_range = median(ranges), ranges[int(0.9 * (len(ranges) - 1))]
    unique = [note for several in notes for note in dict.fromkeys(several)]
    return ProbeResult(
        builder.build(by_rank), median_range, p90_range,
        [*unique, *_noise_warnings(median_range, p90_range, config)],
    )  # fmt: skip


def _noise_warnings(median_range: float, p90_range: float, config: ProbeConfig) -> list[str]:
    """Return a warning if repeats differ too much."""
    if median_range <= _MAX_MEDIAN_RANGE and p90_range <= _MAX_P90_RANGE:
        return []
    return [
        f"the machine was not steady: repeats differ by {median_range:.0%} (median) and "
        f"{p90_range:.0%} (90th percentile); stop other work and probe again, for longer "
        f"(seconds = {3 * config.seconds:g}, repeats = {2 * config.repeats})"
    ]


def _choose_sizes(world: World, config: ProbeConfig, ranks_per_host: int) -> list[Sizes]:
    """Return the sizes for one rank with all cores and for all ranks at once, on rank 0; []
    elsewhere."""
    if not world.is_rank_zero:
        return []
    cpu, share_s, cores = torch.device("cpu"), _share_s(config), devices.num_cores()
    options = (config.dtypes, config.largest_side, config.copy_bytes)
    if world.device == cpu:  # Threads only matter to ranks on a CPU.
        alone = compute.choose_sizes(cpu, *options, share_s, cores)
        threads_per_rank = max(1, cores // ranks_per_host)
        return [alone, replace(alone, min_groups=compute.num_groups_for(threads_per_rank))]
    shared = compute.choose_sizes(world.device, *options, share_s, 1)
    return [compute.choose_sizes(cpu, None, None, None, share_s, cores), shared]


def _share_s(config: ProbeConfig) -> float:
    """Return the seconds for one phase of one repeat."""
    return config.seconds / config.repeats / len(_PHASES)


def _relative_ranges(repeats: list[list[Figures]]) -> list[float]:
    """Return the relative range over the repeats of every measured number."""
    return [
        relative_range(values)
        for ranks in zip(*repeats, strict=True)
        for name in ranks[0]
        for values in zip(*(figures[name] for figures in ranks), strict=True)
    ]


@dataclass
class _RankProbe:
    world: World
    config: ProbeConfig
    hosts: list[list[int]]
    store_gather: _StoreGather
    builder: ClusterBuilder
    on_phase: PhaseCallback

    def __post_init__(self) -> None:
        self.notes: list[str] = []
        (self.host_ranks,) = [ranks for ranks in self.hosts if self.world.rank in ranks]
        self.share_s = _share_s(self.config)

    def measure(self) -> list[Figures]:
        """Run all phases once and return the figures of all ranks."""
        figures: Figures = {}
        measurements = (
            self._measure_one_rank,
            self._measure_all_ranks,
            self._measure_links,
            self._measure_disks,
        )
        for name, measure in zip(_PHASES, measurements, strict=True):
            # A rank that waits here leaves its cores to the ranks that measure.
            self.store_gather.gather(None)
            self.on_phase(name)
            figures |= measure()
        return list(self.store_gather.gather(figures))

    def _measure_one_rank(self) -> Figures:
        is_shared = self.world.device.type == "cpu" and min(map(len, self.hosts)) > 1
        is_used = self.builder.one_rank_sizes.job is None or not is_shared
        if self.world.rank != self.host_ranks[0] or not is_used:
            return {}
        torch.set_num_threads(devices.num_cores())
        cpu = torch.device("cpu")
        return _add_prefix(
            "alone ", compute.measure(cpu, self.builder.one_rank_sizes, self.share_s, lambda: None)
        )

    def _measure_all_ranks(self) -> Figures:
        torch.set_num_threads(max(1, devices.num_cores() // len(self.host_ranks)))
        if self.world.device.type == "cpu" and max(map(len, self.hosts)) == 1:
            return {}  # `_measure_one_rank` has measured this.
        sizes, barrier = self.builder.all_ranks_sizes, self.world.barrier
        return _add_prefix(
            "shared ", compute.measure(self.world.device, sizes, self.share_s, barrier)
        )

    def _measure_links(self) -> Figures:
        if self.world.size == 1 or not self.config.links:
            return {}
        return links.measure(self.world, self.hosts, self.config.message_bytes, self.share_s)

    def _measure_disks(self) -> Figures:
        figures: Figures = {}
        if self.world.rank != self.host_ranks[0]:
            return figures
        for path in self.config.disks:
            share_s = self.share_s / len(self.config.disks)
            try:
                measured = disks.measure(Path(path), self.config.disk_bytes, share_s)
            except disks.NoDirectIO as error:
                self.notes.append(str(error))
            else:
                figures |= _add_prefix(f"disk {path} ", measured)
        return figures


class _StoreGather:
    """All-gather through the store; waiting in it uses no CPU time."""

    def __init__(self, world: World) -> None:
        self._world, self._rank, self._size = world, world.rank, world.size
        self._store = PrefixStore("probe", world.store)
        self._num_gathers = 0

    def gather(self, message: Any) -> list[Any]:
        """Return the JSON `message` of every rank, ordered by rank."""
        self._num_gathers += 1
        self._store.set(f"{self._num_gathers}/{self._rank}", json.dumps(message))
        names = [f"{self._num_gathers}/{rank}" for rank in range(self._size)]
        if not self._world.wait_for_keys(self._store, names):
            raise StoreError(
                f"some ranks did not answer within {self._world.timeout}; "
                "check that all of them run"
            )
        return [json.loads(self._store.get(name)) for name in names]


def _add_prefix(prefix: str, figures: Figures) -> Figures:
    return {f"{prefix}{name}": values for name, values in figures.items()}


def _rank_hardware(world: World) -> RankHardware:
    cpu = torch.device("cpu")
    return RankHardware(
        host=platform.node() or "localhost", cpu=devices.model(cpu), cores=devices.num_cores(),
        host_bytes=devices.host_memory_bytes(), kind=devices.kind(world.device),
        model=devices.model(world.device), device_bytes=devices.memory_bytes(world.device),
        fabric="infiniband" if Path("/sys/class/infiniband").exists() else "ethernet",
    )  # fmt: skip
