"""The best of several policies, by the model that all of them are held against."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moesaic.facts.balance import Balance, Ints, Setting, unchanged
from moesaic.policy.balance.model import times
from moesaic.policy.balance.prophet import pro_prophet
from moesaic.policy.balance.quota import even_s, quota
from moesaic.policy.balance.replicas import eplb
from moesaic.policy.balance.shadow import faster_moe
from moesaic.policy.balance.spill import llep
from moesaic.policy.balance.split import levelled, lp

Policy = Callable[[Ints, Setting], Balance]
"""From rows [ranks, experts] and what they cost."""

_ASKING_S, _ASKING_EACH_S = 5e-4, 1.5e-6
"""About what it takes to ask all others, and for each rank and expert."""
_GAIN = 0.01
"""Of a layer's time: what asking takes must be less."""
_NEAR = 1.03
"""As much longer than evenly spread rows that need not travel a layer may take for nobody else to
be asked: the model is not exact enough to choose by less."""


def auto(counts: Ints, setting: Setting) -> Balance:
    """Ours, or what another policy makes of it if that is modelled faster, our copies with another
    split among them; others are asked where ours leaves something to gain, and a layer takes so
    long that asking does not count."""
    best = quota(counts, setting)
    best_s = times(counts, setting, best).whole
    if best_s <= _NEAR * even_s(counts, setting):
        return best
    asking_s = _ASKING_S + _ASKING_EACH_S * counts.size
    if asking_s > _GAIN * best_s:
        return best
    others: list[Policy] = [llep, pro_prophet, faster_moe]
    if setting.room != 0:
        others += [eplb, lp]
    found = [policy(counts, setting) for policy in others]
    found.append(levelled(counts, setting, best.copies))
    fitting = [best, *(balance for balance in found if _fits(balance, setting))]
    return min(fitting, key=lambda balance: times(counts, setting, balance).whole)


def unless_worse(counts: Ints, setting: Setting, balance: Balance) -> Balance:
    """`balance`, or no copies where these are modelled to take longer than none."""
    if not len(balance.copies):
        return balance
    return min((balance, unchanged()), key=lambda one: times(counts, setting, one).whole)


def _fits(balance: Balance, setting: Setting) -> bool:
    """Whether ranks have room for its copies, those they send and those they get; not every policy
    knows of that."""
    of = (setting.homes[balance.copies[:, 0]], balance.copies[:, 1])
    return all(
        limit is None or int(np.bincount(ranks).max(initial=0)) <= limit
        for limit, ranks in zip((setting.sends, setting.room), of, strict=True)
    )
