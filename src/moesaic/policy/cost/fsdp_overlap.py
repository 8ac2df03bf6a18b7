"""Overlap of FSDP collectives with computing on asynchronous devices, as in FSDP2 of torch 2.13.

- Forward: the all-gather of a layer starts when the parameters of the layer two before it are in
  place. It also needs the host, which an expert layer blocks until its tokens are counted.
- Backward: the all-gather of a layer runs while the layer before it in backward order computes.
- A layer's reduce-scatter starts when its backward is done; the next layer's follows it.

CPU ranks do not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moesaic.facts.workload import STEP
from moesaic.policy.cost.event import AsyncMessage, Event

_UNSHARD, _ALL_GATHER = "unshard", "parameters"
_RESHARD, _REDUCE_SCATTER, _REPLICA_ALL_REDUCE = "reshard", "gradients", "replicas"
_TOKEN_COUNTS = "dispatch"
"""Event that blocks the host until tokens are counted."""


def overlap_forward(events: Sequence[Event]) -> list[Event]:
    """Return the events of a forward pass with prefetched all-gathers."""
    others, needs = _split_all_gathers(events)
    counted = [at for at, event in enumerate(others) if event.name == _TOKEN_COUNTS]
    places = []
    for number, need in enumerate(needs):
        ready = needs[number - 2] + 1 if number > 1 else 0
        places.append(max([ready, *(at for at in counted if at < need)]))
    return _prefetch_all_gathers(events, places)


def overlap_backward(events: Sequence[Event]) -> list[Event]:
    """Return the events of backward with prefetched all-gathers and asynchronous reductions."""
    _, needs = _split_all_gathers(events)
    found: list[Event] = []
    last_scatter: AsyncMessage | None = None
    last: AsyncMessage | None = None
    for event in _prefetch_all_gathers(
        events, [0, *(need + 1 for need in needs[:-1])][: len(needs)]
    ):
        if event.name in (_REDUCE_SCATTER, _REPLICA_ALL_REDUCE):
            last = AsyncMessage()
            last_scatter = last if event.name == _REDUCE_SCATTER else last_scatter
            found.append(replace(event, launches=last))
        elif event.name == _RESHARD:
            found.append(replace(event, waits_for=last_scatter))
        else:
            found.append(event)
    if last is not None:
        one = events[0]
        found.append(
            Event(_REDUCE_SCATTER, one.phase, STEP, np.zeros_like(one.seconds), waits_for=last)
        )
    return found


def add_replica_reductions(
    events: Sequence[Event], update: Sequence[Event]
) -> tuple[list[Event], list[Event]]:
    """Return the last backward of a step with replica all-reduces, and `update` without them.

    Each layer's all-reduce follows its reduce-scatter.
    """
    all_reduces = {event.block: event for event in update if event.name == _REPLICA_ALL_REDUCE}
    found = []
    for event in events:
        found.append(event)
        if event.name == _REDUCE_SCATTER and event.block in all_reduces:
            found.append(all_reduces[event.block])
    return found, [event for event in update if event.name != _REPLICA_ALL_REDUCE]


def _split_all_gathers(events: Sequence[Event]) -> tuple[list[Event], list[int]]:
    """Return the events without parameter all-gathers, and the positions that need parameters."""
    others = [event for event in events if event.name != _ALL_GATHER]
    return others, [at for at, event in enumerate(others) if event.name == _UNSHARD]


def _prefetch_all_gathers(events: Sequence[Event], positions: Sequence[int]) -> list[Event]:
    """Return the events with each all-gather launched before its position among the others."""
    others, needs = _split_all_gathers(events)
    launches, awaits = dict[int, list[Event]](), dict[int, AsyncMessage]()
    gathers = (event for event in events if event.name == _ALL_GATHER)
    for gather, need, place in zip(gathers, needs, positions, strict=True):
        awaits[need] = AsyncMessage()
        launches.setdefault(place, []).append(replace(gather, launches=awaits[need]))
    found = []
    for at, event in enumerate(others):
        found += launches.get(at, [])
        found.append(replace(event, waits_for=awaits[at]) if at in awaits else event)
    return found
