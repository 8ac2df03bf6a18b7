"""Time of a step with expert state on drives.

Transfers overlap with computing, so a phase takes the longer of both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moesaic.facts.cluster import Cluster, Disk, Host, Place
from moesaic.facts.workload import STEP
from moesaic.policy.cost.event import Event, Segment, SegmentRun, Step
from moesaic.policy.cost.timeline import simulate_step

WAIT = "drive"
"""Name of the events in which ranks wait for their drive."""

Traffic = Mapping[str, Mapping[str, int]]
"""`read_bytes` and `written_bytes` of a rank in one step, by phase."""


class DriveTime(NamedTuple):
    """Seconds of one step."""

    busy_s: float
    """Seconds of all transfers on the slowest host."""
    wait_s: float
    """Seconds that ranks wait for them."""


def drive_seconds(
    traffic: Traffic, directory: str, cluster: Cluster, places: Sequence[Place]
) -> dict[str, float] | None:
    """Return the seconds of transfers by phase, on the slowest host; None if the cluster's file
    lists no disk for some host.

    Args:
        traffic: bytes of each rank.
        directory: directory of expert state, as `memory.ssd` has it.
        cluster: the cluster.
        places: place of each rank; ranks of a host share its disk.
    """
    num_ranks = Counter(place.host for place in places)
    disks = {host: _disk(cluster.by_name[host], directory) for host in num_ranks}
    found = dict[str, float]()
    for host, disk in disks.items():
        if disk is None:
            return None
        for phase, one in traffic.items():
            seconds = one["read_bytes"] / disk.read + one["written_bytes"] / disk.write
            found[phase] = max(found.get(phase, 0.0), num_ranks[host] * seconds)
    return found


def _disk(host: Host, directory: str) -> Disk | None:
    """Return the disk of a directory: the one with the longest path above it, else the first."""
    above = [disk for disk in host.disks if Path(directory).is_relative_to(disk.path)]
    return max(above, key=lambda disk: len(disk.path), default=next(iter(host.disks), None))


def add_waiting(
    step: Step, num_ranks: int, busy_s: Mapping[str, float]
) -> tuple[list[SegmentRun], DriveTime]:
    """Return a step with waiting for transfers that take `busy_s` by phase."""
    timeline, found = simulate_step(step, num_ranks), list(step)
    computing_s = timeline.seconds_by_phase(timeline.critical_rank)
    wait_s = {phase: max(busy_s[phase] - computing_s.get(phase, 0.0), 0.0) for phase in busy_s}
    for phase, seconds in wait_s.items():
        _insert_before(phase, Event(WAIT, phase, STEP, np.full(num_ranks, seconds)), found)
    return found, DriveTime(sum(busy_s.values()), sum(wait_s.values()))


def _insert_before(phase: str, event: Event, step: list[SegmentRun]) -> None:
    """Insert `event` before the first event of `phase`, or at the end."""
    for number, run in enumerate(step):
        phases = [one.phase for one in run.segment.events]
        if phase in phases:
            events = list(run.segment.events)
            events.insert(phases.index(phase), event)
            step[number] = run._replace(segment=Segment(events))
            return
    step.append(SegmentRun(Segment([event])))
