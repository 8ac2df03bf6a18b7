"""Events of a step of a job on a cluster, with their seconds; `policy.cost.timeline` runs them.

Without a pipeline, every rank runs the same events in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from numpy.typing import ArrayLike

from moesaic.facts.cluster import Cluster, place_ranks
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, stage_blocks
from moesaic.facts.workload import STEP, Block, Op, Part, job_parts, workload
from moesaic.facts.workload.sizes import Sizes
from moesaic.policy.cost import fsdp_overlap, gradient_reduction
from moesaic.policy.cost.cluster_costs import PHASE_ORDER, ClusterCosts
from moesaic.policy.cost.event import Event, Segment, SegmentRun, map_events
from moesaic.policy.cost.network import NetworkModel
from moesaic.policy.cost.pipeline import PipelineTraffic, pipeline_step


@dataclass(frozen=True)
class JobCosts(ClusterCosts):
    """Costs of a job on a cluster."""

    job: Job = field(kw_only=True)
    loads: Sequence[ArrayLike] | None = field(default=None, kw_only=True)
    """Load by expert layer, as in `workload`; None for even routing."""
    reduces_after_backward: bool = field(default=False, kw_only=True)
    """Gradient reductions wait for the end of backward.

    A model of few layers, next to a large embedding and head, then predicts a deep one.
    """
    part: Part | None = field(default=None, kw_only=True)
    """Part of a job with students, whose job and plan these are; None for the whole job."""
    _blocks_by_rank: dict[int, list[Block]] = field(default_factory=dict, kw_only=True)
    """Cached blocks by rank."""

    @classmethod
    def from_job(
        cls,
        job: Job,
        plan: Plan,
        cluster: Cluster,
        loads: Sequence[ArrayLike] | None = None,
        network: NetworkModel | None = None,
    ) -> JobCosts:
        """Place ranks in the order of the cluster's places.

        `network` must cover as many ranks; None builds it.
        """
        places = place_ranks(cluster, plan.ranks)
        network = network or NetworkModel(cluster, places)
        return cls(plan, cluster, places, network, job=job, loads=loads)

    def parts(self) -> list[JobCosts]:
        """Return the costs of each part of the job: its own model, then its students."""
        return [
            replace(
                self, job=part.job, plan=part.plan, part=part,
                loads=self.loads if part.student is None else None,
                _blocks_by_rank={}, _compute_seconds={}, _groups_by_key={}, _block_cache={},
                _collectives={},
            )
            for part in job_parts(self.job, self.plan)
        ]  # fmt: skip

    def step(self) -> list[SegmentRun]:
        """Return the events of one whole step; a block that computes in a share of the steps has
        this share of its seconds."""
        same_work = self.equal_ranks()
        work = {rank: self.blocks(rank) for rank in same_work}
        found, part = self.step_from_blocks(work, same_work), self.part
        if part is None or (part.running_share == 1.0 and not part.prefix):
            return found

        def change(event: Event) -> Event:
            # Ranks reduce the gradients of auxiliary weights in every step.
            is_reduced = part.student is not None and event.is_communication
            share = 1.0 if is_reduced else part.share_of_steps(event.block)
            seconds = event.seconds if share == 1.0 else share * event.seconds
            prefix = "" if event.block == STEP else part.prefix
            return replace(event, block=f"{prefix}{event.block}", seconds=seconds)

        return map_events(found, change)

    def ops(self, rank: int) -> Iterator[tuple[float, list[Op]]]:
        """Yield operations of `rank` in a step, with the share of the steps that have them."""
        for block in self.blocks(rank):
            once = [*block.forward.ops, *block.backward.ops]
            share = 1.0 if self.part is None else self.part.share_of_steps(block.name)
            yield share, once * self.job.train.micro_batches + [*block.update.ops]

    def flops(self, rank: int) -> float:
        """Return the FLOPs of `rank` in a step, as a mean over steps."""
        return sum(share * op.flops for share, ops in self.ops(rank) for op in ops)

    def blocks(self, rank: int) -> list[Block]:
        """Return the blocks of `rank`."""
        if rank not in self._blocks_by_rank:
            on_cpu = self.device(rank).kind == "cpu"
            if self.part is None:
                found = workload(self.job, self.plan, rank, self.loads, on_cpu=on_cpu)
            else:
                found = self.part.blocks(rank, self.loads, on_cpu=on_cpu)
            self._blocks_by_rank[rank] = found
        return self._blocks_by_rank[rank]

    def step_from_blocks(
        self, blocks_by_rank: Mapping[int, Sequence[Block]], equal_ranks: Mapping[int, list[int]]
    ) -> list[SegmentRun]:
        """Return the events of one whole step from given blocks.

        Args:
            blocks_by_rank: blocks of the first rank of each kind.
            equal_ranks: ranks of each kind, by the first of them.
        """
        micro_batches = self.job.train.micro_batches
        if self.plan.pp == 1:
            return sequential_step(
                self,
                blocks_by_rank,
                equal_ranks,
                micro_batches,
                reduces_after_backward=self.reduces_after_backward,
            )
        sizes = [Sizes(self.job, self.plan, rank) for rank in range(self.plan.ranks_per_stage)]
        stream_bytes = [one.stream_elements * one.stored_bytes for one in sizes] * self.plan.pp
        traffic = PipelineTraffic(
            stage_blocks(self.plan, self.job.model), micro_batches, stream_bytes
        )
        return pipeline_step(self, traffic, blocks_by_rank, equal_ranks)

    def equal_ranks(self, *, in_memory: bool = False) -> dict[int, list[int]]:
        """Return ranks with equal work on equal devices, by the first of them; see
        `equal_ranks`."""
        kinds = self.device_kinds()
        return equal_ranks(self.job, self.plan, kinds, self.loads, in_memory=in_memory)


def equal_ranks(
    job: Job,
    plan: Plan,
    device_kinds: Sequence[int],
    loads: Sequence[ArrayLike] | None = None,
    *,
    in_memory: bool = False,
) -> dict[int, list[int]]:
    """Return ranks with equal work on equal devices, by the first of them.

    Args:
        job: the job.
        plan: placement of the model on ranks.
        device_kinds: number of each rank's device; equal devices share a number.
        loads: one load per expert layer; None for even routing.
        in_memory: whether ranks are equal that differ only in the norm that they compute, and whose
            first one needs as much memory as any.
    """
    size, found = job.train.batch // job.train.micro_batches, dict[tuple[object, ...], list[int]]()
    groups = {rank: group for group in plan.ep_groups() for rank in group}
    rows = [len(plan.sample_range(rank, size)) for rank in range(plan.ranks)]
    group_rows = {group[0]: tuple(rows[rank] for rank in group) for group in plan.ep_groups()}
    for rank, kind in enumerate(device_kinds):
        # Under even routing all experts are equal. The norm runs on first owners only.
        owner = rank // plan.etp % plan.ep if loads is not None else 0
        first = rank % plan.ranks_per_stage < plan.ep * plan.etp, plan.dp_rank(rank) < plan.dp_shard
        position = () if in_memory else (first, rank % plan.tp)
        key = rows[rank], owner, group_rows[groups[rank][0]], plan.pp_rank(rank), position, kind
        found.setdefault(key, []).append(rank)
    return {ranks[0]: ranks for ranks in found.values()}


def sequential_step(
    costs: ClusterCosts,
    blocks_by_rank: Mapping[int, Sequence[Block]],
    equal_ranks: Mapping[int, list[int]],
    num_micro_batches: int = 1,
    *,
    reduces_after_backward: bool = False,
) -> list[SegmentRun]:
    """Return the events of one whole step without a pipeline, micro-batch after micro-batch.

    Args:
        costs: costs of blocks on a cluster.
        blocks_by_rank: blocks of the first rank of each kind.
        equal_ranks: ranks with equal work and devices, by the first of them.
        num_micro_batches: micro-batches of the step.
        reduces_after_backward: whether gradient reductions wait for the end of backward.
    """
    blocks = list(zip(*blocks_by_rank.values(), strict=True))
    ranks = list(equal_ranks.values())
    forward: list[Event] = []
    for row in blocks:
        forward += costs.block_events("forward", row, [block.forward for block in row], ranks)
    backward, update = list[Event](), list[Event]()
    for row in reversed(blocks):
        backward += costs.block_events("backward", row, [block.backward for block in row], ranks)
        update += costs.block_events("", row, [block.update for block in row], ranks)
    update.sort(key=lambda event: (PHASE_ORDER.index(event.phase), bool(event.groups)))
    last = backward
    if costs.plan.dp_shard > 1 and costs.has_async_devices:
        last, update = fsdp_overlap.add_replica_reductions(backward, update)
        forward, backward, last = (
            fsdp_overlap.overlap_forward(forward),
            fsdp_overlap.overlap_backward(backward),
            fsdp_overlap.overlap_backward(last),
        )
    if not reduces_after_backward:
        last, update = gradient_reduction.overlap_reductions(last, update, costs)
    first = sum(event.phase == "data" for event in update)
    begin, ahead, back = Segment(update[:first]), Segment(forward), Segment(backward)
    end = Segment([*last, *update[first:]])
    several = (num_micro_batches - 1) * [ahead, back]
    return [SegmentRun(one) for one in (begin, *several, ahead, end)]


def replicated_step(blocks: Sequence[Block], num_ranks: int, cluster: Cluster) -> list[SegmentRun]:
    """Return the events of a data-parallel step: each of `num_ranks` ranks runs all of `blocks`."""
    plan = Plan(ranks=num_ranks, ep=1, dp_shard=1, experts=0)
    places = place_ranks(cluster, num_ranks)
    costs = ClusterCosts(plan, cluster, places, NetworkModel(cluster, places))
    found: dict[int, list[int]] = {}
    for rank, kind in enumerate(costs.device_kinds()):
        found.setdefault(kind, []).append(rank)
    equal_ranks = {same[0]: same for same in found.values()}
    return sequential_step(costs, dict.fromkeys(equal_ranks, blocks), equal_ranks)
