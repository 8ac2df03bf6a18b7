"""Sums of gradients, each of which begins when backward has the last gradient of its bucket.

Where ranks compute while it is under way it takes them no time, until they wait for all sums; else
it takes its time at once. What backward ends with is left to that waiting.

What is an estimate: what a layer has to say between hosts waits while a sum travels there, and so
within hosts. In truth both share the way, and are done at about the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from moesaic.facts.workload import STEP
from moesaic.facts.workload.sums import GRADIENTS
from moesaic.policy.cost.event import Event, Trip

_BETWEEN = "between hosts"


class Ways(Protocol):
    """What is known of the ways between ranks."""

    def hides(self, message: Event) -> bool:
        """Whether it takes its ranks no time while they compute."""

    def leaves_hosts(self, message: Event) -> bool:
        """Whether it is between hosts."""


def under_backward(
    backward: Sequence[Event], update: Sequence[Event], ways: Ways
) -> tuple[list[Event], list[Event]]:
    """The last backward of a step with the sums that leave in it, and an `update` without them.

    Args:
        backward: all of it, block by block.
        update: with sums, each of the block that has its last gradient.
        ways: between ranks.
    """
    ends = {event.block: at for at, event in enumerate(backward[:-1])}
    ends.pop(backward[-1].block if backward else "", None)
    leaving: dict[int, list[Event]] = {}
    rest = []
    for event in update:
        if event.groups and event.name in GRADIENTS and event.block in ends:
            leaving.setdefault(ends[event.block], []).append(_launched(event, ways))
        else:
            rest.append(event)
    found: list[Event] = []
    for at, event in enumerate(backward):
        found += [_beside_sums(event, ways) if leaving else event, *leaving.get(at, ())]
    hidden = [one for some in leaving.values() for one in some if one.beside is not None]
    if not hidden:
        return found, rest
    waits = [
        Event(one.name, "reduce", STEP, np.zeros_like(one.seconds), awaits=one.beside)
        for one in {one.over: one for one in hidden}.values()  # The last one over each way.
    ]
    at = next((n for n, one in enumerate(rest) if one.phase not in ("data", "backward")), len(rest))
    return found, [*rest[:at], *waits, *rest[at:]]


def _launched(event: Event, ways: Ways) -> Event:
    if not ways.hides(event):
        return replace(event, phase="backward")
    over = (_BETWEEN,) if ways.leaves_hosts(event) else event.over
    return replace(event, phase="backward", beside=Trip(), over=over)


def _beside_sums(event: Event, ways: Ways) -> Event:
    """What is said between hosts waits for sums that travel there."""
    if not event.groups or not ways.leaves_hosts(event):
        return event
    return replace(event, over=(*event.over, _BETWEEN))
