"""Tokens of an expert layer that travel in chunks: while experts compute with one, the next one
comes and what they made of the one before goes home. Backward gradients do, the other way round.
What is local is computed before, between and after chunks, if it is computed by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from moesaic.facts.workload import EXPERTS, RESULTS, TOKENS
from moesaic.policy.cost.event import Event, Trip

Chunks = list[list[Event]]
"""What is said of each, trip by trip."""


def woven(
    computed: Sequence[Event],
    said: Sequence[Event],
    shape: tuple[int, int],
    hides: Callable[[Event], bool],
    *,
    local_first: bool = False,
) -> Iterator[Event]:
    """A block one way, of what is `computed` and `said` in it, each in its order.

    Args:
        computed: operations; those of experts chunk by chunk.
        said: messages; exchanges chunk by chunk.
        shape: how many chunks there are, and trips of each.
        local_first: whether experts compute before, between and after chunks as well.
        hides: whether a message takes its ranks no time while they compute.
    """
    left, times = deque(said), shape[0] + (shape[0] + 1) * local_first
    for sparse, run in groupby(computed, lambda event: event.name == EXPERTS):
        ops = list(run)
        while sparse and len(ops) >= times:
            now, ops = ops[:times], ops[times:]
            while left and not _exchanges(left[0]):
                yield left.popleft()
            coming = _taken(left, shape)
            local = deque(now[::2]) if local_first else deque[Event]()
            now = now[1::2] if local_first else now
            yield from _woven(now, coming, _taken(left, shape), hides, local)
        yield from ops
    yield from left


def _exchanges(event: Event) -> bool:
    return event.name in (TOKENS, RESULTS)


def _taken(left: deque[Event], shape: tuple[int, int]) -> Chunks:
    """The next exchange, if one is `left`, without what is said between its trips."""
    chunks, trips = shape
    found = [event for event in left if _exchanges(event)][: chunks * trips]
    for event in found:
        left.remove(event)
    return [found[at : at + trips] for at in range(0, len(found), trips)]


def _woven(
    ops: Sequence[Event],
    coming: Chunks,
    going: Chunks,
    hides: Callable[[Event], bool],
    local: deque[Event],
) -> Iterator[Event]:
    """The experts' part of it: of the trips of what comes the first is beside computing, and the
    last one of what goes."""
    under_way = list[Event]()  # Chunks that come, as far as they have left.
    gone: Trip | None = None

    def launched(event: Event) -> Event:
        return replace(event, beside=Trip()) if hides(event) else event

    for at, op in enumerate(ops):
        if coming and not at:
            under_way.append(launched(coming[0][0]))
            yield under_way[0]
        if local:
            yield local.popleft()
        arrived = under_way[at].beside if coming else None
        if arrived is not None:
            yield _awaited(op, arrived)
        yield from (_inside(event) for event in (coming[at][1:] if coming else ()))
        if coming[at + 1 :]:
            under_way.append(launched(coming[at + 1][0]))
            yield under_way[-1]
        yield op
        if gone is not None:
            yield _awaited(op, gone)
        if going:
            *before, last = going[at]
            last = launched(last)
            gone = last.beside
            yield from (*map(_inside, before), last)
    yield from local
    if gone is not None:
        yield _awaited(ops[-1], gone)


def _inside(event: Event) -> Event:
    return replace(event, inside=True)


def _awaited(op: Event, trip: Trip) -> Event:
    """Nothing but waiting until it is over."""
    return Event(EXPERTS, op.phase, op.block, np.zeros_like(op.seconds), awaits=trip)
