"""How much of what travels is hidden under experts, between two hosts of one rank and one core."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.layer import PATIENCE_S, in_turn, layer_job, nothing, plan_of
from moesaic.dist.world import World
from moesaic.nn.bank import Bank
from moesaic.nn.dispatch import Dispatcher
from moesaic.nn.travel import Ranks as Alone
from moesaic.testing.hosts import impossible, met, two_hosts
from moesaic.testing.ranks import Ranks
from moesaic.train.assemble import ranks_of

WAYS: dict[str, dict[str, Any]] = {
    "4 chunks": {"chunks": 4},
    "8 chunks": {"chunks": 8},
    "local first": {"local": "first"},
    "local first, 2 chunks": {"local": "first", "chunks": 2},
}
"""To compute while tokens travel."""
CASES: dict[str, tuple[int, dict[str, Any], str]] = {
    "each token once, 1 Gbit/s": (1000, {"dispatch": "visits"}, "local first"),
    "each token once, 200 Mbit/s": (200, {"dispatch": "visits"}, "local first, 2 chunks"),
    "once for each expert, 1 Gbit/s": (1000, {"dispatch": "rows"}, "local first, 2 chunks"),
}
"""Megabits a second, how tokens travel, and the way that the bar is for: what is local while a
message takes less than that does, and two chunks beside it where it takes more."""
RANKS, FFN, TOKENS = 2, 512, 4096
BAR = ">= 0.7"


def rows(rounds: int) -> Iterator[measure.Row]:
    """Every figure, as it comes."""
    hindrance = impossible()
    for name, (megabits, layout, shown) in CASES.items():
        title = f"hidden of the smaller of computing and travelling, two hosts of a rank, {name}"
        if hindrance:
            yield measure.row(
                title, None, "ratio", bar=BAR, against=f"untried: {hindrance}", repeats=0
            )
            continue
        with two_hosts(megabits) as hosts:
            pool = Ranks()
            try:
                found = pool.run(
                    RANKS, on_hosts, hosts, layout, rounds, os.getpid(), timeout_s=PATIENCE_S
                )
            finally:
                pool.close()
        times: measure.Times = found[0]
        for way in WAYS:
            shares = _hidden(times, way)
            yield measure.row(
                f"{title}, {way}", float(np.median(shares)), "ratio",
                bar=BAR if way == shown else "", interval=measure.bootstrap(shares),
                against="limit: all of it, and copies that local first spares; an expert layer "
                "forward and backward, top 8 of 64, "
                f"{TOKENS} tokens a rank, {layer_job({}).model.hidden} x {FFN}",
                repeats=rounds,
            )  # fmt: skip
        both = _hidden(times, shown, of_both=True)
        yield measure.row(
            f"{title}, {shown}, less what both in turn lose to one another", float(np.median(both)),
            "ratio", bar="", interval=measure.bootstrap(both), repeats=rounds,
            against="limit: all of it; what is saved of computing by itself and travelling by "
            "itself, one after the other",
        )  # fmt: skip


def _hidden(times: measure.Times, way: str, *, of_both: bool = False) -> Any:
    """By round, the time that a way saves over the smaller of what could be hidden; saved of the
    whole layer, or of what computing and travelling take by themselves."""
    computing, travelling, whole, cut = (
        np.asarray(times.seconds[name]) for name in ("computing", "travelling", "whole", way)
    )
    before = computing + travelling if of_both else whole
    return (before - cut) / np.minimum(computing, travelling)


def on_hosts(
    world: World, hosts: tuple[str, str], layout: dict[str, Any], rounds: int, root: int
) -> measure.Times | None:
    """On each rank, with a core to itself: all in turn, as rank 0 says."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    with met(world, hosts) as world:
        whole, cut = Layer(world, layout), {way: Layer(world, layout | WAYS[way]) for way in WAYS}
        calls: dict[str, Callable[[], object]] = {
            "computing": Layer(world, layout, alone=True), "travelling": whole.travel,
            "whole": whole, **cut,
        }  # fmt: skip
        result = whole()
        for one in cut.values():
            torch.testing.assert_close(one(), result)
        return in_turn(world, calls, rounds, root)


@dataclass
class Layer:
    """Forward and backward of a layer's experts, with all that travels; `alone`, of a rank that has
    half of the experts and sends all its tokens to them, so that it computes with as many rows."""

    world: World
    layout: dict[str, Any]
    alone: bool = False

    def __post_init__(self) -> None:
        job = layer_job({**self.layout, "ep": RANKS})
        plan, draw = plan_of(job, self.world), torch.Generator().manual_seed(self.world.rank)
        experts = job.model.experts // RANKS if self.alone else job.model.experts
        ranks = Alone() if self.alone else ranks_of(plan, self.world)
        self.dispatcher = Dispatcher(
            experts, ranks, visits=plan.dispatch == "visits" and not self.alone,
            chunks=plan.chunks, local_first=plan.local == "first",
        )  # fmt: skip
        self.bank = Bank(range(job.model.experts // RANKS), job.model.hidden, FFN)
        with torch.no_grad():
            self.bank.arena.normal_(std=0.02, generator=torch.Generator().manual_seed(7))
        self.tokens = torch.randn(TOKENS, job.model.hidden, generator=draw, requires_grad=True)
        odds = torch.rand(TOKENS, experts, generator=draw).softmax(dim=-1)
        self.weights, self.choices = odds.topk(job.model.top_k, dim=-1)
        self.weights.requires_grad_()
        self.cotangent = torch.randn(self.tokens.shape, generator=draw)

    def __call__(self) -> Tensor:
        """One pass; what the tokens' gradients are."""
        counted = self.dispatcher.count(self.choices, training=True)
        sent = self.dispatcher.start(self.tokens, self.weights, self.dispatcher.place(counted))
        with self.bank.at_work(self.dispatcher.computations) as compute:
            return self._back(sent.through(compute))

    def travel(self) -> Tensor:
        """One pass of experts that give back what they get."""
        counted = self.dispatcher.count(self.choices, training=True)
        return self._back(
            self.dispatcher.start(
                self.tokens, self.weights, self.dispatcher.place(counted)
            ).through(nothing)
        )

    def _back(self, out: Tensor) -> Tensor:
        out.backward(self.cotangent)
        gradient = self.tokens.grad
        assert gradient is not None
        self.tokens.grad = self.weights.grad = self.bank.arena.grad = None
        return gradient
