"""Balancer of one layer: the policy that a job names, with the layer's costs and its previous
loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from math import comb
from typing import NamedTuple

import numpy as np

from moesaic.base.decisions import Decision, decide
from moesaic.facts.balance import (
    BalanceDecision,
    BalanceFacts,
    BalanceProblem,
    BoolArray,
    IntArray,
    no_replicas,
)
from moesaic.facts.job import BalanceConfig, BalanceCosts, Job
from moesaic.facts.plan import Plan
from moesaic.facts.workload import COMPUTED_BYTES, STORED_BYTES
from moesaic.policy.balance.cost_model import drop_if_slower, use_local_replicas
from moesaic.policy.balance.eplb import assign_evenly, eplb
from moesaic.policy.balance.faster_moe import faster_moe
from moesaic.policy.balance.pro_prophet import pro_prophet
from moesaic.policy.balance.quota import assign_to_replicas, quota

_EXPERTS_PER_REPLICA_SLOT = 4
"""Experts per rank for each replica slot of quota, if `balance.max_replicas` is unset."""

Policy = Callable[[IntArray, BalanceProblem], BalanceDecision]
"""Decides from routed tokens [ranks, experts] and their costs."""

TokenAssigner = Callable[[IntArray, BalanceProblem, IntArray], BalanceDecision]
"""Assigns routed tokens to owners and to given replicas (expert, rank), sorted."""

LayerDecision = Decision[BalanceFacts, BalanceDecision]


class Method(NamedTuple):
    """Implementation of a policy."""

    policy: Policy
    assign_tokens: TokenAssigner = assign_to_replicas
    """Assignment of current tokens to replicas that were placed by previous loads."""
    compiles: bool = False
    """True if numba compiles the policy, or an `assign_tokens` other than quota's."""


class LayerBalancer:
    """Policy of one layer, with its state between micro-batches."""

    def __init__(
        self,
        config: BalanceConfig,
        problem: BalanceProblem,
        *,
        follows_expert_layer: bool = False,
        method: Method | None = None,
    ) -> None:
        """Use `method`, or the one that `config` names.

        Args:
            config: the policy and its settings.
            problem: costs of the layer.
            follows_expert_layer: whether replicas may be sent while another expert layer computes.
            method: implementation of the policy; None to choose it by `config`.
        """
        self._method = method or _policy_of(config)
        self.problem, self._config = problem, config
        self.prefetches, self._follows_expert_layer = config.uses_past_loads, follows_expert_layer
        self._checks_gain = not config.as_published
        # These policies check current loads themselves, but prefetched replicas take other tokens.
        if config.has_cost_check:
            self._checks_gain = self.prefetches and config.policy != "none"
        self._decisions = list[LayerDecision]()
        self._last_counts: IntArray | None = None
        self._placed_counts: IntArray | None = None
        """Loads that placed the prefetched replicas."""
        self._placed, self._age = no_replicas(), 0

    def prefetched_replicas(self) -> BalanceDecision:
        """Return the replicas to send before this forward's tokens are counted."""
        self.place_next_replicas()
        return self._placed

    def place_next_replicas(self) -> None:
        """Place replicas by the previous loads, if these are known and a new placement is due."""
        last = self._last_counts
        if last is not None and self._is_due(last):
            facts = BalanceFacts(self.problem, last, is_ahead=True)
            replicas = self._decide(self._place, facts).replicas
            prefetched = (
                prefetch_mask(replicas, self.problem) if self._follows_expert_layer else None
            )
            self._placed = no_replicas()._replace(replicas=replicas, prefetched=prefetched)
            self._placed_counts, self._age = last, 0

    def _is_due(self, last: IntArray) -> bool:
        """Return whether replicas must be placed anew, given the `last` loads."""
        if self._placed_counts is None or self._age >= self._config.replan_every:
            return True
        max_drift = self._config.replan_drift
        return max_drift is not None and load_drift(self._placed_counts, last) > max_drift

    def __call__(self, counts: IntArray) -> BalanceDecision:
        """Return the decision for routed tokens `counts`, [ranks, experts]."""
        if not self.prefetches:
            return self._decide(self._place, BalanceFacts(self.problem, counts))
        placed = self.prefetched_replicas()
        self._last_counts = counts
        self._age += 1
        facts = BalanceFacts(self.problem, counts, placed.replicas)
        return self._decide(self._assign, facts)._replace(prefetched=placed.prefetched)

    def _decide(
        self, policy: Callable[[BalanceFacts], BalanceDecision], facts: BalanceFacts
    ) -> BalanceDecision:
        return decide(policy, facts, self._decisions)

    def _place(self, facts: BalanceFacts) -> BalanceDecision:
        """Return the policy's decision, or no replicas if they cost more than they save, unless
        checks are off.

        Prefetched replicas are rated with the tokens that they would be assigned.
        """
        problem, counts = facts.problem, facts.counts
        balance = self._method.policy(counts, problem)
        if not self._checks_gain:
            return balance
        if self.prefetches:
            balance = self._method.assign_tokens(counts, problem, balance.replicas)
        return drop_if_slower(counts, problem, balance)

    def _assign(self, facts: BalanceFacts) -> BalanceDecision:
        assert facts.replicas is not None
        return self._method.assign_tokens(facts.counts, facts.problem, facts.replicas)

    def take_decisions(self) -> list[LayerDecision]:
        """Return the decisions since the last call."""
        taken, self._decisions = self._decisions, []
        return taken

    def set_owners(self, owners: IntArray) -> None:
        """Set new owner ranks and place anew: a replica may now be on its expert's owner rank."""
        self.problem = self.problem._replace(owners=owners)
        self._placed, self._placed_counts = no_replicas(), None

    def warm_up(self, log: Callable[[str], None] | None = None) -> None:
        """Compile the policy, if it uses numba; `log` receives a line before a compilation that is
        not in the cache."""
        policy, assign_tokens, compiles = self._method
        if not (compiles or (self.prefetches and assign_tokens is assign_to_replicas)):
            return  # Importing numba is slow.
        from moesaic.base.compiled import notify_on_compile

        counts = np.zeros((self.problem.num_ranks, len(self.problem.owners)), np.int64)
        counts[:, 0] = 1 << 20
        replica = np.array([[0, (self.problem.owners[0] + 1) % self.problem.num_ranks]])
        with notify_on_compile(lambda is_cached: log and log(_compile_notice(is_cached))):
            assign_tokens(counts, self.problem, replica)
            policy(counts, self.problem)


def _compile_notice(is_cached: bool) -> str:
    if is_cached:
        return "compiling the balance policy, once for this installation (about 10 s)"
    return (
        "compiling the balance policy (about 10 s) at each start, because no cache directory is "
        "writable; set NUMBA_CACHE_DIR to a directory that is"
    )


def _policy_of(config: BalanceConfig) -> Method:
    methods = {
        "none": Method(lambda counts, problem: no_replicas()),
        "quota": Method(quota, compiles=True),
        "pro-prophet": Method(
            pro_prophet, lambda counts, _, replicas: use_local_replicas(counts, replicas)
        ),
        "eplb": Method(
            partial(
                eplb, replicas_per_rank=1 if config.max_replicas is None else config.max_replicas
            ),
            assign_evenly,
        ),
        "faster-moe": Method(faster_moe),
    }
    return methods[config.policy]


def prefetch_mask(replicas: IntArray, problem: BalanceProblem) -> BoolArray:
    """Return the mask of `replicas` (expert, rank) to send during experts of the previous layer.

    In their order, replicas that a rank can send or receive during the dense layers between two
    expert layers stay out of it.
    """
    mask = np.zeros(len(replicas), bool)
    each_s = problem.expert_bytes / problem.bytes_per_s + problem.latency_s
    if not problem.overlaps or not each_s:
        return mask
    num_fitting = min(problem.dense_compute_s / each_s, len(replicas))
    sent, received = Counter[int](), Counter[int]()
    for place, (expert, rank) in enumerate(replicas.tolist()):
        owner = int(problem.owners[expert])
        mask[place] = max(sent[owner], received[rank]) + 1 > num_fitting
        sent[owner] += not mask[place]
        received[rank] += not mask[place]
    return mask


def load_drift(before: IntArray, now: IntArray) -> float:
    """Return the fraction of tokens that went over to other experts.

    This is half the sum of the differences of the experts' shares. If each expert's tokens are
    split as before, no rank's share grows by more.
    """
    one, other = (counts.sum(axis=0) / max(int(counts.sum()), 1) for counts in (before, now))
    return float(np.abs(one - other).sum() / 2)


def expert_owners(plan: Plan, layer: int) -> IntArray:
    """Return the owner rank of each expert of a layer, [experts]."""
    return np.argsort(plan.slot_experts(layer)) // (plan.experts // plan.ep)


def layer_problem(
    job: Job, plan: Plan, config: BalanceConfig, costs: BalanceCosts, layer: int
) -> BalanceProblem:
    """Return the costs of a layer's tokens and replicas."""
    num_elements = 3 * job.model.hidden * job.model.ffn // plan.etp
    precision, finetune = job.train.precision, job.finetune
    recompute = plan.recomputes(job)
    trains_experts, max_replicas = (
        finetune is None or finetune.method == "full",
        config.max_replicas,
    )
    if max_replicas is None and config.has_cost_check:
        max_replicas = max(plan.experts // plan.ep // _EXPERTS_PER_REPLICA_SLOT, 1)
    return BalanceProblem(
        owners=expert_owners(plan, layer),
        num_ranks=plan.ep,
        expert_tokens_per_s=costs.expert_tokens_per_s,
        token_bytes=job.model.hidden
        * COMPUTED_BYTES[precision]
        * _dedup_fraction(plan, job.model.top_k),
        bytes_per_s=costs.bytes_per_s,
        expert_bytes=num_elements * COMPUTED_BYTES[precision],
        gradient_bytes=num_elements * STORED_BYTES[precision] * trains_experts,
        latency_s=costs.latency_s,
        dense_compute_s=_dense_work_in_tokens(job, plan) / costs.expert_tokens_per_s
        if config.uses_past_loads
        else 0.0,
        weight_read_s=costs.weight_read_s,
        overlaps=costs.overlaps,
        cpu_s_per_byte=costs.cpu_s_per_byte,
        num_forwards=2 if recompute else 1,
        max_replicas=max_replicas,
        max_replicas_sent=config.max_replicas_sent,
        min_replica_tokens=config.min_replica_tokens,
    )


def _dedup_fraction(plan: Plan, top_k: int) -> float:
    """Return the fraction of routed tokens that cause traffic of their own.

    It is 1 unless the dispatch method sends a token once for all its experts on a rank or host.
    Then a routed token counts if none of the token's other experts is there, under even routing.
    """
    if plan.dispatch != "dedup":
        return 1.0
    experts_there = plan.experts // (plan.dispatch_hosts if plan.dispatch_hosts > 1 else plan.ep)
    return comb(plan.experts - experts_there, top_k - 1) / comb(plan.experts - 1, top_k - 1)


def _dense_work_in_tokens(job: Job, plan: Plan) -> float:
    """Return a rank's computing between two expert layers, in expert tokens.

    It consists of attention, whose causal scores cover half of all positions, and of shared
    experts.
    """
    model = job.model
    tokens = job.train.batch // job.train.micro_batches * job.data.sequence / plan.dp
    heads = model.heads * model.head_dim
    projections = 2 * model.hidden * (heads + model.kv_heads * model.head_dim)
    scores, shared = job.data.sequence * heads, 3 * model.hidden * model.ffn * model.shared_experts
    each = 2 * (projections + scores + shared) / plan.tp
    return tokens * each / (6 * model.hidden * model.ffn / plan.etp)
