"""From figures to a cluster: two hosts of two GPUs that nobody has, whose speeds are known."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest

from moesaic.base.config import parse
from moesaic.dist.probe.cluster import Assembly, Place, headlines
from moesaic.dist.probe.compute import (
    ATTENTIONS,
    CHAIN,
    FUNCTION_ELEMENTS,
    HEADS,
    KINDS,
    WAYS,
    Sizes,
)  # fmt: skip
from moesaic.dist.probe.links import COLLECTIVES, collective_bytes, message_bytes, pairs
from moesaic.dist.probe.settings import ProbeConfig
from moesaic.dist.probe.timing import Figures
from moesaic.facts.cluster import Cluster
from moesaic.facts.workload.ops import PASSED_BYTES

SIZES = Sizes({"fp32": 64}, [4096, 1 << 20], slots=8)
GPU = Place("a", "a cpu", 8, 64e9, "gpu", "a gpu", 16e9, "infiniband")
PATTERNS = {"read": 8.0, "write": 7.0, "random read": 6.0, "random write": 5.0, "mixed": 4.0}


def computed(name: str, flops: float, bandwidth: float) -> Figures:
    return {
        f"{name} calls": [2 * CHAIN * 1e-6],
        f"{name} functions": [(1e-9 + 4e-9) * FUNCTION_ELEMENTS, 1e-9 * FUNCTION_ELEMENTS],
        **{
            f"{name} passes {kind}": [PASSED_BYTES[kind] * size / 3e10 for size in SIZES.passed]
            for kind in KINDS
        },
        f"{name} copies": [2 * size / bandwidth for size in SIZES.copies],
        **{
            f"{name} attention {way} fp32": [
                HEADS * (place + 1) * 1e-5 * n**2 for n in SIZES.lengths("fp32")
            ]
            for place, way in enumerate(ATTENTIONS)
        },
        f"{name} products fp32": [
            WAYS * 2 * rows * columns * inner / flops
            for rows, columns, inner in SIZES.products("fp32")
        ],
        f"{name} slots fp32": [
            WAYS * SIZES.slots_of("fp32", columns, inner) * rows * columns * inner / flops
            for rows, columns, inner in SIZES.products_of_slots("fp32")
        ],
    }


def message(first: int, second: int, bandwidth: float, both: float = 1.0) -> Figures:
    times = [2e-6 + size / bandwidth for size in message_bytes(16 << 20)]
    return {f"{first}-{second} one way": times, f"{first}-{second} both": [both * times[-1]]}


def operations(where: str, ranks: int, bandwidth: float) -> Figures:
    times = [size / bandwidth for size in collective_bytes(ranks, 16 << 20)]
    return {**{f"{name} {where}": times for name in COLLECTIVES}, f"skew {where}": [0.05]}


def whole(links: bool = True) -> Cluster:
    config = ProbeConfig(
        name="two", links=links, disks=["/data"], price_per_hour=3.0, gpu_price_per_hour=2.0
    )
    found = [
        computed("shared", flops, 1e12) | operations("across", 4, 1e9)
        | operations("within", 2, 1e10)
        for flops in (1e12, 3e12, 5e12, 5e12)
    ]  # fmt: skip
    for leader in (0, 2):
        found[leader] |= computed("alone", 1e10, 2e10)
        found[leader] |= {f"disk /data {name}": [rate] for name, rate in PATTERNS.items()}
    found[0] |= message(0, 1, 2e11) | message(0, 2, 1e10, both=1.9)
    found[2] |= message(2, 3, 2e10)
    places = [GPU, GPU, replace(GPU, host="b"), replace(GPU, host="b")]
    return Assembly(config, places, SIZES, SIZES).cluster(found)


def test_devices_have_the_median_of_their_ranks() -> None:
    first, second = whole().hosts
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
    assert cpu.speed("fp32").flops == pytest.approx(1e10, rel=1e-3)
    # The median of two times is their mean: 1e12 and 3e12 flops a second are 1.5e12.
    assert gpu.speed("fp32").flops == pytest.approx(1.5e12, rel=1e-3)
    assert second.devices[0].speed("fp32").flops == pytest.approx(5e12, rel=1e-3)


def test_curves_are_read_as_they_were_measured() -> None:
    cpu = whole().hosts[0].devices[1]
    assert cpu.memory_bandwidth == pytest.approx(2e10, rel=1e-3)
    assert cpu.streams is not None
    assert cpu.streams.at(8192) == pytest.approx(8192 / 2e10, rel=1e-3)  # 4096 read and written
    assert (cpu.call_s, cpu.special_s) == (1e-6, 4e-9)
    for kind in KINDS:
        times = cpu.times_of(kind)
        assert times is not None
        assert times.at(1e5) == pytest.approx(1e5 / 3e10, rel=1e-3)
    attention = cpu.speed("fp32").attention
    assert attention is not None
    assert attention.at(64, 64, backward=False) == pytest.approx(1e-5 * 64**2, rel=1e-3)
    assert attention.at(128, 32, backward=True) == pytest.approx(1e-5 * 128**2, rel=1e-3)
    masked = attention.at(64, 64, backward=True, masked=True)
    assert masked == pytest.approx(4e-5 * 64**2, rel=1e-3)
    products = cpu.speed("fp32").products
    assert products is not None
    for rows, columns, inner in SIZES.products("fp32"):
        expected = 2 * rows * columns * inner / 1e10
        assert products.at(rows, columns, inner) == pytest.approx(expected, rel=1e-3)
    slots = cpu.speed("fp32").slots
    assert slots is not None
    assert slots.rows == products.rows[:-1]
    for rows, columns, inner in SIZES.products_of_slots("fp32"):
        assert slots.at(rows, columns, inner) == pytest.approx(
            rows * columns * inner / 1e10, rel=1e-3
        )


def test_disks_keep_the_rates_of_small_blocks() -> None:
    (disk,) = whole().hosts[0].disks
    assert (disk.path, disk.block_bytes) == ("/data", 4096)
    assert (disk.read, disk.write) == (8.0, 7.0)
    assert (disk.random_read, disk.random_write, disk.mixed) == (6.0, 5.0, 4.0)


def test_links_join_devices_and_hosts() -> None:
    links = {tuple(link.ends): link for link in whole().links}
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
        sent, *others = link.collectives
        assert (sent.name, sent.ranks) == ("send", 2)
        size, seconds = sent.times.num_bytes[-1], sent.times.seconds[-1]
        assert seconds == pytest.approx(2e-6 + size / bandwidth, rel=1e-3)
        assert [one.name for one in others] == list(COLLECTIVES)
        assert link.skew_s == 0.05
        assert {one.ranks for one in others} == {ranks}
    assert whole(links=False).links == []


def test_operations_of_all_hosts_stand_with_the_slowest_link() -> None:
    places = [replace(GPU, host=name) for name in "abc"]
    found = [computed("shared", 1e12, 1e12) | computed("alone", 1e10, 2e10) for _ in places]
    found = [one | operations("across", 3, 1e9) for one in found]
    found[0] |= message(0, 1, 3e9) | message(0, 2, 2e9)
    found[1] |= message(1, 2, 1e9)
    links = Assembly(ProbeConfig(disks=[]), places, SIZES, SIZES).cluster(found).links
    assert [("".join(link.ends), len(link.collectives)) for link in links] == [
        ("ab", 1), ("ac", 1), ("bc", 1 + len(COLLECTIVES)),
    ]  # fmt: skip


def test_the_file_says_the_same() -> None:
    cluster = whole()
    assert parse(Cluster, tomllib.loads(cluster.to_toml()), "file") == cluster


def test_headlines_name_every_device_link_and_disk() -> None:
    found = list(headlines(whole()))
    assert {one.thing for one in found} == {
        "a: a gpu, 2 of them", "a: a cpu, 1 rank, 8 threads each", "a: disk /data", "a: nvlink",
        "b: a gpu, 2 of them", "b: a cpu, 1 rank, 8 threads each", "b: disk /data", "b: pcie",
        "a to b: infiniband",
    }  # fmt: skip
    assert all(one.value > 0 for one in found)


def test_pairs_are_neighbours_ends_and_first_ranks() -> None:
    assert pairs([[0]]) == []
    assert pairs([[0, 1]]) == [(0, 1)]
    assert pairs([[0, 1, 2, 3]]) == [(0, 1), (0, 3)]
    assert pairs([[0, 1], [2], [3, 4]]) == [(0, 1), (3, 4), (0, 2), (0, 3), (2, 3)]


@pytest.mark.parametrize("ranks", [2, 3, 7, 8])
def test_every_rank_has_whole_numbers_of_an_operation(ranks: int) -> None:
    sizes = collective_bytes(ranks, 16 << 20)
    assert sizes[-1] >= 16 << 20
    assert all(size % (4 * ranks) == 0 for size in sizes)
    assert sizes == sorted(set(sizes))
