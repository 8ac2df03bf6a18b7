"""Cost of blocks on the ranks of a cluster: seconds of computing and of collectives.

An event holds one array of seconds by rank. Ranks with equal work on equal devices are computed
once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest

import numpy as np

from moesaic.facts.cluster import Calibration, Cluster, Device, Place, device_at
from moesaic.facts.plan import Plan
from moesaic.facts.plan.partition import Partition
from moesaic.facts.workload import EXPERTS, Block, BlockWork, CollectiveCall, Op
from moesaic.policy.cost.chunk_overlap import interleave_chunks
from moesaic.policy.cost.compute import matmul_and_elementwise_s, op_s
from moesaic.policy.cost.event import Event, RankGroups, Seconds
from moesaic.policy.cost.network import NetworkModel

GroupKey = tuple[tuple[int, ...], tuple[int, ...]]
"""Groups that run a collective at the same time: what tells one such group, and the first rank of
each participating kind if only some groups take part (else empty)."""
PHASE_BY_NAME = {
    "targets": "data", "accumulate": "backward", "fill buckets": "backward", "replicas": "backward",
    "reduce": "reduce", "norm": "clip", "losses": "log", "loads": "log",
}  # fmt: skip
"""Phase of once-per-step work by name; other ops belong to `optimizer`, other collectives to
`reduce`."""
PHASE_ORDER = ("data", "forward", "backward", "reduce", "clip", "optimizer", "log")
"""Phases in the order of a step."""


@dataclass(frozen=True)
class ClusterCosts:
    """Ranks placed on a cluster, with the cost of blocks on them."""

    plan: Plan
    cluster: Cluster
    places: Sequence[Place]
    network: NetworkModel
    """Network between those places."""
    _compute_seconds: dict[tuple[int, tuple[float, ...]], Seconds] = field(default_factory=dict)
    """Cached seconds by rank, keyed by pipeline rank and seconds per kind of ranks."""
    _groups_by_key: dict[GroupKey, tuple[list[list[int]], RankGroups]] = field(default_factory=dict)
    """Cached groups that run a collective at the same time, and their array layout."""
    _block_cache: dict[object, tuple[Sequence[BlockWork], list[Event]]] = field(
        default_factory=dict
    )
    """Cached events of one pass of a block, keyed by phase, identities of its works, and ranks.

    The cache keeps the works alive, so identities stay unique. Equal layers share an entry.
    """
    _collectives: dict[object, tuple[Seconds, list[list[int]], float]] = field(default_factory=dict)
    """Cached seconds by rank, groups and skew of collectives, keyed by operation, groups and bytes
    by kind of ranks."""

    def device(self, rank: int) -> Device:
        """Return the device of `rank`."""
        return device_at(self.cluster, self.places[rank])

    @property
    def has_async_devices(self) -> bool:
        """All devices run asynchronously: hosts launch their work ahead of time."""
        kinds = {place[:2]: place for place in self.places}
        return all(device_at(self.cluster, one).kind != "cpu" for one in kinds.values())

    def device_kinds(self) -> list[int]:
        """Return a device number by rank; equal devices share a number."""
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
        self,
        phase: str,
        blocks: Sequence[Block],
        works: Sequence[BlockWork],
        ranks: Sequence[list[int]],
    ) -> Iterator[Event]:
        """Yield the events of one pass of a block: computing, then collectives.

        Collectives that precede computing, such as parameter all-gathers, come first.

        Args:
            phase: phase of the step; empty to choose it by the name of each op or collective.
            blocks: the block on the first rank of each kind.
            works: work of the block on those ranks.
            ranks: ranks of each kind.
        """
        name, key = blocks[0].name, (phase, tuple(map(id, works)), _first_ranks(ranks))
        if key not in self._block_cache:
            self._block_cache[key] = works, list(self._make_block_events(phase, name, works, ranks))
        for event in self._block_cache[key][1]:
            yield event if event.block == name else replace(event, block=name)

    def _make_block_events(
        self, phase: str, name: str, works: Sequence[BlockWork], ranks: Sequence[list[int]]
    ) -> Iterator[Event]:
        collectives = self.block_collectives(phase, name, works, ranks)
        yield from (event for first, event in collectives if first)
        computed, plan = list[Event](), self.plan
        for ops in zip(*(work.ops for work in works), strict=True):
            each = self.compute_s([(op,) for op in ops], ranks)
            if any(each) or (plan.overlaps_dispatch and ops[0].name == EXPERTS):
                event_phase = phase or PHASE_BY_NAME.get(ops[0].name, "optimizer")
                computed.append(
                    Event(ops[0].name, event_phase, name, self.seconds_by_rank(each, ranks))
                )
        rest = [event for first, event in collectives if not first]
        if plan.overlaps_dispatch:
            shape, first = (plan.chunks, plan.num_exchanges), plan.overlap_local
            yield from interleave_chunks(computed, rest, shape, self.overlaps, local_first=first)
        else:
            yield from (*computed, *rest)

    def overlaps(self, event: Event) -> bool:
        """Return whether ranks compute while `event` is under way.

        Inside one host's shared memory, CPU ranks copy bytes themselves.
        """
        return self.has_async_devices or all(n > 1 for n in self._hosts_per_group(event))

    def is_inter_host(self, event: Event) -> bool:
        """Return whether at least one of its groups spans several hosts."""
        return any(n > 1 for n in self._hosts_per_group(event))

    def _hosts_per_group(self, event: Event) -> Iterator[int]:
        return (len({self.places[rank].host for rank in group}) for group in event.groups)

    def block_collectives(
        self, phase: str, name: str, works: Sequence[BlockWork], ranks: Sequence[list[int]]
    ) -> list[tuple[bool, Event]]:
        """Return the collectives of a block, each with whether it precedes computing."""
        events = []
        for row in zip_longest(*(work.collectives for work in works)):
            # Ranks with more tokens than others may run more collectives.
            kinds = [
                same_kind for same_kind, one in zip(ranks, row, strict=True) if one is not None
            ]
            calls = [one for one in row if one is not None]
            event = self.collective_event(
                phase, name, calls, kinds, is_subset=len(kinds) < len(ranks)
            )
            events.append((calls[0].precedes_compute, event))
        return events

    def collective_event(
        self,
        phase: str,
        block: str,
        collectives: Sequence[CollectiveCall],
        ranks: Sequence[list[int]],
        *,
        is_subset: bool = False,
    ) -> Event:
        """Return the event of one collective, described by the first rank of each kind.

        Args:
            phase: phase of the step; empty to choose it by the collective's name.
            block: name of the block.
            collectives: the collective as each kind of ranks calls it.
            ranks: ranks of each kind.
            is_subset: whether only these kinds take part; groups of other ranks then have no event.
        """
        first, subset = collectives[0], ranks if is_subset else ()
        # Two ranks and the number of all tell a group of ranks that are equally far apart.
        groups_key = (*first.ranks[:2], len(first.ranks)), _first_ranks(subset)
        num_bytes = [max(one.num_bytes, sum(one.receive_bytes)) for one in collectives]
        key = first.operation, groups_key, _first_ranks(ranks), tuple(num_bytes)
        if key not in self._collectives:
            if groups_key not in self._groups_by_key:
                matching = self._matching_groups(first, subset)
                self._groups_by_key[groups_key] = matching, RankGroups(matching)
            groups, members = self._groups_by_key[groups_key]
            costs = self.network.collective_costs(first.operation, groups)
            num_bytes_by_rank = np.zeros(self.plan.ranks, np.int64)
            for one, same_kind in zip(num_bytes, ranks, strict=True):
                num_bytes_by_rank[same_kind] = one
            # The rank of a group with the most bytes sets the pace.
            group_bytes = members.group_max(num_bytes_by_rank).tolist()
            each = [
                self._communication_factor * cost.seconds(one)
                for cost, one in zip(costs, group_bytes, strict=True)
            ]
            seconds = members.scatter(each, np.zeros(self.plan.ranks))
            self._collectives[key] = seconds, groups, max(cost.skew_s for cost in costs)
        phase = phase or PHASE_BY_NAME.get(first.name, "reduce")
        return Event(first.name, phase, block, *self._collectives[key])

    def compute_s(
        self, ops_by_kind: Sequence[Sequence[Op]], ranks: Sequence[list[int]]
    ) -> tuple[float, ...]:
        """Return the seconds of operations by kind of ranks."""
        found, seconds, last = list[float](), 0.0, None
        for ops, same_kind in zip(ops_by_kind, ranks, strict=True):
            device = self.device(same_kind[0])
            if last is None or last[0] is not device or last[1] != ops:
                seconds = sum(op_s(device, op, self._calibration_of(device)) for op in ops)
                last = device, ops
            found.append(seconds)
        return tuple(found)

    def matmul_and_elementwise_s(self, rank: int, ops: Sequence[Op]) -> tuple[float, float]:
        """Return the seconds of matmuls and of elementwise kernels of `ops` on `rank`."""
        device = self.device(rank)
        each = [matmul_and_elementwise_s(device, op, self._calibration_of(device)) for op in ops]
        return sum(matmul for matmul, _ in each), sum(elementwise for _, elementwise in each)

    def seconds_by_rank(
        self, seconds_by_kind: tuple[float, ...], ranks: Sequence[list[int]]
    ) -> Seconds:
        """Return seconds by rank from seconds by kind; equal layers share the array.

        The kinds cover one pipeline rank; ranks of other pipeline ranks take no time.
        """
        key = self.plan.pp_rank(ranks[0][0]), seconds_by_kind
        if key not in self._compute_seconds:
            seconds = np.zeros(self.plan.ranks)
            for one, same_kind in zip(seconds_by_kind, ranks, strict=True):
                seconds[same_kind] = one
            self._compute_seconds[key] = seconds
        return self._compute_seconds[key]

    def send_s(self, pairs: Sequence[tuple[int, int]], num_bytes: Sequence[int]) -> Seconds:
        """Return seconds by receiving rank; the first rank of each pair sends to the second."""
        seconds = np.zeros(self.plan.ranks)
        for pair, cost, size in zip(
            pairs, self.network.collective_costs("send", pairs), num_bytes, strict=True
        ):
            seconds[pair[1]] = self._communication_factor * cost.seconds(size)
        return seconds

    def spans_pipeline_ranks(self, collective: CollectiveCall) -> bool:
        """Return whether `collective` spans several pipeline ranks."""
        ranks = collective.ranks
        return self.plan.pp_rank(ranks[0]) != self.plan.pp_rank(ranks[-1])

    @property
    def _communication_factor(self) -> float:
        """Calibrated factor of collectives, or 1."""
        calibration = self.cluster.calibration
        return 1.0 if calibration is None else calibration.collectives

    def _calibration_of(self, device: Device) -> Calibration | None:
        """Return the calibration if it covers this device model."""
        calibration = self.cluster.calibration
        return (
            calibration if calibration is not None and device.model in calibration.devices else None
        )

    def _matching_groups(
        self, collective: CollectiveCall, rank_kinds: Sequence[list[int]]
    ) -> list[list[int]]:
        """Return all groups that run `collective` at the same time.

        They belong to the same pipeline ranks; non-empty `rank_kinds` restricts them to ranks of
        these kinds.
        """
        first, members = collective.ranks[0], {rank for kind in rank_kinds for rank in kind}
        for partition in self._partitions:
            if collective.ranks == partition.of(first):
                groups = list(partition)
                break
        else:
            chains = self.plan.pp_groups()
            groups = [[chain[0], chain[-1]] for chain in chains]
            assert collective.ranks == (chains.of(first)[0], chains.of(first)[-1]), (
                f"{collective.name} runs on ranks {collective.ranks}, no process group of the plan"
            )
        if not self.spans_pipeline_ranks(collective):
            pp_rank = self.plan.pp_rank(first)
            groups = [group for group in groups if self.plan.pp_rank(group[0]) == pp_rank]
        return [group for group in groups if not rank_kinds or members.issuperset(group)]

    @cached_property
    def _partitions(self) -> list[Partition]:
        """All partitions of the ranks into process groups, but for those of tied embeddings."""
        plan = self.plan
        return [
            Partition(plan.ranks, plan.ranks), plan.ep_groups(), *plan.exchange_groups(),
            plan.expert_dp_groups(), plan.dp_shard_groups(), plan.dp_replicate_groups(),
            plan.stage_groups(), plan.tp_groups(), plan.dp_groups(), plan.etp_groups(),
            plan.same_etp_rank_groups(), plan.pp_groups(),
        ]  # fmt: skip


def _first_ranks(kinds: Sequence[list[int]]) -> tuple[int, ...]:
    return tuple(same_kind[0] for same_kind in kinds)
