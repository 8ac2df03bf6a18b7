"""An expert layer of two ranks whose choices are drawn, not routed, under a balance policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.on_ranks import plan_of
from benchmarks.training import olmoe
from moesaic.dist.world import World
from moesaic.facts.balance import BalanceProblem
from moesaic.facts.job import BalanceConfig, Job, Prices
from moesaic.facts.plan import Plan
from moesaic.models.build import make_dispatch_ranks
from moesaic.models.expert_benchmark import FixedRouter
from moesaic.nn.dispatch.dispatcher import Dispatcher
from moesaic.nn.experts.bank import ExpertBank
from moesaic.nn.inputs import Inputs, Rotary
from moesaic.nn.moe import MoE
from moesaic.nn.router import Router
from moesaic.policy.balance import (
    LayerBalancer,
    MigrationCosts,
    MigrationFacts,
    RankDevice,
    default_prices,
    layer_problem,
    plan_migration,
)
from moesaic.policy.plan import dispatch
from moesaic.train import balancing

RANKS, TOKENS, HIDDEN, FFN = 2, 2048, 512, 512
EVEN, PLAIN = "even routing", "none"
MOVED = "experts migrated, no replicas"
"""Experts are placed by the load of all steps, as if it were known in advance."""
MOVES_EVERY = 10
_STEPS = 40
"""Steps with choices of their own, which a layer takes in turn."""


class Skew(NamedTuple):
    """How choices are spread over experts."""

    name: str
    top_k: int


@dataclass(frozen=True)
class Work:
    """The choices of a rank's tokens."""

    skew: Skew
    experts: int
    learnt: NDArray[np.float64] | None
    """Shares of experts in a real run."""
    apart: bool = False
    """Whether each rank is on a host of its own."""

    def choices(self, rank: int) -> list[Tensor]:
        """[tokens, choices] of each step."""
        draw = np.random.default_rng([rank, self.experts])
        return [self._chosen(self._shares(step), draw) for step in range(_STEPS)]

    def even(self) -> Tensor:
        """Return as many choices, of all experts in turn."""
        chosen = np.arange(TOKENS * self.skew.top_k).reshape(TOKENS, -1) % self.experts
        return torch.from_numpy(chosen)

    def _shares(self, step: int) -> NDArray[np.float64]:
        """Return shares of experts in a step; hot experts have no order."""
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
        """Return choices of each token, none of them twice."""
        if self.skew.name == "even":
            return self.even()
        odds = np.log(np.maximum(shares, 1e-9)) + draw.gumbel(size=(TOKENS, self.experts))
        return torch.from_numpy(np.argsort(-odds, axis=1)[:, : self.skew.top_k].copy())


class Layer:
    """One contender's layer."""

    def __init__(self, moe: MoE, tokens: Tensor, cotangent: Tensor) -> None:
        self.moe, self._tokens, self._cotangent = moe, tokens, cotangent
        self._calls = self._copies = 0
        self._left = list[float]()

    def __call__(self) -> Tensor:
        """Run one pass and return the tokens' gradients."""
        inputs = Inputs(Rotary(torch.empty(0), torch.empty(0)), training=True)
        self.moe(self._tokens, inputs)[0].backward(self._cotangent)
        gradient = self._tokens.grad
        assert gradient is not None
        self._tokens.grad = self.moe.bank.arena.grad = None
        if isinstance(self.moe.balancer, LayerBalancer):
            told = balancing.take_layer_balance(self.moe).stats
            self._calls += 1
            self._copies += told.replicas
            self._left.append(told.imbalance_after)
        return gradient

    def words(self) -> str:
        """Return what the policy did."""
        if not self._left:
            return "no replicas"
        each = self._copies / max(self._calls, 1)
        return f"{each:.3g} replicas a step, then {np.mean(self._left):.2f} times the mean at most"


def moe_of(world: World, work: Work, name: str) -> tuple[MoE, Job, Plan]:
    """Return a contender's layer, without a policy, its job and its plan."""
    sizes = {"hidden": HIDDEN, "layers": 1, "ffn": FFN, "experts": work.experts}
    model = {**olmoe(1, 8).model.model_dump(exclude_none=True), **sizes, "top_k": work.skew.top_k}
    job = olmoe(RANKS, TOKENS, model=model, layout={"ep": RANKS})
    plan = plan_of(job, world)
    if work.apart:  # The default dispatch method between hosts.
        hosts = [str(rank) for rank in range(RANKS)]
        facts = dispatch.DispatchFacts(plan.ep_groups(), hosts, work.skew.top_k)
        plan = plan.model_copy(update=dispatch.default_dispatch(facts)._asdict())
    ranks = make_dispatch_ranks(plan, world, replicas=True)
    draw, own = torch.Generator().manual_seed(world.rank), torch.Generator().manual_seed(9)
    if name == MOVED:
        plan = plan.with_expert_placement({0: _moved(work, plan)})
    weights = torch.rand(TOKENS, work.skew.top_k, generator=draw)
    choices = [work.even()] if name == EVEN else work.choices(world.rank)
    moe = MoE(
        Router(0, HIDDEN, work.experts, work.skew.top_k),
        ExpertBank(plan.experts_at(ranks.rank, 0), HIDDEN, FFN),
        Dispatcher(
            work.experts, ranks, slot_experts=plan.slot_experts(0), dedup=plan.dispatch == "dedup"
        ),
    )
    router = FixedRouter(choices, weights, work.experts, whole=False)
    moe.router = router  # type: ignore[assignment]
    with torch.no_grad():
        every = torch.randn(work.experts, moe.bank.arena.shape[1], generator=own)
        moe.bank.arena.copy_(every[list(plan.experts_at(ranks.rank, 0))] * 0.02)
    return moe, job, plan


def _moved(work: Work, plan: Plan) -> tuple[int, ...]:
    """Return where experts are placed when moving costs nothing."""
    every = torch.cat([torch.cat(work.choices(rank)).flatten() for rank in range(RANKS)])
    totals = torch.bincount(every, minlength=work.experts).numpy()
    costs = MigrationCosts(1.0, 0.0, 0.0)
    return plan_migration(MigrationFacts(totals, plan.slot_experts(0), RANKS, costs)).slots


def layer_of(world: World, work: Work, name: str, prices: Prices) -> Layer:
    """Return a contender's layer with its policy."""
    moe, job, plan = moe_of(world, work, name)
    draw = torch.Generator().manual_seed(world.rank)
    tokens = torch.randn(TOKENS, HIDDEN, generator=draw, requires_grad=True)
    cotangent = torch.randn(TOKENS, HIDDEN, generator=draw)
    if name not in (EVEN, PLAIN, MOVED):
        config = BalanceConfig.model_validate({"policy": name, "as_published": True})
        policy = LayerBalancer(config, _problem(job, plan, config, prices))
        policy.warm_up()
        moe.balancer = policy
    return Layer(moe, tokens, cotangent)


def _problem(job: Job, plan: Plan, config: BalanceConfig, prices: Prices) -> BalanceProblem:
    """Return what the policy knows; there is no work beside this layer."""
    return layer_problem(job, plan, config, prices, 0)._replace(dense_compute_s=0.0)


def prices_of(world: World, work: Work) -> Prices:
    """Return the default prices of one host, or of a host for each rank."""
    _, job, plan = moe_of(world, work, PLAIN)
    hosts = [str(rank) if work.apart else "here" for rank in range(RANKS)]
    return default_prices(job, plan, [RankDevice(host, "cpu", 1) for host in hosts])
