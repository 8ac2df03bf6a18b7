"""Theme `balance`: an expert layer over two ranks under skewed routing, policy by policy.

Forward and backward of one layer, each rank with one core to itself; choices, tokens and experts
are the same for all contenders. balance.md says what bounds the figures.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from benchmarks import balance_simulated, measure
from benchmarks.on_ranks import in_turn, on_ranks
from benchmarks.skewed import (
    EVEN,
    FFN,
    HIDDEN,
    PLAIN,
    RANKS,
    TOKENS,
    Skew,
    Work,
    costs_of,
    layer_of,
    learnt_shares,
)
from moesaic.dist.world import World
from moesaic.facts.job.balance import Policy
from moesaic.policy.balance import quota
from moesaic.testing.hosts import unsupported_reason

OURS: Policy = "quota"
POLICIES: tuple[Policy, ...] = (OURS, "pro-prophet")
NATURAL, ONE, FLAT = "a run trained without balance loss", "one expert has 80%", "even"
SKEWS = (
    Skew(NATURAL, 2), Skew("Zipf 1.2", 2), Skew(ONE, 1), Skew("a hot expert that moves", 2),
    Skew(FLAT, 2),
)  # fmt: skip
EXPERTS = (16, 64)
ONE_BAR, FLAT_BAR, EVEN_BAR, HOSTS_BAR = ">= 1.5", ">= 0.99", ">= 0.95", ">= 0.99"


def on_one_host(rounds: int) -> Iterator[measure.Row]:
    """Measure two ranks that share the host's memory; claims are the worst cases."""
    learnt = {experts: learnt_shares(experts, 2) for experts in EXPERTS}
    ours: dict[str, list[measure.Row]] = {skew.name: [] for skew in SKEWS}
    others, even = list[measure.Row](), list[measure.Row]()
    for experts in EXPERTS:
        for skew in SKEWS:
            work = Work(skew, experts, learnt[experts])
            found = on_ranks(RANKS, taken, work, (PLAIN, *POLICIES), rounds, pinned=True)
            title = f"two ranks, {experts} experts, {skew.name}"
            ours[skew.name].append(_over_none(title, OURS, found))
            others += [_over_none(title, name, found) for name in POLICIES[1:]]
            even.append(_of_even(title, found))
    title = f"expert layer, two ranks, {OURS}"
    yield measure.worst(f"{title} over none, one expert has 80%, worst of 2", ours[ONE], ONE_BAR)
    yield measure.worst(f"{title} over none, even routing, worst of 2", ours[FLAT], FLAT_BAR)
    yield measure.worst(f"{title}, of even routing, worst of {len(even)} cases", even, EVEN_BAR)
    yield from (*(row for some in ours.values() for row in some), *others)


def on_two_hosts(rounds: int) -> Iterator[measure.Row]:
    """Measure two hosts with a link of 1 Gbit/s, over which replicas cost time."""
    hindrance, details = unsupported_reason(), list[measure.Row]()
    for experts in EXPERTS:
        for skew in SKEWS[1:]:
            title = f"two hosts, 1 Gbit/s, {experts} experts, {skew.name}"
            if hindrance:
                details.append(measure.untried(f"{title}: {OURS} over none", "", hindrance))
                continue
            work = Work(skew, experts, None, apart=True)
            found = on_ranks(RANKS, taken, work, (PLAIN, OURS), rounds, megabits=1000, pinned=True)
            details.append(_over_none(title, OURS, found))
    title = f"expert layer, two hosts, 1 Gbit/s, {OURS} over none, worst of {len(details)} cases"
    yield from measure.claim(title, HOSTS_BAR, details)


def planning(rounds: int) -> Iterator[measure.Row]:
    """Measure how long the policy takes to decide on a layer."""
    yield _decision(64, 256, "<= 1.0", rounds)
    yield _decision(1024, 512, "<= 20.0", rounds)


def _decision(ranks: int, experts: int, bar: str, rounds: int) -> measure.Row:
    loads = itertools.cycle(balance_simulated.loads(ranks, experts, ranks * 4096, 8, 0))
    problem = balance_simulated.large(ranks, experts)
    times = measure.interleave({OURS: lambda: quota(next(loads), problem)}, rounds)
    low, high = measure.bootstrap(times.seconds[OURS])
    return measure.row(
        f"quota decides on a layer, {ranks:,} devices, {experts} experts", 1e3 * times.median(OURS),
        "ms", bar=bar, against="limit: no rank waits", interval=(1e3 * low, 1e3 * high),
        repeats=rounds,
    )  # fmt: skip


def simulated(rounds: int) -> Iterator[measure.Row]:
    """Simulate many devices, once."""
    del rounds
    yield from balance_simulated.rows()


PARTS: dict[str, Callable[[int], Iterator[measure.Row]]] = {
    "host": on_one_host, "hosts": on_two_hosts, "planning": planning,
    "simulated": simulated,
}  # fmt: skip


def _over_none(title: str, name: str, found: Found) -> measure.Row:
    return measure.compare(
        f"{title}: {name} over none", found.times, PLAIN, name,
        against=f"no replicas; {found.told[name]}; {SHAPE}",
    )  # fmt: skip


def _of_even(title: str, found: Found) -> measure.Row:
    return measure.compare(
        f"{title}: {OURS}, of even routing", found.times, EVEN, OURS,
        against=f"limit: as many tokens, routed evenly; {SHAPE}",
    )  # fmt: skip


SHAPE = f"{TOKENS} tokens a rank, {HIDDEN} x {FFN}, forward and backward"


class Found(NamedTuple):
    """Figures of a case."""

    times: measure.Times
    told: dict[str, str]
    """What each policy did."""


def taken(world: World, work: Work, names: Sequence[str], rounds: int, root: int) -> Found | None:
    """On each rank: check that all contenders agree, then time them in turn."""
    costs = costs_of(world, work)
    layers = {name: layer_of(world, work, name, costs) for name in (EVEN, *names)}
    results = {name: one() for name, one in layers.items()}
    del results[EVEN]
    for name, result in results.items():
        torch.testing.assert_close(result, results[PLAIN], rtol=1e-4, atol=1e-5, msg=name)
    times = in_turn(world, dict(layers), rounds, root)
    told = {name: layers[name].words() for name in names if name in POLICIES}
    return None if times is None else Found(times, told)
