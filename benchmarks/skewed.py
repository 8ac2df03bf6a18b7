"""An expert layer of two ranks whose choices are drawn, not routed, under a policy of balance."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.layer import PATIENCE_S, plan_of
from benchmarks.training import olmoe
from moesaic.dist.shared import MEMORY
from moesaic.dist.world import World
from moesaic.facts.balance import Setting
from moesaic.facts.job import BalanceConfig, Job, Prices
from moesaic.facts.job.balance import YardstickConfig
from moesaic.facts.plan import Plan
from moesaic.nn.bank import Bank
from moesaic.nn.context import Context, Rotary
from moesaic.nn.dispatch import Dispatcher
from moesaic.nn.moe import MoE
from moesaic.nn.router import Router, Routing
from moesaic.nn.routes import Routes
from moesaic.policy import dispatch
from moesaic.policy.balance import Moving, Rank, quota, rehomed, setting_of, usual
from moesaic.policy.balance.yardsticks import asked
from moesaic.testing.hosts import two_hosts
from moesaic.testing.ranks import Ranks
from moesaic.train import balancing
from moesaic.train.assemble import ranks_of

RANKS, TOKENS, HIDDEN, FFN = 2, 2048, 512, 512
EVEN, PLAIN = "even routing", "none"
ALONE = "computing alone"
"""Of the rows that `quota` has each rank compute: without messages, copies or decisions."""
MOVED = "experts moved for good"
"""By all choices of all ranks, as if those of the steps before were those to come."""
MOVES_EVERY = 10
_STEPS = 40
"""Of choices, which a layer takes in turn."""


def on_ranks(function: Callable[..., Any], *arguments: Any, megabits: int = 0) -> Any:
    """What the first of two ranks returns of `function(world, *arguments, this process, hosts)`; on
    two hosts that a link of so many Mbit/s joins, or, without one, on this one (None)."""
    with two_hosts(megabits) if megabits else nullcontext() as hosts:
        pool = Ranks()
        try:
            return pool.run(RANKS, function, *arguments, os.getpid(), hosts, timeout_s=PATIENCE_S)[
                0
            ]
        finally:
            pool.close()


class Skew(NamedTuple):
    """How choices are spread."""

    name: str
    top_k: int
    bar: str = ""
    """For ours over none."""


@dataclass(frozen=True)
class Work:
    """What a rank is given to choose."""

    skew: Skew
    experts: int
    learnt: NDArray[np.float64] | None
    """Shares of experts in a real run."""
    apart: bool = False
    """Whether ranks are on hosts of their own."""

    def choices(self, rank: int) -> list[Tensor]:
        """[tokens, choices] of each step."""
        draw = np.random.default_rng([rank, self.experts])
        return [self._chosen(self._shares(step), draw) for step in range(_STEPS)]

    def even(self) -> Tensor:
        """As many choices, of all experts in turn."""
        chosen = np.arange(TOKENS * self.skew.top_k).reshape(TOKENS, -1) % self.experts
        return torch.from_numpy(chosen)

    def _shares(self, step: int) -> NDArray[np.float64]:
        """Of experts, in a step; which of them is hot is not in their order."""
        order = np.random.default_rng(1).permutation(self.experts)
        flat = np.full(self.experts, 1.0 / self.experts)
        if self.skew.name.startswith("Zipf"):
            shares = 1.0 / np.arange(1, self.experts + 1) ** 1.2
            return (shares / shares.sum())[order]
        if self.skew.name.startswith("one expert"):
            return np.where(order == 0, 0.8, 0.2 / (self.experts - 1))
        if self.skew.name.startswith("a hot"):
            hot = step // MOVES_EVERY % self.experts
            return np.where(order == hot, 0.4, 0.6 / (self.experts - 1))
        if self.skew.name.startswith("a run"):
            assert self.learnt is not None
            return self.learnt
        return flat

    def _chosen(self, shares: NDArray[np.float64], draw: np.random.Generator) -> Tensor:
        """Choices of each token, none of them twice."""
        if self.skew.name == "even":
            return self.even()
        odds = np.log(np.maximum(shares, 1e-9)) + draw.gumbel(size=(TOKENS, self.experts))
        return torch.from_numpy(np.argsort(-odds, axis=1)[:, : self.skew.top_k].copy())


class Chosen(torch.nn.Module):
    """A router that has been told what to choose."""

    layer, kind = 0, "top-k"

    def __init__(self, weights: Tensor, choices: list[Tensor], experts: int) -> None:
        super().__init__()
        self._weights, self._choices, self._step = weights, choices, 0
        self._scores = torch.zeros(TOKENS, experts)

    def forward(self, tokens: Tensor, context: Context) -> Routing:
        """The choices of the next step."""
        del tokens, context
        chosen = self._choices[self._step % len(self._choices)]
        self._step += 1
        return Routing(chosen, self._weights, self._scores, self._scores, 0)


class Layer:
    """One contender's."""

    def __init__(self, moe: MoE, tokens: Tensor, cotangent: Tensor) -> None:
        self.moe, self._tokens, self._cotangent = moe, tokens, cotangent
        self._calls = self._copies = 0
        self._left = list[float]()

    def __call__(self) -> Tensor:
        """One pass; what the tokens' gradients are."""
        context = Context(Rotary(torch.empty(0), torch.empty(0)))
        context.training = True
        self.moe(self._tokens, context).backward(self._cotangent)
        gradient = self._tokens.grad
        assert gradient is not None
        self._tokens.grad = self.moe.bank.arena.grad = None
        if isinstance(self.moe.balancer, balancing.Balancer):
            told = self.moe.balancer.told()
            self._calls += 1
            self._copies += told.copies
            self._left.append(told.after)
        return gradient

    def words(self) -> str:
        """What became of its rows."""
        if not self._left:
            return "nobody has copies"
        each = self._copies / max(self._calls, 1)
        return f"{each:.3g} copies a step, then {np.mean(self._left):.2f} times the mean at most"


class Computing:
    """What experts of a rank compute in each step, and nothing else."""

    def __init__(self, counts: list[NDArray[np.int64]]) -> None:
        """Rows of each slot, step by step; a guest's slots are the last ones."""
        slots, rows = max(map(len, counts)), max(int(one.sum()) for one in counts)
        self._bank, self._step = Bank(range(slots), HIDDEN, FFN), 0
        torch.nn.init.normal_(self._bank.arena, std=0.02)
        self._tokens, self._cotangent = torch.randn(2, rows, HIDDEN)
        padded = (torch.from_numpy(np.pad(one, (0, slots - len(one)))) for one in counts)
        self._routes = [Routes(one, torch.randperm(int(one.sum()))) for one in padded]

    def __call__(self) -> None:
        """The next step's, forward and backward."""
        routes = self._routes[self._step % len(self._routes)]
        self._step += 1
        rows = len(routes.order_R)
        tokens = self._tokens[:rows].requires_grad_()
        with self._bank.at_work() as compute:
            out = compute(tokens, routes, None)
        torch.autograd.grad(out, (tokens, self._bank.arena), self._cotangent[:rows])


def alone(work: Work, rank: int, setting: Setting) -> Computing:
    """Rank's part of what `quota` makes of each step."""
    chosen = zip(*(work.choices(one) for one in range(RANKS)), strict=True)
    return Computing([_computed(both, rank, setting) for both in chosen])


def _computed(chosen: Sequence[Tensor], rank: int, setting: Setting) -> NDArray[np.int64]:
    """Rows of a rank's slots in a step, its own experts first."""
    experts = len(setting.homes)
    counts = np.stack([np.bincount(one.flatten().numpy(), minlength=experts) for one in chosen])
    balance = quota(counts, setting)
    rows = np.zeros((experts, RANKS), np.int64)
    rows[np.arange(experts), setting.homes] = counts.sum(axis=0)
    for expert, _, target, number in balance.diverted:
        rows[expert, setting.homes[expert]] -= number
        rows[expert, target] += number
    own = np.flatnonzero(setting.homes == rank)
    guests = balance.copies[balance.copies[:, 1] == rank, 0]
    return rows[np.concatenate((own, guests)), rank]


def moe_of(world: World, work: Work, name: str) -> tuple[MoE, Job, Plan]:
    """A contender's layer, without a policy, and the job that it is of."""
    sizes = {"hidden": HIDDEN, "layers": 1, "ffn": FFN, "experts": work.experts}
    model = {**olmoe(1, 8).model.model_dump(exclude_none=True), **sizes, "top_k": work.skew.top_k}
    job = olmoe(RANKS, TOKENS, model=model, layout={"ep": RANKS})
    plan = plan_of(job, world)
    if work.apart:  # Tokens travel as they do where nobody says how.
        plan = dispatch.usual(plan, [str(rank) for rank in range(RANKS)], work.skew.top_k)
    ranks = ranks_of(plan, world, copies=True)
    draw, own = torch.Generator().manual_seed(world.rank), torch.Generator().manual_seed(9)
    if name == MOVED:
        plan = plan.with_slots({0: _moved(work, plan)})
    weights = torch.rand(TOKENS, work.skew.top_k, generator=draw)
    choices = [work.even()] if name == EVEN else work.choices(world.rank)
    moe = MoE(
        Router(0, HIDDEN, work.experts, work.skew.top_k),
        Bank(plan.homes_at(ranks.rank, 0), HIDDEN, FFN),
        Dispatcher(work.experts, ranks, slots=plan.slots(0), visits=plan.dispatch == "visits"),
    )
    moe.router = Chosen(weights, choices, work.experts)  # type: ignore[assignment]
    with torch.no_grad():
        every = torch.randn(work.experts, moe.bank.arena.shape[1], generator=own)
        moe.bank.arena.copy_(every[list(plan.homes_at(ranks.rank, 0))] * 0.02)
    return moe, job, plan


def _moved(work: Work, plan: Plan) -> tuple[int, ...]:
    """Where experts are when moving costs nothing."""
    every = torch.cat([torch.cat(work.choices(rank)).flatten() for rank in range(RANKS)])
    totals = torch.bincount(every, minlength=work.experts).numpy()
    return rehomed(totals, plan.slots(0), RANKS, Moving(1.0, 0.0, 0.0)).slots


def layer_of(world: World, work: Work, name: str, prices: Prices) -> Layer:
    """A contender's."""
    moe, job, plan = moe_of(world, work, name)
    draw = torch.Generator().manual_seed(world.rank)
    tokens = torch.randn(TOKENS, HIDDEN, generator=draw, requires_grad=True)
    cotangent = torch.randn(TOKENS, HIDDEN, generator=draw)
    if name not in (EVEN, PLAIN, MOVED):
        config = YardstickConfig.model_validate({"policy": name, "as_published": True})
        policy = asked(config, _setting(job, plan, config, prices))
        policy.prepare()
        moe.balancer = balancing.Balancer(policy)
    return Layer(moe, tokens, cotangent)


def alone_of(world: World, work: Work, prices: Prices) -> Computing:
    """What `quota` has a rank compute."""
    _, job, plan = moe_of(world, work, PLAIN)
    return alone(work, world.rank, _setting(job, plan, BalanceConfig(), prices))


def _setting(job: Job, plan: Plan, config: BalanceConfig, prices: Prices) -> Setting:
    """There is nothing but this layer."""
    return setting_of(job, plan, config, prices, 0)._replace(beside_s=0.0)


def prices_of(world: World, work: Work) -> Prices:
    """On one host as where nobody says otherwise, and over a link as they are measured."""
    moe, job, plan = moe_of(world, work, PLAIN)
    carrier = moe.dispatcher.ranks.straight
    assert carrier is not None
    if carrier.name == MEMORY:
        return usual(job, plan, [Rank("here", "cpu", 1)] * RANKS)
    return balancing.measured(moe, None, world)
