"""Reference policies for `moesaic replay` and benchmarks; training does not offer them."""

from __future__ import annotations

from functools import partial

from moesaic.facts.balance import BalanceProblem
from moesaic.facts.job.balance import YardstickConfig
from moesaic.policy.balance.balancer import LayerBalancer, Method
from moesaic.policy.balance.yardsticks.best import best
from moesaic.policy.balance.yardsticks.spill import llep
from moesaic.policy.balance.yardsticks.split import lp, split_optimally
from moesaic.policy.balance.yardsticks.top_k import top_k_broadcast

__all__ = ["best", "llep", "lp", "make_balancer", "split_optimally", "top_k_broadcast"]


def make_balancer(config: YardstickConfig, problem: BalanceProblem) -> LayerBalancer:
    """Return the balancer that `config` names: a training policy or a yardstick."""
    each = 1 if config.max_replicas is None else config.max_replicas
    yardsticks = {
        "best": Method(best, compiles=True), "llep": Method(llep),
        "lp": Method(partial(lp, replicas_per_rank=each), split_optimally, compiles=True),
        "top-k-broadcast": Method(top_k_broadcast),
    }  # fmt: skip
    return LayerBalancer(config, problem, method=yardsticks.get(config.policy))
