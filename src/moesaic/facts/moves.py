"""Moves: which tensor box or expert goes from which rank to which.

`dist.transfer` moves boxes of tensors from any layout to any other. `dist.all_to_all` moves whole
experts, all of one size, for a step or for good.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moesaic.facts.balance import IntArray


@dataclass(frozen=True)
class Box:
    """A box of one state tensor, and the rank that holds or wants it."""

    key: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    rank: int

    @property
    def region(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """The box without its rank."""
        return self.key, self.offset, self.size


@dataclass(frozen=True)
class Move:
    """A copy of the overlap of a held and a wanted box."""

    source: Box
    target: Box


class RankMoves(NamedTuple):
    """Experts that one rank of a group sends and receives."""

    send_experts: IntArray
    """Experts to send, ordered by target rank."""
    receive_experts: IntArray
    """Experts to receive, ordered by source rank."""
    send_counts: list[int]
    """Number of experts to each rank."""
    receive_counts: list[int]
    """Number of experts from each rank."""


class ExpertMoves(NamedTuple):
    """Experts that move between ranks of a group; all experts from one rank to another are one
    message."""

    experts: IntArray
    sources: IntArray
    targets: IntArray

    def rank_moves(self, rank: int, num_ranks: int) -> RankMoves:
        """Return the moves of `rank`; experts from one rank to another keep their order."""
        sent, received = (np.flatnonzero(at == rank) for at in (self.sources, self.targets))
        targets, sources = self.targets[sent], self.sources[received]
        return RankMoves(
            self.experts[sent[np.argsort(targets, kind="stable")]],
            self.experts[received[np.argsort(sources, kind="stable")]],
            np.bincount(targets, minlength=num_ranks).tolist(),
            np.bincount(sources, minlength=num_ranks).tolist(),
        )
