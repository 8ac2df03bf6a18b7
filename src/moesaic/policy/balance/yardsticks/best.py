"""Policy with the fastest predicted layer of all policies, regardless of its own run time."""

from __future__ import annotations

import numpy as np

from moesaic.facts.balance import BalanceDecision, BalanceProblem, IntArray
from moesaic.policy.balance.cost_model import layer_times
from moesaic.policy.balance.eplb import eplb
from moesaic.policy.balance.faster_moe import faster_moe
from moesaic.policy.balance.pro_prophet import pro_prophet
from moesaic.policy.balance.quota import quota
from moesaic.policy.balance.yardsticks.spill import llep
from moesaic.policy.balance.yardsticks.split import lp, split_optimally


def best(counts: IntArray, problem: BalanceProblem) -> BalanceDecision:
    """Return the fastest decision that respects the replica limits; quota's always counts."""
    ours = quota(counts, problem)
    others = [policy(counts, problem) for policy in (llep, pro_prophet, faster_moe)]
    if problem.max_replicas != 0:
        others += [eplb(counts, problem), lp(counts, problem)]
    others.append(split_optimally(counts, problem, ours.replicas))
    fitting = [ours, *(balance for balance in others if _fits_limits(balance, problem))]
    return min(fitting, key=lambda balance: layer_times(counts, problem, balance).total_s)


def _fits_limits(balance: BalanceDecision, problem: BalanceProblem) -> bool:
    """Return whether the replicas that ranks send and receive respect the limits."""
    of = (problem.owners[balance.replicas[:, 0]], balance.replicas[:, 1])
    return all(
        limit is None or int(np.bincount(ranks).max(initial=0)) <= limit
        for limit, ranks in zip((problem.max_replicas_sent, problem.max_replicas), of, strict=True)
    )
