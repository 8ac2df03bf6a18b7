"""FasterMoE's shadows: copies of the hottest experts on every rank."""

from __future__ import annotations

import numpy as np

from moesaic.facts.balance import Balance, Ints, Setting, unchanged
from moesaic.policy.balance.model import at_copies


def faster_moe(counts: Ints, setting: Setting) -> Balance:
    """One expert more, the hottest first, as long as that makes the layer faster by its model.

    It takes what the busiest rank computes for what that one receives as well, and hides nothing.
    """
    computed = np.zeros(setting.ranks, np.int64)
    np.add.at(computed, setting.homes, counts.sum(axis=0))
    each = setting.passes / setting.rows_per_s
    each += setting.exchanges * setting.row_bytes / setting.bytes_per_s
    copied = setting.forwards * setting.expert_bytes + setting.gradient_bytes
    copy_s = copied / setting.bytes_per_s
    least, chosen = int(computed.max()) * each, list[int]()
    for expert in hottest_first(counts):
        home = setting.homes[expert]
        computed += counts[:, expert]
        computed[home] -= int(counts[:, expert].sum())
        step_s = int(computed.max()) * each + (len(chosen) + 1) * copy_s
        if step_s >= least:
            break
        least = step_s
        chosen.append(int(expert))
    return everywhere(counts, setting, chosen)


def everywhere(counts: Ints, setting: Setting, experts: list[int]) -> Balance:
    """Copies of these on every rank, which computes its own rows with them."""
    pairs = [
        (expert, rank)
        for expert in experts
        for rank in range(setting.ranks)
        if rank != setting.homes[expert]
    ]
    return at_copies(counts, np.array(pairs, np.int64)) if pairs else unchanged()


def hottest_first(counts: Ints) -> Ints:
    """Return experts by their rows, most first."""
    return np.argsort(-counts.sum(axis=0), kind="stable")
