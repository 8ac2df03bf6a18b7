"""Communication while the ranks compute: the exchange of an expert layer, and gradients.

An expert layer overlaps its exchange between two hosts of one rank each. Gradients leave in buckets
during backward, against one all-reduce a parameter after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import measure
from benchmarks.hosts import identity, layer_job
from benchmarks.on_ranks import in_turn, on_ranks, plan_of
from benchmarks.training import Ours, olmoe
from moesaic.dist.buckets import GradientBuckets, ReducedParameter
from moesaic.dist.world import World
from moesaic.facts.job import Job
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
LINKS = {"one host": 0, "two hosts, 1 Gbit/s": 1000, "two hosts, 200 Mbit/s": 200}
"""Mbit/s of the link over which gradients travel; 0: none."""
RANKS, FFN, TOKENS = 2, 512, 4096
HIDDEN_BAR, GRADIENTS_BAR = ">= 0.7", ">= 1.0"
SINGLE, BUCKETS = "one all-reduce a parameter", "buckets"


def rows(rounds: int) -> Iterator[measure.Row]:
    """Measure the cases; the claim is the worst of them."""
    title = "share hidden of the smaller of compute and exchange"
    details = [_hidden(f"{title}, {name}", rounds, *case) for name, case in CASES.items()]
    yield from measure.claim(
        f"{title}, two hosts, worst of {len(CASES)} cases", HIDDEN_BAR, details
    )


def _hidden(
    title: str, rounds: int, megabits: int, layout: dict[str, Any], overlap: dict[str, Any]
) -> measure.Row:
    hindrance = unsupported_reason()
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


def gradient_rows(rounds: int) -> Iterator[measure.Row]:
    """Measure every link; the claim is the worst of them."""
    title, words = "training step, two ranks", "gradients in buckets during backward"
    details = [
        _buckets(f"{title}, {name}, {words}", rounds, megabits) for name, megabits in LINKS.items()
    ]
    yield from measure.claim(
        f"{title}, {words}, worst of {len(LINKS)} links", GRADIENTS_BAR, details
    )


def _buckets(title: str, rounds: int, megabits: int) -> measure.Row:
    hindrance = unsupported_reason()
    if megabits and hindrance:
        return measure.untried(title, "", hindrance)
    times = on_ranks(RANKS, timed_steps, rounds, megabits=megabits, pinned=True)
    return measure.compare(
        title, times, SINGLE, BUCKETS,
        against=f"moesaic, {SINGLE} after backward; OLMoE-shaped, 8 layers of 4 experts, "
        "8 x 128 tokens, a core a rank",
    )  # fmt: skip


def timed_steps(world: World, rounds: int, root: int) -> measure.Times | None:
    """On each rank: check that both sum the same gradients, then time steps in turn."""
    ours = Ours(gradient_job(), world)
    arenas = {id(item.parameter) for item in ours.run.part.trainable if item.bank is not None}
    sums = [
        ReducedParameter(one, bucket.group, "experts" if id(one) in arenas else "", one.dim() > 1)
        for bucket in ours.run.part.buckets.buckets
        for one in bucket.parameters
    ]
    ours.run.part.buckets.close()
    kinds: dict[str, Callable[[], Any]] = {
        SINGLE: lambda: OneByOne(sums),
        BUCKETS: lambda: GradientBuckets(sums, overlaps_backward=True),
    }  # fmt: skip

    def step(kind: str) -> None:
        ours.run.part.buckets = kinds[kind]()
        ours.step()
        ours.run.part.buckets.close()

    found = [gradients(ours, kind) for kind in kinds.values()]
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    return in_turn(world, {kind: partial(step, kind) for kind in kinds}, rounds, root)


def gradients(ours: Ours, kind: Callable[[], Any]) -> list[torch.Tensor]:
    """Return those of the next step; two ranks sum them to the same bits."""
    ours.run.part.buckets = kind()
    ours.run.compute_gradients(ours.samples)
    found = [item.grad.clone() for item in ours.run.part.trainable]
    for item in ours.run.part.trainable:
        item.parameter.grad = None
    ours.run.part.buckets.close()
    return found


class OneByOne:
    """One all-reduce a parameter after backward, in place of a run's buckets."""

    def __init__(self, sums: list[ReducedParameter]) -> None:
        self._sums = sums

    def expect_last_backward(self) -> None:
        """Do nothing: no gradient leaves before the end."""

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def finish(self) -> None:
        """Reduce all, one after another."""
        for parameter, group, *_ in self._sums:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)


def gradient_job() -> Job:
    """Return eight layers of four experts, all of them on either rank: only gradients travel."""
    sizes = {**olmoe(1, 8).model.model_dump(exclude_none=True), "layers": 8}
    return olmoe(8, 128, model={**sizes, "experts": 4, "top_k": 2})
