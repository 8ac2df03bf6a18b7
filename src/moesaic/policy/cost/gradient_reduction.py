"""Overlap of gradient reductions with backward.

A reduction starts when backward has computed the last gradient of its bucket. If it can overlap, it
costs no time until the step waits for all reductions; else it takes its time at once. Reductions
that become ready with the last event of backward stay in the update.

One approximation: a layer's collective on the same link waits for a reduction that is under way.
Real transfers share the link and end at about the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moesaic.facts.workload import STEP
from moesaic.facts.workload.gradient_reduction import OVERLAPPED_REDUCTIONS
from moesaic.policy.cost.cluster_costs import ClusterCosts
from moesaic.policy.cost.event import AsyncMessage, Event

_INTER_HOST = "between hosts"


def overlap_reductions(
    backward: Sequence[Event], update: Sequence[Event], costs: ClusterCosts
) -> tuple[list[Event], list[Event]]:
    """Return the last backward of a step with its reductions, and `update` without them.

    Args:
        backward: all events of backward, block by block.
        update: events of the update; each reduction belongs to the block with its last gradient.
        costs: costs on the cluster, which tell what overlaps.
    """
    ends = {event.block: at for at, event in enumerate(backward[:-1])}
    ends.pop(backward[-1].block if backward else "", None)
    launched: dict[int, list[Event]] = {}
    rest = []
    for event in update:
        if event.groups and event.name in OVERLAPPED_REDUCTIONS and event.block in ends:
            launched.setdefault(ends[event.block], []).append(_launch(event, costs))
        else:
            rest.append(event)
    found: list[Event] = []
    for at, event in enumerate(backward):
        found += [
            _share_inter_host_channel(event, costs) if launched else event,
            *launched.get(at, ()),
        ]
    overlapped = [one for some in launched.values() for one in some if one.launches is not None]
    if not overlapped:
        return found, rest
    waits = [
        Event(one.name, "reduce", STEP, np.zeros_like(one.seconds), waits_for=one.launches)
        # The last reduction of each channel.
        for one in {one.channels: one for one in overlapped}.values()
    ]
    at = next((n for n, one in enumerate(rest) if one.phase not in ("data", "backward")), len(rest))
    return found, [*rest[:at], *waits, *rest[at:]]


def _launch(event: Event, costs: ClusterCosts) -> Event:
    if not costs.overlaps(event):
        return replace(event, phase="backward")
    channels = (_INTER_HOST,) if costs.is_inter_host(event) else event.channels
    return replace(event, phase="backward", launches=AsyncMessage(), channels=channels)


def _share_inter_host_channel(event: Event, costs: ClusterCosts) -> Event:
    """Return `event`, queued behind reductions between hosts if it crosses hosts."""
    if not event.groups or not costs.is_inter_host(event):
        return event
    return replace(event, channels=(*event.channels, _INTER_HOST))
