"""Time what several ranks do together, on one host or on two hosts joined by a link."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import measure
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, plan_from_layout
from moesaic.testing.hosts import join_across_hosts, two_hosts
from moesaic.testing.ranks import RankPool

PATIENCE_S = 3600.0


class Unlike(Exception):
    """Two contenders do not compute the same, so their times cannot be compared."""


def on_ranks(
    ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    megabits: int = 0,
    pinned: bool = False,
) -> Any:
    """Return what rank 0 returns of `function(world, *arguments, root)`, called on every rank.

    Args:
        ranks: number of ranks.
        function: what each runs; `root` is this process.
        arguments: its other arguments.
        megabits: Mbit/s of the link between two hosts; 0: all ranks are on this host.
        pinned: whether each rank has one core to itself.
    """
    with two_hosts(megabits) if megabits else nullcontext() as hosts:
        pool = RankPool()
        try:
            found = pool.run(
                ranks, _call, function, arguments, os.getpid(), hosts, pinned, timeout_s=PATIENCE_S
            )
        finally:
            pool.close()
    return found[0]


def _call(
    world: World,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    root: int,
    hosts: tuple[str, str] | None,
    pinned: bool,
) -> Any:
    cores = sorted(os.sched_getaffinity(0))
    if pinned:
        os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    try:
        if hosts is None:
            return function(world, *arguments, root)
        with join_across_hosts(world, hosts) as joined:
            return function(joined, *arguments, root)
    finally:
        os.sched_setaffinity(0, set(cores))


def in_turn(
    world: World,
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    root: int,
    *,
    warmup: int = 2,
    patience_s: float = 1200.0,
) -> measure.Times | None:
    """Time calls that all ranks make together; return the times on rank 0.

    Args:
        world: the ranks.
        calls: what to time, by name.
        rounds: see `measure.interleave`, as for `root`, `warmup` and `patience_s`.
        root: the process whose descendants are not foreign.
        warmup: calls of each before the first round.
        patience_s: disturbed rounds are repeated for so long.
    """
    names, word = list(calls), torch.zeros(1, dtype=torch.int64)

    def together(number: int) -> None:
        word.fill_(number)
        dist.broadcast(word, 0, group=world.group)
        if number >= 0:
            calls[names[number]]()
            world.barrier()

    if world.is_rank_zero:
        contenders = {name: partial(together, number) for number, name in enumerate(names)}
        times = measure.interleave(
            contenders, rounds, warmup=warmup, patience_s=patience_s, root=root
        )
        together(-1)
        return times
    while True:
        dist.broadcast(word, 0, group=world.group)
        if word.item() < 0:
            return None
        calls[names[int(word)]]()
        world.barrier()


def alone(world: World, name: str, work: Callable[[], object]) -> None:
    """Call `work` on rank 0 while all other ranks sleep; `name` is used once in a world."""
    if world.is_rank_zero:
        work()
        world.store.set(name, "")
    world.wait_for_keys(world.store, [name])  # Waiting in gloo would use a core.


def plan_of(job: Job, world: World) -> Plan:
    """Lay the job out over the ranks of `world`."""
    return plan_from_layout(job.layout, job.model, world.size)
