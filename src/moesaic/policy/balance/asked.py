"""A policy as a job asks for it: by name, with what a layer costs, and rows of the time before for
those that go by them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from math import comb
from typing import NamedTuple

import numpy as np

from moesaic.facts.balance import Balance, Ints, Setting, unchanged
from moesaic.facts.job import BalanceConfig, Job, Prices
from moesaic.facts.plan import Plan
from moesaic.facts.workload import COMPUTED_BYTES, STORED_BYTES
from moesaic.policy.balance.halves import leave_ahead
from moesaic.policy.balance.model import at_copies, unless_worse
from moesaic.policy.balance.prophet import pro_prophet
from moesaic.policy.balance.quota import quota, within
from moesaic.policy.balance.replicas import eplb, evenly
from moesaic.policy.balance.shadow import faster_moe

_OF_ITS_OWN = 4
"""A rank's experts per copy that quota has room for, if `balance.copies` is unset."""

Policy = Callable[[Ints, Setting], Balance]
"""From rows [ranks, experts] and what they cost."""

Spreading = Callable[[Ints, Setting, Ints], Balance]
"""Rows over homes and copies (expert, rank) that there are."""


class Method(NamedTuple):
    """How a policy decides."""

    policy: Policy
    spread: Spreading = within
    """How rows at hand are spread over copies that were decided on by the time before."""
    compiles: bool = False
    """Whether numba compiles the policy, or its `spread` where that is not quota's."""


class Asked:
    """The policy of one layer."""

    def __init__(
        self,
        config: BalanceConfig,
        setting: Setting,
        *,
        follows: bool = False,
        method: Method | None = None,
    ) -> None:
        """Use `method`, or the one that `config` names; the layer `follows` another one, if copies
        may leave under it."""
        method = method or _named(config)
        self.setting, self._config = setting, config
        self._policy, self._spread, compiles = method
        self.early, self._follows = config.goes_by_the_past, follows
        self._looks = not config.as_published
        if config.is_careful:  # Of rows at hand, which are not spread as those of early copies.
            self._looks = self.early and config.policy != "none"
        self._compiles = compiles or (self.early and self._spread is within)
        self._last: Ints | None = None
        self._by: Ints | None = None
        self._kept, self._age = unchanged(), 0
        self._early: Balance | None = None

    def ahead(self) -> Balance:
        """Copies for rows that nobody knows yet: by those of the time before, or those in use."""
        self.think()
        self._early = self._kept
        return self._early

    def think(self) -> None:
        """Decide on them, if that is due and rows of the time before are known."""
        last = self._last
        if last is not None and self._is_due(last):
            copies = self._looked_at(last, self._policy(last, self.setting)).copies
            copies = copies[np.lexsort((copies[:, 1], copies[:, 0]))]  # As all stand in a balance.
            leaving = leave_ahead(copies, self.setting) if self._follows else None
            self._kept = unchanged()._replace(copies=copies, ahead=leaving)
            self._by, self._age = last, 0

    def _looked_at(self, counts: Ints, balance: Balance) -> Balance:
        """No copies, if somebody is to look and they would cost more than they save; of those that
        are early, with rows over them as they will be spread."""
        if not self._looks:
            return balance
        if self.early:
            balance = self._spread(counts, self.setting, balance.copies)
        return unless_worse(counts, self.setting, balance)

    def _is_due(self, last: Ints) -> bool:
        """Whether copies are to be decided on anew, given the rows of the time before."""
        if self._by is None or self._age >= self._config.replan_every:
            return True
        most = self._config.replan_drift
        return most is not None and drift(self._by, last) > most

    def __call__(self, counts: Ints) -> Balance:
        """Who computes what of rows [ranks, experts]."""
        if not self.early:
            return self._looked_at(counts, self._policy(counts, self.setting))
        early = self.ahead() if self._early is None else self._early
        self._last, self._early = counts, None
        self._age += 1
        spread = self._spread(counts, self.setting, early.copies)
        return spread._replace(ahead=early.ahead)

    def rehome(self, homes: Ints) -> None:
        """These are the ranks of all experts from now on: copies are decided on anew, for those in
        use may be where their expert lives now."""
        self.setting = self.setting._replace(homes=homes)
        self._kept, self._by, self._early = unchanged(), None, None

    def prepare(self, begins: Callable[[bool], None] | None = None) -> None:
        """Have it compile what it compiles. If there is anything that is not there from before,
        `begins` is called first, with whether it is kept for the next time."""
        if not self._compiles:
            return  # Importing numba takes long.
        from moesaic.policy.balance.compiled import heard

        counts = np.zeros((self.setting.ranks, len(self.setting.homes)), np.int64)
        counts[:, 0] = 1 << 20
        copy = np.array([[0, (self.setting.homes[0] + 1) % self.setting.ranks]])
        with nullcontext() if begins is None else heard(begins):
            self._spread(counts, self.setting, copy)
            self._policy(counts, self.setting)


def compiling(kept: bool) -> str:
    """What a person is told who has to wait for that."""
    if kept:
        return "compiling the balance policy, once for this installation (about 10 s)"
    return (
        "compiling the balance policy (about 10 s), at each start, for there is no directory to "
        "keep it in: let NUMBA_CACHE_DIR name one that can be written"
    )


def _named(config: BalanceConfig) -> Method:
    methods = {
        "none": Method(lambda counts, setting: unchanged()),
        "quota": Method(quota, compiles=True),
        "pro-prophet": Method(pro_prophet, lambda counts, _, copies: at_copies(counts, copies)),
        "eplb": Method(partial(eplb, each=1 if config.copies is None else config.copies), evenly),
        "faster-moe": Method(faster_moe),
    }
    return methods[config.policy]


def drift(before: Ints, now: Ints) -> float:
    """The part of all rows that has gone over to other experts: half the sum of what their shares
    differ by. With each expert's rows split as they were, no rank has more by a larger part."""
    one, other = (counts.sum(axis=0) / max(int(counts.sum()), 1) for counts in (before, now))
    return float(np.abs(one - other).sum() / 2)


def homes_of(plan: Plan, layer: int) -> Ints:
    """The rank of each expert of a layer."""
    return np.argsort(plan.slots(layer)) // (plan.experts // plan.ep)


def setting_of(job: Job, plan: Plan, config: BalanceConfig, prices: Prices, layer: int) -> Setting:
    """What a layer's rows and experts cost."""
    numbers = 3 * job.model.hidden * job.model.ffn // plan.etp
    precision, finetune = job.train.precision, job.finetune
    recompute = job.train.recompute if plan.recompute is None else plan.recompute
    learns, room = finetune is None or finetune.method == "full", config.copies
    if room is None and config.is_careful:
        room = max(plan.experts // plan.ep // _OF_ITS_OWN, 1)
    return Setting(
        homes=homes_of(plan, layer),
        ranks=plan.ep,
        rows_per_s=prices.rows_per_s,
        row_bytes=job.model.hidden * COMPUTED_BYTES[precision] * _alone(plan, job.model.top_k),
        bytes_per_s=prices.bytes_per_s,
        expert_bytes=numbers * COMPUTED_BYTES[precision],
        gradient_bytes=numbers * STORED_BYTES[precision] * learns,
        latency_s=prices.latency_s,
        beside_s=_beside_rows(job, plan) / prices.rows_per_s if config.goes_by_the_past else 0.0,
        matrices_s=prices.matrices_s,
        hides=prices.hides,
        handling_s=prices.handling_s,
        forwards=2 if recompute else 1,
        room=room,
        sends=config.copies_sent,
        least_rows=config.least_rows,
    )


def _alone(plan: Plan, top_k: int) -> float:
    """The part of rows that travel which nobody would send but for them: all, unless a token
    travels once for all of its experts on a rank, or on a host. Then those of tokens none of whose
    other experts is there; as many as there are where choices are even."""
    if plan.dispatch != "visits":
        return 1.0
    there = plan.experts // (plan.hosts if plan.hosts > 1 else plan.ep)
    return comb(plan.experts - there, top_k - 1) / comb(plan.experts - 1, top_k - 1)


def _beside_rows(job: Job, plan: Plan) -> float:
    """What a rank computes between two expert layers, in rows of experts: attention, of which
    products with half of all positions, and what all tokens visit."""
    model = job.model
    tokens = job.train.batch // job.train.micro_batches * job.data.sequence / plan.replicas
    heads = model.heads * model.head_dim
    projections = 2 * model.hidden * (heads + model.kv_heads * model.head_dim)
    scores, shared = job.data.sequence * heads, 3 * model.hidden * model.ffn * model.shared
    each = 2 * (projections + scores + shared) / plan.tp
    return tokens * each / (6 * model.hidden * model.ffn / plan.etp)
