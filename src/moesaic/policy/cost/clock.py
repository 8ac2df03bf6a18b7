"""Clocks of classes of ranks, which the events of a segment advance.

Arrays have a row for each class and a column for each case. Cases are runs of the segment with
their own starts, or unit vectors: ranks only add seconds and wait for the latest, so in max-plus
algebra a segment is a linear map from its start to its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from moesaic.policy.cost.event import (
    AsyncMessage,
    Event,
    RankGroups,
    Ranks,
    Seconds,
    StageTransfer,
)


class ClassEvent(NamedTuple):
    """An event on the classes of its segment."""

    event: Event
    seconds: Seconds
    """Duration by class, [classes, 1]."""
    groups: RankGroups | None
    """Distinct groups of classes that start together; None for computing and transfers."""
    has_waiting: bool
    """True if a group has several classes, which may wait for one another."""
    senders: Ranks | None
    """Classes that send when the event ends, one for each class of receivers."""
    receivers: Ranks | None
    """Classes that receive."""


class EventTimes(NamedTuple):
    """Times of an event, [classes, cases]."""

    arrive_s: Seconds
    """Time at which a class reaches the event."""
    begin_s: Seconds
    """Start; later than `arrive_s` for classes that wait."""
    end_s: Seconds
    """End; for an asynchronous event all three times are equal."""
    channel_free_s: Seconds | None = None
    """Time until which the rank's own collectives block the event."""
    async_interval: tuple[Seconds, Seconds] | None = None
    """Start and end of an asynchronous event."""


@dataclass
class Clock:
    """Clocks of the classes of a segment."""

    now: Seconds
    computed_s: Seconds | None
    """Computing since the last collective; None if no collective of the step has a skew."""
    sent_s: dict[StageTransfer, Seconds]
    """Time at which senders are done, for each class of receivers."""
    _channel_busy_s: dict[str, Seconds] = field(default_factory=dict)
    """Time until which each channel is busy."""
    _async_end_s: dict[AsyncMessage, Seconds] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        """True if no asynchronous collective is under way."""
        return not any((busy_s > self.now).any() for busy_s in self._channel_busy_s.values())

    def advance(self, one: ClassEvent) -> EventTimes:
        """Advance past an event, and return its times."""
        if one.event.receives is not None:
            times = self._receive(one, one.event.receives)
        else:
            times = self._run(one)
        self.now = times.end_s
        if one.event.sends is not None:
            self.sent_s[one.event.sends] = times.end_s[one.senders]
        return times

    def _run(self, one: ClassEvent) -> EventTimes:
        """Return the times of computing or of a collective."""
        start, event, free = self.now, one.event, None
        begin = start
        if event.waits_for is not None:
            free = begin = np.maximum(start, self._async_end_s[event.waits_for])
        if one.groups is not None:
            free = begin
            for channel in event.channels:
                if channel in self._channel_busy_s:
                    free = np.maximum(free, self._channel_busy_s[channel])
            begin = self._start_together(one, one.groups, begin, free)
        elif self.computed_s is not None:
            self.computed_s = self.computed_s + one.seconds
        end = begin + one.seconds
        if event.launches is None:
            return EventTimes(start, begin, end, free)
        self._async_end_s[event.launches] = end
        for channel in event.channels:
            busy_s = self._channel_busy_s.get(channel, end)
            self._channel_busy_s[channel] = np.maximum(busy_s, end)
        return EventTimes(start, start, start, None, (begin, end))

    def _receive(self, one: ClassEvent, transfer: StageTransfer) -> EventTimes:
        """Return the times of a transfer on the side of its receivers."""
        start, sent_s, rows = self.now, self.sent_s.pop(transfer), one.receivers
        begin, end, seconds = start.copy(), start.copy(), one.seconds[rows]
        begin_there = np.maximum(start[rows], sent_s)
        begin[rows] = begin_there
        end[rows] = (
            np.maximum(begin_there, sent_s + seconds)
            if transfer.is_eager
            else begin_there + seconds
        )
        return EventTimes(start, begin, end)

    def _start_together(
        self, one: ClassEvent, groups: RankGroups, ready_s: Seconds, free_s: Seconds
    ) -> Seconds:
        """Return the start of a collective: when the last class of each group is ready.

        Args:
            one: the collective.
            groups: its groups of classes.
            ready_s: time at which each class reaches it; classes without a group keep it.
            free_s: time at which the channels of each class are free.
        """
        if self.computed_s is not None:
            # Skew makes the last rank of a group late.
            free_s = free_s + one.event.skew_s * np.sqrt(self.computed_s)
            self.computed_s = groups.scatter(np.zeros((len(groups), 1)), self.computed_s)
        if not one.has_waiting and free_s is ready_s:
            return ready_s
        return groups.scatter(groups.group_max(free_s), ready_s)
