"""Sums of gradients, each of which begins when backward has the last gradient of its bucket.

Where ranks compute while it is under way it takes them no time, until they wait for all sums; else
it takes its time at once. What backward ends with is left to that waiting.

What is an estimate: while a sum travels, what a layer has to say waits for it. In truth both share
the way, and are done at about the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from moesaic.facts.workload import STEP
from moesaic.facts.workload.sums import GRADIENTS
from moesaic.policy.cost.event import Event, Trip


def under_backward(
    backward: Sequence[Event], update: Sequence[Event], hides: Callable[[Event], bool]
) -> tuple[list[Event], list[Event]]:
    """The last backward of a step with the sums that leave in it, and an `update` without them.

    Args:
        backward: all of it, block by block.
        update: with sums, each of the block that has its last gradient.
        hides: whether a message takes its ranks no time while they compute.
    """
    ends = {event.block: at for at, event in enumerate(backward[:-1])}
    ends.pop(backward[-1].block if backward else "", None)
    leaving: dict[int, list[Event]] = {}
    rest = []
    for event in update:
        if event.groups and event.name in GRADIENTS and event.block in ends:
            leaving.setdefault(ends[event.block], []).append(replace(event, phase="backward"))
        else:
            rest.append(event)
    found: list[Event] = []
    last: Event | None = None
    for at, event in enumerate(backward):
        found.append(event)
        for one in leaving.get(at, ()):
            said = replace(one, beside=Trip()) if hides(one) else one
            found.append(said)
            last = said if said.beside is not None else last
    if last is None:
        return found, rest
    wait = Event(last.name, "reduce", STEP, np.zeros_like(last.seconds), awaits=last.beside)
    at = next((n for n, one in enumerate(rest) if one.phase not in ("data", "backward")), len(rest))
    return found, [*rest[:at], wait, *rest[at:]]
