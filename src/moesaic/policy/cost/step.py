"""A step of a job on a cluster as events with their seconds: what `sim.timeline` runs.

Without a pipeline every rank does the same things in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from numpy.typing import ArrayLike

from moesaic.facts.cluster import Cluster, place
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, stages
from moesaic.facts.workload import Block, Op, workload
from moesaic.facts.workload.sizes import Sizes
from moesaic.policy.cost import ahead, sums
from moesaic.policy.cost.event import Event
from moesaic.policy.cost.lanes import ORDER, Lanes
from moesaic.policy.cost.pipeline import Flow, pipelined
from moesaic.policy.cost.traffic import Traffic


@dataclass(frozen=True)
class Costs(Lanes):
    """A job laid over a cluster."""

    job: Job = field(kw_only=True)
    loads: Sequence[ArrayLike] | None = field(default=None, kw_only=True)
    """By expert layer, as `workload` takes them; None: even routing."""
    late: bool = field(default=False, kw_only=True)
    """Whether sums of gradients wait for the end of backward: so a few layers show what many do,
    beside each of which there is little of those of embedding and head."""
    _work: dict[int, list[Block]] = field(default_factory=dict, kw_only=True)
    """Blocks by rank."""

    @classmethod
    def of(
        cls,
        job: Job,
        plan: Plan,
        cluster: Cluster,
        loads: Sequence[ArrayLike] | None = None,
        traffic: Traffic | None = None,
    ) -> Costs:
        """Ranks in the order of the cluster's places; `traffic` is of as many of them, if known."""
        places = place(cluster, plan.ranks)
        traffic = traffic or Traffic(cluster, places)
        return cls(plan, cluster, places, traffic, job=job, loads=loads)

    def events(self) -> list[Event]:
        """One whole step."""
        alike = self._alike()
        work = {rank: self.work(rank) for rank in alike}
        return self.events_of(work, alike)

    def ops(self, rank: int) -> list[Op]:
        """Everything that `rank` computes in one whole step."""
        work, micro_batches = self.work(rank), self.job.train.micro_batches
        once = [op for block in work for way in (block.forward, block.backward) for op in way.ops]
        return once * micro_batches + [op for block in work for op in block.update.ops]

    def work(self, rank: int) -> list[Block]:
        """Its blocks."""
        if rank not in self._work:
            on_cpu = self.device(rank).kind == "cpu"
            found = workload(self.job, self.plan, rank, self.loads, on_cpu=on_cpu)
            self._work[rank] = found
        return self._work[rank]

    def events_of(
        self, work: Mapping[int, Sequence[Block]], alike: Mapping[int, list[int]]
    ) -> list[Event]:
        """One whole step, of blocks of the first of each kind of ranks; those `alike`, by it."""
        micro_batches = self.job.train.micro_batches
        if self.plan.pp == 1:
            return sequential(self, work, alike, micro_batches, late=self.late)
        sizes = [Sizes.of(self.job, self.plan, rank) for rank in range(self.plan.span)]
        stream_bytes = [one.stream * one.wide for one in sizes] * self.plan.pp
        flow = Flow(stages(self.plan, self.job.model), micro_batches, stream_bytes)
        return pipelined(self, flow, work, alike)

    def _alike(self) -> dict[int, list[int]]:
        """Ranks that have equal work on equal devices, by the first of them."""
        size = self.job.train.batch // self.job.train.micro_batches
        plan, found = self.plan, dict[tuple[object, ...], list[int]]()
        groups = {rank: group for group in plan.expert_groups() for rank in group}
        rows = [len(plan.rows(rank, size)) for rank in range(plan.ranks)]
        arriving = {group[0]: tuple(rows[rank] for rank in group) for group in plan.expert_groups()}
        for rank, kind in enumerate(self.device_kinds()):
            # Experts are alike where routing is even; the first owners count the norm.
            home = rank // plan.etp % plan.ep if self.loads is not None else 0
            sent = arriving[groups[rank][0]]
            first = (rank % plan.span < plan.ep * plan.etp, plan.replica(rank) < plan.shard)
            where = (plan.part(rank), rank % plan.tp)
            found.setdefault((rows[rank], home, sent, first, where, kind), []).append(rank)
        return {ranks[0]: ranks for ranks in found.values()}


def sequential(
    lanes: Lanes,
    work: Mapping[int, Sequence[Block]],
    alike: Mapping[int, list[int]],
    micro_batches: int = 1,
    *,
    late: bool = False,
) -> list[Event]:
    """One whole step without a pipeline, micro-batch after micro-batch.

    Args:
        lanes: ranks on a cluster.
        work: blocks of the first of each kind of ranks.
        alike: ranks that have its work on its kind of device, by the first of them.
        micro_batches: of the step.
        late: whether sums of gradients wait for the end of backward.
    """
    blocks = list(zip(*work.values(), strict=True))
    ranks = list(alike.values())
    forward: list[Event] = []
    for row in blocks:
        forward += lanes.block_events("forward", row, [block.forward for block in row], ranks)
    backward, update = list[Event](), list[Event]()
    for row in reversed(blocks):
        backward += lanes.block_events("backward", row, [block.backward for block in row], ranks)
        update += lanes.block_events("", row, [block.update for block in row], ranks)
    update.sort(key=lambda event: (ORDER.index(event.phase), bool(event.groups)))
    last = backward
    if lanes.plan.shard > 1 and lanes.hand_ahead:
        last, update = ahead.with_copies(backward, update)
        forward, backward, last = (
            ahead.forward(forward),
            ahead.backward(backward),
            ahead.backward(last),
        )
    if not late:
        last, update = sums.under_backward(last, update, lanes)
    first = sum(event.phase == "data" for event in update)
    several = (micro_batches - 1) * [*forward, *backward]
    return [*update[:first], *several, *forward, *last, *update[first:]]


def replicated(blocks: Sequence[Block], ranks: int, cluster: Cluster) -> list[Event]:
    """A step in which each of `ranks` ranks does all of `blocks` on samples of its own."""
    plan = Plan(ranks=ranks, ep=1, shard=1, experts=0)
    places = place(cluster, ranks)
    lanes = Lanes(plan, cluster, places, Traffic(cluster, places))
    found: dict[int, list[int]] = {}
    for rank, kind in enumerate(lanes.device_kinds()):
        found.setdefault(kind, []).append(rank)
    alike = {same[0]: same for same in found.values()}
    return sequential(lanes, dict.fromkeys(alike, blocks), alike)
