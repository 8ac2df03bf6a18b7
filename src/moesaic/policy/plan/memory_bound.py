"""Lower bounds of memory, for candidates whose keys are partly open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from moesaic.facts.cluster import device_at
from moesaic.facts.plan import block_names, pipeline_actions, stage_blocks
from moesaic.policy.plan.block_costs import BlockCosts, block_kinds
from moesaic.policy.plan.space import Candidate, Space
from moesaic.policy.plan.state_costs import StateBytes, StateCosts


class MemoryBounds:
    """Lower bounds of memory for the candidates of a space.

    A level is the number of decisions after the shape, as in `Space.LEVELS`.
    """

    def __init__(self, space: Space, *, has_loads: bool = False) -> None:
        self._space, self._job, self._cluster = space, space.job, space.cluster
        self._blocks = BlockCosts(space, has_loads=has_loads)
        self._states = StateCosts(space, self._blocks)
        self._places = self._blocks.places
        self._kinds = block_kinds(space.job.model)
        self._kind_of = dict(zip(block_names(space.job.model), self._kinds, strict=True))
        self._in_flight: dict[object, tuple[int, bool]] = {}
        self._capacity: dict[int, list[float]] = {}
        self._memory = [device_at(self._cluster, place).usable_bytes for place in self._places]

    def exceeds_memory(self, candidate: Candidate, level: int) -> bool:
        """Return whether no plan below `candidate` fits, by what memory holds at least."""
        if self.state_fraction(candidate, level) > 1:
            return True
        if self._job.memory is not None:
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
        states, saved = self._states_of(candidate, level), self._saved(candidate, level)
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
        states, saved = self._states_of(candidate, level), self._saved(candidate, level)
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
            used = counts if pp > 1 else Counter(stages[-1][-2:])
            used["embed"] += pp == 1 and level >= 3
            gathered = sum(count * states[kind].gathered for kind, count in used.items())
        most: int = max(total, lasting + activations + gathered)
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

    def _saved(self, candidate: Candidate, level: int) -> dict[str, int]:
        """Return bytes that forward keeps of a micro-batch by kind of block, at least over stages;
        "stream": those of the input of a stage."""
        if level > 0:
            stages = self._blocks.stages(candidate)
        else:  # The dispatch method decides what experts keep.
            stages = self._blocks.without_experts(candidate)
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
