"""Lower bounds of memory, for candidates whose keys are partly open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moesaic.facts.cluster import device_at
from moesaic.facts.plan import block_names, pipeline_actions, stage_blocks
from moesaic.policy.plan.block_costs import BlockCosts, StageCost, block_kinds
from moesaic.policy.plan.space import SCHEDULES, Candidate, Space
from moesaic.policy.plan.state_costs import StateBytes, StateCosts

_STAGES_PER_RANK = 2
"""Stages of a pipeline rank under the interleaved schedule."""
_WHOLE_BACKWARD = ("1f1b", "gpipe")
"""Schedules where a whole backward follows the forward with the most activations."""


class _Sums(NamedTuple):
    """Bytes of the first blocks of a model, [blocks + 1]; those of a range are a difference."""

    lasting: NDArray[np.int64]
    total: NDArray[np.int64]
    gathered: NDArray[np.int64]
    saved: NDArray[np.int64]
    """Bytes that forward keeps of a micro-batch."""
    backward: NDArray[np.int64]
    """Bytes that backward of the last layer adds, by end of a range; not a sum."""


class _Saved(NamedTuple):
    """Bytes of activations of a micro-batch."""

    kept: Mapping[str, int]
    """Bytes that forward keeps for backward, by kind of block."""
    backward: Mapping[str, int]
    """Bytes that backward of a layer adds: the recomputed layer, and the gradient of its result."""
    stream: int
    """Bytes of the input of a layer."""
    logits: int
    """Bytes of logits that exist at one time."""


class MemoryBounds:
    """Lower bounds of memory for the candidates of a space.

    A level is the number of decisions after the shape, as in `Space.LEVELS`.
    """

    def __init__(self, space: Space, *, has_loads: bool = False) -> None:
        self._space, self._job, self._cluster = space, space.job, space.cluster
        self._has_loads = has_loads
        self._blocks = BlockCosts(space, has_loads=has_loads)
        self._states = StateCosts(space, self._blocks)
        self._places = self._blocks.places
        self._kinds = block_kinds(space.job.model)
        self._kind_of = dict(zip(block_names(space.job.model), self._kinds, strict=True))
        self._layers = Counter(kind for kind in self._kinds if kind.startswith("layers."))
        self._in_flight: dict[object, tuple[int, bool]] = {}
        self._saved_by_key: dict[object, _Saved] = {}
        self._sums_by_key: dict[object, _Sums] = {}
        self._fits_by_key: dict[object, NDArray[np.bool_]] = {}
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
            if candidate.schedule == "interleaved" and candidate.pp > 1:
                return self._layers_exceed_memory(candidate, level)
            return self._cuts_exceed_memory(candidate, level)
        found = self._space.plan(candidate)
        assert found is not None
        return self.stages_exceed_memory(candidate, stage_blocks(found[1], self._job.model))

    def _cuts_exceed_memory(self, candidate: Candidate, level: int) -> bool:
        """Return whether no stage boundaries fit: each rank takes all blocks that it may hold."""
        kinds, start = self._kinds, 1 if level < 3 else 0
        if candidate.pp == 1:
            return self._stage_fraction(candidate, 0, [kinds[start:]], level) > 1
        for pp_rank in range(candidate.pp):
            ends = np.arange(start + 1, len(kinds) + 1)
            fractions = self._range_fractions(candidate, pp_rank, np.array(start), ends, level)
            start = int(ends[fractions <= 1].max(initial=start))
            if start == len(kinds):
                return False
        return True

    def _layers_exceed_memory(self, candidate: Candidate, level: int) -> bool:
        """Return whether the ranks hold too few layers of some kind, with several stages each.

        A rank holds as many micro-batches of every block as it does of all its stages at one time.
        """
        states, saved = self._states_of(candidate, level), self._saved(candidate, level)
        pp, stream, rooms = candidate.pp, saved.stream, dict.fromkeys(self._layers, 0)
        for pp_rank, capacity in enumerate(self._capacities(pp)):
            number, has_gradients = self._stages_in_flight(candidate, pp_rank)

            def bytes_of(kind: str, number: int = number, whole: bool = has_gradients) -> int:
                state = states[kind]
                lasting = state.total if whole else state.lasting
                gathered = state.gathered if candidate.dp_shard > 1 else 0
                return lasting + gathered + number * saved.kept[kind]

            is_first, is_last = not pp_rank, pp_rank == pp - 1
            received = 2 * _STAGES_PER_RANK - is_first - is_last
            room = capacity - received * candidate.micro_batches * stream
            room += number * (_STAGES_PER_RANK - is_first) * stream
            if is_first and level >= 3:  # Else the embedding may be open.
                room -= bytes_of("embed")
            if is_last:
                room -= bytes_of("head") + saved.logits
            for kind in rooms:
                rooms[kind] += max(0, int(room // max(bytes_of(kind), 1)))
        return any(rooms[kind] < count for kind, count in self._layers.items())

    def stages_fit(self, candidate: Candidate, level: int) -> NDArray[np.bool_] | None:
        """Return which ranges of blocks may be the only stage of a pipeline rank, by rank, first
        block and end; None if all may."""
        if self._job.memory is not None or candidate.schedule == "interleaved":
            return None
        key = candidate._replace(cuts="even"), level
        if key not in self._fits_by_key:
            ends = np.arange(len(self._kinds) + 1)
            self._fits_by_key[key] = np.array([
                self._range_fractions(candidate, pp_rank, ends[:, None], ends[None, :], level) <= 1
                for pp_rank in range(candidate.pp)
            ])  # fmt: skip
        return self._fits_by_key[key]

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
        fits = self.stages_fit(candidate, len(Space.LEVELS))
        return fits is not None and not fits[pp_rank, start, end]

    def like_blocks(self, start: int, end: int) -> object:
        """Return a key that is equal for ranges of blocks that need equal memory."""
        return (start, end) if self._has_loads else tuple(self._kinds[start:end])

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
        total = sum(states[kind].lasting + in_flight * saved.kept[kind] for kind in kinds)
        total -= in_flight * (candidate.pp - 1) * saved.stream
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
        held = [sum(map(saved.kept.__getitem__, stage)) for stage in stages]
        if pp > 1:
            held = [one - saved.stream * (at > 0 or pp_rank > 0) for at, one in enumerate(held)]
        activations, has_gradients = self._most_held(candidate, pp_rank, tuple(held))
        if has_gradients:
            lasting = total
        in_backward = 0
        if pp == 1 or candidate.schedule in _WHOLE_BACKWARD:
            in_backward = _backward_bytes(stages[-1], saved)
        activations += max(saved.logits * ("head" in counts), in_backward)
        if pp > 1:
            received = 2 * len(stages) - ("embed" in counts) - ("head" in counts)
            received -= level < 3 and not pp_rank  # The embedding may be open.
            activations += received * micro_batches * saved.stream
        gathered = 0
        if candidate.dp_shard > 1:
            used = counts if pp > 1 else Counter(stages[-1][-2:])
            used["embed"] += pp == 1 and level >= 3
            gathered = sum(count * states[kind].gathered for kind, count in used.items())
        most: int = max(total, lasting + activations + gathered)
        return most / self._capacities(pp)[pp_rank]

    def _range_fractions(
        self,
        candidate: Candidate,
        pp_rank: int,
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
        level: int,
    ) -> NDArray[np.float64]:
        """Return the fractions of `_stage_fraction` if a rank of a pipeline has one stage, for
        ranges of blocks."""
        sums, saved = self._sums(candidate, level), self._saved(candidate, level)
        lasting, total, gathered, held = (one[ends] - one[starts] for one in sums[:4])
        number, has_gradients = self._most_held(candidate, pp_rank, (1,))
        has_head, stream = ends == len(self._kinds), saved.stream
        received = 2 - (starts == 0) - has_head - int(level < 3 and not pp_rank)
        in_backward = sums.backward[ends] * (candidate.schedule in _WHOLE_BACKWARD)
        in_backward = in_backward * (ends - has_head > starts)
        activations = number * (held - stream * (pp_rank > 0))
        activations = activations + np.maximum(has_head * saved.logits, in_backward)
        activations = activations + received * candidate.micro_batches * stream
        if candidate.dp_shard > 1:
            activations = activations + gathered
        at_peak = (total if has_gradients else lasting) + activations
        most: NDArray[np.float64] = np.maximum(total, at_peak).astype(np.float64)
        return most / self._capacities(candidate.pp)[pp_rank]

    def _sums(self, candidate: Candidate, level: int) -> _Sums:
        key = candidate._replace(cuts="even", schedule=SCHEDULES[0]), level
        if key not in self._sums_by_key:
            states, saved = self._states_of(candidate, level), self._saved(candidate, level)
            each = [(*states[kind], saved.kept[kind]) for kind in self._kinds]
            lasting, total, gathered, kept = (
                np.cumsum([0, *one], dtype=np.int64) for one in zip(*each, strict=True)
            )
            ends = range(1, len(each) + 1)
            backward = [0, *(_backward_bytes(self._kinds[:end], saved) for end in ends)]
            ends_with = np.array(backward, np.int64)
            self._sums_by_key[key] = _Sums(lasting, total, gathered, kept, ends_with)
        return self._sums_by_key[key]

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

    def _stages_in_flight(self, candidate: Candidate, pp_rank: int) -> tuple[int, bool]:
        """Return the micro-batches that all stages of a rank hold at one time, and whether it has
        all gradients by then."""
        own = candidate
        key = own.schedule, own.pp, own.micro_batches, pp_rank, _STAGES_PER_RANK
        if key not in self._in_flight:
            self._in_flight[key] = _stages_in_flight(candidate, pp_rank)
        return self._in_flight[key]

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

    def _saved(self, candidate: Candidate, level: int) -> _Saved:
        """Return the activations of a micro-batch, at least over stages."""
        plain = candidate._replace(cuts="even", schedule=SCHEDULES[0], dp_shard=1)
        # The dispatch method decides what experts keep.
        has_experts = level > 1 or (level == 1 and self._space.with_fewest_chunks(plain) == plain)
        key = plain, has_experts
        if key not in self._saved_by_key:
            if has_experts:
                stages = self._blocks.stages(candidate)
            else:
                stages = self._blocks.without_experts(candidate)
            self._saved_by_key[key] = _saved_bytes(stages, recomputes=candidate.recompute)
        return self._saved_by_key[key]


def _saved_bytes(stages: Sequence[StageCost], *, recomputes: bool) -> _Saved:
    stream = min(stage.stream_bytes for stage in stages)
    kept = {
        kind: min(stage.blocks[kind].saved_bytes for stage in stages) for kind in stages[0].blocks
    }
    layers = [kind for kind in kept if kind.startswith("layers.")]
    backward = {kind: kept[kind] if recomputes else stream for kind in layers}
    if recomputes:
        kept |= dict.fromkeys(layers, stream)
    return _Saved(kept, backward, stream, min(stage.logits_bytes for stage in stages))


def _backward_bytes(blocks: Sequence[str], saved: _Saved) -> int:
    """Return bytes that backward of the last layer of a stage adds to what forward keeps."""
    has_head = blocks[-1] == "head"
    layers = blocks[:-1] if has_head else blocks
    added = saved.backward.get(layers[-1], 0) if layers else 0
    return added - has_head * saved.kept["head"]


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


def _stages_in_flight(candidate: Candidate, pp_rank: int) -> tuple[int, bool]:
    pp, found, done = candidate.pp, (0, False), set[int]()
    held = [0] * _STAGES_PER_RANK
    for kind, stage, _ in pipeline_actions(
        candidate.schedule, pp, _STAGES_PER_RANK, candidate.micro_batches, pp_rank
    ):
        if kind == "forward":
            held[stage // pp] += 1
            found = max(found, (min(held), len(done) == _STAGES_PER_RANK))
        else:
            held[stage // pp] -= 1
            done.add(stage)
    return found
