"""Lower bounds of a step's seconds and of memory, for candidates whose keys are partly open.

A bound is the step of ranks that wait for no other rank (`step_bounds`). It adds the seconds of
each kind of block (`block_costs`) and of parameters (`state_costs`). It takes milliseconds where
the step simulator takes seconds. Open settings count as little as they may.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moesaic.facts.cluster import device_at
from moesaic.facts.plan import Action, stage_blocks
from moesaic.facts.workload.collectives import (
    CollectiveCall,
    count_reduction,
    scalar_reductions,
)
from moesaic.facts.workload.parameters import parameters
from moesaic.facts.workload.sizes import Sizes
from moesaic.policy.cost.compute import PEAK_FRACTION
from moesaic.policy.cost.network import NetworkModel
from moesaic.policy.cost.pipeline import EAGER_SCHEDULES, merge_schedules
from moesaic.policy.cost.step import JobCosts
from moesaic.policy.plan.block_costs import Seconds, StageCost
from moesaic.policy.plan.memory_bound import MemoryBounds
from moesaic.policy.plan.space import Candidate, Space
from moesaic.policy.plan.state_costs import ENDS, StageState
from moesaic.policy.plan.step_bounds import (
    BlockTimes,
    StageTimes,
    backward_seconds,
    forward_seconds,
    least_pipeline_seconds,
    pipeline_seconds,
)


class Work(NamedTuple):
    """Seconds of a kind of block in a micro-batch, [ranks]."""

    total_s: Seconds
    front_s: Seconds
    """Seconds of these that later stages of a pipeline wait for, at least."""
    forward_s: Seconds


ROUNDING = 1 - 1e-9
"""Factor on bounds, for sums in another order."""


class Bounds(MemoryBounds):
    """Lower bounds for the candidates of a space.

    A level is the number of decisions after the shape, as in `Space.LEVELS`. Level -1 is a quick
    bound of a shape, without blocks of experts.
    """

    def __init__(self, space: Space, *, has_loads: bool = False) -> None:
        super().__init__(space, has_loads=has_loads)
        self._counts = Counter(self._kinds)
        self._actions: dict[object, list[Action]] = {}
        self._sends: dict[object, dict[tuple[int, int], float]] = {}
        self._worlds: dict[object, JobCosts] = {}
        self._scalars: dict[object, float] = {}
        self._known: dict[tuple[Candidate, int], float] = {}
        self._network = NetworkModel(self._cluster, self._places)
        experts = (self._kind_of[f"layers.{layer}"] for layer in self._job.model.expert_layers)
        self._expert_kinds = frozenset(experts)
        devices, precision = self._blocks.devices, self._job.train.precision
        calibration = self._cluster.calibration
        factor = 1.0 if calibration is None else min(calibration.matmul, 1.0)
        speeds = [one.matmul_speed(precision).flops / factor for one in devices]
        self._speeds = [] if self._blocks.is_measured else speeds
        """Calibrated speeds of matmuls by rank, at least; empty if one is measured, and so no
        limit."""
        self._is_async = all(
            device_at(self._cluster, one).kind != "cpu" for one in dict.fromkeys(self._places)
        )

    def matmul_seconds(self) -> float | None:
        """Return seconds that no plan beats: all matmuls with weights, evenly over all ranks.

        None if the speed of a device is measured, and so no limit.
        """
        job, weights = self._job, 0
        if not self._speeds:
            return None
        for p in parameters(job.model, lambda _: range(min(job.model.experts, 1))):
            is_matrix = len(p.shape) == 2 and p.kind not in ("router", "embedding")
            weights += is_matrix * p.size * (job.model.top_k if p.kind == "expert" else 1)
        if job.model.tied:
            weights += job.model.vocab * job.model.hidden
        speed = PEAK_FRACTION * sum(self._speeds)
        return ROUNDING * self._matmul_operations(weights) / speed

    def _matmul_operations(self, weights: int) -> float:
        """Return the operations of a step's matmuls with so many weights."""
        job = self._job
        # Forward, and the gradients of inputs and of weights, with two operations each.
        passes = 3 if job.finetune is None or job.finetune.method == "full" else 2
        passes = 1 if job.distill.frozen else passes
        return 2 * passes * weights * job.train.batch * job.data.sequence

    def _expert_seconds(self, candidate: Candidate) -> float:
        """Return seconds of a layer's experts in a micro-batch on a rank of a stage, at least.

        Some rank of a stage computes as many rows as the average rank, whatever the dispatch.
        """
        if not self._speeds:
            return 0.0
        model, ranks = self._job.model, self._space.ranks // candidate.pp
        weights = 3 * model.hidden * model.ffn * model.top_k
        speed = PEAK_FRACTION * max(self._speeds) * ranks * candidate.micro_batches
        return self._matmul_operations(weights) / speed

    def seconds(self, candidate: Candidate, level: int) -> float:
        """Return seconds of a step that no plan below `candidate` can beat."""
        key = candidate, level
        if key not in self._known:
            self._known[key] = ROUNDING * self._least(candidate, level)
        return self._known[key]

    def _least(self, candidate: Candidate, level: int) -> float:
        if level < 0:
            return self._partly(candidate, has_experts=False)
        if level == 0 and candidate.ep > 1:
            options = self._space.children(candidate, 0)
            is_open = any(one.overlaps_dispatch for one in options)
            first = dict.fromkeys(map(self._space.with_fewest_chunks, options))
            found = [self._partly(one, is_open=is_open) for one in first]
            return min(found, default=0.0)
        if level == 1:  # Most chunks are ruled out by those bounds, before their blocks are built.
            fewest = self._space.with_fewest_chunks(candidate)
            return self._partly(fewest, is_open=fewest != candidate)
        if level < 2:
            return self._partly(candidate)
        if level == 2:
            options = self._space.children(candidate, 2)
            return min((self.seconds(one, 3) for one in options), default=0.0)
        if candidate.pp == 1:
            return self._sequential(candidate)
        if level == len(Space.LEVELS) and candidate.cuts == "even":
            found_plan = self._space.plan(candidate)
            assert found_plan is not None
            return self._pipeline(candidate, stage_blocks(found_plan[1], self._job.model))
        return self._partly(candidate, has_state=True)

    def _partly(
        self,
        candidate: Candidate,
        *,
        is_open: bool = False,
        has_state: bool = False,
        has_experts: bool = True,
    ) -> float:
        """Return the seconds of a step whose dispatch chunks, state or stage boundaries are open.

        Without `has_state`, the embedding and the sharding of dense parameters are open.
        """
        if has_experts:
            stages = self._blocks.stages(candidate)
        else:
            stages = self._blocks.without_experts(candidate)
        work = [self._work(one, candidate, is_open, has_state) for one in stages]
        if has_state:
            update = self._update(candidate)
        elif has_experts:
            update = self._least_update(candidate)
        else:
            update = [dict.fromkeys(self._counts, np.zeros(1))] * candidate.pp
        pp, micro_batches = candidate.pp, candidate.micro_batches
        rest_s = self._scalars_of(candidate)
        if self._job.distill.frozen:  # The teacher computes only forward.
            rest_s, update = 0.0, [dict.fromkeys(self._counts, np.zeros(1))] * candidate.pp
        experts_s = 0.0 if has_experts else self._expert_seconds(candidate)
        if pp == 1:
            total = sum(
                count * (micro_batches * work[0][kind].total_s + update[0][kind])
                for kind, count in self._counts.items()
            )
            experts_s *= micro_batches * sum(map(self._counts.__getitem__, self._expert_kinds))
            return max(float(np.max(total)), float(np.min(total)) + experts_s) + rest_s
        if not has_experts:
            return rest_s + self._partly_piped(candidate, work, update, -1, experts_s)
        level = 3 if has_state else 0 if is_open else 1
        return rest_s + self._partly_piped(candidate, work, update, level)

    def _partly_piped(
        self,
        candidate: Candidate,
        work: Sequence[Mapping[str, Work]],
        update: Sequence[Mapping[str, Seconds]],
        level: int,
        experts_s: float = 0.0,
    ) -> float:
        """Return the seconds of a step of a pipeline whose stage boundaries are open."""
        pp, micro_batches = candidate.pp, candidate.micro_batches
        # Passes alone, what later stages wait for, forward, and passes with the rest of a step.
        each = np.array([
            [
                (
                    one.total_s.min(), one.front_s.min(), one.forward_s.min(),
                    (one.total_s + update[pp_rank][kind] / micro_batches).min(),
                )
                for kind, one in work[pp_rank].items()
            ]
            for pp_rank in range(pp)
        ])  # fmt: skip
        own, front, forward, whole = np.moveaxis(each, 2, 0)[:, :, self._positions(work[0])]
        # The rank with the most rows may wait for ranks with few: `front` has no such rows.
        has_experts = np.array([kind in self._expert_kinds for kind in self._kinds])
        own, whole = own + experts_s * has_experts, whole + experts_s * has_experts
        transfer_s = 2 * min(self._sends_of(candidate).values())
        least_s = micro_batches * float(whole.min(axis=0).sum()) / pp
        if candidate.schedule == "interleaved":
            one_s = float(front.min(axis=0).sum()) + (2 * pp - 1) * transfer_s
            return max(least_s, micro_batches * float(own.min(axis=0).max()), one_s)
        receives = candidate.schedule not in EAGER_SCHEDULES
        transfer_s *= receives
        fits = self.stages_fit(candidate, level) if level >= 0 else None
        # While the stages before a rank end their backward, it does the rest of its step.
        return max(
            least_s,
            least_pipeline_seconds(
                own, front, transfer_s, micro_batches, receives=receives, fits=fits
            ),
            least_pipeline_seconds(whole, forward, 0.0, micro_batches, receives=False, fits=fits),
        )

    def _positions(self, kinds: Iterable[str]) -> list[int]:
        """Return the position of each block's kind in `kinds`."""
        order = {kind: at for at, kind in enumerate(kinds)}
        return [order[kind] for kind in self._kinds]

    def _work(
        self, stage: StageCost, candidate: Candidate, is_open: bool, has_embedding: bool
    ) -> dict[str, Work]:
        """Return the work of each kind of block in a micro-batch."""
        found = {}
        for kind, cost in stage.blocks.items():
            passes = cost.least if is_open else cost.passes
            forward, total = passes["forward"], passes["forward"] + passes["backward"]
            front = total
            if candidate.schedule == "zero-bubble" and candidate.pp > 1:
                total = np.minimum(total, forward + passes["input"] + passes["weight"])
                front = forward
            if self._job.distill.frozen:
                total = forward * (kind != "head")
            found[kind] = Work(total, front, forward)
        if not has_embedding:  # Column shards look tokens up in another way.
            found["embed"] = Work(*(0.0 * one for one in found["embed"]))
        return found

    def _least_update(self, candidate: Candidate) -> list[dict[str, Seconds]]:
        """Return the seconds once per step by kind of block, with any sharding of parameters."""
        shards = [candidate.dp_shard]
        if self._space.is_open("layout.dp_shard"):
            shards = [1, self._space.ranks // candidate.pp // candidate.tp]
        options = [
            [
                {kind: own.total_s for kind, own in stage.update.items()}
                for stage in self._states.stages(candidate._replace(dp_shard=one))
            ]
            for one in dict.fromkeys(shards)
        ]
        found = []
        for stages in zip(*options, strict=True):
            least = {kind: np.minimum.reduce([one[kind] for one in stages]) for kind in stages[0]}
            found.append(least | {kind: 0.0 * least[kind] for kind in ("embed", "head")})
        return found

    def _update(self, candidate: Candidate) -> list[dict[str, Seconds]]:
        """Return the seconds once per step by kind of block on the ranks of a pipeline."""
        found = []
        for stage in self._states.stages(candidate):
            own: dict[str, Seconds] = {}
            for kind, update in stage.update.items():
                total = update.total_s
                if kind in stage.sharding:
                    total = total + stage.sharding[kind].total_s
                for name, num_bytes in stage.gradients[kind].items():
                    total = total + stage.s_per_byte[name][1] * num_bytes
                own[kind] = total
            found.append(own)
        return found

    def _sequential(self, candidate: Candidate) -> float:
        """Return the seconds of a step without a pipeline."""
        if self._job.student:
            return self._partly(candidate)
        stage, state = self._blocks.stages(candidate)[0], self._states.stages(candidate)[0]
        found = []
        for rank in range(len(stage.blocks["embed"].passes["forward"])):
            times = {kind: self._block_times(stage, state, kind, rank) for kind in self._counts}
            blocks = [times[kind] for kind in self._kinds]
            updates = [(self._counts[kind], one) for kind, one in state.update.items()]
            accumulate_s = sum(count * float(one.accumulate_s[rank]) for count, one in updates)
            rest_s = sum(count * float((one.norm_s + one.rest_s)[rank]) for count, one in updates)
            launched: dict[int, list[tuple[str, float]]] = {}
            for bucket in state.buckets:
                if bucket.block:
                    channel = "between hosts" if bucket.is_inter_host else ""
                    own = launched.setdefault(bucket.block, [])
                    own.append((channel, float(bucket.seconds[rank])))
                else:
                    rest_s += float(bucket.seconds[rank])
            step_s = candidate.micro_batches * forward_seconds(blocks, is_async=self._is_async)
            if candidate.micro_batches > 1:
                each_s = backward_seconds(blocks, is_async=self._is_async)
                step_s += (candidate.micro_batches - 1) * each_s
            step_s += backward_seconds(
                blocks, is_async=self._is_async, reductions=launched, then_s=accumulate_s
            )
            found.append(step_s + rest_s)
        return max(found) + self._scalars_of(candidate)

    def _block_times(self, stage: StageCost, state: StageState, kind: str, rank: int) -> BlockTimes:
        passes = stage.blocks[kind].passes
        own = [float(passes[one][rank]) for one in ("forward", "backward")]
        sharding = state.sharding.get(ENDS if kind == "embed" else kind)
        if sharding is None:
            return BlockTimes(*own)
        return BlockTimes(*own, *(float(one[rank]) for one in sharding))

    def _pipeline(self, candidate: Candidate, stages: Sequence[Sequence[str]]) -> float:
        """Return the seconds of a step of a pipeline with these stages."""
        pp, micro_batches, own = candidate.pp, candidate.micro_batches, candidate
        costs, states = self._blocks.stages(candidate), self._states.stages(candidate)
        times, after, rest = list[StageTimes](), [0.0] * pp, [0.0] * pp
        bytes_of: list[Counter[str]] = [Counter() for _ in range(pp)]
        layers: list[Counter[int]] = [Counter() for _ in range(pp)]
        expert_layers = {f"layers.{layer}" for layer in self._job.model.expert_layers}
        for number, names in enumerate(stages):
            pp_rank = number % pp
            cost, state = costs[pp_rank], states[pp_rank]
            kinds = Counter(self._kind_of[name] for name in names)
            times.append(_stage_times(cost, state, kinds, number == 0, micro_batches))
            for kind, count in kinds.items():
                after[pp_rank] += count * float(state.update[kind].norm_s.min())
                rest[pp_rank] += count * float(state.update[kind].rest_s.min())
                for name, num_bytes in state.gradients[kind].items():
                    bytes_of[pp_rank][name] += count * num_bytes
            layers[pp_rank][len(expert_layers.intersection(names))] += 1
        for pp_rank, state in enumerate(states):
            for name, num_bytes in bytes_of[pp_rank].items():
                latency, slope = state.s_per_byte[name]
                after[pp_rank] += float((latency + num_bytes * slope).min())
            for count, times_of in layers[pp_rank].items():
                if count:
                    each_s = self._count_seconds(candidate, pp_rank, count)
                    after[pp_rank] += times_of * micro_batches * each_s
        key = own.schedule, pp, len(stages) // pp, micro_batches
        if key not in self._actions:
            self._actions[key] = list(merge_schedules(*key))
        ends = pipeline_seconds(
            self._actions[key], own.schedule, times, self._sends_of(candidate), pp
        )
        last = max(end + more for end, more in zip(ends, after, strict=True))
        return last + max(rest) + self._scalars_of(candidate)

    def stages_seconds(self, candidate: Candidate, stages: Sequence[Sequence[str]]) -> float:
        """Return seconds that a step of a complete candidate with these stages takes at least."""
        if candidate.pp == 1:
            return self.seconds(candidate, len(Space.LEVELS))
        return ROUNDING * self._pipeline(candidate, stages)

    def _world(self, candidate: Candidate) -> JobCosts:
        """Return costs of collectives that span all ranks; they do not depend on the dispatch."""
        own = candidate
        key = own.pp, own.tp, own.etp, own.micro_batches
        if key not in self._worlds:
            found = self._space.plan(candidate)
            assert found is not None
            job, plan = found
            self._worlds[key] = JobCosts(plan, self._cluster, self._places, self._network, job=job)
        return self._worlds[key]

    def _scalars_of(self, candidate: Candidate) -> float:
        """Return the seconds of reductions of single numbers; expert counts only without a
        pipeline."""
        own = candidate
        key = own.pp, own.tp, own.etp if own.pp == 1 else 0, own.micro_batches
        if key not in self._scalars:
            costs, total = self._world(candidate), 0.0
            calls = Counter(scalar_reductions(costs.job, costs.plan, 0))
            for call, count in calls.items():
                if own.pp == 1 or call.name != "expert counts":
                    total += count * _seconds_of(costs, call, 0)
            self._scalars[key] = total
        return self._scalars[key]

    def _count_seconds(self, candidate: Candidate, pp_rank: int, num_layers: int) -> float:
        """Return the seconds of reducing the expert counts of a stage with some expert layers."""
        own = candidate
        key = own.pp, own.tp, own.etp, own.micro_batches, pp_rank, num_layers
        if key not in self._scalars:
            costs, rank = self._world(candidate), pp_rank * (self._space.ranks // own.pp)
            call = count_reduction(costs.job, costs.plan, rank, num_layers)
            self._scalars[key] = _seconds_of(costs, call[0], rank) if call else 0.0
        return self._scalars[key]

    def _sends_of(self, candidate: Candidate) -> dict[tuple[int, int], float]:
        """Return the least seconds of a transfer by the pipeline ranks at its ends."""
        pp, is_round = candidate.pp, candidate.schedule == "interleaved"
        key = pp, candidate.tp, candidate.micro_batches, is_round
        if key not in self._sends:
            costs, size = self._world(candidate), self._space.ranks // pp
            sizes = [Sizes(costs.job, costs.plan, rank) for rank in range(size)]
            num_bytes = [one.stream_elements * one.stored_bytes for one in sizes]
            ends = [(one, one + 1) for one in range(pp - 1)] + [(pp - 1, 0)] * is_round
            found = {}
            for source, target in (*ends, *((b, a) for a, b in ends)):
                pairs = [(source * size + at, target * size + at) for at in range(size)]
                seconds = costs.send_s(pairs, num_bytes)
                found[source, target] = float(min(seconds[rank] for _, rank in pairs))
            self._sends[key] = found
        return self._sends[key]

    def block_seconds(self, candidate: Candidate) -> list[list[float]]:
        """Return the seconds of a micro-batch by pipeline stage and block, [stages][blocks]."""
        found = self._space.plan(candidate)
        assert found is not None
        rows = []
        for stage in self._blocks.stages(candidate):
            each = {
                kind: float((one.passes["forward"] + one.passes["backward"]).max())
                for kind, one in stage.blocks.items()
            }
            rows.append([each[kind] for kind in self._kinds])
        return [rows[stage % candidate.pp] for stage in range(found[1].num_stages)]


def _stage_times(
    cost: StageCost, state: StageState, kinds: Mapping[str, int], is_first: bool, micro_batches: int
) -> StageTimes:
    """Return the seconds of a pipeline stage with so many blocks of each kind."""
    passes, before_s, after_s = dict[str, float](), 0.0, 0.0
    for kind, count in kinds.items():
        own = {name: float(one.min()) for name, one in cost.blocks[kind].passes.items()}
        if is_first:
            # The model's inputs have no gradients: the whole backward is in `weight`.
            own |= {"input": 0.0, "weight": own["backward"]}
        share_s = float(state.update[kind].accumulate_s.min()) / micro_batches
        for name, seconds in own.items():
            more_s = share_s if name in ("backward", "weight") else 0.0
            passes[name] = passes.get(name, 0.0) + count * (seconds + more_s)
        if kind in state.sharding:
            sharding = state.sharding[kind]
            first = sharding.gather_s + sharding.unshard_s
            before_s += count * float(first.min())
            after_s += count * float((sharding.total_s - first).min())
    return StageTimes(passes, before_s, after_s)


def _seconds_of(costs: JobCosts, call: CollectiveCall, rank: int) -> float:
    event = costs.collective_event("", "", [call], [list(range(costs.plan.ranks))])
    return float(event.seconds[rank])
