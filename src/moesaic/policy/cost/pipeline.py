"""Events of a step with pipeline parallelism.

One list holds all pipeline ranks. Each rank keeps the order of its schedule
(`facts.plan.pipeline_order`), and no event comes before one that it waits for. An event concerns
one pipeline rank. Collectives that span several come after the pipeline, as in any step. Every
action of a stage is one segment, which runs once for each micro-batch.

Approximations:

- Every backward of a micro-batch accumulates an equal share of the gradients.
- In a split backward, the input half runs all elementwise kernels.
- Stage transfers compete only with other transfers that leave the same pipeline rank at that time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moesaic.facts.job.train import PipelineSchedule
from moesaic.facts.plan import Action, pipeline_actions
from moesaic.facts.plan.pipeline_order import ActionKind
from moesaic.facts.workload import STEP, Block, BlockWork, CollectiveCall, Op
from moesaic.policy.cost.cluster_costs import PHASE_ORDER, ClusterCosts
from moesaic.policy.cost.event import (
    PIPELINE,
    Event,
    Seconds,
    Segment,
    SegmentRun,
    StageTransfer,
)

_BEFORE_FIRST_FORWARD = frozenset({"unshard", "parameters"})
"""Work of a stage before its first forward: parameter all-gathers."""
_AFTER_LAST_BACKWARD = frozenset({"reshard", "gradients", "replicas"})
"""Work of a stage after its last backward: gradient reductions."""
_ACCUMULATE = frozenset({"accumulate"})
"""Gradient accumulation: part of every backward, but listed once in the update."""
_FINAL_ACTIONS = frozenset({"backward", "weight"})
"""Kinds of actions that end a micro-batch on a stage."""
EAGER_SCHEDULES = frozenset({"interleaved", "zero-bubble"})
"""Schedules that post receives ahead of time."""


@dataclass(frozen=True)
class PipelineTraffic:
    """Traffic of one step through a pipeline."""

    stages: Sequence[Sequence[str]]
    """Names of the blocks of each stage, as in the plan."""
    num_micro_batches: int
    activation_bytes: Sequence[int]
    """Bytes per micro-batch that each rank sends to the next stage, and back in backward."""


def pipeline_step(
    costs: ClusterCosts,
    traffic: PipelineTraffic,
    blocks_by_rank: Mapping[int, Sequence[Block]],
    equal_ranks: Mapping[int, list[int]],
) -> list[SegmentRun]:
    """Return the events of one whole step.

    Args:
        costs: costs of blocks on a cluster.
        traffic: traffic of the pipeline.
        blocks_by_rank: blocks of the rank's own stages, for the first rank of each kind.
        equal_ranks: ranks of one pipeline rank with equal work and devices, by the first of them.
    """
    pipeline_ranks = []
    for index in range(costs.plan.pp):
        own_kinds = {
            first: ranks
            for first, ranks in equal_ranks.items()
            if costs.plan.pp_rank(first) == index
        }
        rows = list(zip(*(blocks_by_rank[first] for first in own_kinds), strict=True))
        pipeline_ranks.append(PipelineRank(costs, traffic, list(own_kinds.values()), rows))
    rest = [event for one in pipeline_ranks for event in one.events_after_pipeline()]
    rest += _cross_stage_events(costs, pipeline_ranks)
    rest.sort(key=lambda event: (PHASE_ORDER.index(event.phase), bool(event.groups)))
    first = sum(event.phase == "data" for event in rest)
    return [
        SegmentRun(Segment(rest[:first])),
        *_micro_batch_runs(costs, traffic, pipeline_ranks),
        SegmentRun(Segment(rest[first:])),
    ]


def merge_schedules(
    schedule: PipelineSchedule, pp: int, stages_per_rank: int, num_micro_batches: int
) -> Iterator[Action]:
    """Yield the actions of all pipeline ranks in an order that respects all dependencies.

    Each pipeline rank keeps its own order.
    """
    last, done = pp * stages_per_rank - 1, set[Action]()
    queues = [
        deque(pipeline_actions(schedule, pp, stages_per_rank, num_micro_batches, pp_rank))
        for pp_rank in range(pp)
    ]
    while any(queues):
        count = len(done)
        for queue in queues:
            while queue and ((before := prerequisite(queue[0], last)) is None or before in done):
                done.add(queue[0])
                yield queue.popleft()
        assert len(done) > count, f"pipeline ranks of schedule {schedule} deadlock"


def prerequisite(action: Action, last_stage: int) -> Action | None:
    """Return the action of another stage that must precede `action`, if any.

    `last_stage` is the index of the model's last stage.
    """
    if action.kind == "forward":
        return action._replace(stage=action.stage - 1) if action.stage else None
    if action.kind == "weight" or action.stage == last_stage:
        return None
    return action._replace(stage=action.stage + 1)


@dataclass(frozen=True)
class PipelineRank:
    """One pipeline rank: its events per micro-batch and per step."""

    costs: ClusterCosts
    traffic: PipelineTraffic
    ranks: Sequence[list[int]]
    """Ranks by kind; all ranks of a kind have equal work."""
    blocks: Sequence[Sequence[Block]]
    """Blocks, each as a row over the first rank of every kind."""

    def step_events(self, stage: int, names: Container[str]) -> Iterator[Event]:
        """Yield the once-per-step events of a stage in the pipeline, restricted to `names`."""
        for row in self._stage_blocks(stage):
            works = [_filter_work(block.update, names) for block in row]
            yield from self.costs.block_events(PIPELINE, row, works, self.ranks)

    def events_after_pipeline(self) -> Iterator[Event]:
        """Yield its own once-per-step events that run after the pipeline."""
        inside = _BEFORE_FIRST_FORWARD | _AFTER_LAST_BACKWARD | _ACCUMULATE
        for row in reversed(self.blocks):
            works = [self._work_after_pipeline(block.update, inside) for block in row]
            yield from self.costs.block_events("", row, works, self.ranks)

    def _work_after_pipeline(self, update: BlockWork, excluded: Container[str]) -> BlockWork:
        return BlockWork(
            tuple(op for op in update.ops if op.name not in excluded),
            tuple(
                call
                for call in update.collectives
                if call.name not in excluded and not self.costs.spans_pipeline_ranks(call)
            ),
        )

    def _stage_blocks(self, stage: int) -> list[Sequence[Block]]:
        """Return the blocks of one stage; a layer has two blocks."""
        names = self.traffic.stages[stage]
        return [row for row in self.blocks if ".".join(row[0].name.split(".")[:2]) in names]

    def action_events(self, kind: ActionKind, stage: int) -> Iterator[Event]:
        """Yield the events of one pass of a stage: each block computes, then communicates.

        With overlapped dispatch, computing and exchanges of chunks are interleaved.
        """
        costs, ranks, num_micro_batches = self.costs, self.ranks, self.traffic.num_micro_batches
        accumulates, rows = kind in _FINAL_ACTIONS, self._stage_blocks(stage)
        for row in rows if kind == "forward" else reversed(rows):
            works = [action_work(block, kind, is_first_stage=stage == 0) for block in row]
            interleaves = costs.plan.overlaps_dispatch
            computed = [() if interleaves else work.ops for work in works]
            each = costs.compute_s(computed, ranks)
            if accumulates:
                more = costs.compute_s(
                    [_filter_work(one.update, _ACCUMULATE).ops for one in row], ranks
                )
                each = tuple(a + b / num_micro_batches for a, b in zip(each, more, strict=True))
            yield Event(kind, PIPELINE, row[0].name, costs.seconds_by_rank(each, ranks))
            if interleaves:
                for event in costs.block_events(PIPELINE, row, works, ranks):
                    yield event if event.is_communication else replace(event, name=kind)
            else:
                collectives = costs.block_collectives(PIPELINE, row[0].name, works, ranks)
                yield from (event for _, event in collectives)


def _filter_work(work: BlockWork, names: Container[str]) -> BlockWork:
    return BlockWork(
        tuple(op for op in work.ops if op.name in names),
        tuple(call for call in work.collectives if call.name in names),
    )


def action_work(block: Block, kind: str, *, is_first_stage: bool) -> BlockWork:
    """Return the work of an action on a block.

    A split backward computes weight gradients in `weight`, and all else in `input`. The first stage
    needs no input gradient, so its whole backward is in `weight`.
    """
    if kind == "forward":
        return block.forward
    if kind == "backward" or (is_first_stage and kind == "weight"):
        return block.backward
    if is_first_stage:
        return BlockWork()
    inputs, weights = list[Op](), list[Op]()
    for op in block.backward.ops:
        matmuls = tuple(one for one in op.matmuls if one.is_weight_gradient)
        rest = tuple(one for one in op.matmuls if not one.is_weight_gradient)
        inputs.append(replace(op, matmuls=rest))
        if matmuls:
            weights.append(Op(op.name, matmuls, dtype=op.dtype, kind=op.kind))
    if kind == "input":
        return BlockWork(tuple(inputs), block.backward.collectives)
    return BlockWork(tuple(weights))


def _micro_batch_runs(
    costs: ClusterCosts, traffic: PipelineTraffic, pipeline_ranks: Sequence[PipelineRank]
) -> Iterator[SegmentRun]:
    """Yield the runs of forward and backward of all micro-batches."""
    pp, schedule, num_micro_batches = costs.plan.pp, costs.plan.schedule, traffic.num_micro_batches
    stages_per_rank = len(traffic.stages) // pp
    actions = list(merge_schedules(schedule, pp, stages_per_rank, num_micro_batches))
    passes = dict.fromkeys(action._replace(micro_batch=0) for action in actions)
    receives, sends = _stage_transfers(costs, traffic, passes)
    segments = dict[Action, Segment]()
    for one in passes:
        events = list(pipeline_ranks[one.stage % pp].action_events(one.kind, one.stage))
        events[-1] = replace(events[-1], sends=sends.get(one))
        segments[one] = Segment(events)
    for action in actions:
        one, before = action._replace(micro_batch=0), list[SegmentRun]()
        pipeline_rank = pipeline_ranks[action.stage % pp]
        if one in receives:
            before.append(SegmentRun(receives[one], action.micro_batch))
        if action.kind == "forward" and action == one:
            first = Segment(list(pipeline_rank.step_events(action.stage, _BEFORE_FIRST_FORWARD)))
            before.insert(0 if schedule in EAGER_SCHEDULES else len(before), SegmentRun(first))
        yield from (*before, SegmentRun(segments[one], action.micro_batch))
        if action.kind in _FINAL_ACTIONS and action.micro_batch == num_micro_batches - 1:
            last = Segment(list(pipeline_rank.step_events(action.stage, _AFTER_LAST_BACKWARD)))
            yield SegmentRun(last)


def _stage_transfers(
    costs: ClusterCosts, traffic: PipelineTraffic, passes: Iterable[Action]
) -> tuple[dict[Action, Segment], dict[Action, StageTransfer]]:
    """Return the receives of `passes` that have one, and the transfers that they send.

    `passes` are the actions of the first micro-batch.
    """
    plan, last, chains = costs.plan, len(traffic.stages) - 1, np.array(costs.plan.pp_groups())
    receives, sends = dict[Action, Segment](), dict[Action, StageTransfer]()
    seconds_by_pair = dict[tuple[int, int], Seconds]()
    for one in passes:
        before = prerequisite(one, last)
        if before is None:
            continue
        source, target = before.stage % plan.pp, one.stage % plan.pp
        senders, receivers = chains[:, source], chains[:, target]
        if (source, target) not in seconds_by_pair:
            pairs = list(zip(senders.tolist(), receivers.tolist(), strict=True))
            num_bytes = [traffic.activation_bytes[rank] for rank, _ in pairs]
            seconds_by_pair[source, target] = costs.send_s(pairs, num_bytes)
        name = "activations" if one.kind == "forward" else "gradients"
        sends[before] = StageTransfer(senders, receivers, plan.schedule in EAGER_SCHEDULES)
        seconds = seconds_by_pair[source, target]
        receives[one] = Segment([Event(name, PIPELINE, STEP, seconds, receives=sends[before])])
    return receives, sends


def _cross_stage_events(
    costs: ClusterCosts, pipeline_ranks: Sequence[PipelineRank]
) -> Iterator[Event]:
    """Yield the once-per-step collectives that span several pipeline ranks."""
    calls_by_key: dict[tuple[str, int], tuple[list[CollectiveCall], list[list[int]]]] = {}
    for pipeline_rank in pipeline_ranks:
        for kind, ranks in enumerate(pipeline_rank.ranks):
            num_calls: Counter[str] = Counter()
            for call in (
                one for row in pipeline_rank.blocks for one in row[kind].update.collectives
            ):
                if costs.spans_pipeline_ranks(call):
                    entry = calls_by_key.setdefault((call.name, num_calls[call.name]), ([], []))
                    entry[0].append(call)
                    entry[1].append(ranks)
                    num_calls[call.name] += 1
    for calls, ranks_of_all in calls_by_key.values():
        yield costs.collective_event("", STEP, calls, ranks_of_all)
