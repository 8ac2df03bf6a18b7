"""Pro-Prophet's planner: the hottest expert of the hottest rank, again and again, to all ranks but
those that have the fewest rows for it; and of all these placements the one that is modelled best.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moesaic.facts.balance import Balance, Ints, Setting, unchanged
from moesaic.policy.balance.model import at_copies


class Search(NamedTuple):
    """How it is told to search."""

    coefficient: float = 0.1
    """Loads are even enough where they differ by less than so many times the mean: 3 in the
    released code, with which few ranks never search at all."""
    left_out: int = 0
    """Ranks that get no copy of an expert that is chosen."""
    hides: bool = True
    """Whether copies travel under experts and what is between layers, where they can."""


_PAPERS = Search()


def pro_prophet(counts: Ints, setting: Setting, search: Search = _PAPERS) -> Balance:
    """The paper's greedy search, for any number of experts on a rank."""
    homes, chosen, best = setting.homes, list[tuple[int, Ints]](), 0
    by_rank = [np.flatnonzero(homes == rank) for rank in range(setting.ranks)]
    state = _State.of(counts, setting)
    least = state.step_s(setting, 0, search)
    used = np.zeros(len(homes), bool)
    total = int(counts.sum())
    while np.ptp(state.computed) >= search.coefficient * total / setting.ranks:
        hottest = int(state.computed.argmax())
        left = by_rank[hottest][~used[by_rank[hottest]]]
        if not len(left):
            break
        away = counts.sum(axis=0)[left] - counts[hottest, left]
        expert = int(left[away.argmax()])
        used[expert] = True
        receivers = _receivers(counts[:, expert], hottest, search.left_out)
        state.give(counts[:, expert], hottest, receivers)
        chosen.append((expert, receivers))
        step_s = state.step_s(setting, len(chosen), search)
        if step_s < least:
            least, best = step_s, len(chosen)
    pairs = [(expert, int(rank)) for expert, ranks in chosen[:best] for rank in ranks]
    return at_copies(counts, np.array(pairs, np.int64)) if pairs else unchanged()


def _receivers(rows: Ints, home: int, left_out: int) -> Ints:
    """All ranks but its home and those with the fewest rows; of equals the first stay."""
    others = np.delete(np.arange(len(rows)), home)
    order = others[np.argsort(-rows[others], kind="stable")]
    return np.sort(order[: max(len(others) - left_out, 0)])


class _State(NamedTuple):
    """Rows that each rank computes, and receives from others."""

    computed: Ints
    received: Ints

    @classmethod
    def of(cls, counts: Ints, setting: Setting) -> _State:
        """With everything at home."""
        computed, received = (np.zeros(setting.ranks, np.int64) for _ in range(2))
        experts = np.arange(len(setting.homes))
        np.add.at(computed, setting.homes, counts.sum(axis=0))
        np.add.at(received, setting.homes, counts.sum(axis=0) - counts[setting.homes, experts])
        return cls(computed, received)

    def give(self, rows: Ints, home: int, receivers: Ints) -> None:
        """An expert's rows of the receivers stay there."""
        stay = int(rows[receivers].sum())
        self.computed[receivers] += rows[receivers]
        self.computed[home] -= stay
        self.received[home] -= stay

    def step_s(self, setting: Setting, chosen: int, search: Search) -> float:
        """Equations (6) and (8) of the paper, which count what is received, and what every rank
        has a part of in copying."""
        exchange = int(self.received.max()) * setting.row_bytes / setting.bytes_per_s
        experts = int(self.computed.max()) / setting.rows_per_s
        each = chosen * (setting.ranks - search.left_out) / setting.ranks / setting.bytes_per_s
        out, back = each * setting.expert_bytes, each * setting.gradient_bytes
        hidden = (experts + setting.beside_s) * (search.hides and setting.hides)
        exposed = setting.forwards * max(0.0, out - hidden) + max(0.0, back - 2 * hidden)
        return setting.exchanges * exchange + setting.passes * experts + exposed
