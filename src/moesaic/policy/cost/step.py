"""A step of a job on a cluster as events with their seconds: what `sim.timeline` runs.

Every rank does the same things in the same order, so an event is one row of seconds by rank. Ranks
that have the same work on the same kind of device are worked out once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from moesaic.facts.cluster import Calibration, Cluster, Device, Place, device_at, place
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.workload import Block, Message, Work, workload
from moesaic.policy.cost.compute import op_s
from moesaic.policy.cost.event import Event, Seconds
from moesaic.policy.cost.traffic import Pace, Traffic

PHASES = {
    "targets": "data", "accumulate": "backward", "copies": "backward", "reduce": "reduce",
    "norm": "clip", "losses": "log",
}  # fmt: skip
"""Phases of what is done once a step, by its name: else the optimizer's, and of messages reduce."""
ORDER = ("data", "forward", "backward", "reduce", "clip", "optimizer", "log")
"""Phases as a step goes through them."""


@dataclass(frozen=True)
class Lanes:
    """Ranks laid over a cluster, and what blocks take on them."""

    plan: Plan
    cluster: Cluster
    places: Sequence[Place]
    _seconds: dict[tuple[float, ...], Seconds] = field(default_factory=dict)
    """What is worked out once: seconds by rank of ops, by those of ranks that are alike."""
    _kinds: dict[tuple[int, ...], list[list[int]]] = field(default_factory=dict)
    """All groups of a kind, by the ranks of one."""
    _paces: dict[tuple[str, tuple[int, ...]], list[Pace]] = field(default_factory=dict)
    """By operation and the ranks of one group."""
    _spoken: dict[tuple[str, tuple[int, ...], tuple[int, ...]], Seconds] = field(
        default_factory=dict
    )
    """Seconds by rank of messages, by operation, ranks of one group and bytes of each group."""

    @cached_property
    def _traffic(self) -> Traffic:
        return Traffic(self.cluster, self.places)

    def device(self, rank: int) -> Device:
        """What `rank` computes with."""
        return device_at(self.cluster, self.places[rank])

    def step(
        self, work: Mapping[int, Sequence[Block]], alike: Mapping[int, list[int]], times: int = 1
    ) -> list[Event]:
        """One whole step, micro-batch after micro-batch.

        Args:
            work: blocks of the first of each kind of ranks.
            alike: ranks that have its work on its kind of device, by the first of them.
            times: micro-batches.
        """
        blocks = list(zip(*work.values(), strict=True))
        ranks = list(alike.values())
        once: list[Event] = []
        for row in blocks:
            once += self._events("forward", row, [block.forward for block in row], ranks)
        for row in reversed(blocks):
            once += self._events("backward", row, [block.backward for block in row], ranks)
        update: list[Event] = []
        for row in reversed(blocks):
            update += self._events("", row, [block.update for block in row], ranks)
        update.sort(key=lambda event: (ORDER.index(event.phase), bool(event.groups)))
        first = sum(event.phase == "data" for event in update)
        return [*update[:first], *(once * times), *update[first:]]

    def device_kinds(self) -> list[int]:
        """By rank, a number that equal devices share."""
        kinds: dict[tuple[str, int], int] = {}
        devices: list[Device] = []
        found = []
        for rank, (host, entry, _) in enumerate(self.places):
            if (host, entry) not in kinds:
                device = self.device(rank)
                if device not in devices:
                    devices.append(device)
                kinds[host, entry] = devices.index(device)
            found.append(kinds[host, entry])
        return found

    def _events(
        self, phase: str, row: Sequence[Block], works: Sequence[Work], ranks: list[list[int]]
    ) -> Iterator[Event]:
        """What one block does one way: first it computes, then it speaks."""
        name = row[0].name
        devices = [self.device(alike[0]) for alike in ranks]
        slower = [self._slower(device) for device in devices]
        for ops in zip(*(work.ops for work in works), strict=True):
            each = tuple(map(op_s, devices, ops, slower))
            if any(each):
                seconds = self._spread(each, ranks)
                yield Event(
                    ops[0].name, phase or PHASES.get(ops[0].name, "optimizer"), name, seconds
                )
        for messages in zip(*(work.messages for work in works), strict=True):
            groups = self._groups(messages[0])
            seconds, said = self._message_s(messages, ranks, groups), messages[0].name
            paces = self._paces[messages[0].operation, messages[0].ranks]
            yield Event(
                said, phase or PHASES.get(said, "reduce"), name, seconds, groups,
                max(pace.skew_s for pace in paces),
            )  # fmt: skip

    def _slower(self, device: Device) -> Calibration | None:
        """What runs have shown of devices like this one."""
        learnt = self.cluster.calibration
        return learnt if learnt is not None and device.model in learnt.devices else None

    def _spread(self, each: tuple[float, ...], ranks: list[list[int]]) -> Seconds:
        """Seconds by rank, from those of ranks that are alike; layers share what is equal."""
        if each not in self._seconds:
            seconds = np.zeros(self.plan.ranks)
            for one, alike in zip(each, ranks, strict=True):
                seconds[alike] = one
            self._seconds[each] = seconds
        return self._seconds[each]

    def _groups(self, message: Message) -> list[list[int]]:
        """Everyone who takes part in operations like `message`, group by group."""
        if message.ranks not in self._kinds:
            self._kinds[message.ranks] = self._kind(message)
        return self._kinds[message.ranks]

    def _kind(self, message: Message) -> list[list[int]]:
        plan = self.plan
        for groups in (
            [list(range(plan.ranks))], plan.expert_groups(), plan.replica_groups(),
            plan.shard_groups(), plan.shard_replica_groups(),
        ):  # fmt: skip
            if list(message.ranks) in groups:
                return groups
        raise AssertionError(f"{message.name} is among ranks {message.ranks}, no group of the plan")

    def _message_s(
        self, messages: Sequence[Message], ranks: list[list[int]], groups: list[list[int]]
    ) -> Seconds:
        """Seconds by rank; who of a group has the most to send or to receive sets its pace."""
        carried = np.zeros(self.plan.ranks, np.int64)
        for message, alike in zip(messages, ranks, strict=True):
            carried[alike] = max(message.num_bytes, sum(message.receive))
        most = tuple(int(carried[group].max()) for group in groups)
        operation, one = messages[0].operation, messages[0].ranks
        key = (operation, one, most)
        if key not in self._spoken:
            if key[:2] not in self._paces:
                self._paces[key[:2]] = self._traffic.paces(operation, groups)
            learnt = self.cluster.calibration
            by = 1.0 if learnt is None else learnt.messages
            seconds = np.zeros(self.plan.ranks)
            for group, pace, num_bytes in zip(groups, self._paces[key[:2]], most, strict=True):
                seconds[group] = by * pace.seconds(num_bytes)
            self._spoken[key] = seconds
        return self._spoken[key]


@dataclass(frozen=True)
class Costs(Lanes):
    """A job laid over a cluster."""

    job: Job = field(kw_only=True)
    loads: Sequence[ArrayLike] | None = field(default=None, kw_only=True)
    """By expert layer, as `workload` takes them; None: even routing."""

    @classmethod
    def of(
        cls, job: Job, plan: Plan, cluster: Cluster, loads: Sequence[ArrayLike] | None = None
    ) -> Costs:
        """Ranks in the order of the cluster's places."""
        return cls(plan, cluster, place(cluster, plan.ranks), job=job, loads=loads)

    def events(self) -> list[Event]:
        """One whole step."""
        alike = self._alike()
        work = {rank: workload(self.job, self.plan, rank, self.loads) for rank in alike}
        return self.step(work, alike, self.job.train.micro_batches)

    def _alike(self) -> dict[int, list[int]]:
        """Ranks that have equal work on equal devices, by the first of them."""
        size = self.job.train.batch // self.job.train.micro_batches
        plan, found = self.plan, dict[tuple[object, ...], list[int]]()
        groups = {rank: group for group in plan.expert_groups() for rank in group}
        rows = [len(plan.rows(rank, size)) for rank in range(plan.ranks)]
        arriving = {group[0]: tuple(rows[rank] for rank in group) for group in plan.expert_groups()}
        for rank, kind in enumerate(self.device_kinds()):
            # Experts are alike where routing is even; the first owners count the norm.
            home = rank % plan.ep if self.loads is not None else 0
            sent = arriving[groups[rank][0]]
            at = (rows[rank], home, sent, rank < plan.ep, rank < plan.shard, kind)
            found.setdefault(at, []).append(rank)
        return {ranks[0]: ranks for ranks in found.values()}


def replicated(blocks: Sequence[Block], ranks: int, cluster: Cluster) -> list[Event]:
    """A step in which each of `ranks` ranks does all of `blocks` on samples of its own."""
    plan = Plan(ranks=ranks, ep=1, shard=1, experts=0)
    lanes = Lanes(plan, cluster, place(cluster, ranks))
    found: dict[int, list[int]] = {}
    for rank, kind in enumerate(lanes.device_kinds()):
        found.setdefault(kind, []).append(rank)
    alike = {same[0]: same for same in found.values()}
    return lanes.step(dict.fromkeys(alike, blocks), alike)
