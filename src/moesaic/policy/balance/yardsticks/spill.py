"""LLEP: tokens above a rank's share spill over to the least loaded ranks."""

from __future__ import annotations

import numpy as np

from moesaic.facts.balance import BalanceDecision, BalanceProblem, IntArray, no_replicas


def llep(
    counts: IntArray,
    setting: BalanceProblem,
    *,
    capacity_factor: float = 1.0,
    threshold: float = 1.3,
    min_replica_tokens: int | None = None,
) -> BalanceDecision:
    """Return the spilled tokens, expert by expert, the one with the most tokens first.

    Args:
        counts: routed tokens [ranks, experts].
        setting: costs of the layer.
        capacity_factor: a rank's share before it spills, as a multiple of the mean.
        threshold: imbalance (busiest rank over the mean) up to which nothing is done.
        min_replica_tokens: smallest spill, unless it is an expert's last; None for the setting's
            value.
    """
    totals, ranks = counts.sum(axis=0), setting.num_ranks
    owner_load = np.zeros(ranks, np.int64)
    np.add.at(owner_load, setting.owners, totals)
    if owner_load.max() * ranks <= threshold * owner_load.sum():
        return no_replicas()
    min_tokens = setting.min_replica_tokens if min_replica_tokens is None else min_replica_tokens
    capacity = int(np.ceil(capacity_factor * owner_load.sum() / ranks))
    computed, sources = np.zeros(ranks, np.int64), Sources(counts, setting)
    slots_left, sends_left = (
        np.full(ranks, len(totals) * ranks if limit is None else limit)
        for limit in (setting.max_replicas, setting.max_replicas_sent)
    )
    for expert in np.argsort(-totals, kind="stable").tolist():
        owner, left = int(setting.owners[expert]), int(totals[expert])
        kept = min(left, max(capacity - int(computed[owner]), 0))
        computed[owner] += kept
        left -= kept
        free = slots_left > 0
        free[owner] = False
        while left and free.any() and sends_left[owner] > 0:
            rank = int(np.where(free, computed, np.iinfo(np.int64).max).argmin())
            number = min(left, capacity - int(computed[rank]))
            if number < min(min_tokens, left) or number <= 0:
                break
            sources.take(expert, rank, number)
            computed[rank] += number
            slots_left[rank] -= 1
            sends_left[owner] -= 1
            free[rank] = False
            left -= number
        computed[owner] += left
    return sources.balance()


class Sources:
    """Tokens by expert and source that are still assigned to owners.

    A replica takes its own rank's tokens first, then those that other ranks would send to the
    owner, and the owner's last.
    """

    def __init__(self, counts: IntArray, setting: BalanceProblem) -> None:
        self._counts, self._homes = counts, setting.owners
        self._left: dict[int, IntArray] = {}
        self._taken: dict[tuple[int, int], IntArray] = {}

    def left(self, expert: int) -> IntArray:
        """Return the tokens of `expert` that are left for the owner, by source rank."""
        return self._left.get(expert, self._counts[:, expert])

    def take(self, expert: int, rank: int, number: int) -> IntArray:
        """Assign `number` tokens of `expert` to its replica on `rank`, and return them by source
        rank."""
        left = self._left.setdefault(expert, self._counts[:, expert].copy())
        found = np.zeros_like(left)
        found[rank] = min(number, int(left[rank]))
        owner = int(self._homes[expert])
        others = left.copy()
        others[[rank, owner]] = 0
        wanted = number - int(found[rank])
        before = np.cumsum(others) - others
        found += np.clip(wanted - before, 0, others)
        found[owner] += number - int(found.sum())
        left -= found
        self._taken[expert, rank] = found
        return found

    def balance(self, moves: int | None = None) -> BalanceDecision:
        """Return the decision for everything taken, or for the first `moves` replicas."""
        taken = list(self._taken.items())[:moves]
        if not taken:
            return no_replicas()
        replicas, rerouted = [key for key, _ in taken], list[tuple[int, int, int, int]]()
        for (expert, rank), found in taken:
            rerouted += [(expert, int(at), rank, int(found[at])) for at in np.flatnonzero(found)]
        return BalanceDecision(
            np.array(sorted(replicas), np.int64), np.array(sorted(rerouted), np.int64)
        )
