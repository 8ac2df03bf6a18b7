"""Simulated timeline of a step: every rank runs the events in order and waits for late ranks.

Ranks that behave alike are simulated once (`rank_classes`), and so are equal micro-batches
(`class_segment`): a simulation takes about as long for many of either as for few.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from moesaic.base.errors import ConfigError
from moesaic.facts.job.train import PipelineSchedule
from moesaic.policy.cost.class_segment import ClassSegment, EventSpan, EventTotals, StepState
from moesaic.policy.cost.event import PIPELINE, Event, Seconds, Step
from moesaic.policy.cost.rank_classes import RankClasses, rank_classes


class EventSeconds(NamedTuple):
    """Seconds of an event on one rank, summed over micro-batches; see `EventTotals`."""

    event: Event
    elapsed_s: float
    waiting_s: float
    queueing_s: float
    async_s: float


class Timeline:
    """Simulated step."""

    def __init__(
        self, classes: RankClasses, segments: Sequence[ClassSegment], class_end_s: Seconds
    ) -> None:
        """Keep the segments of a step, in order, and the end of each class of ranks."""
        self._classes, self._segments, self._class_end_s = classes, segments, class_end_s

    @property
    def end_s(self) -> Seconds:
        """End of the step by rank."""
        return self._class_end_s[self._classes.of_rank]

    @property
    def step_s(self) -> float:
        """Time until the last rank ends, in seconds."""
        return float(self._class_end_s.max())

    @cached_property
    def critical_rank(self) -> int:
        """The rank that waits least among those that end last.

        All ranks that meet in a final collective end last.
        """
        waiting = self._sum_by_class(lambda one: one.waiting_s)
        waiting[self._class_end_s < self._class_end_s.max()] = np.inf
        return int(self._classes.first_rank[waiting.argmin()])

    @cached_property
    def _totals(self) -> list[list[EventTotals]]:
        """Seconds of the events of each segment."""
        return [list(segment.totals()) for segment in self._segments]

    def events(self, rank: int) -> list[EventSeconds]:
        """Return the seconds of the events that concern a rank, in order of their first run."""
        number = self._classes.of_rank[rank]
        return [
            EventSeconds(one.event, *(float(seconds[row]) for seconds in one[1:5]))
            for segment, totals in zip(self._segments, self._totals, strict=True)
            for row in np.flatnonzero(segment.rows == number)
            for one in totals
        ]

    def spans(self, rank: int) -> list[EventSpan]:
        """Return all events that concern a rank, run by run."""
        number = self._classes.of_rank[rank]
        found = [
            one
            for segment in self._segments
            for row in np.flatnonzero(segment.rows == number)
            for one in segment.spans(int(row))
        ]
        return [span for _, span in sorted(found, key=lambda one: one[0])]

    def seconds_by_phase(self, rank: int) -> dict[str, float]:
        """Return seconds by phase on one rank, waiting included."""
        return self._sum_by_name(rank, lambda event: event.phase)

    def seconds_by_block(self, rank: int) -> dict[str, float]:
        """Return seconds by block on one rank, waiting included."""
        return self._sum_by_name(rank, lambda event: event.block)

    def max_seconds_by_block(self) -> dict[str, float]:
        """Return seconds by block, waiting included, on the slowest rank of each block."""
        found: dict[str, Seconds] = {}
        for segment, totals in zip(self._segments, self._totals, strict=True):
            for one in totals:
                seconds = found.setdefault(one.event.block, np.zeros(len(self._classes)))
                seconds[segment.rows] += one.elapsed_s
        return {block: float(seconds.max()) for block, seconds in found.items()}

    def waiting_s(self, rank: int) -> float:
        """Return the seconds that a rank waits for others or for asynchronous collectives."""
        return sum(one.waiting_s for one in self.events(rank))

    def queueing_s(self, rank: int) -> float:
        """Return the part of `waiting_s` that the rank's own collectives cause."""
        return sum(one.queueing_s for one in self.events(rank))

    def communication_s(self, rank: int) -> float:
        """Return the seconds of a rank's synchronous collectives and transfers."""
        collectives = (one for one in self.events(rank) if one.event.is_communication)
        return sum(one.elapsed_s - one.waiting_s for one in collectives)

    def seconds_by_kind(self, rank: int) -> dict[str, float]:
        """Return seconds of computing, collectives and waiting on one rank."""
        queueing_s = self.queueing_s(rank)
        collectives_s = self.communication_s(rank) + queueing_s
        waiting_s = self.waiting_s(rank) - queueing_s
        computing_s = float(self.end_s[rank]) - collectives_s - waiting_s
        return {
            "computing": max(0.0, computing_s), "collectives": collectives_s, "waiting": waiting_s,
        }  # fmt: skip

    def overlapped_s(self, rank: int) -> tuple[float, float]:
        """Return the seconds of a rank's overlapped collectives, and those of waiting for them."""
        events = self.events(rank)
        waits = (one.waiting_s for one in events if one.event.waits_for is not None)
        return sum(one.async_s for one in events), sum(waits)

    def bubble_fraction(self) -> float:
        """Return the mean fraction of a step's pipeline that ranks wait for other stages.

        The pipeline lasts from the first rank's start to the last rank's end. A rank waits while it
        neither computes nor runs collectives inside its stage; stage transfers count as waiting.
        The result is 0 without a pipeline.
        """
        pipeline = [one for totals in self._totals for one in totals if one.event.phase == PIPELINE]
        busy = self._sum_by_class(
            lambda one: one.elapsed_s * (one.event.phase == PIPELINE and one.event.receives is None)
        )
        if not pipeline:
            return 0.0
        seconds = max(one.last_s for one in pipeline) - min(one.first_s for one in pipeline)
        return 1.0 - float(busy[self._classes.of_rank].mean()) / seconds if seconds else 0.0

    def _sum_by_class(self, value: Callable[[EventTotals], Seconds]) -> Seconds:
        """Return the sum of `value` over all events, by class."""
        total = np.zeros(len(self._classes))
        for segment, totals in zip(self._segments, self._totals, strict=True):
            for one in totals:
                total[segment.rows] += value(one)
        return total

    def _sum_by_name(self, rank: int, name: Callable[[Event], str]) -> dict[str, float]:
        names = (name(one.event) for totals in self._totals for one in totals)
        found = dict.fromkeys(names, 0.0)
        for one in self.events(rank):
            found[name(one.event)] += one.elapsed_s
        return found


def simulate_step(step: Step, num_ranks: int) -> Timeline:
    """Simulate `step` on `num_ranks` ranks."""
    num_runs = Counter(run.segment for run in step)
    events = [event for segment in num_runs for event in segment.events]
    classes = rank_classes(events, num_ranks)
    segments = {one: ClassSegment(one, classes, number) for one, number in num_runs.items()}
    has_skew = any(event.skew_s for event in events)
    state = StepState(np.zeros(len(classes)), np.zeros(len(classes)) if has_skew else None)
    with np.errstate(invalid="ignore"):  # Figures without bounds; `check_step_time` finds them.
        for number, (segment, micro_batch) in enumerate(step):
            segments[segment].run(state, number, micro_batch)
    return Timeline(classes, list(segments.values()), state.now)


def ideal_bubble_fraction(
    schedule: PipelineSchedule, pp: int, stages_per_rank: int, num_micro_batches: int
) -> float:
    """Return the bubble fraction for equal stages and instant transfers.

    `interleaved` and `zero-bubble` need at least as many micro-batches as pipeline ranks.
    `zero-bubble` also assumes that forward and both halves of backward take equally long.
    """
    passes = 3 if schedule == "zero-bubble" else 1
    idle = pp - 1
    return idle / (passes * stages_per_rank * num_micro_batches + idle)


def check_step_time(cluster: str, step_s: float, *others: float) -> None:
    """Raise ConfigError if a step takes no time or if any figure is not finite."""
    if not (0 < step_s < math.inf and all(map(math.isfinite, others))):
        raise ConfigError(
            f"a step on cluster '{cluster}' would take {step_s} s: correct figures in the cluster "
            "file or sizes of the model that are too small or too large"
        )
