"""The best of several policies, by the model that all of them are held against."""

from __future__ import annotations

from collections.abc import Callable

from moesaic.facts.balance import Balance, Ints, Setting
from moesaic.policy.balance.model import times
from moesaic.policy.balance.prophet import pro_prophet
from moesaic.policy.balance.quota import quota
from moesaic.policy.balance.replicas import eplb
from moesaic.policy.balance.shadow import faster_moe
from moesaic.policy.balance.spill import llep

Policy = Callable[[Ints, Setting], Balance]
"""From rows [ranks, experts] and what they cost."""


def auto(counts: Ints, setting: Setting) -> Balance:
    """Ours, or what another one makes of it if that is modelled faster."""
    policies: list[Policy] = [quota, llep]
    if setting.room != 0:
        policies.append(eplb)
    if setting.room is None:  # The others know no limit.
        policies += [pro_prophet, faster_moe]
    found = [policy(counts, setting) for policy in policies]
    return min(found, key=lambda balance: times(counts, setting, balance).whole)
