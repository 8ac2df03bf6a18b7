"""Expert balancing in a run: its policy decides per layer from the exact token counts of each
micro-batch.

Costs of replicas come from the job or the plan, else from defaults for the device. All ranks of an
EP group know the same counts and costs, so each computes the same decision by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from moesaic.base.decisions import Decision, decide
from moesaic.dist.all_to_all import BACKWARD_EXCHANGE, FORWARD_EXCHANGE
from moesaic.dist.clock import Clock
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, stage_blocks
from moesaic.kernels import device as devices
from moesaic.models.lm import LanguageModel
from moesaic.nn.experts.grouped import BACKWARD, FORWARD
from moesaic.nn.moe import MoE
from moesaic.policy import balance as policies
from moesaic.train import topology


def attach_balancers(
    model: LanguageModel,
    job: Job,
    plan: Plan,
    world: World,
    decisions: list[Decision[Any, Any]],
    log: Callable[[str], None] | None,
) -> Plan:
    """Attach a balancer to every expert layer if the job balances, and return `plan` with costs.

    Costs that neither the job nor the plan gives are decided here, and added to `decisions`. Every
    rank must call this. `log` receives a message before slow work.
    """
    costs = job.balance.costs or plan.balance_costs
    if costs is None:
        ranks = topology.gather_ranks(world)
        facts = policies.BalanceCostFacts.of_job(job, plan, ranks)
        costs = decide(policies.default_balance_costs, facts, decisions)
    for layers in (
        _consecutive_layers(model, job, plan) if policies.should_balance(job, plan) else ()
    ):
        for before, later in pairwise(layers):
            before.next_layers = (later,)
        for index, moe in enumerate(layers):
            problem = policies.layer_problem(job, plan, job.balance, costs, moe.router.layer)
            balancer = policies.LayerBalancer(job.balance, problem, follows_expert_layer=index > 0)
            balancer.warm_up(log)
            moe.clock = Clock() if devices.is_synchronous(world.device) else None
            moe.balancer = balancer
    return plan.model_copy(update={"balance_costs": costs})


def _consecutive_layers(model: LanguageModel, job: Job, plan: Plan) -> list[list[MoE]]:
    """Return expert layers grouped by uninterrupted computation; with recomputation each is
    alone."""
    local = dict(model.expert_layers())
    if any(layer.recompute for layer in model.decoder_layers()):
        return [[moe] for moe in local.values()]
    runs = stage_blocks(plan, job.model)
    return [[moe for index, moe in local.items() if f"layers.{index}" in run] for run in runs]


class LayerBalance(NamedTuple):
    """Balance of one layer in one step, in the EP group of this rank."""

    decisions: list[policies.LayerDecision]
    stats: policies.BalanceStats


def take_layer_balance(moe: MoE) -> LayerBalance:
    """Return a layer's decisions since the last call, and their statistics. They are computed after
    the step, because a pass would delay its tokens."""
    assert isinstance(moe.balancer, policies.LayerBalancer)
    groups, decisions = moe.dispatcher.groups, moe.balancer.take_decisions()
    stats = policies.balance_stats(decisions, groups.ep_size, groups.ep_rank)
    if moe.clock is not None:
        seconds = moe.clock.pop_seconds()
        stats.replica_wait_s = seconds.get(FORWARD_EXCHANGE, 0.0)
        stats.gradient_wait_s = seconds.get(BACKWARD_EXCHANGE, 0.0)
        stats.forward_s, stats.backward_s = seconds.get(FORWARD, 0.0), seconds.get(BACKWARD, 0.0)
    return LayerBalance(decisions, stats)
