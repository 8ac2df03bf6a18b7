"""A step as events: what every rank computes for itself, what ranks do together, and what one hands
to another.

Events stand in the order in which each rank meets them; a rank that an event does not concern takes
no time over it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Seconds = NDArray[np.float64]
Ranks = NDArray[np.int64]
Number = TypeVar("Number", np.int64, np.float64)

PIPELINE = "pipeline"
"""The phase in which the parts of a pipeline compute forward and backward."""


@dataclass(frozen=True, eq=False)
class Handover:
    """What ranks of one part of a pipeline hand to as many of another, each to its counterpart."""

    senders: Ranks
    receivers: Ranks
    ahead: bool
    """Whether it travels as soon as it has left; else when both of them are there for it."""


@dataclass(frozen=True, eq=False)
class Trip:
    """A message under way beside what its ranks do, who are told from others by it alone."""


class Members:
    """Groups of ranks, laid out so that all of them are looked at together."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._sizes = np.fromiter(map(len, groups), np.int64, len(groups))
        ends = self._sizes.cumsum()
        self._first = ends - self._sizes
        self._ranks = np.fromiter(itertools.chain.from_iterable(groups), np.int64, ends[-1])

    def most(self, values: NDArray[Number]) -> NDArray[Number]:
        """Of values by rank, the largest of each group."""
        found: NDArray[Number] = np.maximum.reduceat(values[self._ranks], self._first)
        return found

    def spread(self, each: ArrayLike, others: Seconds) -> Seconds:
        """By rank, what is said of its group, or, as of `others`, if it is in none."""
        values = others.copy()
        values[self._ranks] = np.asarray(each).repeat(self._sizes)
        return values


@dataclass(frozen=True)
class Event:
    """One thing that happens on ranks."""

    name: str
    """What it is: an op, or a message."""
    phase: str
    """The phase of the step that it belongs to, as `train.phases` names it."""
    block: str
    """The block of the model; `step`: none."""
    seconds: Seconds
    """How long it takes, by rank."""
    groups: Sequence[Sequence[int]] = field(default_factory=tuple)
    """Ranks that do it together: they begin when the last of them has come."""
    skew_s: float = 0.0
    """How much later the last of them comes than each by itself would, after a second of computing;
    as the square root of other times."""
    takes: Handover | None = None
    """What ranks take over in it, which has left in an earlier event; `seconds` on the way."""
    leaves: Handover | None = None
    """What leaves ranks when they are done with it. They do not wait until it has come."""
    beside: Trip | None = None
    """Of a message: ranks go on at once, and it begins as soon as none of theirs is under way."""
    inside: bool = False
    """Of a message: it is carried inside hosts, whatever is under way between them."""
    over: tuple[str, ...] = ("",)
    """Of a message: ways that it takes. Messages of a rank over the same way take turns."""
    awaits: Trip | None = None
    """What has to be over before it begins; of several of the same trip, the last one."""

    @property
    def is_message(self) -> bool:
        """Whether ranks speak in it; else they compute."""
        return bool(self.groups) or self.takes is not None
