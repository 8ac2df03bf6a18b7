"""Conversion of figures to a cluster: two imaginary hosts of two GPUs with known speeds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moesaic.dist.probe.cluster import ClusterBuilder, RankHardware
from moesaic.dist.probe.compute import (  # fmt: skip
    ATTENTION_KINDS,
    CHAIN_LENGTH,
    ELEMENTWISE_KINDS,
    FUNCTION_ELEMENTS,
    HEADS,
    MATMULS_PER_LAYER,
    Sizes,
)
from moesaic.dist.probe.links import COLLECTIVES, collective_bytes, link_pairs, message_bytes
from moesaic.dist.probe.probe import _noise_warnings
from moesaic.dist.probe.settings import ProbeConfig
from moesaic.dist.probe.timing import Figures
from moesaic.facts.cluster import Cluster
from moesaic.facts.workload.ops import TRAFFIC_FACTOR

SIZES = Sizes({"fp32": 64}, [4096, 1 << 20], min_groups=8)
GPU = RankHardware("a", "a cpu", 8, 64e9, "gpu", "a gpu", 16e9, "infiniband")
PATTERNS = {"read": 8.0, "write": 7.0, "random read": 6.0, "random write": 5.0, "mixed": 4.0}


def compute_figures(name: str, flops: float, bandwidth: float) -> Figures:
    return {
        f"{name} reference": [3e-3],
        f"{name} calls": [2 * CHAIN_LENGTH * 1e-6],
        f"{name} functions": [(1e-9 + 4e-9) * FUNCTION_ELEMENTS, 1e-9 * FUNCTION_ELEMENTS],
        **{
            f"{name} elementwise {kind}": [
                TRAFFIC_FACTOR[kind] * size / 3e10 for size in SIZES.elementwise_bytes
            ]
            for kind in ELEMENTWISE_KINDS
        },
        f"{name} copies": [2 * size / bandwidth for size in SIZES.copy_bytes],
        **{
            f"{name} attention {kind} fp32": [
                HEADS * (index + 1) * 1e-5 * n**2 for n in SIZES.axes("fp32").lengths
            ]
            for index, kind in enumerate(ATTENTION_KINDS)
        },
        f"{name} matmul fp32": [
            MATMULS_PER_LAYER * 2 * rows * columns * inner / flops
            for rows, columns, inner in SIZES.matmul_shapes("fp32")
        ],
        f"{name} grouped matmul fp32": [
            MATMULS_PER_LAYER
            * SIZES.num_groups("fp32", columns, inner)
            * rows
            * columns
            * inner
            / flops
            for rows, columns, inner in SIZES.grouped_matmul_shapes("fp32")
        ],
    }


def message_figures(first: int, second: int, bandwidth: float, both: float = 1.0) -> Figures:
    times = [2e-6 + size / bandwidth for size in message_bytes(16 << 20)]
    return {f"{first}-{second} one way": times, f"{first}-{second} both": [both * times[-1]]}


def collective_figures(scope: str, ranks: int, bandwidth: float) -> Figures:
    times = [size / bandwidth for size in collective_bytes(ranks, 16 << 20)]
    return {**{f"{name} {scope}": times for name in COLLECTIVES}, f"skew {scope}": [0.05]}


def make_cluster(links: bool = True) -> Cluster:
    config = ProbeConfig(
        name="two", links=links, disks=["/data"], price_per_hour=3.0, gpu_price_per_hour=2.0
    )
    figures = [
        compute_figures("shared", flops, 1e12) | collective_figures("across", 4, 1e9)
        | collective_figures("within", 2, 1e10)
        for flops in (1e12, 3e12, 5e12, 5e12)
    ]  # fmt: skip
    for leader in (0, 2):
        figures[leader] |= compute_figures("alone", 1e10, 2e10)
        figures[leader] |= {f"disk /data {name}": [rate] for name, rate in PATTERNS.items()}
    figures[0] |= message_figures(0, 1, 2e11) | message_figures(0, 2, 1e10, both=1.9)
    figures[2] |= message_figures(2, 3, 2e10)
    hardware = [GPU, GPU, replace(GPU, host="b"), replace(GPU, host="b")]
    return ClusterBuilder(config, hardware, SIZES, SIZES).build(figures)


def test_device_speeds_are_medians_over_ranks() -> None:
    first, second = make_cluster().hosts
    assert (first.name, second.name, first.memory_bytes, first.price_per_hour) == (
        "a",
        "b",
        64e9,
        3,
    )
    gpu, cpu = first.devices
    assert (gpu.kind, gpu.model, gpu.count, gpu.memory_bytes) == ("gpu", "a gpu", 2, 16e9)
    assert (gpu.price_per_hour, cpu.price_per_hour) == (2.0, 0.0)
    assert (cpu.kind, cpu.model, cpu.count, cpu.threads) == ("cpu", "a cpu", 1, 8)
    assert cpu.matmul_speed("fp32").flops == pytest.approx(1e10, rel=1e-3)
    # The median of two times is their mean: 1e12 and 3e12 flops a second are 1.5e12.
    assert gpu.matmul_speed("fp32").flops == pytest.approx(1.5e12, rel=1e-3)
    assert second.devices[0].matmul_speed("fp32").flops == pytest.approx(5e12, rel=1e-3)


def test_curves_return_measured_times() -> None:
    cpu = make_cluster().hosts[0].devices[1]
    assert cpu.memory_bandwidth == pytest.approx(2e10, rel=1e-3)
    assert cpu.memory_times is not None
    assert cpu.memory_times.at(8192) == pytest.approx(
        8192 / 2e10, rel=1e-3
    )  # A copy of 4096 bytes reads and writes.
    assert (cpu.launch_s, cpu.transcendental_s, cpu.reference_s) == (1e-6, 4e-9, 3e-3)
    for kind in ELEMENTWISE_KINDS:
        times = cpu.elementwise_times(kind)
        assert times is not None
        assert times.at(1e5) == pytest.approx(1e5 / 3e10, rel=1e-3)
    attention = cpu.matmul_speed("fp32").attention
    assert attention is not None
    assert attention.at(64, 64, backward=False) == pytest.approx(1e-5 * 64**2, rel=1e-3)
    assert attention.at(128, 32, backward=True) == pytest.approx(1e-5 * 128**2, rel=1e-3)
    masked = attention.at(64, 64, backward=True, masked=True)
    assert masked == pytest.approx(4e-5 * 64**2, rel=1e-3)
    times = cpu.matmul_speed("fp32").times
    assert times is not None
    for rows, columns, inner in SIZES.matmul_shapes("fp32"):
        expected = 2 * rows * columns * inner / 1e10
        assert times.at(rows, columns, inner) == pytest.approx(expected, rel=1e-3)
    grouped = cpu.matmul_speed("fp32").grouped_times
    assert grouped is not None
    assert grouped.rows == times.rows[:-1]
    for rows, columns, inner in SIZES.grouped_matmul_shapes("fp32"):
        assert grouped.at(rows, columns, inner) == pytest.approx(
            rows * columns * inner / 1e10, rel=1e-3
        )


def test_disks_have_measured_rates() -> None:
    (disk,) = make_cluster().hosts[0].disks
    assert (disk.path, disk.block_bytes) == ("/data", 4096)
    assert (disk.read, disk.write) == (8.0, 7.0)
    assert (disk.random_read, disk.random_write, disk.mixed) == (6.0, 5.0, 4.0)


def test_links_within_and_between_hosts() -> None:
    links = {tuple(link.ends): link for link in make_cluster().links}
    assert set(links) == {("a", "a"), ("b", "b"), ("a", "b")}
    for ends, kind, bandwidth, duplex, ranks in (
        (("a", "a"), "nvlink", 2e11, True, 2),
        (("b", "b"), "pcie", 2e10, True, 2),
        (("a", "b"), "infiniband", 1e10, False, 4),
    ):
        link = links[ends]
        assert (link.kind, link.duplex) == (kind, duplex)
        assert link.bandwidth == pytest.approx(bandwidth, rel=1e-3)
        assert link.latency_s == pytest.approx(2e-6, rel=1e-3)
        send, *others = link.collectives
        assert (send.name, send.ranks) == ("send", 2)
        size, seconds = send.times.num_bytes[-1], send.times.seconds[-1]
        assert seconds == pytest.approx(2e-6 + size / bandwidth, rel=1e-3)
        assert [one.name for one in others] == list(COLLECTIVES)
        assert link.skew_s == 0.05
        assert {one.ranks for one in others} == {ranks}
    assert make_cluster(links=False).links == []


def test_collectives_over_all_hosts_belong_to_the_slowest_link() -> None:
    hardware = [replace(GPU, host=name) for name in "abc"]
    figures = [
        compute_figures("shared", 1e12, 1e12) | compute_figures("alone", 1e10, 2e10)
        for _ in hardware
    ]
    figures = [own | collective_figures("across", 3, 1e9) for own in figures]
    figures[0] |= message_figures(0, 1, 3e9) | message_figures(0, 2, 2e9)
    figures[1] |= message_figures(1, 2, 1e9)
    links = ClusterBuilder(ProbeConfig(disks=[]), hardware, SIZES, SIZES).build(figures).links
    assert [("".join(link.ends), len(link.collectives)) for link in links] == [
        ("ab", 1), ("ac", 1), ("bc", 1 + len(COLLECTIVES)),
    ]  # fmt: skip


def test_an_unsteady_machine_causes_a_warning() -> None:
    config = ProbeConfig(seconds=20.0, repeats=3)
    assert _noise_warnings(0.2, 0.5, config) == []
    for ranges in ((0.21, 0.3), (0.1, 0.51)):
        (warning,) = _noise_warnings(*ranges, config)
        assert warning.startswith("the machine was not steady: repeats differ by ")
        assert warning.endswith("(seconds = 60, repeats = 6)")


def test_measured_pairs_of_ranks() -> None:
    assert link_pairs([[0]]) == []
    assert link_pairs([[0, 1]]) == [(0, 1)]
    assert link_pairs([[0, 1, 2, 3]]) == [(0, 1), (0, 3)]
    assert link_pairs([[0, 1], [2], [3, 4]]) == [(0, 1), (3, 4), (0, 2), (0, 3), (2, 3)]


@pytest.mark.parametrize("ranks", [2, 3, 7, 8])
def test_collective_sizes_divide_over_ranks(ranks: int) -> None:
    sizes = collective_bytes(ranks, 16 << 20)
    assert sizes[-1] >= 16 << 20
    assert all(size % (4 * ranks) == 0 for size in sizes)
    assert sizes == sorted(set(sizes))
