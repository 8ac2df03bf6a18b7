"""Policies to compare with: for `moesaic replay` and benchmarks, never for training."""

from __future__ import annotations

from functools import partial

from moesaic.facts.balance import Setting
from moesaic.facts.job.balance import YardstickConfig
from moesaic.policy.balance.asked import Asked, Method
from moesaic.policy.balance.yardsticks.best import best
from moesaic.policy.balance.yardsticks.spill import llep
from moesaic.policy.balance.yardsticks.split import levelled, lp
from moesaic.policy.balance.yardsticks.top_k import top_k_broadcast

__all__ = ["asked", "best", "levelled", "llep", "lp", "top_k_broadcast"]


def asked(config: YardstickConfig, setting: Setting) -> Asked:
    """Return the policy that `config` names: one of training's, or a yardstick."""
    each = 1 if config.copies is None else config.copies
    yardsticks = {
        "best": Method(best, compiles=True), "llep": Method(llep),
        "lp": Method(partial(lp, each=each), levelled, compiles=True),
        "top-k-broadcast": Method(top_k_broadcast),
    }  # fmt: skip
    return Asked(config, setting, method=yardsticks.get(config.policy))
