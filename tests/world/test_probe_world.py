"""A tiny probe on one rank, on two, and on two simulated hosts."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moesaic.dist.probe import compute
from moesaic.dist.probe.compute import Axes
from moesaic.dist.probe.probe import _choose_sizes, num_phases, probe
from moesaic.dist.probe.settings import ProbeConfig
from moesaic.dist.world import World
from moesaic.testing.ranks import RankPool

TINY: dict[str, Any] = {
    "seconds": 0.4, "largest_side": 64, "dtypes": ["fp32"], "copy_bytes": 1 << 20,
    "message_bytes": 1 << 16, "disk_bytes": 1 << 20, "device": "cpu",
}  # fmt: skip


def measure(world: World, directory: Path, ranks_per_host: int) -> Any:
    """Return the result, and the phases that this rank reported."""
    node, phases = platform.node, list[str]()
    name = f"host-{world.rank // ranks_per_host}"
    platform.node = lambda: name
    try:
        found = probe(world, ProbeConfig(**TINY, disks=[str(directory)]), phases.append)
    finally:
        platform.node = node
    return found, phases


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from numbers(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


@pytest.mark.parametrize(("size", "ranks_per_host"), [(1, 1), (4, 2)])
def test_the_probe_measures_every_host_device_and_link(
    size: int, ranks_per_host: int, ranks: RankPool, tmp_path: Path
) -> None:
    results = ranks.run(size, measure, tmp_path, ranks_per_host)
    assert [found is None for found, _ in results] == [False] + [True] * (size - 1)
    assert all(len(phases) == num_phases(ProbeConfig()) for _, phases in results)
    found = results[0][0]
    num_hosts = size // ranks_per_host
    assert [host.name for host in found.cluster.hosts] == [f"host-{i}" for i in range(num_hosts)]
    for host in found.cluster.hosts:
        counts = [device.count for device in host.devices]
        assert counts == ([ranks_per_host, 1] if ranks_per_host > 1 else [1])
        assert any("was not measured" in one for one in found.notes) or len(host.disks) == 1
    ends = {tuple(link.ends) for link in found.cluster.links}
    inside = {(f"host-{i}", f"host-{i}") for i in range(num_hosts) if ranks_per_host > 1}
    assert ends == inside | ({("host-0", "host-1")} if num_hosts > 1 else set())
    assert all(one.collectives for one in found.cluster.links)
    for host in found.cluster.model_dump()["hosts"]:
        assert host.pop("price_per_hour") == 0.0
        for device in host["devices"]:
            assert device.pop("price_per_hour") == 0.0
            assert device.pop("transcendental_s") >= 0.0
        assert all(number > 0 for number in numbers(host))
    for link in found.cluster.model_dump()["links"]:
        assert (link.pop("skew_s") > 0.0) == bool(link["collectives"])
        assert all(number > 0 for number in numbers(link))
    assert 0 <= found.median_range <= found.p90_range
    assert list(tmp_path.iterdir()) == []


def measure_sizes_of_a_job(world: World, job: Axes) -> Any:
    return probe(world, ProbeConfig(**TINY, disks=[], links=False), lambda _phase: None, job)


def test_the_sizes_of_a_job_are_measured_instead_of_a_grid(ranks: RankPool) -> None:
    """Only as far as time permits: `largest_side` allows as many flops as a grid up to 64."""
    job = Axes([3, 40], [8, 24, 48], [2, 5], [12, 20], head_dim=6)
    (device,) = ranks.run(2, measure_sizes_of_a_job, job)[0].cluster.hosts[0].devices
    assert (device.count, device.reference_s > 0) == (2, True)
    (speed,) = device.matmul
    assert (speed.times.rows, speed.times.inner) == ([3, 40], [8, 24, 48])
    assert speed.grouped_times.rows == [2, 5]
    assert (speed.attention.lengths, speed.attention.head_dim) == ([12, 20], 6)


def test_large_jobs_are_cut_to_the_time_of_a_grid() -> None:
    grid, job = Axes.up_to(256), Axes([16, 9000], [512, 4096], [100, 5000], [128, 4096], 32)
    cut = job.within(grid)
    assert (cut.rows, cut.columns, cut.head_dim) == ([16, 256], [256], 32)
    assert job.within(Axes.up_to(1 << 14)) == job


@pytest.mark.parametrize(("device", "slots"), [("cuda", 8), ("cpu", 16)])
def test_group_counts_ignore_host_cores_on_a_gpu(
    device: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a GPU would multiply more groups than the probe has time for."""
    config = ProbeConfig(**TINY)
    monkeypatch.setattr("moesaic.kernels.device.num_cores", lambda: 8)
    monkeypatch.setattr(compute, "_largest_side", lambda *_: 64)
    world = SimpleNamespace(device=torch.device(device), is_rank_zero=True)
    found = _choose_sizes(world, config, 2)  # type: ignore[arg-type]
    assert [one.min_groups for one in found] == [32, slots]
