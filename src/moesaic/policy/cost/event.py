"""Events of a step: computing of each rank, collectives, and transfers between pipeline stages.

Events stand in the order in which each rank runs them. A rank outside an event spends no time on
it. Micro-batches repeat the same events, so a step is a list of runs of event segments.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Seconds = NDArray[np.float64]
Ranks = NDArray[np.int64]
Number = TypeVar("Number", np.int64, np.float64)

PIPELINE = "pipeline"
"""Phase of forward and backward in a pipeline."""


@dataclass(frozen=True, eq=False)
class StageTransfer:
    """A transfer from the ranks of one pipeline rank to their counterparts of another.

    It happens once for each micro-batch.
    """

    senders: Ranks
    receivers: Ranks
    is_eager: bool
    """True to start when the sender is done, false to start when both ends are ready."""


@dataclass(frozen=True, eq=False)
class AsyncMessage:
    """A collective that runs while its ranks go on; compared by identity."""


class RankGroups:
    """Groups of ranks, or of classes of ranks, as flat arrays for vectorized reductions."""

    def __init__(self, groups: Collection[Collection[int]]) -> None:
        self._sizes = np.fromiter(map(len, groups), np.int64, len(groups))
        ends = self._sizes.cumsum()
        self._starts = ends - self._sizes
        self._ranks = np.fromiter(itertools.chain.from_iterable(groups), np.int64, ends[-1])

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self._sizes)

    def __iter__(self) -> Iterator[Ranks]:
        """Yield the ranks of each group."""
        yield from np.split(self._ranks, self._starts[1:])

    def group_max(self, values: NDArray[Number]) -> NDArray[Number]:
        """Return the maximum of each group, from values by rank, [ranks, ...]."""
        found: NDArray[Number] = np.maximum.reduceat(values[self._ranks], self._starts)
        return found

    def scatter(self, group_values: ArrayLike, default: NDArray[Number]) -> NDArray[Number]:
        """Return values by rank from values by group; ranks outside all groups keep `default`."""
        values = default.copy()
        values[self._ranks] = np.asarray(group_values).repeat(self._sizes, axis=0)
        return values


@dataclass(frozen=True)
class Event:
    """One operation, collective or transfer on all ranks that take part."""

    name: str
    """Name of the op or collective."""
    phase: str
    """Phase of the step, as in `train.phases`."""
    block: str
    """Block of the model; `step` if it belongs to none."""
    seconds: Seconds
    """Duration by rank, [ranks]."""
    groups: Sequence[Sequence[int]] = field(default_factory=tuple)
    """Groups of ranks that start together, when their last rank is ready; empty for computing."""
    skew_s: float = 0.0
    """Expected lateness of a group's last rank after one second of computing.

    It grows with the square root of the computing time.
    """
    receives: StageTransfer | None = None
    """Transfer that ranks receive here, sent by an earlier event; `seconds` is its duration."""
    sends: StageTransfer | None = None
    """Transfer that ranks send when this event ends; senders do not wait for it."""
    launches: AsyncMessage | None = None
    """For a collective: it runs asynchronously, and starts when the channels of its ranks are free.
    """
    channels: tuple[str, ...] = ("",)
    """For a collective: channels that it occupies; collectives on the same channel run in sequence.
    Empty if it stays inside hosts and waits for none."""
    waits_for: AsyncMessage | None = None
    """Asynchronous collective that must end first; for an exchange of several steps, its last one.
    """

    @property
    def is_communication(self) -> bool:
        """True for collectives and transfers, false for computing."""
        return bool(self.groups) or self.receives is not None


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive events that run once, or again for other micro-batches; compared by identity.

    When it ends, all its asynchronous collectives have ended, unless it ends the step.
    """

    events: Sequence[Event]


class SegmentRun(NamedTuple):
    """One run of a segment."""

    segment: Segment
    micro_batch: int | None = None
    """Micro-batch of a pipeline; None for events once per step, and without a pipeline."""


Step = Sequence[SegmentRun]
"""A step: runs of segments in an order that respects all dependencies between ranks."""


def map_events(step: Step, change: Callable[[Event], Event]) -> list[SegmentRun]:
    """Return `step` with changed events; equal segments stay equal."""
    segments = dict.fromkeys(run.segment for run in step)
    changed = {one: Segment([change(event) for event in one.events]) for one in segments}
    return [run._replace(segment=changed[run.segment]) for run in step]
