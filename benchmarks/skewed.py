"""An expert layer of two ranks whose choices are drawn, not routed, under a balance policy."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks import measure
from benchmarks.experts import FixedRouter
from benchmarks.on_ranks import plan_of
from benchmarks.training import olmoe
from moesaic.dist.world import World
from moesaic.facts.balance import BalanceProblem
from moesaic.facts.job import BalanceConfig, BalanceCosts, Job
from moesaic.facts.plan import Plan
from moesaic.models.build import make_dispatch_ranks
from moesaic.nn.dispatch.dispatcher import Dispatcher
from moesaic.nn.experts.bank import ExpertBank
from moesaic.nn.inputs import Inputs, Rotary
from moesaic.nn.moe import MoE
from moesaic.nn.router import Router
from moesaic.policy.balance import (
    BalanceCostFacts,
    LayerBalancer,
    RankDevice,
    default_balance_costs,
    layer_problem,
)
from moesaic.policy.plan import dispatch
from moesaic.train import balancing

RANKS, TOKENS, HIDDEN, FFN = 2, 2048, 512, 512
EVEN, PLAIN = "even routing", "none"
MOVES_EVERY = 10
_TRAINED = 150
"""Steps of the run that learns shares of experts."""
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


def learnt_shares(experts: int, top_k: int) -> NDArray[np.float64]:
    """Train the demo's model without a balance loss; return shares of experts in its last step.

    They are those of the layer with the hottest expert.
    """
    demo = measure.ROOT / "examples" / "demo"
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([sys.executable, demo / "make_text.py", place], check=True)
        changed = {
            "data.path": f"{place}/topics.jsonl", "layout.ep": 1, "routing.balance_loss": 0.0,
            "model.experts": experts, "model.top_k": top_k, "train.steps": _TRAINED,
            "data.cache": f"{place}/cache",
        }  # fmt: skip
        sets = [f"--set={key}={json.dumps(value)}" for key, value in changed.items()]
        command = [sys.executable, "-m", "moesaic", "train", demo / "demo.toml", *sets]
        subprocess.run([*command, "--out", f"{place}/run"], check=True, capture_output=True)
        table = pq.read_table(Path(place) / "run" / "loads").to_pylist()
    table.sort(key=lambda one: (one["step"], one["layer"]))
    counts = np.array([one["counts"] for one in table], np.float64).reshape(_TRAINED, -1, experts)
    shares: NDArray[np.float64] = counts[-1] / counts[-1].sum(axis=-1, keepdims=True)
    hottest: NDArray[np.float64] = shares[shares.max(axis=-1).argmax()]
    return hottest


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
        facts = dispatch.DispatchFacts(list(plan.ep_groups()), hosts, work.skew.top_k)
        plan = plan.model_copy(update=dispatch.default_dispatch(facts)._asdict())
    ranks = make_dispatch_ranks(plan, world, replicas=True)
    draw, own = torch.Generator().manual_seed(world.rank), torch.Generator().manual_seed(9)
    weights = torch.rand(TOKENS, work.skew.top_k, generator=draw)
    choices = [work.even()] if name == EVEN else work.choices(world.rank)
    moe = MoE(
        Router(0, HIDDEN, work.experts, work.skew.top_k),
        ExpertBank(plan.experts_at(ranks.ep_rank, 0), HIDDEN, FFN),
        Dispatcher(
            work.experts, ranks, slot_experts=plan.slot_experts(0), dedup=plan.dispatch == "dedup"
        ),
    )
    router = FixedRouter(choices, weights, work.experts, whole=False)
    moe.router = router  # type: ignore[assignment]
    with torch.no_grad():
        every = torch.randn(work.experts, moe.bank.arena.shape[1], generator=own)
        moe.bank.arena.copy_(every[list(plan.experts_at(ranks.ep_rank, 0))] * 0.02)
    return moe, job, plan


def layer_of(world: World, work: Work, name: str, costs: BalanceCosts) -> Layer:
    """Return a contender's layer with its policy."""
    moe, job, plan = moe_of(world, work, name)
    draw = torch.Generator().manual_seed(world.rank)
    tokens = torch.randn(TOKENS, HIDDEN, generator=draw, requires_grad=True)
    cotangent = torch.randn(TOKENS, HIDDEN, generator=draw)
    if name not in (EVEN, PLAIN):
        config = BalanceConfig.model_validate({"policy": name, "as_published": True})
        policy = LayerBalancer(config, _problem(job, plan, config, costs))
        policy.warm_up()
        moe.balancer = policy
    return Layer(moe, tokens, cotangent)


def _problem(job: Job, plan: Plan, config: BalanceConfig, costs: BalanceCosts) -> BalanceProblem:
    """Return what the policy knows; there is no work beside this layer."""
    return layer_problem(job, plan, config, costs, 0)._replace(dense_compute_s=0.0)


def costs_of(world: World, work: Work) -> BalanceCosts:
    """Return the default costs of one host, or of a host for each rank."""
    _, job, plan = moe_of(world, work, PLAIN)
    hosts = [str(rank) if work.apart else "here" for rank in range(RANKS)]
    ranks = [RankDevice(host, "cpu", 1) for host in hosts]
    return default_balance_costs(BalanceCostFacts.of_job(job, plan, ranks))
