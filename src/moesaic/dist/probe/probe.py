"""The probe itself: every part, on all ranks, several times over."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore

from moesaic.base.errors import StoreError
from moesaic.dist import device as devices
from moesaic.dist.probe import compute, disks, links
from moesaic.dist.probe.cluster import Assembly, Place, hosts_of
from moesaic.dist.probe.compute import Sizes
from moesaic.dist.probe.settings import ProbeConfig
from moesaic.dist.probe.timing import Figures, medians, spread
from moesaic.dist.world import World
from moesaic.facts.cluster import Cluster

Watch = Callable[[str], None]
"""Is told of every part that begins."""
_PARTS = ("one rank with all cores", "all ranks at once", "links", "disks")


@dataclass(frozen=True)
class Found:
    """What a probe found."""

    cluster: Cluster
    """By medians of all repeats."""
    repeats: list[Cluster]
    """By each of them alone."""
    spreads: list[float]
    """How far the repeats of every measured point lie apart, rising."""
    notes: list[str]
    """What could not be measured, and whether to trust what was, in sentences."""


def deadline(config: ProbeConfig) -> timedelta:
    """How long a rank waits for others that measure."""
    return timedelta(seconds=120 + 10 * config.seconds)


def num_parts(config: ProbeConfig) -> int:
    """How many parts `watch` will be told of."""
    return len(_PARTS) * config.repeats


def probe(world: World, config: ProbeConfig, watch: Watch) -> Found | None:
    """Measure; every rank of the world must call this, and rank 0 is told what came of it."""
    words = _Words(world)
    places = [Place(**said) for said in words.gather(asdict(_place(world)))]
    hosts = hosts_of(places)
    sizes = words.gather([asdict(one) for one in _sizes(world, config, len(hosts[0]))])[0]
    alone, shared = (Sizes(**one) for one in sizes)
    whole = Assembly(config, places, alone, shared)
    part = _Part(world, config, hosts, words, whole, watch)
    threads = torch.get_num_threads()
    try:
        repeats = [part.measure() for _ in range(config.repeats)]
    finally:
        torch.set_num_threads(threads)
    notes = words.gather(part.notes)
    if not world.leads:
        return None
    by_rank = [medians([repeat[rank] for repeat in repeats]) for rank in range(world.size)]
    return Found(
        whole.cluster(by_rank),
        [whole.cluster(repeat) for repeat in repeats],
        sorted(_spreads(repeats)),
        [note for several in notes for note in dict.fromkeys(several)],
    )


def _sizes(world: World, config: ProbeConfig, ranks_each: int) -> list[Sizes]:
    """What one rank with all cores, and what all at once have to do, so many of each host: rank 0
    tries it out."""
    if not world.leads:
        return []
    cpu, share_s, cores = torch.device("cpu"), _share_s(config), devices.num_cores()
    asked = (config.dtypes, config.largest, config.copy_bytes)
    is_cpu = world.device == cpu  # Whose cores a rank computes with; to a GPU they are nothing.
    threads_each = max(1, cores // ranks_each) if is_cpu else 1
    shared = compute.suitable(world.device, *asked, share_s, threads_each)
    if is_cpu:
        return [replace(shared, slots=compute.slots_for(cores)), shared]
    return [compute.suitable(cpu, None, None, None, share_s, cores), shared]


def _share_s(config: ProbeConfig) -> float:
    """Seconds for one part in one repeat."""
    return config.seconds / config.repeats / len(_PARTS)


def _spreads(repeats: list[list[Figures]]) -> list[float]:
    """How far the repeats lie apart, for every number that any rank measured."""
    return [
        spread(values)
        for ranks in zip(*repeats, strict=True)
        for name in ranks[0]
        for values in zip(*(figures[name] for figures in ranks), strict=True)
    ]


@dataclass
class _Part:
    """One rank's part."""

    world: World
    config: ProbeConfig
    hosts: list[list[int]]
    words: _Words
    whole: Assembly
    watch: Watch

    def __post_init__(self) -> None:
        self.notes: list[str] = []
        (self.mine,) = [ranks for ranks in self.hosts if self.world.rank in ranks]
        self.share_s = _share_s(self.config)

    def measure(self) -> list[Figures]:
        """Everything once; the figures of all ranks."""
        found: Figures = {}
        work = (self._alone, self._shared, self._links, self._disks)
        for name, measured in zip(_PARTS, work, strict=True):
            self.words.gather(None)  # Whoever waits here leaves the cores to those who measure.
            self.watch(name)
            found |= measured()
        return list(self.words.gather(found))

    def _alone(self) -> Figures:
        if self.world.rank != self.mine[0]:
            return {}
        torch.set_num_threads(devices.num_cores())
        cpu = torch.device("cpu")
        return _under("alone ", compute.measure(cpu, self.whole.alone, self.share_s, lambda: None))

    def _shared(self) -> Figures:
        torch.set_num_threads(max(1, devices.num_cores() // len(self.mine)))
        if self.world.device.type == "cpu" and max(map(len, self.hosts)) == 1:
            return {}  # That was measured already.
        sizes, meet = self.whole.shared, self.world.barrier
        return _under("shared ", compute.measure(self.world.device, sizes, self.share_s, meet))

    def _links(self) -> Figures:
        if self.world.size == 1 or not self.config.links:
            return {}
        return links.measure(self.world, self.hosts, self.config.message_bytes, self.share_s)

    def _disks(self) -> Figures:
        found: Figures = {}
        if self.world.rank != self.mine[0]:
            return found
        for path in self.config.disks:
            share_s = self.share_s / len(self.config.disks)
            try:
                figures = disks.measure(Path(path), self.config.disk_bytes, share_s)
            except disks.NoDirectAccess as refusal:
                self.notes.append(str(refusal))
            else:
                found |= _under(f"disk {path} ", figures)
        return found


class _Words:
    """What ranks tell one another through the store: waiting for it costs no core."""

    def __init__(self, world: World) -> None:
        self._world, self._rank, self._size = world, world.rank, world.size
        self._store = PrefixStore("probe", world.store)
        self._said = 0

    def gather(self, word: Any) -> list[Any]:
        """Every rank's `word`, which is JSON, by rank."""
        self._said += 1
        self._store.set(f"{self._said}/{self._rank}", json.dumps(word))
        names = [f"{self._said}/{rank}" for rank in range(self._size)]
        if not self._world.await_words(self._store, names):
            raise StoreError(
                f"no word from some rank for {self._world.deadline}: see that all live"
            )
        return [json.loads(self._store.get(name)) for name in names]


def _under(prefix: str, figures: Figures) -> Figures:
    return {f"{prefix}{name}": values for name, values in figures.items()}


def _place(world: World) -> Place:
    cpu = torch.device("cpu")
    return Place(
        host=platform.node() or "localhost", cpu=devices.model(cpu), cores=devices.num_cores(),
        host_bytes=devices.host_bytes(), kind=devices.kind(world.device),
        model=devices.model(world.device), device_bytes=devices.memory_bytes(world.device),
        fabric="infiniband" if Path("/sys/class/infiniband").exists() else "ethernet",
    )  # fmt: skip
