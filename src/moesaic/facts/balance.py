"""Who computes what of an expert layer where some of its experts have copies for a step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Setting(NamedTuple):
    """What an expert layer costs on the ranks that share out its experts; D ranks, E experts."""

    homes: Ints
    """The rank of each expert, [E]."""
    ranks: int
    """D."""
    rows_per_s: float
    """That a rank's experts take forward; backward is twice the work."""
    row_bytes: float
    """Of a row that travels, each way."""
    bytes_per_s: float
    """That a rank sends, and receives."""
    expert_bytes: float
    """Of an expert's parameters."""
    gradient_bytes: float
    """Of their gradients."""
    latency_s: float = 0.0
    """Of a message."""
    beside_s: float = 0.0
    """What a rank computes forward between two expert layers; backward is twice the work."""
    matrices_s: float = 0.0
    """What a rank's own experts take forward beside rows; backward is twice the work."""
    hides: bool = True
    """Whether copies travel while ranks compute; else these move all bytes themselves, both who
    sends them and who gets them."""
    handling_s: float = 0.0
    """Of a rank's computing that a byte of a copy takes which travels meanwhile, at both ends;
    without a meaning where ranks move bytes themselves."""
    forwards: int = 1
    """Times that a layer is computed forward: twice, if backward computes it again."""
    relays: bool = False
    """Whether ranks that have got a copy hand it on, so that an expert's home sends it once; else
    it sends every copy itself, and adds up what comes back."""
    room: int | None = None
    """Copies that a rank has memory for; None: of all experts."""
    sends: int | None = None
    """Copies that a rank sends at most; None: any number."""
    least_rows: int = 0
    """Of a copy: products of fewer are no faster."""

    @property
    def passes(self) -> int:
        """As many times as forward all computing takes: backward is twice the work."""
        return self.forwards + 2

    @property
    def exchanges(self) -> int:
        """Of rows, there and back, with their gradients."""
        return 2 * self.forwards + 2

    @property
    def own(self) -> float:
        """Experts that are at home on a rank."""
        return len(self.homes) / self.ranks


class Balance(NamedTuple):
    """What is done about it in one step; nothing of it outlives the step."""

    copies: Ints
    """(expert, rank), [C, 2], in that order: who gets an expert's parameters beside its home."""
    diverted: Ints
    """(expert, source, target, rows), [M, 4], in any order: rows of a rank that are computed where
    a copy is; all others are computed at their expert's home."""
    ahead: Bools | None = None
    """Which of the copies, [C], leave under experts of the layer before; None: none."""


def unchanged() -> Balance:
    """Everything is computed at home."""
    return Balance(np.zeros((0, 2), np.int64), np.zeros((0, 4), np.int64))
