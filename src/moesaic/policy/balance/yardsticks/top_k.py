"""Top-k broadcast: the experts with the most tokens get a copy on every rank."""

from __future__ import annotations

from moesaic.facts.balance import Balance, Ints, Setting
from moesaic.policy.balance.shadow import everywhere, hottest_first


def top_k_broadcast(counts: Ints, setting: Setting, number: int = 1) -> Balance:
    """Copy the `number` experts with the most rows to every rank, at any cost."""
    return everywhere(counts, setting, [int(e) for e in hottest_first(counts)[:number]])
