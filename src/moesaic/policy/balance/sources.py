"""Whose rows are computed where, once it is known how many rows a copy takes: its own rank's first,
then those of ranks that would have sent them home, and the home's own last."""

from __future__ import annotations

import numpy as np

from moesaic.facts.balance import Balance, Ints, Setting, unchanged


class Sources:
    """Rows of every rank for every expert that are still to be computed at home."""

    def __init__(self, counts: Ints, setting: Setting) -> None:
        self._counts, self._homes = counts, setting.homes
        self._left: dict[int, Ints] = {}
        self._taken: dict[tuple[int, int], Ints] = {}

    def left(self, expert: int) -> Ints:
        """By rank, rows of `expert` that are still to be computed at home."""
        return self._left.get(expert, self._counts[:, expert])

    def take(self, expert: int, rank: int, number: int) -> Ints:
        """By source, so many rows of `expert` that its copy on `rank` takes from now on."""
        left = self._left.setdefault(expert, self._counts[:, expert].copy())
        found = np.zeros_like(left)
        found[rank] = min(number, int(left[rank]))
        home = int(self._homes[expert])
        others = left.copy()
        others[[rank, home]] = 0
        wanted = number - int(found[rank])
        before = np.cumsum(others) - others
        found += np.clip(wanted - before, 0, others)
        found[home] += number - int(found.sum())
        left -= found
        self._taken[expert, rank] = found
        return found

    def balance(self, moves: int | None = None) -> Balance:
        """All that has been taken, or the first so many of it."""
        taken = list(self._taken.items())[:moves]
        if not taken:
            return unchanged()
        copies, diverted = [key for key, _ in taken], list[tuple[int, int, int, int]]()
        for (expert, rank), found in taken:
            diverted += [(expert, int(at), rank, int(found[at])) for at in np.flatnonzero(found)]
        return Balance(np.array(sorted(copies), np.int64), np.array(sorted(diverted), np.int64))
