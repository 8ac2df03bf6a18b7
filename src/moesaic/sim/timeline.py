"""A step on a clock: every rank goes through the events, and waits where others come later.

All ranks go from event to event together, so that a thousand cost little more than one. In a
pipeline too: ranks of parts that an event does not concern pass it in no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from moesaic.policy.cost.event import Event, Handover, Members, Seconds, Trip


@dataclass(frozen=True)
class Span:
    """One event on the clock, by rank."""

    event: Event
    start_s: Seconds
    """When each rank came to it."""
    begin_s: Seconds
    """When it began there: later than `start_s` for who had to wait."""
    end_s: Seconds
    """When it was over; of what travels beside all three are the same."""
    away: tuple[Seconds, Seconds] | None = None
    """When what travels beside began, and was over."""
    own_s: Seconds | None = None
    """Until when each rank's own messages that are under way keep it from beginning."""


@dataclass(frozen=True)
class Timeline:
    """What a step would be."""

    spans: Sequence[Span]
    end_s: Seconds
    """When each rank is done."""

    @property
    def step_s(self) -> float:
        """The time until the last rank is done."""
        return float(self.end_s.max())

    @cached_property
    def slowest(self) -> int:
        """Of those who are done last, as all are that meet at the end, who waits least."""
        waiting = np.zeros_like(self.end_s)
        for span in self.spans:
            waiting += span.begin_s - span.start_s
        waiting[self.end_s < self.end_s.max()] = np.inf
        return int(waiting.argmin())

    def by_phase(self, rank: int) -> dict[str, float]:
        """Seconds of one rank by phase, waiting included."""
        return _sums((span.event.phase, span, rank) for span in self.spans)

    def by_block(self, rank: int) -> dict[str, float]:
        """Seconds of one rank by block, waiting included."""
        return _sums((span.event.block, span, rank) for span in self.spans)

    def longest_by_block(self) -> dict[str, float]:
        """Seconds by block, waiting included, on the rank that takes longest over it."""
        found: dict[str, Seconds] = {}
        for span in self.spans:
            known = found.setdefault(span.event.block, np.zeros_like(self.end_s))
            known += span.end_s - span.start_s
        return {block: float(seconds.max()) for block, seconds in found.items()}

    def waiting_s(self, rank: int) -> float:
        """Seconds that one rank waits for others, or for what travels beside."""
        return float(sum(span.begin_s[rank] - span.start_s[rank] for span in self.spans))

    def queueing_s(self, rank: int) -> float:
        """Of that, what it waits until messages of its own are over."""
        held = ((span, span.own_s) for span in self.spans)
        return float(
            sum(
                max(min(own_s[rank], span.begin_s[rank]) - span.start_s[rank], 0.0)
                for span, own_s in held
                if own_s is not None
            )
        )

    def speaking_s(self, rank: int) -> float:
        """Seconds of its messages, but for those beside."""
        said = (span for span in self.spans if span.event.is_message)
        return float(sum(span.end_s[rank] - span.begin_s[rank] for span in said))

    def beside_s(self, rank: int) -> tuple[float, float]:
        """Seconds of what it sends beside computing, and of its waiting for that."""
        sent = waited = 0.0
        for span in self.spans:
            if span.away is not None:
                sent += float(span.away[1][rank] - span.away[0][rank])
            elif span.event.awaits is not None:
                waited += float(span.begin_s[rank] - span.start_s[rank])
        return sent, waited


def run(events: Iterable[Event], ranks: int) -> Timeline:
    """Let `ranks` ranks go through `events`, in their order."""
    clock = _Clock(np.zeros(ranks), np.zeros(ranks))
    spans = [clock.pass_by(event) for event in events]
    return Timeline(spans, clock.now)


@dataclass
class _Clock:
    """The time of each rank."""

    now: Seconds
    computed: Seconds
    """What it has computed since it last met others."""
    spoken: dict[str, Seconds] = field(default_factory=dict)
    """Until when what it sends beside is under way, by way."""
    left: dict[Handover, Seconds] = field(default_factory=dict)
    trips: dict[Trip, Seconds] = field(default_factory=dict)
    """When what travels beside is over."""
    _tables: dict[int, Members] = field(default_factory=dict)

    def pass_by(self, event: Event) -> Span:
        """What `event` is on each rank."""
        start, own = self.now, None
        if event.takes is not None:
            left = self.left.pop(event.takes)
            begin, end = _taken_over(event.takes, start, left, event.seconds)
        else:
            begin = start
            if event.awaits is not None:
                own = begin = np.maximum(start, self.trips[event.awaits])
            if event.groups:
                own = begin
                for way in () if event.inside else event.over:
                    own = np.maximum(own, self.spoken.get(way, own))
                begin = self._meet(event, begin, own)
            else:
                self.computed = self.computed + event.seconds
            end = begin + event.seconds
            if event.beside is not None:
                self.trips[event.beside] = end
                for way in event.over:
                    self.spoken[way] = np.maximum(self.spoken.get(way, end), end)
                return Span(event, start, start, start, (begin, end))
        if event.leaves is not None:
            self.left[event.leaves] = end
        self.now = end
        return Span(event, start, begin, end, own_s=own)

    def _meet(self, event: Event, ready: Seconds, free: Seconds) -> Seconds:
        """When ranks that were `ready` begin to speak, and have said what they had to say before
        when they are `free`."""
        # Spans keep their events, so that groups live as long as their identity is used.
        key = id(event.groups)
        if key not in self._tables:
            self._tables[key] = Members(event.groups)
        members = self._tables[key]
        # The last of a group has come, which may be late.
        there = free + event.skew_s * np.sqrt(self.computed)
        self.computed = members.spread(np.zeros(len(event.groups)), self.computed)
        return members.spread(members.most(there), ready)


def _taken_over(
    handover: Handover, now: Seconds, left: Seconds, seconds: Seconds
) -> tuple[Seconds, Seconds]:
    """When receivers have waited until it `left`, and when they have it: `seconds` on the way."""
    begin, end = now.copy(), now.copy()
    gone, travels = left[handover.senders], seconds[handover.receivers]
    met = np.maximum(now[handover.receivers], gone)
    begin[handover.receivers] = met
    end[handover.receivers] = np.maximum(met, gone + travels) if handover.ahead else met + travels
    return begin, end


def _sums(rows: Iterable[tuple[str, Span, int]]) -> dict[str, float]:
    result: dict[str, float] = {}
    for name, span, rank in rows:
        result[name] = result.get(name, 0.0) + float(span.end_s[rank] - span.start_s[rank])
    return result
