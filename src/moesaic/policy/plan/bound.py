"""Lower bounds of a step's seconds and of memory, for candidates whose keys are partly open.

A bound is the step of ranks that wait for no other rank (`step_bounds`), with the seconds of each
kind of block (`block_costs`) and of parameters (`state_costs`). It takes milliseconds where the
step simulator takes seconds. What is open counts as little as it may.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moesaic.facts.cluster import device_at
from moesaic.facts.plan import Action, block_names, pipeline_actions, stage_blocks
from moesaic.facts.workload.collectives import (
    CollectiveCall,
    count_reduction,
    scalar_reductions,
)
from moesaic.facts.workload.sizes import Sizes
from moesaic.policy.cost.network import NetworkModel
from moesaic.policy.cost.pipeline import EAGER_SCHEDULES, merge_schedules
from moesaic.policy.cost.step import JobCosts
from moesaic.policy.plan.block_costs import BlockCosts, Seconds, StageCost, block_kinds
from moesaic.policy.plan.space import Candidate, Space
from moesaic.policy.plan.state_costs import ENDS, StageState, StateBytes, StateCosts
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


ROUNDING = 1 - 1e-9
"""Factor on bounds, for sums in another order."""


class Bounds:
    """Lower bounds for the candidates of a space.

    A level is the number of decisions after the shape, as in `Space.LEVELS`. Level -1 is a quick
    bound of a shape, without blocks of experts.
    """

    def __init__(self, space: Space, *, has_loads: bool = False) -> None:
        self._space, self._job, self._cluster = space, space.job, space.cluster
        self._blocks = BlockCosts(space, has_loads=has_loads)
        self._states = StateCosts(space, self._blocks)
        self._places = self._blocks.places
        self._kinds = block_kinds(space.job.model)
        self._counts = Counter(self._kinds)
        self._kind_of = dict(zip(block_names(space.job.model), self._kinds, strict=True))
        self._actions: dict[object, list[Action]] = {}
        self._sends: dict[object, dict[tuple[int, int], float]] = {}
        self._worlds: dict[object, JobCosts] = {}
        self._scalars: dict[object, float] = {}
        self._known: dict[tuple[Candidate, int], float] = {}
        self._network = NetworkModel(self._cluster, self._places)
        self._is_async = all(
            device_at(self._cluster, one).kind != "cpu" for one in dict.fromkeys(self._places)
        )
        self._in_flight: dict[object, tuple[int, bool]] = {}
        self._capacity: dict[int, list[float]] = {}
        self._memory = [device_at(self._cluster, place).memory_bytes for place in self._places]

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
            chunks = min((one.chunks for one in options), default=1)
            first = dict.fromkeys(one._replace(chunks=chunks) for one in options)
            found = [self._partly(one, is_open=is_open) for one in first]
            return min(found, default=0.0)
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
        if pp == 1:
            total = sum(
                count * (micro_batches * work[0][kind].total_s + update[0][kind])
                for kind, count in self._counts.items()
            )
            return float(np.max(total)) + rest_s
        own, front = np.zeros((pp, len(self._kinds))), np.zeros((pp, len(self._kinds)))
        for pp_rank in range(pp):
            each = {
                kind: float((one.total_s + update[pp_rank][kind] / micro_batches).min())
                for kind, one in work[pp_rank].items()
            }
            fronts = {kind: float(one.front_s.min()) for kind, one in work[pp_rank].items()}
            own[pp_rank] = [each[kind] for kind in self._kinds]
            front[pp_rank] = [fronts[kind] for kind in self._kinds]
        transfer_s = 2 * min(self._sends_of(candidate).values())
        least_s = micro_batches * float(own.min(axis=0).sum()) / pp
        if candidate.schedule == "interleaved":
            one_s = float(front.min(axis=0).sum()) + (2 * pp - 1) * transfer_s
            return max(least_s, micro_batches * float(own.min(axis=0).max()), one_s) + rest_s
        receives = candidate.schedule not in EAGER_SCHEDULES
        cut_s = least_pipeline_seconds(
            own, front, transfer_s * receives, micro_batches, receives=receives
        )
        return max(least_s, cut_s) + rest_s

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
            found[kind] = Work(total, front)
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
                {kind: sum(own) for kind, own in stage.update.items()}
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
                total = sum(update)
                if kind in stage.sharding:
                    total = total + sum(stage.sharding[kind])
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

    def _block_times(
        self, stage: StageCost, state: StageState, kind: str, rank: int
    ) -> BlockTimes:
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
        key = own.pp, own.tp, own.etp, own.ep, own.micro_batches
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
        key = own.pp, own.tp, own.etp, own.ep, own.micro_batches
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
        key = own.pp, own.tp, own.etp, own.ep, own.micro_batches, pp_rank, num_layers
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

    def exceeds_memory(self, candidate: Candidate, level: int) -> bool:
        """Return whether no plan below `candidate` fits, by what memory holds at least."""
        if self.state_fraction(candidate, level) > 1:
            return True
        if not level or self._job.memory is not None:
            return False
        if level < len(Space.LEVELS) or candidate.cuts != "even":
            if self._total_fraction(candidate, level) > 1:
                return True
            has_one_stage = candidate.schedule != "interleaved" or candidate.pp == 1
            return has_one_stage and self._cuts_exceed_memory(candidate, level)
        found = self._space.plan(candidate)
        assert found is not None
        return self.stages_exceed_memory(candidate, stage_blocks(found[1], self._job.model))

    def _cuts_exceed_memory(self, candidate: Candidate, level: int) -> bool:
        """Return whether no stage boundaries fit: each rank takes all blocks that it may hold."""
        kinds, start = self._kinds, 1 if level < 3 else 0
        for pp_rank in range(candidate.pp):
            low, high = start, len(kinds)
            while low < high:
                end = (low + high + 1) // 2
                own = [kinds[start:end]]
                if self._stage_fraction(candidate, pp_rank, own, level) > 1:
                    high = end - 1
                else:
                    low = end
            start = low
            if start == len(kinds):
                return False
        return True

    def stages_exceed_memory(self, candidate: Candidate, stages: Sequence[Sequence[str]]) -> bool:
        """Return whether some pipeline rank has too little memory for its stages."""
        if self._job.memory is not None:
            return False
        listed = [[self._kind_of[name] for name in stage] for stage in stages]
        return any(
            self._stage_fraction(candidate, pp_rank, listed[pp_rank :: candidate.pp]) > 1
            for pp_rank in range(candidate.pp)
        )

    def stage_exceeds_memory(
        self, candidate: Candidate, pp_rank: int, start: int, end: int
    ) -> bool:
        """Return whether some consecutive blocks exceed the memory of a pipeline rank."""
        if self._job.memory is not None:
            return False
        return self._stage_fraction(candidate, pp_rank, [self._kinds[start:end]]) > 1

    def state_fraction(self, candidate: Candidate, level: int = 0) -> float:
        """Return bytes of parameters, moments and gradients as a fraction of memory, at least.

        A replica of the whole model has one rank on each stage.
        """
        if self._job.memory is not None:
            return 0.0
        states = self._states_of(candidate, level)
        kinds = self._kinds
        if level < 3 and self._space.is_open("layout.embedding"):
            kinds = kinds[1:]
        return sum(states[kind].total for kind in kinds) / sum(self._capacities(candidate.pp))

    def _total_fraction(self, candidate: Candidate, level: int) -> float:
        """Return bytes of parameters, moments and activations as a fraction of all memory."""
        states, saved = self._states_of(candidate, level), self._saved(candidate)
        kinds = self._kinds[1:] if level < 3 else self._kinds
        in_flight = candidate.micro_batches if candidate.schedule == "gpipe" else 1
        in_flight = in_flight if candidate.pp > 1 else 1
        total = sum(states[kind].lasting + in_flight * saved[kind] for kind in kinds)
        total -= in_flight * (candidate.pp - 1) * saved["stream"]
        return total / sum(self._capacities(candidate.pp))

    def _stage_fraction(
        self,
        candidate: Candidate,
        pp_rank: int,
        stages: Sequence[Sequence[str]],
        level: int = len(Space.LEVELS),
    ) -> float:
        """Return bytes that the stages of a pipeline rank need at least, as a fraction of memory.

        The stages are kinds of blocks."""
        states, saved = self._states_of(candidate, level), self._saved(candidate)
        pp, micro_batches = candidate.pp, candidate.micro_batches
        counts = Counter(kind for stage in stages for kind in stage)
        lasting, total = (
            sum(count * getattr(states[kind], name) for kind, count in counts.items())
            for name in ("lasting", "total")
        )
        held = [sum(map(saved.__getitem__, stage)) for stage in stages]
        if pp > 1:
            held = [one - saved["stream"] * (at > 0 or pp_rank > 0) for at, one in enumerate(held)]
        activations, has_gradients = self._most_held(candidate, pp_rank, tuple(held))
        if has_gradients:
            lasting = total
        if "head" in counts:
            activations += saved["logits"]
        if pp > 1:
            received = 2 * len(stages) - ("embed" in counts) - ("head" in counts)
            received -= level < 3 and not pp_rank  # The embedding may be open.
            activations += received * micro_batches * saved["stream"]
        gathered = 0
        if candidate.dp_shard > 1:
            used = counts if pp > 1 else Counter({stages[-1][-2], "head"})
            used["embed"] += pp == 1 and level >= 3
            gathered = sum(count * states[kind].gathered for kind, count in used.items())
        most = max(total, lasting + activations + gathered)
        return most / self._capacities(pp)[pp_rank]

    def _most_held(
        self, candidate: Candidate, pp_rank: int, held: tuple[int, ...]
    ) -> tuple[int, bool]:
        """Return the most activations of a pipeline rank, and whether it has all gradients then."""
        if len(held) > 1:
            return _most_held(candidate, pp_rank, held)
        own = candidate
        key = own.schedule, own.pp, own.micro_batches, pp_rank
        if key not in self._in_flight:
            self._in_flight[key] = _most_held(candidate, pp_rank, (1,))
        number, has_gradients = self._in_flight[key]
        return number * held[0], has_gradients

    def _capacities(self, pp: int) -> list[float]:
        """Return the largest memory of a device, by pipeline rank."""
        if pp not in self._capacity:
            size = len(self._places) // pp
            starts = range(0, len(self._places), size)
            self._capacity[pp] = [max(self._memory[at : at + size]) for at in starts]
        return self._capacity[pp]

    def _states_of(self, candidate: Candidate, level: int) -> dict[str, StateBytes]:
        """Return the state of each kind of block on the first rank of a stage."""
        dp_shard = candidate.dp_shard
        if level < 2 and self._space.is_open("layout.dp_shard"):
            dp_shard = self._space.ranks // candidate.pp // candidate.tp
        return self._states.bytes(candidate, dp_shard)

    def _saved(self, candidate: Candidate) -> dict[str, int]:
        """Return bytes that forward keeps of a micro-batch by kind of block, at least over stages;
        "stream": those of the input of a stage."""
        stages = self._blocks.stages(candidate)
        saved = {
            kind: min(stage.blocks[kind].saved_bytes for stage in stages)
            for kind in stages[0].blocks
        }
        saved["stream"] = min(stage.stream_bytes for stage in stages)
        saved["logits"] = min(stage.logits_bytes for stage in stages)
        if candidate.recompute:
            saved |= {kind: saved["stream"] for kind in saved if kind.startswith("layers.")}
        return saved


def _most_held(candidate: Candidate, pp_rank: int, held: tuple[int, ...]) -> tuple[int, bool]:
    """Return the most activations of a pipeline rank, and whether it has all gradients by then.

    `held` has the activations of a micro-batch by stage of the rank.
    """
    pp, micro_batches = candidate.pp, candidate.micro_batches
    if pp == 1:
        return held[0], micro_batches > 1
    most = current = 0
    done, has_gradients = set[int](), False
    for kind, stage, _ in pipeline_actions(
        candidate.schedule, pp, len(held), micro_batches, pp_rank
    ):
        if kind == "forward":
            current += held[stage // pp]
            if current > most or (current == most and len(done) == len(held)):
                most, has_gradients = current, len(done) == len(held)
        elif kind in ("backward", "weight"):
            current -= held[stage // pp]
            done.add(stage)
    return most, has_gradients


def _stage_times(
    cost: StageCost, state: StageState, kinds: Mapping[str, int], is_first: bool, micro_batches: int
) -> StageTimes:
    """Return the seconds of a pipeline stage with so many blocks of each kind."""
    passes, before_s, after_s = Counter[str](), 0.0, 0.0
    for kind, count in kinds.items():
        own = {name: float(one.min()) for name, one in cost.blocks[kind].passes.items()}
        if is_first:
            # The model's inputs have no gradients: the whole backward is in `weight`.
            own |= {"input": 0.0, "weight": own["backward"]}
        share_s = float(state.update[kind].accumulate_s.min()) / micro_batches
        for name, seconds in own.items():
            passes[name] += count * (seconds + (name in ("backward", "weight")) * share_s)
        if kind in state.sharding:
            sharding = state.sharding[kind]
            before_s += count * float((sharding.gather_s + sharding.unshard_s).min())
            later = sharding.scatter_s + sharding.reshard_s + sharding.replicas_s
            after_s += count * float(later.min())
    return StageTimes(passes, before_s, after_s)


def _seconds_of(costs: JobCosts, call: CollectiveCall, rank: int) -> float:
    event = costs.collective_event("", "", [call], [list(range(costs.plan.ranks))])
    return float(event.seconds[rank])
