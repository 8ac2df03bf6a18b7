"""The policy that the model rates fastest for each layer, however long the comparison takes."""

from __future__ import annotations

import numpy as np

from moesaic.facts.balance import Balance, Ints, Setting
from moesaic.policy.balance.model import times
from moesaic.policy.balance.prophet import pro_prophet
from moesaic.policy.balance.quota import quota
from moesaic.policy.balance.replicas import eplb
from moesaic.policy.balance.shadow import faster_moe
from moesaic.policy.balance.yardsticks.spill import llep
from moesaic.policy.balance.yardsticks.split import levelled, lp


def best(counts: Ints, setting: Setting) -> Balance:
    """Return the fastest of all balances that keep to the limits; the first one is quota's."""
    ours = quota(counts, setting)
    others = [policy(counts, setting) for policy in (llep, pro_prophet, faster_moe)]
    if setting.room != 0:
        others += [eplb(counts, setting), lp(counts, setting)]
    others.append(levelled(counts, setting, ours.copies))
    fitting = [ours, *(balance for balance in others if _fits(balance, setting))]
    return min(fitting, key=lambda balance: times(counts, setting, balance).whole)


def _fits(balance: Balance, setting: Setting) -> bool:
    """Return whether ranks have room for the copies that they send and receive."""
    of = (setting.homes[balance.copies[:, 0]], balance.copies[:, 1])
    return all(
        limit is None or int(np.bincount(ranks).max(initial=0)) <= limit
        for limit, ranks in zip((setting.sends, setting.room), of, strict=True)
    )
