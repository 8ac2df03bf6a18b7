"""What FSDP sends beside computing where a host hands its device work ahead of time: on a GPU, and
not on a CPU. This is what FSDP2 of torch 2.13 does by itself.

Parameters come ahead of the layer that needs them. Forward, as soon as those of the last but one
before it lie where they belong; but not before the host gets to ask for them, which an expert layer
keeps waiting until its tokens are counted. Backward, while the layer behind it is computed.
Gradients leave when their layer is done, and those of the next one when they have gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moesaic.facts.workload import STEP
from moesaic.policy.cost.event import Event, Trip

_NEEDS, _GATHERS = "unshard", "parameters"
_GIVES, _SCATTERS, _SUMS = "reshard", "gradients", "copies"
_COUNTED = "dispatch"
"""What the host waits for counts for."""


def forward(events: Sequence[Event]) -> list[Event]:
    """A pass through the layers."""
    own, needs = _apart(events)
    counted = [at for at, event in enumerate(own) if event.name == _COUNTED]
    places = []
    for number, need in enumerate(needs):
        ready = needs[number - 2] + 1 if number > 1 else 0
        places.append(max([ready, *(at for at in counted if at < need)]))
    return _asked(events, places)


def backward(events: Sequence[Event]) -> list[Event]:
    """The pass back; where it ends early, parameters of one layer more are asked for in vain."""
    _, needs = _apart(events)
    num_asked = sum(event.name == _GATHERS for event in events)
    found: list[Event] = []
    gone: Trip | None = None
    last: Trip | None = None
    for event in _asked(events, [0, *(need + 1 for need in needs)][:num_asked]):
        if event.name in (_SCATTERS, _SUMS):
            last = Trip()
            gone = last if event.name == _SCATTERS else gone
            found.append(replace(event, beside=last))
        elif event.name == _GIVES:
            found.append(replace(event, awaits=gone))
        else:
            found.append(event)
    if last is not None:
        one = events[0]
        found.append(Event(_SCATTERS, one.phase, STEP, np.zeros_like(one.seconds), awaits=last))
    return found


def with_copies(
    events: Sequence[Event], update: Sequence[Event]
) -> tuple[list[Event], list[Event]]:
    """The last pass back of a step, each layer's gradients with their sum over copies, which no
    `update` has then."""
    copies = {event.block: event for event in update if event.name == _SUMS}
    found = []
    for event in events:
        found.append(event)
        if event.name == _SCATTERS and event.block in copies:
            found.append(copies[event.block])
    return found, [event for event in update if event.name != _SUMS]


def _apart(events: Sequence[Event]) -> tuple[list[Event], list[int]]:
    """What is left without the messages that bring parameters, and where in it they are needed."""
    own = [event for event in events if event.name != _GATHERS]
    return own, [at for at, event in enumerate(own) if event.name == _NEEDS]


def _asked(events: Sequence[Event], places: Sequence[int]) -> list[Event]:
    """The same, where each message that brings parameters begins before what stands at its place of
    what is left."""
    own, needs = _apart(events)
    asked: dict[int, list[Event]] = {}
    awaited = {}
    gathers = (event for event in events if event.name == _GATHERS)
    for number, (gather, place) in enumerate(zip(gathers, places, strict=True)):
        trip = Trip()
        if number < len(needs):
            awaited[needs[number]] = trip
        asked.setdefault(place, []).append(replace(gather, beside=trip))
    found = []
    for at, event in enumerate(own):
        found += asked.get(at, [])
        found.append(replace(event, awaits=awaited[at]) if at in awaited else event)
    return found
