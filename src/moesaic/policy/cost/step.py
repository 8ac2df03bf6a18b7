"""A step of a job on a cluster as events with their seconds: what `sim.timeline` runs.

Every rank does the same things in the same order, so an event is one row of seconds by rank. Ranks
that have the same work on the same kind of device are worked out once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moesaic.facts.cluster import Cluster, Device, Link, Place, device_at, path, place
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.workload import Block, Message, Op, Work, workload
from moesaic.policy.cost.communication import collective_s
from moesaic.policy.cost.compute import op_s
from moesaic.policy.cost.event import Event, Seconds

PHASES = {"reduce": "reduce", "norm": "clip", "accumulate": "backward"}
"""Phases of what is done once a step, by the name of the op; anything else is the optimizer's."""


@dataclass(frozen=True)
class Lanes:
    """Ranks laid over a cluster, and what blocks take on them."""

    plan: Plan
    cluster: Cluster
    places: Sequence[Place]
    _ways: dict[tuple[int, ...], tuple[Link, int]] = field(default_factory=dict)
    """What holds a group of ranks up, once it was looked for."""

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
        last: list[Event] = []
        for row in reversed(blocks):  # The last of them is the step's own: sums come first.
            last += self._events("", row, [block.update for block in row], ranks)
        return [*(once * times), *last]

    def _events(
        self, phase: str, row: Sequence[Block], works: Sequence[Work], ranks: list[list[int]]
    ) -> Iterator[Event]:
        """What one block does one way: first it computes, then it speaks."""
        name = "" if row[0].name == "step" else row[0].name
        for ops in zip(*(work.ops for work in works), strict=True):
            seconds = np.zeros(self.plan.ranks)
            for op, alike in zip(ops, ranks, strict=True):
                seconds[alike] = op_s(self.device(alike[0]), op)
            if seconds.any():
                yield Event(ops[0].name, phase or _phase(ops[0]), name, seconds)
        for messages in zip(*(work.messages for work in works), strict=True):
            groups = self._groups(messages[0])
            seconds = self._message_s(messages, groups)
            yield Event(messages[0].name, phase or "reduce", name, seconds, groups)

    def _groups(self, message: Message) -> list[list[int]]:
        """Everyone who takes part in operations like `message`, group by group."""
        plan = self.plan
        for groups in (
            [list(range(plan.ranks))], plan.expert_groups(), plan.replica_groups(),
            plan.shard_groups(), plan.shard_replica_groups(),
        ):  # fmt: skip
            if list(message.ranks) in groups:
                return groups
        raise AssertionError(f"{message.name} is among ranks {message.ranks}, no group of the plan")

    def _message_s(self, messages: Sequence[Message], groups: list[list[int]]) -> Seconds:
        most = max(message.num_bytes for message in messages)
        seconds = np.zeros(self.plan.ranks)
        for group in groups:
            if tuple(group) not in self._ways:
                self._ways[tuple(group)] = self._narrowest(group, groups)
            link, sharing = self._ways[tuple(group)]
            name = messages[0].operation
            seconds[group] = collective_s(link, name, len(group), most, sharing)
        return seconds

    def _narrowest(self, group: Sequence[int], groups: list[list[int]]) -> tuple[Link, int]:
        """The link that holds a group up, and how many operations pass it at the same time."""
        hosts = {self.places[rank].host for rank in group}
        pairs = [(self.places[a], self.places[b]) for a, b in itertools.pairwise(group)]
        links = [link for a, b in pairs for link in path(self.cluster, a, b)]
        narrowest = min(links, key=lambda link: link.bandwidth)
        if len(hosts) == 1:
            return narrowest, 1
        beside = [g for g in groups if {self.places[rank].host for rank in g} & hosts]
        across = [g for g in beside if len({self.places[rank].host for rank in g}) > 1]
        return narrowest, max(len(across), 1)


@dataclass(frozen=True)
class Costs(Lanes):
    """A job laid over a cluster."""

    job: Job = field(kw_only=True)

    @classmethod
    def of(cls, job: Job, plan: Plan, cluster: Cluster) -> Costs:
        """Ranks in the order of the cluster's places."""
        return cls(plan, cluster, place(cluster, plan.ranks), job=job)

    def events(self) -> list[Event]:
        """One whole step."""
        alike = self._alike()
        work = {rank: workload(self.job, self.plan, rank) for rank in alike}
        return self.step(work, alike, self.job.train.micro_batches)

    def _alike(self) -> dict[int, list[int]]:
        """Ranks that have equal work on equal devices, by the first of them."""
        size = self.job.train.batch // self.job.train.micro_batches
        plan, found = self.plan, dict[tuple[int, ...], list[int]]()
        devices: list[Device] = []
        for rank in range(plan.ranks):
            device = self.device(rank)
            if device not in devices:
                devices.append(device)
            rows = len(plan.rows(rank, size))
            # Routing is even, so that experts are alike; the first owners count the norm.
            at = (rows, rank < plan.ep, rank < plan.shard, devices.index(device))
            found.setdefault(at, []).append(rank)
        return {ranks[0]: ranks for ranks in found.values()}


def replicated(blocks: Sequence[Block], ranks: int, cluster: Cluster) -> list[Event]:
    """A step in which each of `ranks` ranks does all of `blocks` on samples of its own."""
    plan = Plan(ranks=ranks, ep=1, shard=1, experts=0)
    lanes = Lanes(plan, cluster, place(cluster, ranks))
    found: list[list[int]] = []
    for rank in range(ranks):
        same = [one for one in found if lanes.device(one[0]) == lanes.device(rank)]
        if same:
            same[0].append(rank)
        else:
            found.append([rank])
    alike = {one[0]: one for one in found}
    return lanes.step(dict.fromkeys(alike, blocks), alike)


def _phase(op: Op) -> str:
    return PHASES.get(op.name, "optimizer")
