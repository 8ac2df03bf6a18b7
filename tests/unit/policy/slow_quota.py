"""Ours, step by step: what `quota` must come to, copy for copy and row for row."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from moesaic.facts.balance import Balance, Ints, Setting, unchanged
from moesaic.policy.balance.model import moved, rows, times, times_of
from moesaic.policy.balance.quota import own_gifts
from moesaic.policy.balance.yardsticks.spill import Sources

_Way = Literal["to the mean", "half", "given on", "own rows"]
_WORTH = 1.01
"""As much slower a layer must be without copies for them to be made."""


def slow_quota(counts: Ints, setting: Setting) -> Balance:
    """The best state on the ways from everything at home to equal loads."""
    found, least_s = unchanged(), times(counts, setting, unchanged()).whole / _WORTH
    for way in get_args(_Way):
        state, best = _State(counts, setting, way), 0
        most = own_gifts(counts, least_s) if way == "own rows" else counts.size
        while state.gifts < most and state.give():
            step_s = state.step_s()
            if step_s < least_s:
                least_s, best = step_s, state.gifts
        if best:
            found = state.sources.balance(best)
    return found


class _State:
    """Who computes what so far."""

    def __init__(self, counts: Ints, setting: Setting, way: _Way) -> None:
        self._counts, self._setting, self._way, self.gifts = counts, setting, way, 0
        self._rows = rows(counts, setting.homes, unchanged())
        self._copies = moved(unchanged(), setting)
        self.sources = Sources(counts, setting)
        self._at_home = counts.sum(axis=0)
        self._mean = -(-int(self._at_home.sum()) // setting.ranks)
        experts = len(setting.homes)
        self._room = np.full(setting.ranks, experts if setting.room is None else setting.room)
        self._sends = counts.size if setting.sends is None else setting.sends
        self._by_rank = [np.flatnonzero(setting.homes == rank) for rank in range(setting.ranks)]
        self._has = np.zeros((setting.ranks, experts), bool)
        self._own = self._rows.computed.copy()
        """Rows of experts that are at home there, which can be given on."""

    def step_s(self) -> float:
        """What the layer takes as it is."""
        return times_of(self._rows, *self._copies, self._setting).whole

    def give(self) -> bool:
        """One gift more, if there is one to be made."""
        if self._way == "own rows":
            return self._give_own_rows()
        computed = self._rows.computed
        busiest = int(computed.argmax())
        excess = int(computed[busiest]) - self._mean
        if excess < max(self._setting.least_rows, 1):
            return False
        if self._copies[0][busiest] >= self._sends:
            return False
        own = self._by_rank[busiest]
        for expert in own[np.argsort(-self._at_home[own], kind="stable")].tolist():
            found = self._receiver(expert, min(excess, int(self._at_home[expert])))
            if found is not None:
                self._move(expert, busiest, *found)
                return True
        return False

    def _give_own_rows(self) -> bool:
        """All rows of a rank for an expert, whichever takes most off the rank with most traffic."""
        setting, (computed, sent, received) = self._setting, self._rows
        own = np.stack([self.sources.left(expert) for expert in range(len(setting.homes))])
        may = ~self._has.T & (own >= max(setting.least_rows, 1)) & (self._room > 0)
        may[np.arange(len(own)), setting.homes] = False
        may[self._copies[0][setting.homes] >= self._sends] = False
        if sent.max() >= received.max():
            may[:, np.arange(setting.ranks) != sent.argmax()] = False
        else:
            may[setting.homes != received.argmax()] = False
        more = np.maximum(computed + own - computed.max(), 0)
        saved = own * (setting.exchanges * setting.row_bytes / setting.bytes_per_s)
        saved = np.where(may, saved - more * (setting.passes / setting.rows_per_s), 0.0)
        expert, rank = divmod(int(saved.argmax()), setting.ranks)
        if saved[expert, rank] <= 0:
            return False
        self._move(expert, int(setting.homes[expert]), rank, int(own[expert, rank]))
        return True

    def _receiver(self, expert: int, number: int) -> tuple[int, int] | None:
        """Who had best take some of so many rows, and how many."""
        setting, least = self._setting, max(self._setting.least_rows, 1)
        takes = np.minimum(self._most(number), number)
        takes[(self._room <= 0) | self._has[:, expert]] = 0
        saved = takes * (setting.passes / setting.rows_per_s)
        local = np.minimum(self._counts[:, expert], takes)
        saved += local * (setting.exchanges * setting.row_bytes / setting.bytes_per_s)
        saved[takes < least] = 0
        rank = int(saved.argmax())
        return (rank, int(takes[rank])) if saved[rank] > 0 else None

    def _most(self, number: int) -> Ints:
        """Rows that each rank would take of so many."""
        computed, most = self._rows.computed, self._mean - self._rows.computed
        top = int(computed.max())
        if self._way == "half":
            return np.maximum(most, (top - computed) // 2)
        if self._way == "given on":
            more = most + np.minimum(self._own, self._mean)
            return np.where(computed + np.minimum(more, number) < top, more, most)
        return most

    def _move(self, expert: int, home: int, rank: int, number: int) -> None:
        taken = self.sources.take(expert, rank, number)
        computed, sent, received = self._rows
        computed[home] -= number
        computed[rank] += number
        sent -= taken  # To the home;
        sent[home] += taken[home]
        received[home] -= number - int(taken[home])
        sent += taken  # and now to the copy.
        sent[rank] -= taken[rank]
        received[rank] += number - int(taken[rank])
        self._copies[0][home] += 1
        self._copies[1][rank] += 1
        self._at_home[expert] -= number
        self._own[home] -= number
        self._room[rank] -= 1
        self._has[rank, expert] = True
        self.gifts += 1
