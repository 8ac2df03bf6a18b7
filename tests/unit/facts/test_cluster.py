from __future__ import annotations

import itertools
import json
import tomllib
import tracemalloc
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.base import keys
from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.facts.cluster import (
    Calibration,
    Cluster,
    Curve,
    Grid,
    Link,
    Place,
    device_at,
    load_cluster,
    path,
    place,
    price_per_hour,
    with_calibration,
)
from moesaic.facts.cluster.file import ClusterFile, resolve
from moesaic.facts.cluster.presets import PRESETS, SOURCES, Preset

SPEED = {"dtype": "fp32", "flops": 1e12}
DEVICE = {"kind": "gpu", "model": "G", "memory_bytes": 1e9, "memory_bandwidth": 1e9,
          "matmul": [SPEED]}  # fmt: skip


def core(ranks: int, **changes: object) -> dict[str, Any]:
    """A CPU shared by `ranks`."""
    return {**DEVICE, "kind": "cpu", "model": "C", "count": ranks, **changes}


def host(name: str, *devices: dict[str, Any], **changes: object) -> dict[str, Any]:
    return {"name": name, "memory_bytes": 1e9, "devices": list(devices) or [DEVICE], **changes}


def link(one: str, other: str, bandwidth: float = 1e9) -> dict[str, Any]:
    return {"ends": [one, other], "kind": "ethernet", "latency_s": 1e-5, "bandwidth": bandwidth}


def cluster(hosts: list[Any], links: list[Any] | None = None) -> Cluster:
    return resolve({"name": "test", "hosts": hosts, "links": links or []}, "c.toml")


POINT = {"bytes": [1], "seconds": [1]}
SUM = {"name": "all_reduce", "ranks": 2, "times": POINT}
LINKED = [link("a", "b"), link("a", "a", 5e9)]
RATES = dict.fromkeys(("read", "write", "random_read", "random_write", "mixed"), 1000000000.0)
KEYS_OF_DEVICE = (
    "kind, model, count, threads, memory_bytes, memory_bandwidth, streams, passes, call_s, "
    "special_s, matmul, price_per_hour"
)

WRONG: list[tuple[list[Any], list[Any], str]] = [
    ([], [], "hosts = [] is empty: write [[hosts]] with keys "
     "preset, name, memory_bytes, devices, disks, price_per_hour, replicas, link"),
    ([3], [], "hosts[0] = 3 is an integer where a table is needed: write [[hosts]] with keys "
     "preset, name, memory_bytes, devices, disks, price_per_hour, replicas, link"),
    ([host("a"), host("b"), host("a")], [],
     'two hosts are called "a": give each a name of its own'),
    ([host("a"), host("a-1"), host("a", replicas=2)], [],
     'two hosts are called "a-1": give each a name of its own'),
    ([host("a"), host("b", devices=[])], [],
     f"hosts[1].devices = [] is empty: write [[hosts.devices]] with keys {KEYS_OF_DEVICE}"),
    ([{"name": "a", "memory_bytes": 1}], [],
     "table [[hosts.devices]] is missing: add it to hosts[0] (what it computes with)"),
    ([host("a", devices={"count": 3})], [],
     "hosts[0].devices = { count = 3 } is a table where a list of tables is needed: "
     f"write [[hosts.devices]] with keys {KEYS_OF_DEVICE}"),
    ([{"name": "a", "devices": [DEVICE]}], [],
     "hosts[0].memory_bytes is missing: add memory_bytes or preset to [[hosts]] "
     "(a number above 0: its main memory, in bytes)"),
    ([host("a"), host("b", {**DEVICE, "kidn": "gpu"})], [],
     "unknown key 'hosts[1].devices[0].kidn': did you mean 'hosts.devices.kind'?"),
    ([host("a", {**DEVICE, "kind": "gpus"})], [],
     'hosts[0].devices[0].kind = "gpus" is not known: did you mean "gpu" (it takes "cpu", "gpu", '
     '"npu" or "xpu")?'),
    ([host("a", {**DEVICE, "matmul": [SPEED, SPEED]})], [],
     "hosts[0].devices[0]: matmul has two speeds for fp32: keep one"),
    ([host("a", core(1), core(2), core(2))], [],
     "hosts[0]: two devices of kind cpu have count = 2: keep one"),
    ([host("a-*")], [],
     'hosts[0]: name = "a-*" holds a *, by which links name many: leave it out'),
    ([host("a-1")], [link("a-?", "a-[1]")],
     'links[0].ends = ["a-?", "a-[1]"]: no host is called "a-?": did you mean "a-1" (it takes one '
     'of ["a-1"])?'),
    ([host("a", {**DEVICE, "passes": [{"kind": "norm", "times": POINT}] * 2})], [],
     "hosts[0].devices[0]: passes has two curves for norm: keep one"),
    ([host("a")], [{**link("a", "a"), "collectives": [SUM, {**SUM, "ranks": 3}, SUM]}],
     "links[0]: collectives has two curves for all_reduce of 2 ranks: keep one"),
    ([host("a", {**DEVICE, "count": 10**8})], [],
     "hosts[0].devices[0].count = 100000000 is out of range: give an integer from 1 and up to "
     "65536"),
    ([host("a", replicas=10**8)], [],
     "hosts[0].replicas = 100000000 is out of range: give an integer from 1 and up to 65536"),
    ([host("a", {**DEVICE, "streams": {"bytes": [2, 1], "seconds": [1, 2]}})], [],
     "hosts[0].devices[0].streams: bytes = [2.0, 1.0] does not rise from above 0: sort it"),
    ([host("a", {**DEVICE, "streams": {"bytes": [1, 2], "seconds": [1]}})], [],
     "hosts[0].devices[0].streams: seconds holds 1 times for 2 points: give one for each"),
    ([host("a"), host("b")], [*LINKED, link("a", "b", 0)],
     "links[2].bandwidth = 0 is out of range: give a number above 0"),
    ([host("alpha"), host("beta")], [link("alpha", "bata")],
     'links[0].ends = ["alpha", "bata"]: no host is called "bata": '
     'did you mean "beta" (it takes one of ["alpha", "beta"])?'),
    ([host("a"), host("b")], [*LINKED, link("x-*", "a")],
     'links[2].ends = ["x-*", "a"]: no host is called "x-*": give one of ["a", "b"]'),
    ([host("a")], [{**link("a", "a"), "ends": ["a"]}],
     'links[0].ends = ["a"] is 1 long: give a list of 2 strings'),
    ([host("a"), {"preset": "h100_8"}], [],
     'hosts[1].preset = "h100_8" is not known: did you mean "h100-8" (it takes "v100-8", "a100-8", '
     '"h100-8", "h200-8", "ascend910-8", "kunlun1-8" or "cpu")?'),
    ([{"preset": 8}], [],
     'hosts[0].preset = 8 is not known: give "v100-8", "a100-8", "h100-8", "h200-8", '
     '"ascend910-8", "kunlun1-8" or "cpu"'),
    ([{"preset": "h100-8", "devices": {"cuont": 4}}], [],
     "unknown key 'hosts[0].devices[0].cuont': did you mean 'hosts.devices.count'?"),
    ([{"preset": "h100-8", "link": {"bandwidth": -1}}], [],
     "hosts[0].link.bandwidth = -1 is out of range: give a number above 0"),
    ([{"preset": "cpu", "devices": {"count": 4}}], [],
     "hosts[0]: two devices of kind cpu have count = 4: keep one"),
    ([host("a", replicas=0)], [],
     "hosts[0].replicas = 0 is out of range: give an integer from 1 and up to 65536"),
]  # fmt: skip


@pytest.mark.parametrize(("hosts", "links", "sentence"), WRONG, ids=lambda value: str(value)[:40])
def test_an_impossible_cluster_is_one_sentence(
    hosts: list[Any], links: list[Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        cluster(hosts, links)
    assert str(caught.value) == f"c.toml: {sentence}"


@pytest.mark.parametrize("raw", [{"name": "c", "hosts": 3}, {"name": "c"}, {"hosts": [host("a")]}])
def test_a_file_without_its_parts_says_so(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"c\.toml: .*(is missing: add|is needed: write)"):
        resolve(raw, "c.toml")


def test_what_one_may_ask_and_not_get_is_one_sentence() -> None:
    made = cluster(
        [host("a", {**DEVICE, "count": 2}), host("b"), host("c", core(1), core(4))],
        [link("a", "b")],
    )
    a0, a1, b, c = place(made, 4)
    for ask, sentence in (
        (lambda: place(made, 8),
         "cluster 'test' has places for 7 ranks, not for 8: ask for fewer, or add hosts"),
        (lambda: place(made, 5),
         "the cores of host 'c' are shared by 1 or 4 ranks, not by 2: add [[hosts.devices]] of "
         "kind cpu with count = 2, or change the number of ranks"),
        (lambda: path(made, a0, a1),
         "nothing joins the devices of host 'a': give it link = { ... }, or add [[links]] with "
         'ends = ["a", "a"]'),
        (lambda: path(made, b, c),
         "no links lead from host 'b' to host 'c': add [[links]] with ends = [\"b\", \"c\"], or "
         '["*", "*"] for a network of all'),
        (lambda: device_at(made, b).speed("bf16"),
         "bf16 products are asked of device 'G', which has speeds for fp32 alone: add a "
         '[[hosts.devices.matmul]] with dtype = "bf16" to those, for a list of your own goes '
         "in the place of a preset's, or plan for another device"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            ask()
        assert str(caught.value) == sentence


def test_a_cluster_survives_its_files(tmp_path: Path) -> None:
    streams = {"bytes": [1, 2.5], "seconds": [1e-7, 0.5]}
    products = {"rows": [1], "columns": [2, 3], "inner": [4], "seconds": [1e-6, 2e-6]}
    measured = {**DEVICE, "streams": streams, "matmul": [
        {**SPEED, "products": products}, {"dtype": "bf16", "flops": 1e16}]}  # fmt: skip
    times = [{"name": "all_reduce", "ranks": 4, "times": streams}]
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
    assert (device.streams, device.speed("fp32").products) == (Curve(**streams), Grid(**products))


# What a file may leave to others.


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_whole_host(name: str) -> None:
    made = cluster([{"preset": name}])
    (alone,) = made.hosts
    assert alone.name == name
    num_ranks = max(sum(d.count for d in alone.devices if d.kind != "cpu"), alone.devices[-1].count)
    places = place(made, num_ranks)
    assert len(places) == num_ranks == int(name.partition("-")[2] or 32)
    assert len(path(made, places[0], places[-1])) == 1
    assert all(0 < speed.flops < 1e16 for device in alone.devices for speed in device.matmul)


def test_presets_have_names_and_sources() -> None:
    assert set(get_args(Preset)) == set(PRESETS) == set(SOURCES)
    assert all(len(source) > 30 for source in SOURCES.values())


def test_the_ways_to_share_a_cpu_add_up_to_it() -> None:
    (alone,) = cluster([{"preset": "cpu"}]).hosts
    whole = alone.devices[0]
    assert [device.count for device in alone.devices] == [1, 2, 4, 8, 16, 32]
    for device in alone.devices:
        assert device.count * device.threads == 32
        assert device.count * device.memory_bytes == whole.memory_bytes
        assert device.count * device.memory_bandwidth == whole.memory_bandwidth
        assert device.count * device.speed("fp32").flops == whole.speed("fp32").flops


def test_a_file_goes_before_its_preset() -> None:
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


def test_a_link_of_the_file_goes_before_that_of_the_host() -> None:
    hosts = [{"preset": "a100-8", "name": "a", "link": {"bandwidth": 7}},
             {"preset": "a100-8", "name": "b"}]  # fmt: skip
    made = cluster(hosts, [link("b", "b", 5)])
    places = place(made, 16)
    (wire,) = path(made, places[0], places[1])
    assert (wire.kind, wire.bandwidth) == ("nvlink", 7)
    (wire,) = path(made, places[8], places[9])
    assert (wire.kind, wire.bandwidth) == ("ethernet", 5)


def test_128_devices_take_ten_lines(tmp_path: Path) -> None:
    text = """name = "sixteen"
[[hosts]]
name = "a"
preset = "h100-8"
replicas = 16
[[links]]
ends = ["a-*", "a-*"]
kind = "infiniband"
latency_s = 5e-6
bandwidth = 400e9
"""
    assert text.count("\n") == 10
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    made = load_cluster(file)
    places = place(made, 128)
    assert [made.hosts[0].name, made.hosts[-1].name] == ["a-0", "a-15"]
    assert [wire.kind for wire in path(made, places[0], places[7])] == ["nvlink"]
    assert [wire.kind for wire in path(made, places[7], places[127])] == ["infiniband"]


def test_a_thousand_hosts_are_little_work() -> None:
    many = cluster([{"preset": "h100-8", "name": "a", "replicas": 1000}], [link("a-*", "*")])
    again = resolve(tomllib.loads(many.to_toml()), "c.toml")
    assert again == many
    places = place(many, 8000)
    assert places[-1] == Place("a-999", 0, 7)
    assert len(path(many, places[0], places[-1])) == 1


def test_only_as_many_places_are_made_as_are_asked_for() -> None:
    made = cluster([host(f"a{i}", {**DEVICE, "count": 1 << 16}) for i in range(64)])
    tracemalloc.start()
    try:
        assert len(place(made, 8)) == 8
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_every_key_is_documented() -> None:
    for key in keys.walk(ClusterFile):
        assert len(key.meaning) > 5, key
        assert key.meaning.endswith((".", "...")), key


# Places and paths.


def test_hosts_are_filled_in_order() -> None:
    made = cluster(
        [host("a", {**DEVICE, "count": 2}, core(8), {**DEVICE, "kind": "npu"}),
         host("c", core(1), core(2), core(4))]
    )  # fmt: skip
    accelerators = [("a", 0, 0), ("a", 0, 1), ("a", 2, 0)]
    assert place(made, 0) == []
    assert place(made, 2) == accelerators[:2]
    assert place(made, 4) == [*accelerators, ("c", 0, 0)]
    assert place(made, 5) == [*accelerators, ("c", 1, 0), ("c", 1, 1)]
    assert place(made, 7) == [*accelerators, *(("c", 2, number) for number in range(4))]
    assert [device_at(made, one).kind for one in place(made, 4)] == ["gpu", "gpu", "npu", "cpu"]


def test_devices_and_the_hosts_they_stand_in_are_paid_for() -> None:
    made = cluster(
        [host("a", {**DEVICE, "count": 2, "price_per_hour": 3}, price_per_hour=10),
         host("b", {**DEVICE, "price_per_hour": 0.5})]
    )  # fmt: skip
    prices = [price_per_hour(made, place(made, num_ranks)) for num_ranks in range(4)]
    assert prices == [0, 13, 16, 16.5]


@st.composite
def networks(draw: st.DrawFn) -> Cluster:
    names = ["a-0", "a-1", "b-0", "b-1", "c"]
    ends = st.sampled_from([*names, "a-*", "b-*", "*"])
    widths = st.integers(1, 4)
    links = draw(st.lists(st.builds(link, ends, ends, widths), max_size=7))
    return cluster([host(name) for name in names], links)


def joined(wire: Link, one: str, other: str) -> bool:
    """Whether a link leads from one host to another, by the meaning of its ends."""

    def stands_for(end: str, name: str) -> bool:
        return name.startswith(end[:-1]) if end.endswith("*") else name == end

    first, second = wire.ends
    return any(
        stands_for(first, here) and stands_for(second, there)
        for here, there in ((one, other), (other, one))
    )


def best(made: Cluster, start: str, end: str) -> tuple[int, float] | None:
    """Links and width of the best way, by trying every way through every order of hosts."""
    between = [name for name in made.by_name if name not in (start, end)]
    found = []
    for length in range(len(between) + 1):
        for middle in itertools.permutations(between, length):
            widths = [
                max((w.bandwidth for w in made.links if joined(w, *leg)), default=0.0)
                for leg in itertools.pairwise((start, *middle, end))
            ]
            if min(widths) > 0:
                found.append((length + 1, -min(widths)))
    hops, width = min(found, default=(0, 0.0))
    return (hops, -width) if hops else None


@settings(deadline=None)
@given(networks())
def test_a_path_is_the_best_of_all_and_the_same_both_ways(made: Cluster) -> None:
    for a, b in itertools.permutations(place(made, 5), 2):
        expected = best(made, a.host, b.host)
        if expected is None:
            with pytest.raises(ConfigError, match="no links lead"):
                path(made, a, b)
            continue
        way = path(made, a, b)
        assert (len(way), min(wire.bandwidth for wire in way)) == expected
        here = {a.host}
        for wire in way:  # It can be walked, too.
            here = {there for one in here for there in made.by_name if joined(wire, one, there)}
        assert b.host in here


@pytest.mark.parametrize(
    ("end", "matched"),
    [("a*", ["ab", "axbxb"]), ("*b*b", ["axbxb"]), ("*", ["ab", "axbxb", "cc"]), ("c*c", ["cc"])],
)
def test_a_star_stands_for_anything(end: str, matched: list[str]) -> None:
    made = cluster([host(name) for name in ("ab", "axbxb", "cc")], [link(end, end)])
    assert list(made.matches[end]) == matched


def test_many_stars_are_little_work() -> None:
    with pytest.raises(ConfigError, match="no host is called"):
        cluster([host("a" * 200)], [link("*a" * 40 + "*b", "*")])


def test_a_copy_knows_its_own_hosts() -> None:
    made = cluster([host("a"), host("b"), host("c")], [link("*", "*"), link("b", "c", 1)])
    fewer = made.model_copy(update={"hosts": made.hosts[:2], "links": made.links[:1]})
    assert list(fewer.by_name) == list(fewer.matches["*"]) == ["a", "b"]
    assert fewer == cluster([host("a"), host("b")], [link("*", "*")])
    assert list(made.by_name) == ["a", "b", "c"]


def test_there_is_no_way_to_where_one_is() -> None:
    made = cluster([{"preset": "v100-8"}])
    first, second = place(made, 2)
    assert path(made, first, first) == []
    assert path(made, first, second) == path(made, second, first) == made.links


def test_of_two_links_the_wider_is_taken() -> None:
    made = cluster(
        [host("a", {**DEVICE, "count": 2}), host("b")],
        [link("a", "a", 1), link("a", "a", 3), link("a", "a", 2), link("a", "b", 1),
         link("b", "a", 2)],
    )  # fmt: skip
    a0, a1, b = place(made, 3)
    assert path(made, a0, a1) == [made.links[1]]
    assert path(made, a0, b) == path(made, b, a1) == [made.links[4]]


HAND = """# A machine of ours.
name = "by hand"   # and by nobody else

[[hosts]]
name = "a"
preset = "cpu"
"""
OLD = """[calibration]   # what it was
runs = 9
devices = [
  "X",  # of old
]
products = 1.0
passes = 1.0
messages = 1.0
"""
LINK = """
# The cable behind the cupboard.
[[links]]
ends = ["a", "a"]
kind = "loopback"
latency_s = 1e-5
bandwidth = 1e9
"""


@pytest.mark.parametrize(
    "text", [HAND, f"{HAND}{LINK}", f"{HAND}\n{OLD}{LINK}", f"{HAND}{LINK}\n{OLD}# The end.\n\n"]
)
def test_a_calibration_is_written_beside_what_a_hand_wrote(text: str) -> None:
    learnt = Calibration(runs=2, devices=['A "fast" one'], products=0.9, passes=1.5, messages=1.25)
    written = with_calibration(text, learnt, "here.toml")
    assert resolve(tomllib.loads(written), "here.toml").calibration == learnt
    for line in text.replace(OLD, "").splitlines():
        assert line in written.splitlines()
    assert written.count("[calibration]") == 1
    assert "X" not in written
    assert with_calibration(written, learnt, "here.toml") == written
    windows = with_calibration(text.replace("\n", "\r\n"), learnt, "here.toml")
    assert tomllib.loads(windows) == tomllib.loads(written)


@pytest.mark.parametrize(
    "text",
    [
        HAND.rstrip(), f"{HAND}\n \n\n", f"{HAND}  ", HAND.replace("\n", "\r\n"), f"\ufeff{HAND}",
        f"{HAND}# Of a line within one:\u2028[calibration]\n",
    ],
)  # fmt: skip
def test_a_calibration_leaves_every_byte_of_a_hand(text: str) -> None:
    learnt = Calibration(runs=1, devices=["C"], products=1.0, passes=1.5, messages=1.0)
    written = with_calibration(text, learnt, "here.toml")
    assert written.startswith(text)
    assert resolve(tomllib.loads(written.lstrip("\ufeff")), "here.toml").calibration == learnt
    assert with_calibration(written, learnt, "here.toml") == written


@pytest.mark.parametrize(
    "line",
    ["calibration.runs = 1", "calibration = { runs = 1 }", '["calibration"]', "[calibration.x]"],
)
def test_a_calibration_in_another_form_is_refused(line: str) -> None:
    learnt = Calibration(runs=1, devices=["C"], products=1.0, passes=1.0, messages=1.0)
    text = f"{line}\n{HAND}" if "=" in line else f"{HAND}{line}\n"
    with pytest.raises(ConfigError, match=r"here.toml: "):
        with_calibration(text, learnt, "here.toml")


def test_a_factor_beyond_bounds_is_refused() -> None:
    table = {"runs": 1, "devices": ["C"], "products": 4.1, "passes": 1.0, "messages": 1.0}
    with pytest.raises(ConfigError, match=r"calibration.products = 4.1 is out of range: give a "):
        resolve({"name": "c", "hosts": [host("a")], "calibration": table}, "c.toml")
