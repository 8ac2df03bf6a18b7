"""Sums of gradients: in buckets that leave under backward, against one a parameter after it; and
the update of what lies side by side for their sake, against that of single tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks import measure
from benchmarks.layer import PATIENCE_S, in_turn
from benchmarks.training import Ours, olmoe
from moesaic.dist.buckets import Buckets, Summed
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import lay_out
from moesaic.facts.workload.share import Share
from moesaic.facts.workload.sums import sums_of
from moesaic.testing.hosts import impossible, met, two_hosts
from moesaic.testing.ranks import Ranks
from moesaic.train.optim import AdamW, Stretch
from moesaic.train.run import Run

RANKS = 2
LINKS = {"one host": 0, "two hosts, 1 Gbit/s": 1000, "two hosts, 200 Mbit/s": 200}
"""Megabits a second; 0: no link."""
PLAIN, LATE, FUSED = "one a parameter", "buckets after backward", "buckets"
SINGLE, FLAT = "single tensors", "side by side"
BAR = ">= 1.0"


def rows(rounds: int) -> Iterator[measure.Row]:
    """Every figure, as it comes."""
    hindrance = impossible()
    for name, megabits in LINKS.items():
        title = f"training step, two ranks, {name}, gradients in buckets under backward"
        if megabits and hindrance:
            yield measure.row(
                title, None, "ratio", bar=BAR, against=f"untried: {hindrance}", repeats=0
            )
            continue
        found = on_two_ranks(megabits, rounds)
        num_parameters, num_buckets = found.counted[PLAIN], found.counted[FUSED]
        if not megabits:
            yield measure.row(
                "sums of gradients in a step, in buckets", num_buckets, "messages",
                bar=f"== {implied()}", repeats=1,
                against=f"limit: what buckets of 32 MiB imply; {num_parameters} parameters",
            )  # fmt: skip
            ratio, interval = found.updates.ratio(SINGLE, FLAT)
            yield measure.row(
                "AdamW, two ranks, dense parameters side by side", ratio, "ratio", bar=BAR,
                against=f"moesaic, each a tensor: {found.counted[SINGLE]} for "
                f"{found.counted[FLAT]} on a rank; 108 million numbers, a core a rank",
                interval=interval, repeats=rounds,
            )  # fmt: skip
        shape = "OLMoE-shaped, 8 layers of 4 experts, 8 x 128 tokens, a core a rank"
        for other, bar in ((PLAIN, BAR), (LATE, "")):
            ratio, interval = found.times.ratio(other, FUSED)
            yield measure.row(
                title if other == PLAIN else f"{title}, against after it", ratio, "ratio", bar=bar,
                against=f"moesaic, sums of gradients as {other}, of {num_parameters}; {shape}",
                interval=interval, repeats=rounds,
            )  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What two ranks did."""

    times: measure.Times
    updates: measure.Times
    counted: dict[str, int]
    """Sums of gradients in a step; and tensors that AdamW is given."""


def on_two_ranks(megabits: int, rounds: int) -> Found:
    """Steps with sums of each kind, on one host or on two with a link."""
    pool = Ranks()
    try:
        if not megabits:
            return _found(pool.run(RANKS, steps, rounds, os.getpid(), timeout_s=PATIENCE_S))
        with two_hosts(megabits) as hosts:
            return _found(
                pool.run(RANKS, on_hosts, hosts, rounds, os.getpid(), timeout_s=PATIENCE_S)
            )
    finally:
        pool.close()


def _found(results: list[Found | None]) -> Found:
    (found,) = (one for one in results if one is not None)
    return found


def on_hosts(world: World, hosts: tuple[str, str], rounds: int, root: int) -> Found | None:
    """On each rank, each on a host of its own."""
    with met(world, hosts) as world:
        return steps(world, rounds, root)


def steps(world: World, rounds: int, root: int) -> Found | None:
    """On each rank, with a core to itself: all kinds of sums in turn, as rank 0 says."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    try:
        ours = Ours(job(), world)
        arenas = {id(item.parameter) for item in ours.run.holdings if item.bank is not None}
        sums = [
            Summed(one, bucket.group, "experts" if id(one) in arenas else "", one.dim() > 1)
            for bucket in ours.run.buckets.buckets
            for one in bucket.parameters
        ]
        ours.run.buckets.close()
        kinds: dict[str, Callable[[], Any]] = {
            PLAIN: lambda: OneByOne(sums),
            LATE: lambda: Buckets(sums, early=False),
            FUSED: lambda: Buckets(sums, early=True),
        }

        optimizers: dict[str, Any] = {FLAT: ours.run.optimizer, SINGLE: Single(ours.run.optimizer)}

        def step(kind: str) -> None:
            ours.run.buckets = kinds[kind]()
            ours.run.optimizer = optimizers[SINGLE if kind == PLAIN else FLAT]
            ours.step()
            ours.run.buckets.close()

        found = [gradients(ours, kind) for kind in kinds.values()]
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=0, atol=0)
        calls = {kind: partial(step, kind) for kind in kinds}
        counted = {kind: count(call) for kind, call in calls.items()}
        times = in_turn(world, calls, rounds, root)
        ours.run.buckets = kinds[FUSED]()
        ours.run.gradients(ours.samples)
        updates = {kind: partial(update, ours.run, one) for kind, one in optimizers.items()}
        counted |= {SINGLE: len(ours.run.holdings), FLAT: len(ours.run.updated)}
        updated = in_turn(world, updates, rounds, root)
        if times is None or updated is None:
            return None
        return Found(times, updated, counted)
    finally:
        os.sched_setaffinity(0, set(cores))


def gradients(ours: Ours, kind: Callable[[], Any]) -> list[torch.Tensor]:
    """Those of the next step, by sums of one kind; of two ranks they are the same to the bit."""
    ours.run.buckets = kind()
    ours.run.gradients(ours.samples)
    found = [item.grad.clone() for item in ours.run.holdings]
    for item in ours.run.holdings:
        item.parameter.grad = None
    ours.run.buckets.close()
    return found


def update(run: Run, optimizer: AdamW | Single) -> None:
    """All of a rank, block by block, by gradients that are there."""
    step = run.counters["step"] + 1
    for _, block in groupby(run.updated, key=lambda one: one.block):
        optimizer.apply(list(block), run.world.rank, step, lr=1e-4, clip=1.0)


class Single:
    """AdamW on parameters as if none lay beside others; in place of a run's."""

    def __init__(self, real: AdamW) -> None:
        self._real = real

    def apply(
        self, some: Sequence[Stretch], rank: int, step: int, *, lr: float, clip: float
    ) -> None:
        """As `AdamW.apply`."""
        del rank
        for decay in (True, False):
            items = [item for one in some if one.decays == decay for item in one.items]
            self._real.update(
                [item.local for item in items], [item.grad for item in items],
                [self._real.moments[item.name] for item in items],
                step, lr=lr, clip=clip, decay=decay,
            )  # fmt: skip


class OneByOne:
    """A sum a parameter, when backward is over; in place of a run's buckets."""

    def __init__(self, sums: list[Summed]) -> None:
        self._sums = sums

    def expect(self) -> None:
        """Nothing leaves before the end."""

    def close(self) -> None:
        """Nothing is held."""

    def finish(self) -> None:
        """All of them, one after another."""
        for parameter, group, *_ in self._sums:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)


def count(step: Callable[[], None]) -> int:
    """Sums of gradients that a step asks torch for: of more than single numbers."""
    asked, real = [0], dist.all_reduce

    def counting(tensor: torch.Tensor, *args: Any, **more: Any) -> Any:
        asked[0] += tensor.dtype == torch.float32
        return real(tensor, *args, **more)

    with mock.patch.object(dist, "all_reduce", counting):
        step()
    return asked[0]


def job() -> Job:
    """Eight layers of four experts, all of them on either rank: nothing but sums travels."""
    sizes = {**olmoe(1, 8).model.model_dump(exclude_none=True), "layers": 8}
    return olmoe(8, 128, model={**sizes, "experts": 4, "top_k": 2})


def implied() -> int:
    """Messages of the job's buckets."""
    one = job()
    share = Share.of(one, lay_out(one.layout, one.model, RANKS), 0)
    return sum(len(sums.buckets) for sums in sums_of(share))
