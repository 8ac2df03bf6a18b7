"""Segments of a step on classes of ranks: where each run starts, and what its events take.

A segment that runs often goes from start to end at once, by a matrix in max-plus algebra. The times
of its events then follow for all runs together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moesaic.policy.cost.clock import ClassEvent, Clock, EventTimes
from moesaic.policy.cost.event import Event, RankGroups, Ranks, Seconds, Segment, StageTransfer
from moesaic.policy.cost.rank_classes import RankClasses

Flags = NDArray[np.bool_]
_ELEMENTS_PER_CALL = 1000
"""Elements that numpy computes in about the time of a call."""


@dataclass
class StepState:
    """State of all classes between two segments."""

    now: Seconds
    """Time of each class, [classes]."""
    computed_s: Seconds | None
    """Computing since the last collective, [classes]; None if no collective has a skew."""
    sent_s: dict[tuple[StageTransfer, int | None], Seconds] = field(default_factory=dict)
    """Time at which senders are done, by transfer and micro-batch; see `Clock.sent_s`."""
    is_idle: bool = True
    """True if no asynchronous collective is under way."""


class Start(NamedTuple):
    """State of a segment's classes when a run starts."""

    number: int
    """Position of the run in the step."""
    micro_batch: int | None
    now: Seconds
    computed_s: Seconds | None
    sent_s: Sequence[Seconds]
    """Time at which senders are done, for each transfer that another segment sends."""


class EventTotals(NamedTuple):
    """Seconds of an event over all runs of its segment, [classes]."""

    event: Event
    elapsed_s: Seconds
    """From arrival to end; 0 for an asynchronous collective."""
    waiting_s: Seconds
    """From arrival to start."""
    queueing_s: Seconds
    """Part of the waiting that the rank's own collectives cause."""
    async_s: Seconds
    """Duration as an asynchronous collective."""
    first_s: float
    """Time at which the first class arrives."""
    last_s: float
    """Time at which the last class ends."""


class EventSpan(NamedTuple):
    """One event on the clock of a rank, in seconds."""

    event: Event
    micro_batch: int | None
    """Micro-batch of a pipeline; None for events once per step, and without a pipeline."""
    arrive_s: float
    """Time at which the rank reaches the event."""
    begin_s: float
    """Start; later than `arrive_s` on a rank that waits."""
    end_s: float
    """End; for an asynchronous event all three times are equal."""
    async_interval: tuple[float, float] | None
    """Start and end of an asynchronous event."""


class SegmentMap(NamedTuple):
    """A segment from start to end, in max-plus algebra."""

    seconds: Seconds
    """Least seconds from the start of a class (column) to the end of another (row)."""
    computed_s: Seconds | None
    """Computing since the last collective, or since the start without one, [classes]."""


class ClassSegment:
    """A segment on the classes that it concerns, and its runs."""

    def __init__(self, segment: Segment, classes: RankClasses, num_runs: int) -> None:
        self.rows = _concerned_classes(segment.events, classes)
        self.starts: list[Start] = []
        self._events = list(_class_events(segment.events, classes, self.rows))
        sends = [event.sends for event in segment.events if event.sends is not None]
        receives = [event.receives for event in segment.events if event.receives is not None]
        self._received = [one for one in receives if one not in sends]
        self._sent = [one for one in sends if one not in receives]
        # A map takes a column for each class, where runs take one each.
        self._is_mapped = (
            not receives
            and all(event.sends is None for event in segment.events[:-1])
            and len(self.rows) ** 2 < _ELEMENTS_PER_CALL * (num_runs - 1)
        )
        self._maps: dict[bytes, SegmentMap] = {}
        collectives = [one for one in self._events if one.groups is not None]
        self._is_grouped = _in_groups(collectives, len(self.rows))
        skewed = (one for one in collectives if one.event.skew_s)
        self._is_skewed = _in_groups(skewed, len(self.rows))

    def run(self, state: StepState, number: int, micro_batch: int | None) -> None:
        """Advance `state` past one run, the `number`-th of the step."""
        assert state.is_idle, "a segment left an asynchronous collective under way"
        computed_s = None if state.computed_s is None else state.computed_s[self.rows]
        sent_s = [state.sent_s.pop((one, micro_batch)) for one in self._received]
        start = Start(number, micro_batch, state.now[self.rows], computed_s, sent_s)
        self.starts.append(start)
        if self._is_mapped:
            self._run_mapped(start, state)
            return
        clock = self._clock([start])
        for one in self._events:
            clock.advance(one)
        state.is_idle, state.now[self.rows] = clock.is_idle, clock.now[:, 0]
        if state.computed_s is not None and clock.computed_s is not None:
            state.computed_s[self.rows] = clock.computed_s[:, 0]
        for transfer in self._sent:
            state.sent_s[transfer, micro_batch] = clock.sent_s[transfer][:, 0]

    def totals(self) -> Iterator[EventTotals]:
        """Yield the seconds of each event over all runs."""
        clock, num_runs = self._clock(self.starts), len(self.starts)
        zeros = np.zeros(len(self.rows))
        for one in self._events:
            times = clock.advance(one)
            duration, async_s = num_runs * one.seconds[:, 0], zeros
            if times.async_interval is not None:
                duration, async_s = zeros, duration
            sums = _sum_times(times, zeros, duration)
            yield EventTotals(one.event, *sums, async_s, times.arrive_s.min(), times.end_s.max())

    def spans(self, row: int) -> Iterator[tuple[int, EventSpan]]:
        """Yield the events of each run on the class in `row`, with the position of the run."""
        clock = self._clock(self.starts)
        times = [(one.event, clock.advance(one)) for one in self._events]
        for case, start in enumerate(self.starts):
            for event, (arrive, begin, end, _, interval) in times:
                arrive_s, begin_s, end_s = (float(one[row, case]) for one in (arrive, begin, end))
                async_s = None
                if interval is not None:
                    async_s = float(interval[0][row, case]), float(interval[1][row, case])
                span = EventSpan(event, start.micro_batch, arrive_s, begin_s, end_s, async_s)
                yield start.number, span

    def _run_mapped(self, start: Start, state: StepState) -> None:
        """Advance `state` by the map of the segment."""
        key = b"" if start.computed_s is None else start.computed_s[self._is_skewed].tobytes()
        if key not in self._maps:
            self._maps[key] = self._map(start.computed_s)
        found = self._maps[key]
        state.now[self.rows] = end_s = (found.seconds + start.now).max(axis=1)
        if state.computed_s is not None and start.computed_s is not None:
            before_s = np.where(self._is_grouped, 0.0, start.computed_s)
            state.computed_s[self.rows] = before_s + found.computed_s
        for transfer in self._sent:
            state.sent_s[transfer, start.micro_batch] = end_s[self._events[-1].senders]

    def _map(self, computed_s: Seconds | None) -> SegmentMap:
        """Return the map of the segment, for classes that have computed so long."""
        never = np.full((len(self.rows),) * 2, -np.inf)
        np.fill_diagonal(never, 0.0)
        before_s = None
        if computed_s is not None:  # Other classes add what they have computed before.
            before_s = np.where(self._is_skewed, computed_s, 0.0)[:, None]
        clock = Clock(never, before_s, {})
        for one in self._events:
            clock.advance(one)
        assert clock.is_idle, "a segment left an asynchronous collective under way"
        return SegmentMap(clock.now, None if clock.computed_s is None else clock.computed_s[:, 0])

    def _clock(self, starts: Sequence[Start]) -> Clock:
        """Return the clock at `starts`, one in each column."""
        if len(starts) == 1:
            _, _, now, before_s, sent_s = starts[0]
            return Clock(
                now[:, None],
                None if before_s is None else before_s[:, None],
                {one: s[:, None] for one, s in zip(self._received, sent_s, strict=True)},
            )
        computed_s = [start.computed_s for start in starts if start.computed_s is not None]
        return Clock(
            np.stack([start.now for start in starts], axis=1),
            np.stack(computed_s, axis=1) if computed_s else None,
            {
                transfer: np.stack([start.sent_s[at] for start in starts], axis=1)
                for at, transfer in enumerate(self._received)
            },
        )


def _sum_times(
    times: EventTimes, zeros: Seconds, duration: Seconds
) -> tuple[Seconds, Seconds, Seconds]:
    """Return the sums of elapsed, waiting and queueing seconds, [classes].

    `duration` are the elapsed seconds without waiting.
    """
    arrive_s, begin_s, end_s = times.arrive_s, times.begin_s, times.end_s
    if begin_s is arrive_s:
        return duration, zeros, zeros
    waiting, queueing = (begin_s - arrive_s).sum(axis=1), zeros
    if times.channel_free_s is not None and times.channel_free_s is not arrive_s:
        own_s = np.minimum(times.channel_free_s, begin_s) - arrive_s
        queueing = np.maximum(own_s, 0.0).sum(axis=1)
    return (end_s - arrive_s).sum(axis=1), waiting, queueing


def _concerned_classes(events: Iterable[Event], classes: RankClasses) -> Ranks:
    """Return the classes that take part in some of `events`, at least one."""
    found = np.zeros(len(classes), bool)
    for seconds in {id(event.seconds): event.seconds for event in events}.values():
        found |= seconds[classes.first_rank] > 0
    for event in events:
        for group in classes.class_groups(event.groups):
            found[group] = True
        if event.sends is not None:
            found[classes.transfer(event.sends)[0]] = True
        if event.receives is not None:
            found[classes.transfer(event.receives)[1]] = True
    found[0] |= not found.any()
    return found.nonzero()[0]


def _class_events(
    events: Iterable[Event], classes: RankClasses, rows: Ranks
) -> Iterator[ClassEvent]:
    """Yield `events` on the classes `rows`."""
    first_rank, positions = classes.first_rank[rows], np.zeros(len(classes), np.int64)
    positions[rows] = np.arange(len(rows))
    groups_by_id: dict[int, tuple[RankGroups, bool]] = {}
    for event in events:
        groups, has_waiting = None, False
        if event.groups:
            if id(event.groups) not in groups_by_id:
                sets = classes.class_groups(event.groups)
                own = RankGroups([positions[one].tolist() for one in sets])
                groups_by_id[id(event.groups)] = own, max(map(len, sets)) > 1
            groups, has_waiting = groups_by_id[id(event.groups)]
        senders = receivers = None
        if event.sends is not None:
            senders = positions[classes.transfer(event.sends)[0]]
        if event.receives is not None:
            receivers = positions[classes.transfer(event.receives)[1]]
        seconds = event.seconds[first_rank][:, None]
        yield ClassEvent(event, seconds, groups, has_waiting, senders, receivers)


def _in_groups(collectives: Iterable[ClassEvent], num_classes: int) -> Flags:
    """Return whether each class takes part in some of `collectives`."""
    found = np.zeros(num_classes, bool)
    for one in collectives:
        if one.groups is not None:
            found |= one.groups.scatter(np.ones(len(one.groups), bool), found)
    return found
