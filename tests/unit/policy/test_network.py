"""Network model: compared with a slow reference that counts every message, and by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.facts.cluster import (
    Cluster,
    Collective,
    Curve,
    Link,
    Place,
    inter_host_link,
    intra_host_link,
    place_ranks,
)
from moesaic.policy.cost.network import CollectiveCost, NetworkModel
from moesaic.testing.clusters import make_cluster

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


def cluster(*counts: int, net: dict[str, Any] | None = None, **bus: Any) -> Cluster:
    """Return a cluster with one host for each of `counts`, with that many devices."""
    return make_cluster(*({"count": count} for count in counts), bus=bus, network=net or {})


def all_places(made: Cluster) -> list[Place]:
    return place_ranks(made, sum(host.devices[0].count for host in made.hosts))


def costs(made: Cluster, operation: str, *groups: list[int]) -> list[CollectiveCost]:
    return NetworkModel(made, all_places(made)).collective_costs(operation, groups)


def rounds_of(operation: str, ranks: int) -> Iterator[list[tuple[int, int, float]]]:
    """Yield the messages of every round: source, destination, fraction of the size."""
    if ranks == 1:
        return
    if operation in ("all_reduce", "all_gather", "reduce_scatter"):
        for _ in range((ranks - 1) * (2 if operation == "all_reduce" else 1)):
            yield [(r, (r + 1) % ranks, 1 / ranks) for r in range(ranks)]
    elif operation == "all_to_all":
        for step in range(1, ranks):
            yield [(r, (r + step) % ranks, 1 / ranks) for r in range(ranks)]
    elif operation == "send":
        yield [(0, ranks - 1, 1.0)]
    else:
        have, span = {0}, 1
        while span < ranks:
            span *= 2
        while len(have) < ranks:
            span //= 2
            sent = [(r, r + span, 1.0) for r in sorted(have) if r + span < ranks]
            have |= {there for _, there, _ in sent}
            if sent:
                yield sent


Ports = Counter[tuple[int, object, str]]


def count(made: Cluster, here: Place, there: Place, share: float, ports: Ports) -> float:
    """Add one message to every port that it passes; return its latency."""
    if here.host == there.host:
        link, a, b = intra_host_link(made, here.host), here, there
    else:
        link, a, b = inter_host_link(made, here.host, there.host), here.host, there.host
    if link.shared:
        ports[id(link), "", ""] += share
    elif link.duplex:
        ports[id(link), a, "out"] += share
        ports[id(link), b, "in"] += share
    else:
        ports[id(link), a, ""] += share
        ports[id(link), b, ""] += share
    return link.latency_s


def reference_seconds(
    made: Cluster, operation: str, groups: list[list[int]], num_bytes: float
) -> list[float]:
    """Return seconds by group, counted message by message, round by round, port by port."""
    places, widths = all_places(made), {id(link): link.bandwidth for link in made.links}
    # Only there does a round wait for the bytes of the previous one.
    waits = operation == "broadcast"
    late_s = [0.0] * len(groups)
    loads_by_group: list[list[Ports]] = []
    for index, group in enumerate(groups):
        late, ports = list[float](), list[Ports]()
        for one_round in rounds_of(operation, len(group)):
            if waits or not ports:
                ports.append(Counter())
            at = [(places[group[a]], places[group[b]], share) for a, b, share in one_round]
            late.append(max(count(made, a, b, share, ports[-1]) for a, b, share in at))
        late_s[index] = sum(late) if waits else len(late) * max(late, default=0.0)
        loads_by_group.append(ports)
    seconds = []
    for own, late in zip(loads_by_group, late_s, strict=True):
        busy_s = 0.0
        for number, ports in enumerate(own):
            total: Ports = Counter()
            for other in loads_by_group:
                total.update(other[number] if number < len(other) else {})
            busy_s += max(total[port] / widths[port[0]] for port in ports)
        seconds.append(late + busy_s * num_bytes)
    return seconds


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    wires = st.fixed_dictionaries(
        {
            "shared": st.booleans(),
            "duplex": st.booleans(),
            "bandwidth": st.sampled_from([1e8, 1e10]),
        }
    )
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    return cluster(*counts, net=draw(wires), **draw(wires))


@st.composite
def operations(draw: st.DrawFn) -> tuple[Cluster, str, list[list[int]]]:
    made = draw(clusters())
    ranks = draw(st.permutations(range(len(all_places(made)))))
    cuts = sorted(draw(st.sets(st.integers(1, max(len(ranks) - 1, 1)), max_size=3)))
    groups = [ranks[a:b] for a, b in zip([0, *cuts], [*cuts, len(ranks)], strict=True)]
    return made, draw(st.sampled_from(OPERATIONS)), [group for group in groups if group]


@settings(max_examples=150)
@given(operations(), st.floats(0, 1e9))
def test_costs_match_the_slow_reference(
    case: tuple[Cluster, str, list[list[int]]], num_bytes: float
) -> None:
    made, operation, groups = case
    found = [cost.seconds(num_bytes) for cost in costs(made, operation, *groups)]
    assert found == pytest.approx(
        reference_seconds(made, operation, groups, num_bytes), rel=1e-9, abs=1e-15
    )


@given(operations(), st.floats(0, 1e9), st.floats(0, 1e9))
def test_more_bytes_and_more_contention_are_never_faster(
    case: tuple[Cluster, str, list[list[int]]], few: float, more: float
) -> None:
    made, operation, groups = case
    for group, contended in zip(groups, costs(made, operation, *groups), strict=True):
        (alone,) = costs(made, operation, group)
        assert alone.contention == pytest.approx(1.0)
        assert contended.contention >= 1.0 - 1e-12
        assert alone.seconds(few) <= contended.seconds(few) * (1 + 1e-12)
        assert contended.seconds(few) <= contended.seconds(few + more)


@pytest.mark.parametrize(
    ("operation", "seconds"),
    [
        ("all_reduce", 6e-5 + 1.5e-2), ("all_gather", 3e-5 + 7.5e-3),
        ("reduce_scatter", 3e-5 + 7.5e-3), ("all_to_all", 3e-5 + 7.5e-3),
        ("broadcast", 2e-5 + 2e-2), ("send", 1e-5 + 1e-2),
    ],
)  # fmt: skip
def test_one_host_by_hand(operation: str, seconds: float) -> None:
    """Four ranks, 100 MB, 10 us, 10 GB/s."""
    assert costs(cluster(4), operation, [0, 1, 2, 3])[0].seconds(1e8) == pytest.approx(seconds)
    assert costs(cluster(4), operation, [2])[0].seconds(1e8) == 0.0


@pytest.mark.parametrize(
    ("operation", "num_bytes"),
    # A ring crosses each boundary once per direction. In an all-to-all, each of 8 ranks sends an
    # eighth to 4 others: 4 x 4 / 8. Only the first edge of a tree crosses hosts.
    [("all_reduce", 14 / 8), ("all_gather", 7 / 8), ("all_to_all", 2.0), ("send", 1.0)],
)
def test_two_hosts_by_hand(operation: str, num_bytes: float) -> None:
    (found,) = costs(cluster(4, 4), operation, list(range(8)))
    assert found.s_per_byte == pytest.approx(num_bytes / 1e9)
    (tree,) = costs(cluster(4, 4), "broadcast", list(range(8)))
    assert tree.seconds(1e9) == pytest.approx(5e-5 + 1.0 + 2 * (1e-5 + 0.1))


def test_rings_across_hosts_share_host_links() -> None:
    """Four groups of two over two hosts: each host's link carries all four."""
    groups = [[rank, rank + 4] for rank in range(4)]
    for found in costs(cluster(4, 4), "all_reduce", *groups):
        assert found.contention == pytest.approx(4.0)
        assert found.s_per_byte == pytest.approx(4 / 1e9)


def test_groups_inside_a_host_contend_only_on_a_shared_bus() -> None:
    pairs = ([0, 1], [2, 3])
    assert [one.contention for one in costs(cluster(4), "all_gather", *pairs)] == [1.0, 1.0]
    found = costs(cluster(4, shared=True), "all_gather", *pairs)
    # Both ranks of each pair send half the bytes over the one bus.
    assert [one.s_per_byte for one in found] == pytest.approx([2 / 1e10] * 2)


def test_a_shared_switch_carries_all_bytes() -> None:
    wide, narrow = cluster(1, 1, 1, 1), cluster(1, 1, 1, 1, net={"shared": True})
    (fast,), (slow,) = (costs(one, "all_gather", [0, 1, 2, 3]) for one in (wide, narrow))
    assert slow.s_per_byte == pytest.approx(4 * fast.s_per_byte)


def test_measurements_apply_to_the_same_collective_and_size() -> None:
    times = {"bytes": [1e3, 1e9], "seconds": [1e-4, 5.0]}
    known = [{"name": "all_reduce", "ranks": 2, "times": times}]
    near = cluster(4, collectives=known)
    assert costs(near, "all_reduce", [0, 1])[0].seconds(1e9) == pytest.approx(5.0)
    assert costs(near, "all_gather", [0, 1])[0].seconds(1e8) == pytest.approx(1e-5 + 5e-3)
    assert costs(near, "all_reduce", [0, 1, 2, 3])[0].seconds(1e8) == pytest.approx(6e-5 + 1.5e-2)
    far = cluster(2, 2, net={"collectives": known})
    curve = Curve(**times)
    (alone,) = costs(far, "all_reduce", [0, 2])
    assert alone.seconds(1e7) == pytest.approx(curve.at(1e7))
    for shared in costs(far, "all_reduce", [0, 2], [1, 3]):  # Two groups at once: twice the bytes.
        assert shared.seconds(1e7) == pytest.approx(curve.at(2e7))
    assert costs(far, "all_reduce", [0, 1])[0].measured_curve is None


def test_sends_take_their_measurement() -> None:
    """It takes twice as long if two messages leave one device at once."""
    times = {"bytes": [8.0, 1e3, 1e6], "seconds": [1e-4, 1e-4, 3e-3]}
    sent = cluster(4, collectives=[{"name": "send", "ranks": 2, "times": times}])
    (one,) = costs(sent, "send", [0, 1])
    assert [one.seconds(size) for size in (0, 500, 1e6)] == pytest.approx([1e-4, 1e-4, 3e-3])
    for cost in costs(sent, "send", [0, 1], [0, 2]):
        assert cost.seconds(5e5) == pytest.approx(3e-3)


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_measurements_of_the_slowest_link_apply_to_the_ring(slow: int) -> None:
    times = {"bytes": [1e3, 1e9], "seconds": [1e-4, 5.0]}
    known = [Collective(name="all_gather", ranks=3, times=Curve(**times))]
    made = cluster(1, 1, 1)
    wires = [
        Link(
            ends=[f"h{here}", f"h{(here + 1) % 3}"], kind="cable", latency_s=1e-6,
            bandwidth=1e8 if here == slow else 1e9, collectives=known if here == slow else [],
        )
        for here in range(3)
    ]  # fmt: skip
    own = [link for link in made.links if link.ends != ["*", "*"]]
    joined = made.model_copy(update={"links": own + wires})
    assert costs(joined, "all_gather", [0, 1, 2])[0].seconds(1e9) == pytest.approx(5.0)
