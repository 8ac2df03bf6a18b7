"""Ranks laid over a cluster: what blocks take on each of them, and how long their messages.

An event is one row of seconds by rank. Ranks that have the same work on the same kind of device are
worked out once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest

import numpy as np

from moesaic.facts.cluster import Calibration, Cluster, Device, Place, device_at
from moesaic.facts.plan import Plan
from moesaic.facts.workload import EXPERTS, Block, Message, Op, Work
from moesaic.policy.cost.chunks import woven
from moesaic.policy.cost.compute import apart_s, op_s
from moesaic.policy.cost.event import Event, Members, Seconds
from moesaic.policy.cost.traffic import Pace, Traffic

Together = tuple[tuple[int, ...], tuple[int, ...]]
"""Groups that do the same at the same time: by the ranks of one, and if not all of such groups take
part, the first of each kind of ranks that do."""
PHASES = {
    "targets": "data", "accumulate": "backward", "fill": "backward", "copies": "backward",
    "reduce": "reduce", "norm": "clip", "losses": "log", "loads": "log",
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
    traffic: Traffic
    """Between those places."""
    _seconds: dict[tuple[int, tuple[float, ...]], Seconds] = field(default_factory=dict)
    """What is worked out once: seconds by rank of ops, by part of the pipeline and seconds of its
    ranks that are alike."""
    _kinds: dict[Together, list[list[int]]] = field(default_factory=dict)
    """All groups that do the same at the same time."""
    _members: dict[Together, Members] = field(default_factory=dict)
    """Those groups, laid out."""
    _paces: dict[tuple[str, Together], list[Pace]] = field(default_factory=dict)
    """By operation and groups."""
    _blocks: dict[object, tuple[Sequence[Work], list[Event]]] = field(default_factory=dict)
    """What a block does one way, by phase, identities of what it does, which live as long, and
    ranks: layers that are the same thing to `workload` share it."""
    _spoken: dict[tuple[str, Together, bytes], Seconds] = field(default_factory=dict)
    """Seconds by rank of messages, by operation, groups and bytes of each group."""

    def device(self, rank: int) -> Device:
        """What `rank` computes with."""
        return device_at(self.cluster, self.places[rank])

    @property
    def hand_ahead(self) -> bool:
        """Whether hosts hand devices their work ahead of time."""
        kinds = {place[:2]: place for place in self.places}
        return all(device_at(self.cluster, one).kind != "cpu" for one in kinds.values())

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

    def block_events(
        self, phase: str, row: Sequence[Block], works: Sequence[Work], ranks: Sequence[list[int]]
    ) -> Iterator[Event]:
        """What one block does one way: it computes, and then speaks; what brings parameters is
        first.

        Args:
            phase: of the step; empty: by what each thing is called.
            row: the block on the first of each kind of ranks.
            works: what it does there.
            ranks: those of each kind.
        """
        who = tuple((alike[0], len(alike)) for alike in ranks)
        name, key = row[0].name, (phase, tuple(map(id, works)), who)
        if key not in self._blocks:
            self._blocks[key] = works, list(self._block_events(phase, name, works, ranks))
        for event in self._blocks[key][1]:
            yield event if event.block == name else replace(event, block=name)

    def _block_events(
        self, phase: str, name: str, works: Sequence[Work], ranks: Sequence[list[int]]
    ) -> Iterator[Event]:
        messages = self.block_messages(phase, name, works, ranks)
        yield from (event for first, event in messages if first)
        computed, plan = list[Event](), self.plan
        for ops in zip(*(work.ops for work in works), strict=True):
            each = self.computing([(op,) for op in ops], ranks)
            if any(each) or (plan.overlaps and ops[0].name == EXPERTS):
                of = phase or PHASES.get(ops[0].name, "optimizer")
                computed.append(Event(ops[0].name, of, name, self.spread(each, ranks)))
        said = [event for first, event in messages if not first]
        if plan.overlaps:
            shape, first = (plan.chunks, plan.trips), plan.local == "first"
            yield from woven(computed, said, shape, self.hides, local_first=first)
        else:
            yield from (*computed, *said)

    def hides(self, message: Event) -> bool:
        """Whether ranks compute while it is under way: those that share a host's memory copy it
        themselves."""
        return self.hand_ahead or all(n > 1 for n in self._num_hosts(message))

    def leaves_hosts(self, message: Event) -> bool:
        """Whether it is between hosts for some of its groups."""
        return any(n > 1 for n in self._num_hosts(message))

    def _num_hosts(self, message: Event) -> Iterator[int]:
        """By group."""
        return (len({self.places[rank].host for rank in group}) for group in message.groups)

    def block_messages(
        self, phase: str, name: str, works: Sequence[Work], ranks: Sequence[list[int]]
    ) -> list[tuple[bool, Event]]:
        """What a block says, and whether it does so first."""
        found = []
        for row in zip_longest(*(work.messages for work in works)):
            # Who has more tokens than others may have more to say.
            who = [alike for alike, one in zip(ranks, row, strict=True) if one is not None]
            said = [one for one in row if one is not None]
            event = self.message(phase, name, said, who, alone=len(who) < len(ranks))
            found.append((said[0].first, event))
        return found

    def message(
        self,
        phase: str,
        block: str,
        messages: Sequence[Message],
        ranks: Sequence[list[int]],
        *,
        alone: bool = False,
    ) -> Event:
        """A message of a block, as the first of each kind of ranks sees it; `phase` as above.

        If those kinds say it `alone`, others that could do so at the same time have nothing to say.
        """
        said, some = messages[0].name, ranks if alone else ()
        together = messages[0].ranks, tuple(alike[0] for alike in some)
        if together not in self._kinds:
            self._kinds[together] = self._kind(messages[0], some)
            self._members[together] = Members(self._kinds[together])
        groups = self._kinds[together]
        seconds = self._message_s(messages, ranks, together)
        skew_s = max(pace.skew_s for pace in self._paces[messages[0].operation, together])
        return Event(said, phase or PHASES.get(said, "reduce"), block, seconds, groups, skew_s)

    def computing(
        self, works: Sequence[Sequence[Op]], ranks: Sequence[list[int]]
    ) -> tuple[float, ...]:
        """Seconds that operations take together, by kind of ranks."""
        devices = [self.device(alike[0]) for alike in ranks]
        return tuple(
            sum(op_s(device, op, self._slower(device)) for op in ops)
            for device, ops in zip(devices, works, strict=True)
        )

    def apart_s(self, rank: int, ops: Sequence[Op]) -> tuple[float, float]:
        """Seconds of the products of operations on `rank`, and of passes over memory."""
        device = self.device(rank)
        each = [apart_s(device, op, self._slower(device)) for op in ops]
        return sum(products for products, _ in each), sum(passes for _, passes in each)

    def spread(self, each: tuple[float, ...], ranks: Sequence[list[int]]) -> Seconds:
        """Seconds by rank, from those of each kind; layers share what is equal.

        The kinds are all of a part of the pipeline; ranks of other parts take no time.
        """
        key = self.plan.part(ranks[0][0]), each
        if key not in self._seconds:
            seconds = np.zeros(self.plan.ranks)
            for one, alike in zip(each, ranks, strict=True):
                seconds[alike] = one
            self._seconds[key] = seconds
        return self._seconds[key]

    def sending_s(self, pairs: Sequence[tuple[int, int]], num_bytes: Sequence[int]) -> Seconds:
        """Seconds by rank of who receives, where the first of each pair sends to the second."""
        seconds = np.zeros(self.plan.ranks)
        for pair, pace, size in zip(
            pairs, self.traffic.paces("send", pairs), num_bytes, strict=True
        ):
            seconds[pair[1]] = self._messages_by * pace.seconds(size)
        return seconds

    def crosses(self, message: Message) -> bool:
        """Whether it is among ranks of several parts of the pipeline."""
        return len(self._parts(message.ranks)) > 1

    def _parts(self, ranks: Sequence[int]) -> set[int]:
        return set(map(self.plan.part, ranks))

    @property
    def _messages_by(self) -> float:
        """What runs have shown of messages."""
        learnt = self.cluster.calibration
        return 1.0 if learnt is None else learnt.messages

    def _slower(self, device: Device) -> Calibration | None:
        """What runs have shown of devices like this one."""
        learnt = self.cluster.calibration
        return learnt if learnt is not None and device.model in learnt.devices else None

    def _kind(self, message: Message, some: Sequence[list[int]]) -> list[list[int]]:
        """Everyone who does as `message` says at the same time, group by group.

        Those are ranks of the same parts of a pipeline; if there are `some` kinds, of those.
        """
        parts = self._parts(message.ranks)
        members = {rank for alike in some for rank in alike}
        for groups in self._groups:
            if list(message.ranks) in groups:
                alike = [group for group in groups if self._parts(group) == parts]
                return [group for group in alike if not some or members.issuperset(group)]
        raise AssertionError(f"{message.name} is among ranks {message.ranks}, no group of the plan")

    @cached_property
    def _groups(self) -> list[list[list[int]]]:
        """All that ranks of the plan speak in."""
        plan = self.plan
        chains = plan.chain_groups()
        return [
            [list(range(plan.ranks))], *plan.trip_groups(), plan.replica_groups(),
            plan.shard_groups(), plan.shard_replica_groups(), plan.part_groups(),
            plan.slice_groups(), plan.same_slice_groups(), plan.expert_slice_groups(),
            plan.same_expert_slice_groups(), chains,
            [[chain[0], chain[-1]] for chain in chains],
        ]  # fmt: skip

    def _message_s(
        self, messages: Sequence[Message], ranks: Sequence[list[int]], together: Together
    ) -> Seconds:
        """Seconds by rank; who of a group has the most to send or to receive sets its pace."""
        carried, members = np.zeros(self.plan.ranks, np.int64), self._members[together]
        for message, alike in zip(messages, ranks, strict=True):
            carried[alike] = max(message.num_bytes, sum(message.receive))
        most = members.most(carried)
        operation = messages[0].operation
        key = (operation, together, most.tobytes())
        if key not in self._spoken:
            if key[:2] not in self._paces:
                self._paces[key[:2]] = self.traffic.paces(operation, self._kinds[together])
            each = zip(self._paces[key[:2]], most.tolist(), strict=True)
            own = [self._messages_by * pace.seconds(num_bytes) for pace, num_bytes in each]
            self._spoken[key] = members.spread(own, np.zeros(self.plan.ranks))
        return self._spoken[key]
