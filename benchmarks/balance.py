"""Expert load balance: an expert layer over two ranks under skewed routing, policy by policy.

Forward and backward of one layer, each rank with one core to itself; the same choices, tokens and
experts for all. What all are held against are as many rows, spread evenly.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from benchmarks import balance_policies, balance_simulated, break_even, early, measure
from benchmarks.layer import in_turn
from benchmarks.natural import least_even, trained
from benchmarks.skewed import (
    ALONE,
    EVEN,
    FFN,
    HIDDEN,
    MOVED,
    PLAIN,
    RANKS,
    TOKENS,
    Skew,
    Work,
    alone_of,
    layer_of,
    moe_of,
    on_ranks,
    prices_of,
)  # fmt: skip
from moesaic.dist.exchange import Carrier
from moesaic.dist.world import World
from moesaic.facts.job import BalanceConfig
from moesaic.nn.bank import Bank
from moesaic.nn.routes import Routes
from moesaic.policy.balance import quota, setting_of
from moesaic.policy.balance.yardsticks import lp
from moesaic.testing.hosts import impossible, met
from moesaic.train import balancing

OURS = "quota"
POLICIES = ("quota", "pro-prophet", "faster-moe", "top-k-broadcast", "eplb", "llep", "lp")
SKEWS = (
    Skew("a run trained without balance loss", 2),
    Skew("Zipf 1.2", 2),
    Skew("one expert has 80%", 1, ">= 1.5"),
    Skew("a hot expert that moves", 2),
    Skew("even", 2, ">= 0.99"),
)
EXPERTS = (16, 64)


def rows(rounds: int) -> Iterator[measure.Row]:
    """Every figure, as it comes."""
    for part in PARTS.values():
        yield from part(rounds)
    yield from balance_simulated.rows()


def on_one_host(rounds: int) -> Iterator[measure.Row]:
    """Two ranks, and the host's memory between them."""
    learnt = {experts: least_even(trained(experts, 2))[-1] for experts in EXPERTS}
    for experts in EXPERTS:
        for skew in SKEWS:
            found = on_ranks(taken, Work(skew, experts, learnt[experts]), rounds)
            title = f"two ranks, {experts} experts, {skew.name}"
            yield from _rows(title, skew.bar, found, rounds, ">= 0.95")


def on_two_hosts(rounds: int) -> Iterator[measure.Row]:
    """A link of 1 Gbit/s between them, over which copies have a price."""
    for experts in EXPERTS:
        for skew in SKEWS[1:]:
            title = f"two hosts of a rank, 1 Gbit/s, {experts} experts, {skew.name}"
            hindrance = impossible()
            if hindrance:
                yield measure.row(
                    title, None, "ratio", bar=">= 1.0", against=f"untried: {hindrance}", repeats=0
                )
                continue
            work = Work(skew, experts, None, apart=True)
            found = on_ranks(taken, work, rounds, megabits=1000)
            yield from _rows(title, ">= 0.99", found, rounds, "")


def model(rounds: int) -> Iterator[measure.Row]:
    """How far what policies count on is from what is measured."""
    for where, megabits in {"on one host": 0, "over 1 Gbit/s": 1000}.items():
        hindrance = impossible() if megabits else ""
        if hindrance:
            yield measure.row(
                f"the model's mean error of links, {where}", None, "ratio", bar="<= 0.1",
                against=f"untried: {hindrance}", repeats=0,
            )  # fmt: skip
            continue
        found = on_ranks(modelled, rounds, megabits=megabits)
        for what, bar in (("experts", "<= 0.05"), ("links", "<= 0.1")):
            errors = {
                name: abs(foretold_s / found.measured_s(name) - 1)
                for name, foretold_s in found.foretold.items()
                if name.startswith(what)
            }
            worst = max(errors, key=lambda name: errors[name])
            yield measure.row(
                f"the model's mean error of {what}, {where}", float(np.mean(list(errors.values()))),
                "ratio", bar=bar, repeats=rounds,
                against=f"medians of {len(errors)} loads; the worst, {worst}: {errors[worst]:.3f}",
            )  # fmt: skip


class Foretold(NamedTuple):
    """Seconds of single loads, as the model has them, and as measured."""

    foretold: dict[str, float]
    seconds: dict[str, list[float]]

    def measured_s(self, name: str) -> float:
        """The middle one."""
        return float(np.median(self.seconds[name]))


class Alone:
    """A load by itself: ranks begin together, and nothing that it takes is in a cache."""

    def __init__(self, world: World, call: Callable[[], object]) -> None:
        self._world, self._call, self.seconds = world, call, list[float]()
        self._other = torch.zeros(64 << 20, dtype=torch.uint8)

    def __call__(self) -> None:
        """Once more."""
        self._other.add_(1)
        self._world.barrier()
        began = time.perf_counter()
        self._call()
        self.seconds.append(time.perf_counter() - began)


def modelled(
    world: World, rounds: int, root: int, hosts: tuple[str, str] | None = None
) -> Foretold | None:
    """On each rank, with a core to itself."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    if hosts is None:
        return _modelled(world, rounds, root)
    with met(world, hosts) as world:
        return _modelled(world, rounds, root)


def _modelled(world: World, rounds: int, root: int) -> Foretold | None:
    moe, job, plan = moe_of(world, Work(SKEWS[1], EXPERTS[0], None), PLAIN)
    prices = balancing.measured(moe, None, world)
    setting = setting_of(job, plan, BalanceConfig(), prices, 0)
    carrier, bank, foretold = moe.dispatcher.ranks.straight, moe.bank, dict[str, float]()
    assert carrier is not None
    calls = dict[str, Callable[[], object]]()
    for rows in (512, 2048, 8192):
        name = f"experts with {rows} rows"
        calls[name] = partial(_computing, bank, rows)
        foretold[name] = 3 * (rows / setting.rows_per_s + setting.matrices_s)
    if setting.handling_s:
        rows, copies = 4096, 2
        name = f"experts with {rows} rows, under which {copies} copies travel each way"
        calls[name] = partial(_under_computing, carrier, bank, rows, copies)
        handled_s = 2 * copies * setting.expert_bytes * setting.handling_s
        foretold[name] = 3 * (rows / setting.rows_per_s + setting.matrices_s) + handled_s
    for rows in (256, 1024, 4096):
        name = f"links with {rows} rows"
        calls[name] = partial(_exchanging, carrier, rows, HIDDEN)
        foretold[name] = rows * setting.row_bytes / setting.bytes_per_s + setting.latency_s
    for copies in (1, 2, 4):
        name = f"links with {copies} experts"
        calls[name] = partial(_exchanging, carrier, copies, bank.arena.shape[1])
        size = copies * setting.expert_bytes
        foretold[name] = size / setting.bytes_per_s + setting.latency_s
        name = f"links with {copies} experts one way"
        # A link has done its part when they have come; by hand who sends them has half of the work.
        sender = 1 if setting.hides else 0
        calls[name] = partial(_exchanging, carrier, copies, bank.arena.shape[1], sender=sender)
        size *= 1.0 if setting.hides else 0.5
        foretold[name] = size / setting.bytes_per_s + setting.latency_s
    seconds = dict[str, list[float]]()
    for what in ("experts", "links"):  # Links that are left alone for long start slowly.
        own = {n: Alone(world, call) for n, call in calls.items() if n.startswith(what)}
        in_turn(world, own, rounds, root)
        seconds |= {name: one.seconds for name, one in own.items()}
    return Foretold(foretold, seconds) if world.leads else None


def _computing(bank: Bank, rows: int) -> None:
    """Forward and backward of so many rows, by Zipf over the experts of a rank."""
    slots = len(bank.arena)
    shares = 1.0 / np.arange(1, slots + 1)
    counts = np.floor(rows * shares / shares.sum()).astype(np.int64)
    counts[0] += rows - counts.sum()
    tokens = torch.ones(rows, bank.hidden, requires_grad=True)
    routes = Routes(torch.from_numpy(counts), torch.arange(rows))
    with bank.at_work() as compute:
        out = compute(tokens, routes, None)
    torch.autograd.grad(out, (tokens, bank.arena), torch.ones_like(out))


def _exchanging(carrier: Carrier, rows: int, width: int, *, sender: int | None = None) -> None:
    """So many rows from each of two ranks to the other, or from one alone."""
    me = carrier.group.rank()
    sends, gets = (rows if sender in (None, rank) else 0 for rank in (me, 1 - me))
    send, receive = (
        [0 if rank == me else number for rank in range(RANKS)] for number in (sends, gets)
    )
    _, work = carrier.start(torch.zeros(sends, width), send, receive)
    work.wait()


def _under_computing(carrier: Carrier, bank: Bank, rows: int, copies: int) -> None:
    """Forward and backward of so many rows, while copies leave and come."""
    sizes = [copies if rank != carrier.group.rank() else 0 for rank in range(RANKS)]
    _, work = carrier.start(bank.arena.detach()[:copies], sizes, sizes)
    _computing(bank, rows)
    work.wait()


def planning(rounds: int) -> Iterator[measure.Row]:
    """How long it takes to decide on a layer: ours, and a copy on each rank with an exact split."""
    for (ranks, experts), bar in {(64, 256): "<= 1.0", (1024, 512): "<= 20.0"}.items():
        every = list(balance_simulated.loads(ranks, experts, ranks * 4096, 8, 0))
        setting = balance_simulated.large(ranks, experts)
        for policy, said in {quota: "", lp: ", lp"}.items():
            policy(every[0], setting)
            taken_s = list[float]()
            for turn in range(rounds):
                began = time.perf_counter()
                policy(every[turn % len(every)], setting)
                taken_s.append(time.perf_counter() - began)
            low, high = measure.bootstrap(taken_s)
            yield measure.row(
                f"deciding on a layer, {ranks:,} devices, {experts} experts{said}",
                1e3 * float(np.median(taken_s)), "ms", bar=bar,
                against="limit: nobody is to wait", interval=(1e3 * low, 1e3 * high),
                repeats=rounds,
            )  # fmt: skip


PARTS: dict[str, Callable[[int], Iterator[measure.Row]]] = {
    "host": on_one_host,
    "hosts": on_two_hosts,
    "model": model,
    "break-even": break_even.rows,
    "early": early.rows,
    "planning": planning,
    "policies": lambda rounds: balance_policies.rows(),
}


def simulated_rows() -> Iterator[measure.Row]:
    """Those of the model, which may be taken alone."""
    yield from balance_policies.rows()
    yield from balance_simulated.rows()


def _rows(
    title: str, bar: str, found: Found | None, rounds: int, even_bar: str
) -> Iterator[measure.Row]:
    assert found is not None
    times = found.times
    shape = f"{TOKENS} tokens a rank, {HIDDEN} x {FFN}, forward and backward"
    for policy in POLICIES:
        ratio, interval = times.ratio(of=PLAIN, to=policy)
        yield measure.row(
            f"{title}: {policy} over none", ratio, "ratio", bar=bar if policy == OURS else "",
            against=f"every row at home; {found.told[policy]}; {shape}", interval=interval,
            repeats=rounds,
        )  # fmt: skip
    ratio, interval = times.ratio(of=PLAIN, to=MOVED)
    yield measure.row(
        f"{title}: {MOVED}, without copies", ratio, "ratio", bar="",
        against=f"experts in turn; {shape}", interval=interval, repeats=rounds,
    )  # fmt: skip
    ratio, interval = times.ratio(of=PLAIN, to=ALONE)
    yield measure.row(
        f"{title}: {ALONE} over none, the ceiling", ratio, "ratio", bar="",
        against=f"every row at home; the rows that {OURS} has each rank compute, without messages, "
        f"copies or decisions; {shape}", interval=interval, repeats=rounds,
    )  # fmt: skip
    ratio, interval = times.ratio(of=ALONE, to=OURS)
    yield measure.row(
        f"{title}: {OURS}, of {ALONE}", ratio, "ratio", bar="",
        against=f"limit: the ceiling; {shape}", interval=interval, repeats=rounds,
    )  # fmt: skip
    ratio, interval = times.ratio(of=EVEN, to=OURS)
    yield measure.row(
        f"{title}: {OURS}, of as many rows spread evenly", ratio, "ratio", bar=even_bar,
        against=f"limit: even routing; {shape}", interval=interval, repeats=rounds,
    )  # fmt: skip
    best = min((name for name in POLICIES if name != OURS), key=times.median)
    ratio, interval = times.ratio(of=best, to=OURS)
    yield measure.row(
        f"{title}: {OURS} over the best of the others", ratio, "ratio",
        bar=">= 0.98" if even_bar else "", against=f"{best}; {shape}", interval=interval,
        repeats=rounds,
    )  # fmt: skip


class Found(NamedTuple):
    """What a case came to."""

    times: measure.Times
    told: dict[str, str]
    """What each policy did."""


def taken(
    world: World, work: Work, rounds: int, root: int, hosts: tuple[str, str] | None = None
) -> Found | None:
    """On each rank, with a core to itself: all in turn, as rank 0 says."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    if hosts is None:
        return _taken(world, work, rounds, root)
    with met(world, hosts) as world:
        return _taken(world, work, rounds, root)


def _taken(world: World, work: Work, rounds: int, root: int) -> Found | None:
    prices = prices_of(world, work)
    layers = {name: layer_of(world, work, name, prices) for name in (EVEN, PLAIN, MOVED, *POLICIES)}
    results = {name: one() for name, one in layers.items()}
    del results[EVEN]
    for name, result in results.items():
        torch.testing.assert_close(result, results[PLAIN], rtol=1e-4, atol=1e-5, msg=name)
    computing = alone_of(world, work, prices)
    computing()  # All have taken one of the draws, and go on with the same.
    times = in_turn(world, {**layers, ALONE: computing}, rounds, root)
    told = {name: layers[name].words() for name in POLICIES}
    return None if times is None else Found(times, told)
