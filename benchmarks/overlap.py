"""How much of the exchange the experts' computation hides, between two hosts of one rank each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.hosts import identity, layer_job
from benchmarks.on_ranks import in_turn, on_ranks, plan_of
from moesaic.dist.world import World
from moesaic.models.build import make_dispatch_ranks
from moesaic.nn.dispatch.all_to_all import DispatchGroups as Alone
from moesaic.nn.dispatch.dispatcher import Dispatcher
from moesaic.nn.experts.bank import ExpertBank
from moesaic.testing.hosts import unsupported_reason

FIRST: dict[str, Any] = {"overlap_local": True}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dedup, 1 Gbit/s, local tokens first": (1000, {"dispatch": "dedup"}, FIRST),
    "dedup, 200 Mbit/s, local tokens first, 2 chunks": (
        200, {"dispatch": "dedup"}, {**FIRST, "chunks": 2},
    ),
    "all_to_all, 1 Gbit/s, local tokens first, 2 chunks": (
        1000, {"dispatch": "all_to_all"}, {**FIRST, "chunks": 2},
    ),
}  # fmt: skip
"""Mbit/s, the dispatch method, and how the layer overlaps it: local tokens first, and in two chunks
where a message takes longer than they do."""
RANKS, FFN, TOKENS = 2, 512, 4096
BAR = ">= 0.7"


def rows(rounds: int) -> Iterator[measure.Row]:
    """Measure the cases; the claim is the worst of them."""
    details = [_row(name, rounds) for name in CASES]
    yield measure.worst(
        f"share hidden of the smaller of compute and exchange, two hosts, worst of {len(CASES)} "
        "cases", details, BAR,
    )  # fmt: skip
    yield from details


def _row(name: str, rounds: int) -> measure.Row:
    megabits, layout, overlap = CASES[name]
    title, hindrance = (
        f"share hidden of the smaller of compute and exchange, {name}",
        unsupported_reason(),
    )
    if hindrance:
        return measure.untried(title, "", hindrance)
    times = on_ranks(RANKS, timed, layout, overlap, rounds, megabits=megabits, pinned=True)
    computing, exchange, whole, cut = (
        np.asarray(times.seconds[name]) for name in ("computing", "exchange", "whole", "overlapped")
    )
    shares = (whole - cut) / np.minimum(computing, exchange)
    return measure.row(
        title, float(np.median(shares)), "ratio", bar="", interval=measure.bootstrap(shares),
        against="limit: all of it; an expert layer forward and backward, top 8 of 64, "
        f"{TOKENS} tokens a rank, {layer_job({}).model.hidden} x {FFN}", repeats=rounds,
    )  # fmt: skip


def timed(
    world: World, layout: dict[str, Any], overlap: dict[str, Any], rounds: int, root: int
) -> measure.Times | None:
    """On each rank: check that both layers agree, then time all in turn."""
    whole, cut = Layer(world, layout), Layer(world, layout | overlap)
    calls: dict[str, Callable[[], object]] = {
        "computing": Layer(world, layout, alone=True), "exchange": whole.exchange, "whole": whole,
        "overlapped": cut,
    }  # fmt: skip
    torch.testing.assert_close(cut(), whole())
    return in_turn(world, calls, rounds, root)


@dataclass
class Layer:
    """Forward and backward of a layer's experts with their exchange; `alone`: without it, on half
    of the experts, so that as many rows are computed."""

    world: World
    layout: dict[str, Any]
    alone: bool = False

    def __post_init__(self) -> None:
        job = layer_job({**self.layout, "ep": RANKS})
        plan, draw = plan_of(job, self.world), torch.Generator().manual_seed(self.world.rank)
        experts = job.model.experts // RANKS if self.alone else job.model.experts
        ranks = Alone() if self.alone else make_dispatch_ranks(plan, self.world)
        self.dispatcher = Dispatcher(
            experts, ranks, dedup=plan.dispatch == "dedup" and not self.alone,
            num_chunks=plan.chunks, overlap_local=plan.overlap_local,
        )  # fmt: skip
        self.bank = ExpertBank(range(job.model.experts // RANKS), job.model.hidden, FFN)
        with torch.no_grad():
            self.bank.arena.normal_(std=0.02, generator=torch.Generator().manual_seed(7))
        self.tokens = torch.randn(TOKENS, job.model.hidden, generator=draw, requires_grad=True)
        odds = torch.rand(TOKENS, experts, generator=draw).softmax(dim=-1)
        self.weights, self.choices = odds.topk(job.model.top_k, dim=-1)
        self.weights.requires_grad_()
        self.cotangent = torch.randn(self.tokens.shape, generator=draw)

    def __call__(self) -> Tensor:
        """Run one pass and return the tokens' gradients."""
        counted = self.dispatcher.count(self.choices, training=True)
        sent = self.dispatcher.start_dispatch(
            self.tokens, self.weights, self.dispatcher.assign_slots(counted)
        )
        with self.bank.expert_function(self.dispatcher.num_expert_calls) as compute:
            return self._back(sent.run_experts(compute))

    def exchange(self) -> Tensor:
        """Run one pass whose experts are the identity."""
        counted = self.dispatcher.count(self.choices, training=True)
        return self._back(
            self.dispatcher.start_dispatch(
                self.tokens, self.weights, self.dispatcher.assign_slots(counted)
            ).run_experts(identity)
        )

    def _back(self, out: Tensor) -> Tensor:
        out.backward(self.cotangent)
        gradient = self.tokens.grad
        assert gradient is not None
        self.tokens.grad = self.weights.grad = self.bank.arena.grad = None
        return gradient
