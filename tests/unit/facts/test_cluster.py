from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.facts.cluster import (
    Cluster,
    Curve,
    Grid,
    Place,
    device_at,
    inter_host_link,
    intra_host_link,
    load_cluster,
    place_ranks,
    price_per_hour,
)
from moesaic.facts.cluster.file import resolve_cluster
from moesaic.facts.cluster.presets import PRESETS, PUBLISHED, SOURCES, Preset

SPEED = {"dtype": "fp32", "flops": 1e12}
DEVICE = {"kind": "gpu", "model": "G", "memory_bytes": 1e9, "memory_bandwidth": 1e9,
          "matmul": [SPEED]}  # fmt: skip


def core(ranks: int, **changes: object) -> dict[str, Any]:
    """Return a CPU shared by `ranks`."""
    return {**DEVICE, "kind": "cpu", "model": "C", "count": ranks, **changes}


def host(name: str, *devices: dict[str, Any], **changes: object) -> dict[str, Any]:
    return {"name": name, "memory_bytes": 1e9, "devices": list(devices) or [DEVICE], **changes}


def link(one: str, other: str, bandwidth: float = 1e9) -> dict[str, Any]:
    return {"ends": [one, other], "kind": "ethernet", "latency_s": 1e-5, "bandwidth": bandwidth}


def cluster(hosts: list[Any], links: list[Any] | None = None) -> Cluster:
    return resolve_cluster({"name": "test", "hosts": hosts, "links": links or []}, "c.toml")


POINT = {"bytes": [1], "seconds": [1]}
SUM = {"name": "all_reduce", "ranks": 2, "times": POINT}
LINKED = [link("a", "b"), link("a", "a", 5e9)]
RATES = dict.fromkeys(("read", "write", "random_read", "random_write", "mixed"), 1000000000.0)
WRONG: list[tuple[list[Any], list[Any], str]] = [
    ([], [], "hosts = []: give a list of one or more tables with keys preset, name, "),
    ([host("a"), host("b"), host("a")], [],
     'two hosts are named "a": give each its own name'),
    ([host("a"), host("a-1"), host("a", replicas=2)], [],
     'two hosts are named "a-1": give each its own name'),
    ([{"name": "a", "memory_bytes": 1}], [],
     "hosts[0].devices is missing: give a list of one or more tables "),
    ([host("a"), host("b", {**DEVICE, "kidn": "gpu"})], [],
     "unknown key 'hosts[1].devices[0].kidn': did you mean 'hosts.devices.kind'?"),
    ([host("a", {**DEVICE, "kind": "gpus"})], [],
     'hosts[0].devices[0].kind = "gpus" is not known: did you mean "gpu" (it takes "cpu", "gpu", '
     '"npu" or "xpu")?'),
    ([host("a", {**DEVICE, "matmul": [SPEED, SPEED]})], [],
     "hosts[0].devices[0]: matmul has two speeds for fp32: keep one"),
    ([host("a", {**DEVICE, "reserved_bytes": 1e9})], [],
     "hosts[0].devices[0]: reserved_bytes = 1e+09 leaves nothing of memory_bytes = 1e+09: keep "),
    ([host("a", core(1), core(2), core(2))], [],
     "hosts[0]: two devices of kind cpu have count = 2: keep one"),
    ([host("a-*")], [],
     'hosts[0]: name = "a-*" has a *, which links use as a wildcard: remove it'),
    ([host("a-1")], [link("a-?", "a-[1]")],
     'links[0].ends = ["a-?", "a-[1]"]: no host has the name "a-?": did you mean "a-1" (it takes '
     'one of ["a-1"])?'),
    ([host("a", {**DEVICE, "elementwise": [{"kind": "norm", "times": POINT}] * 2})], [],
     "hosts[0].devices[0]: elementwise has two curves for norm: keep one"),
    ([host("a")], [{**link("a", "a"), "collectives": [SUM, {**SUM, "ranks": 3}, SUM]}],
     "links[0]: collectives has two curves for all_reduce of 2 ranks: keep one"),
    ([host("a", {**DEVICE, "memory_times": {"bytes": [2, 1], "seconds": [1, 2]}})], [],
     "hosts[0].devices[0].memory_times: bytes = [2.0, 1.0] does not rise from above 0: sort it"),
    ([host("a"), host("b")], [*LINKED, link("a", "b", 0)],
     "links[2].bandwidth = 0: give a number above 0"),
    ([host("alpha"), host("beta")], [link("alpha", "bata")],
     'links[0].ends = ["alpha", "bata"]: no host has the name "bata": '
     'did you mean "beta" (it takes one of ["alpha", "beta"])?'),
    ([host("a"), {"preset": "h100_8"}], [],
     'hosts[1].preset = "h100_8" is not known: did you mean "h100-8" (it takes "v100-8", "a100-8", '
     '"h100-8", "h200-8", "ascend910-8", "kunlun1-8" or "cpu")?'),
    ([{"preset": "h100-8", "devices": {"cuont": 4}}], [],
     "unknown key 'hosts[0].devices[0].cuont': did you mean 'hosts.devices.count'?"),
    ([{"preset": "cpu", "devices": {"count": 4}}], [],
     "hosts[0]: two devices of kind cpu have count = 4: keep one"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "usable"),
    [
        ({"memory_bytes": 8e10}, 0.95 * 8e10 - 2**31),
        ({"memory_bytes": 8e10, "reserved_bytes": 1e9}, 7.9e10),
        ({"memory_bytes": 8e10, "reserved_bytes": 0}, 8e10),
        ({"memory_bytes": 1e9}, 8e8),
        ({"memory_bytes": 1e9, "kind": "cpu"}, 1e9),
    ],
)
def test_plans_keep_memory_of_accelerators_free(changes: dict[str, Any], usable: float) -> None:
    made = cluster([host("a", {**DEVICE, **changes})])
    assert made.hosts[0].devices[0].usable_bytes == pytest.approx(usable, rel=1e-12)


@pytest.mark.parametrize(("hosts", "links", "sentence"), WRONG, ids=lambda value: str(value)[:40])
def test_impossible_cluster_is_reported_in_one_sentence(
    hosts: list[Any], links: list[Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        cluster(hosts, links)
    assert str(caught.value).startswith(f"c.toml: {sentence}")


def test_impossible_requests_are_reported_in_one_sentence() -> None:
    made = cluster(
        [host("a", {**DEVICE, "count": 2}), host("b"), host("c", core(1), core(4))],
        [link("a", "b")],
    )
    b = place_ranks(made, 3)[-1]
    for ask, sentence in (
        (lambda: place_ranks(made, 8),
         "cluster 'test' has places for 7 ranks, not for 8: use fewer ranks, or add hosts"),
        (lambda: place_ranks(made, 5),
         "the cores of host 'c' can be shared by 1 or 4 ranks, not by 2: add [[hosts.devices]] "
         "of kind cpu with count = 2, or use another number of ranks"),
        (lambda: intra_host_link(made, "a"),
         "host 'a' has no link between its devices: give it link = { ... }, or add [[links]] with "
         'ends = ["a", "a"]'),
        (lambda: inter_host_link(made, "b", "c"),
         "no link joins the hosts 'b' and 'c': add [[links]] with ends = [\"b\", \"c\"], or "
         '["*", "*"] for a network of all hosts'),
        (lambda: device_at(made, b).matmul_speed("bf16"),
         "device 'G' has matmul speeds for fp32, not for bf16: add [[hosts.devices.matmul]] with "
         "dtype = \"bf16\" to these (a list in the file replaces a preset's), or plan for "
         "another device"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            ask()
        assert str(caught.value) == sentence


def test_cluster_round_trips_through_toml_and_json(tmp_path: Path) -> None:
    memory = {"bytes": [1, 2.5], "seconds": [1e-7, 0.5]}
    matmul = {"rows": [1], "columns": [2, 3], "inner": [4], "seconds": [1e-6, 2e-6]}
    measured = {**DEVICE, "memory_times": memory, "matmul": [
        {**SPEED, "times": matmul}, {"dtype": "bf16", "flops": 1e16}]}  # fmt: skip
    times = [{"name": "all_reduce", "ranks": 4, "times": memory}]
    made = cluster(
        [
            host("a", measured, core(1), disks=[{"path": "/a b", **RATES}], price_per_hour=1.5),
            {"name": 'quoted"', "preset": "h200-8", "replicas": 2},
        ],
        [{**link("a", "a"), "collectives": times, "duplex": False}, link("*", "*")],
    )
    file = tmp_path / "cluster.toml"
    file.write_text(made.to_toml())
    assert load_cluster(file) == made
    assert parse(Cluster, json.loads(made.to_json()), "c.json") == made
    device = made.hosts[0].devices[0]
    assert (device.memory_times, device.matmul_speed("fp32").times) == (
        Curve(**memory),
        Grid(**matmul),
    )


# Presets and short forms of a file.


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_complete_host(name: str) -> None:
    made = cluster([{"preset": name}])
    (alone,) = made.hosts
    assert alone.name == name
    num_ranks = max(sum(d.count for d in alone.devices if d.kind != "cpu"), alone.devices[-1].count)
    places = place_ranks(made, num_ranks)
    assert len(places) == num_ranks == int(name.partition("-")[2] or 32)
    assert intra_host_link(made, name)
    assert all(0 < speed.flops < 1e16 for device in alone.devices for speed in device.matmul)


def test_presets_have_names_and_sources() -> None:
    assert set(get_args(Preset)) == set(PRESETS) == set(SOURCES)
    assert all(len(source) > 30 for source in SOURCES.values())


def test_hosts_at_the_speed_of_a_preset_are_calibrated_by_published_runs() -> None:
    def calibration(*hosts: dict[str, Any], **more: object) -> Any:
        named = [{"name": f"h{at}", **one} for at, one in enumerate(hosts)]
        return resolve_cluster({"name": "c", "hosts": named, **more}, "c").calibration

    h100, a100 = {"preset": "h100-8"}, {"preset": "a100-8", "replicas": 2}
    found = calibration(h100, a100)
    assert found.model_dump() == PUBLISHED
    assert found.describe() == f"{PUBLISHED['runs']} published runs of other trainers in bf16"
    assert calibration({**h100, "devices": {"count": 4, "price_per_hour": 2.0}}) == found
    own = {"runs": 1, "devices": ["X"], **dict.fromkeys(("matmul", "elementwise"), 1.5)}
    mine = calibration(h100, calibration={**own, "collectives": 2.0})
    assert (mine.matmul, mine.source, mine.describe()) == (1.5, None, "1 run")
    for other in (
        {"preset": "h200-8"},
        {**h100, "devices": {"memory_bandwidth": 1e12}},
        {**h100, "devices": [DEVICE]},
        {"memory_bytes": 1e9, "devices": [DEVICE]},
    ):
        assert calibration(h100, other) is None


def test_file_overrides_preset() -> None:
    changed, replaced = cluster(
        [
            {"preset": "a100-8", "name": "a", "memory_bytes": 1e12, "link": {"bandwidth": 7},
             "devices": {"count": 4, "price_per_hour": 2}},
            {"preset": "a100-8", "name": "b", "devices": [DEVICE]},
        ]
    ).hosts  # fmt: skip
    (device,) = changed.devices
    assert (changed.name, changed.memory_bytes) == ("a", 1e12)
    assert (device.model, device.count, device.price_per_hour) == ("NVIDIA A100 SXM4", 4, 2.0)
    assert [device.model for device in replaced.devices] == ["G"]
    assert PRESETS["a100-8"]["devices"][0]["count"] == 8


def test_file_link_overrides_host_link() -> None:
    hosts = [{"preset": "a100-8", "name": "a", "link": {"bandwidth": 7}},
             {"preset": "a100-8", "name": "b"}]  # fmt: skip
    made = cluster(hosts, [link("b", "b", 5)])
    for name, expected in (("a", ("nvlink", 7)), ("b", ("ethernet", 5))):
        found = intra_host_link(made, name)
        assert (found.kind, found.bandwidth) == expected


def test_a_thousand_hosts_are_fast() -> None:
    many = cluster([{"preset": "h100-8", "name": "a", "replicas": 1000}], [link("a-*", "*")])
    again = resolve_cluster(tomllib.loads(many.to_toml()), "c.toml")
    assert again == many
    places = place_ranks(many, 8000)
    assert places[-1] == Place("a-999", 0, 7)
    assert inter_host_link(many, "a-0", "a-999") == many.links[0]


# Places and routes.


def test_hosts_are_filled_in_order() -> None:
    made = cluster(
        [host("a", {**DEVICE, "count": 2}, core(8), {**DEVICE, "kind": "npu"}),
         host("c", core(1), core(2), core(4))]
    )  # fmt: skip
    accelerators = [("a", 0, 0), ("a", 0, 1), ("a", 2, 0)]
    assert place_ranks(made, 0) == []
    assert place_ranks(made, 2) == accelerators[:2]
    assert place_ranks(made, 4) == [*accelerators, ("c", 0, 0)]
    assert place_ranks(made, 5) == [*accelerators, ("c", 1, 0), ("c", 1, 1)]
    assert place_ranks(made, 7) == [*accelerators, *(("c", 2, number) for number in range(4))]
    assert [device_at(made, one).kind for one in place_ranks(made, 4)] == [
        "gpu",
        "gpu",
        "npu",
        "cpu",
    ]


def test_price_counts_devices_and_their_hosts() -> None:
    made = cluster(
        [host("a", {**DEVICE, "count": 2, "price_per_hour": 3}, price_per_hour=10),
         host("b", {**DEVICE, "price_per_hour": 0.5})]
    )  # fmt: skip
    prices = [price_per_hour(made, place_ranks(made, num_ranks)) for num_ranks in range(4)]
    assert prices == [0, 13, 16, 16.5]


@pytest.mark.parametrize(
    ("end", "matched"),
    [("a*", ["ab", "axbxb"]), ("*b*b", ["axbxb"]), ("*", ["ab", "axbxb", "cc"]), ("c*c", ["cc"])],
)
def test_wildcard_matches_any_text(end: str, matched: list[str]) -> None:
    made = cluster([host(name) for name in ("ab", "axbxb", "cc")], [link(end, end)])
    assert list(made.hosts_of_end[end]) == matched


def test_copy_recomputes_cached_properties() -> None:
    made = cluster([host("a"), host("b"), host("c")], [link("*", "*"), link("b", "c", 1)])
    fewer = made.model_copy(update={"hosts": made.hosts[:2], "links": made.links[:1]})
    assert list(fewer.by_name) == list(fewer.hosts_of_end["*"]) == ["a", "b"]
    assert fewer == cluster([host("a"), host("b")], [link("*", "*")])
    assert list(made.by_name) == ["a", "b", "c"]


def test_widest_link_is_used() -> None:
    made = cluster(
        [host("a", {**DEVICE, "count": 2}), host("b")],
        [link("a", "a", 1), link("a", "a", 3), link("a", "a", 2), link("a", "b", 1),
         link("b", "a", 2)],
    )  # fmt: skip
    assert intra_host_link(made, "a") == made.links[1]
    assert inter_host_link(made, "a", "b") == inter_host_link(made, "b", "a") == made.links[4]
