"""Moves: which piece of what goes from which rank to which.

Boxes of tensors, from any layout to any other, are moved by `dist.transfer`. Whole experts, all of
one size, which leave for a step or for good, travel as rows by `dist.exchange`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moesaic.facts.balance import Ints


@dataclass(frozen=True)
class Box:
    """A box of one tensor of the state, and the rank that holds or wants it."""

    key: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    rank: int

    @property
    def place(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """The box, whoever holds it."""
        return self.key, self.offset, self.size


@dataclass(frozen=True)
class Move:
    """Copy the common part of a held and a wanted box."""

    have: Box
    want: Box


class Share(NamedTuple):
    """What one rank of a group has to do with moves."""

    leaves: Ints
    """Experts that it sends: those to each rank in turn."""
    comes: Ints
    """Experts that it gets: those from each rank in turn."""
    send: list[int]
    """How many to each."""
    receive: list[int]
    """And from each."""


class ExpertMoves(NamedTuple):
    """Experts between ranks of a group, any of them to any; all that one rank has for another is
    one message."""

    experts: Ints
    sources: Ints
    targets: Ints

    def share(self, rank: int, ranks: int) -> Share:
        """That of one of so many ranks. Between any two experts keep the order they have here."""
        leaving, coming = (np.flatnonzero(at == rank) for at in (self.sources, self.targets))
        to, of = self.targets[leaving], self.sources[coming]
        return Share(
            self.experts[leaving[np.argsort(to, kind="stable")]],
            self.experts[coming[np.argsort(of, kind="stable")]],
            np.bincount(to, minlength=ranks).tolist(),
            np.bincount(of, minlength=ranks).tolist(),
        )
