"""Slow reference of timelines: every rank runs every event of every micro-batch.

All ranks advance through one list of events as arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from moesaic.policy.cost.event import (
    PIPELINE,
    AsyncMessage,
    Event,
    RankGroups,
    Seconds,
    Segment,
    SegmentRun,
    StageTransfer,
    Step,
)
from moesaic.policy.cost.timeline import Timeline, simulate_step


def simulate_events(events: Iterable[Event], ranks: int) -> Timeline:
    """Return the timeline of a step of these events."""
    return simulate_step([SegmentRun(Segment(list(events)))], ranks)


def unfold(step: Step) -> list[Event]:
    """Return the events of all runs, with transfers and names of their own."""
    transfers: dict[tuple[StageTransfer | None, int | None], StageTransfer] = {}

    def own(transfer: StageTransfer | None, number: int | None) -> StageTransfer | None:
        if transfer is None:
            return None
        return transfers.setdefault((transfer, number), replace(transfer))

    found = []
    for segment, number in step:
        for event in segment.events:
            name = event.name if number is None or event.groups else f"{event.name} {number}"
            sends, receives = own(event.sends, number), own(event.receives, number)
            found.append(replace(event, name=name, sends=sends, receives=receives))
    return found


@dataclass(frozen=True)
class SlowSpan:
    """One event on the clock, in seconds by rank."""

    event: Event
    arrive_s: Seconds
    """Time at which each rank reaches the event."""
    begin_s: Seconds
    """Start on each rank; later than `arrive_s` on ranks that wait."""
    end_s: Seconds
    """End on each rank; for an asynchronous event all three times are equal."""
    async_interval: tuple[Seconds, Seconds] | None = None
    """Start and end of an asynchronous event."""
    channel_free_s: Seconds | None = None
    """Time until which the rank's own collectives block the event."""


@dataclass(frozen=True)
class SlowTimeline:
    """Simulated step."""

    spans: Sequence[SlowSpan]
    end_s: Seconds
    """End of the step by rank."""

    @property
    def step_s(self) -> float:
        """Time until the last rank ends, in seconds."""
        return float(self.end_s.max())

    @cached_property
    def critical_rank(self) -> int:
        """The rank that waits least among those that end last.

        All ranks that meet in a final collective end last.
        """
        waiting = np.zeros_like(self.end_s)
        for span in self.spans:
            waiting += span.begin_s - span.arrive_s
        waiting[self.end_s < self.end_s.max()] = np.inf
        return int(waiting.argmin())

    def seconds_by_phase(self, rank: int) -> dict[str, float]:
        """Return seconds by phase on one rank, waiting included."""
        return _sum_by_name((span.event.phase, span, rank) for span in self.spans)

    def seconds_by_block(self, rank: int) -> dict[str, float]:
        """Return seconds by block on one rank, waiting included."""
        return _sum_by_name((span.event.block, span, rank) for span in self.spans)

    def max_seconds_by_block(self) -> dict[str, float]:
        """Return seconds by block, waiting included, on the slowest rank of each block."""
        found: dict[str, Seconds] = {}
        for span in self.spans:
            seconds = found.setdefault(span.event.block, np.zeros_like(self.end_s))
            seconds += span.end_s - span.arrive_s
        return {block: float(seconds.max()) for block, seconds in found.items()}

    def waiting_s(self, rank: int) -> float:
        """Return the seconds that a rank waits for others or for asynchronous collectives."""
        return float(sum(span.begin_s[rank] - span.arrive_s[rank] for span in self.spans))

    def queueing_s(self, rank: int) -> float:
        """Return the part of `waiting_s` that the rank's own collectives cause."""
        blocked = ((span, span.channel_free_s) for span in self.spans)
        return float(
            sum(
                max(min(own_s[rank], span.begin_s[rank]) - span.arrive_s[rank], 0.0)
                for span, own_s in blocked
                if own_s is not None
            )
        )

    def communication_s(self, rank: int) -> float:
        """Return the seconds of a rank's synchronous collectives and transfers."""
        collectives = (span for span in self.spans if span.event.is_communication)
        return float(sum(span.end_s[rank] - span.begin_s[rank] for span in collectives))

    def overlapped_s(self, rank: int) -> tuple[float, float]:
        """Return the seconds of a rank's overlapped collectives, and those of waiting for them."""
        sent = waited = 0.0
        for span in self.spans:
            if span.async_interval is not None:
                sent += float(span.async_interval[1][rank] - span.async_interval[0][rank])
            elif span.event.waits_for is not None:
                waited += float(span.begin_s[rank] - span.arrive_s[rank])
        return sent, waited

    def bubble_fraction(self) -> float:
        """Return the mean fraction of a step's pipeline that ranks wait for other stages."""
        spans = [span for span in self.spans if span.event.phase == PIPELINE]
        if not spans:
            return 0.0
        busy = np.zeros_like(self.end_s)
        for span in spans:
            if span.event.receives is None:
                busy += span.end_s - span.arrive_s
        pipeline_s = float(spans[-1].end_s.max() - spans[0].arrive_s.min())
        return 1.0 - float(busy.mean()) / pipeline_s if pipeline_s else 0.0


def run_all(step: Step, ranks: int) -> SlowTimeline:
    """Run all events of `step` on `ranks` ranks."""
    clock = _Clock(np.zeros(ranks), np.zeros(ranks))
    spans = [clock.advance(event) for event in unfold(step)]
    return SlowTimeline(spans, clock.now)


@dataclass
class _Clock:
    """Time of each rank."""

    now: Seconds
    computed_s: Seconds
    """Computing of each rank since its last collective."""
    channel_busy_s: dict[str, Seconds] = field(default_factory=dict)
    """Time until which each channel is busy, by rank."""
    sent_s: dict[StageTransfer, Seconds] = field(default_factory=dict)
    async_end_s: dict[AsyncMessage, Seconds] = field(default_factory=dict)
    """End of asynchronous collectives, by rank."""
    _rank_groups: dict[int, RankGroups] = field(default_factory=dict)

    def advance(self, event: Event) -> SlowSpan:
        """Advance all ranks past `event`, and return its times."""
        start, own = self.now, None
        if event.receives is not None:
            left = self.sent_s.pop(event.receives)
            begin, end = _receive(event.receives, start, left, event.seconds)
        else:
            begin = start
            if event.waits_for is not None:
                own = begin = np.maximum(start, self.async_end_s[event.waits_for])
            if event.groups:
                own = begin
                for channel in event.channels:
                    own = np.maximum(own, self.channel_busy_s.get(channel, own))
                begin = self._start_together(event, begin, own)
            else:
                self.computed_s = self.computed_s + event.seconds
            end = begin + event.seconds
            if event.launches is not None:
                self.async_end_s[event.launches] = end
                for channel in event.channels:
                    self.channel_busy_s[channel] = np.maximum(
                        self.channel_busy_s.get(channel, end), end
                    )
                return SlowSpan(event, start, start, start, (begin, end))
        if event.sends is not None:
            self.sent_s[event.sends] = end
        self.now = end
        return SlowSpan(event, start, begin, end, channel_free_s=own)

    def _start_together(self, event: Event, ready_s: Seconds, free_s: Seconds) -> Seconds:
        """Return the start of a collective by rank: when the last rank of its group is ready.

        Args:
            event: the collective.
            ready_s: time at which each rank reaches it; ranks without a group keep it.
            free_s: time at which each rank's channels are free.
        """
        # Spans keep their events, so groups live as long as their identity is used.
        key = id(event.groups)
        if key not in self._rank_groups:
            self._rank_groups[key] = RankGroups(event.groups)
        members = self._rank_groups[key]
        # Skew makes the last rank of a group late.
        ready = free_s + event.skew_s * np.sqrt(self.computed_s)
        self.computed_s = members.scatter(np.zeros(len(event.groups)), self.computed_s)
        return members.scatter(members.group_max(ready), ready_s)


def _receive(
    transfer: StageTransfer, now_s: Seconds, sent_s: Seconds, seconds: Seconds
) -> tuple[Seconds, Seconds]:
    """Return the start and end of `transfer` by rank; `sent_s` is when senders are done."""
    begin, end = now_s.copy(), now_s.copy()
    sent, duration = sent_s[transfer.senders], seconds[transfer.receivers]
    begin_there = np.maximum(now_s[transfer.receivers], sent)
    begin[transfer.receivers] = begin_there
    end[transfer.receivers] = (
        np.maximum(begin_there, sent + duration) if transfer.is_eager else begin_there + duration
    )
    return begin, end


def _sum_by_name(entries: Iterable[tuple[str, SlowSpan, int]]) -> dict[str, float]:
    result: dict[str, float] = {}
    for name, span, rank in entries:
        result[name] = result.get(name, 0.0) + float(span.end_s[rank] - span.arrive_s[rank])
    return result
