"""Lower bounds of a step's seconds and of memory, for candidates whose keys are partly open.

A bound adds up what a rank cannot do at the same time: its computing, and the collectives that it
waits for in forward and backward. It needs the blocks of one pipeline stage of a model with few
layers, so it takes milliseconds where the step simulator takes seconds. Gradient reductions,
FSDP's collectives and stage transfers may overlap, and do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moesaic.facts.cluster import Cluster, Device, Place, device_at, place_ranks
from moesaic.facts.job import Job, ModelConfig
from moesaic.facts.plan import Plan, block_names, pipeline_actions, stage_blocks
from moesaic.facts.workload import (
    EXPERTS,
    RESULTS,
    STORED_BYTES,
    TOKENS,
    Block,
    BlockSpec,
    BlockWork,
    Op,
    block_specs,
)
from moesaic.facts.workload.blocks import BlockBuilder
from moesaic.facts.workload.memory import logits_bytes
from moesaic.facts.workload.parameters import is_trainable, local_size, moment_bytes
from moesaic.facts.workload.rank_params import RankParams
from moesaic.facts.workload.sizes import Sizes
from moesaic.policy.cost.network import NetworkModel
from moesaic.policy.cost.step import JobCosts
from moesaic.policy.plan.space import Candidate, Space

ROUNDING = 1 - 1e-9
"""Factor on bounds, for sums in another order."""
_LAYOUT = ("dispatch", "combine", "concat chunks", EXPERTS)
"""Ops that depend on the dispatch method and its chunks."""

Seconds = NDArray[np.float64]


class BlockCost(NamedTuple):
    """One block of a model on a rank of each kind in a stage."""

    pass_s: Seconds
    """Seconds of forward and backward of a micro-batch, [ranks]."""
    exchange_s: Seconds
    """Seconds of exchanges of tokens, of these."""
    routed_s: Seconds
    """Seconds of computing that depends on the dispatch method, of these."""
    update_s: Seconds
    """Seconds of computing once per step."""
    saved_bytes: int
    """Bytes that forward keeps of a micro-batch for backward."""
    stream_bytes: int
    """Bytes of the input of a layer."""
    logits_bytes: int
    """Bytes of the logits that exist at one time."""


class StateBytes(NamedTuple):
    """Bytes of a block's state on the first rank of a stage."""

    lasting: int
    """Bytes of parameters and moments."""
    total: int
    """Bytes with gradients."""
    gathered: int
    """Bytes of the dense parameters, as FSDP gathers them."""

    def __add__(self, other: object) -> StateBytes:
        """Return the state of two blocks."""
        assert isinstance(other, StateBytes)
        return StateBytes(*map(sum, zip(self, other, strict=True)))


class Bounds:
    """Lower bounds for the candidates of a space.

    A level is the number of decisions after the shape, as in `Space.LEVELS`.
    """

    def __init__(self, space: Space, *, has_loads: bool = False) -> None:
        self._space, self._job, self._cluster = space, space.job, space.cluster
        self._has_loads = has_loads
        self._places = place_ranks(self._cluster, space.ranks)
        self._host_kinds = _host_kinds(self._cluster)
        self._networks: dict[tuple[Place, ...], NetworkModel] = {}
        self._states: dict[tuple[object, ...], dict[str, StateBytes]] = {}
        self._kinds = _block_kinds(space.job.model)
        self._costs: dict[Candidate, list[dict[str, BlockCost]]] = {}
        devices = [device_at(self._cluster, place) for place in dict.fromkeys(self._places)]
        self._memory = [device_at(self._cluster, place).memory_bytes for place in self._places]
        self._is_measured = any(_is_measured(device) for device in devices)

    def seconds(self, candidate: Candidate, level: int) -> float:
        """Return seconds of a step that no plan below `candidate` can beat."""
        if level or candidate.ep == 1:
            return ROUNDING * self._seconds(candidate, level, candidate.overlaps_dispatch)
        options = self._space.children(candidate, 0)
        plain = dict.fromkeys(one._replace(chunks=1, overlap_local=False) for one in options)
        overlaps = any(one.overlaps_dispatch for one in options)
        found = [self._seconds(one, 1, is_overlapped=overlaps, is_open=overlaps) for one in plain]
        return ROUNDING * min(found, default=0.0)

    def _seconds(
        self, candidate: Candidate, level: int, is_overlapped: bool, is_open: bool = False
    ) -> float:
        stages = [
            {
                kind: self._counted(cost, kind, level, is_overlapped, is_open)
                for kind, cost in stage.items()
            }
            for stage in self._stage_costs(candidate, level)
        ]
        kinds = self._kinds
        micro_batches = candidate.micro_batches
        if candidate.pp == 1:
            by_kind = stages[0]
            each = sum(by_kind[kind][0] for kind in kinds)
            update = sum(by_kind[kind][1] for kind in kinds)
            return float(np.max(micro_batches * each + update))
        least = {kind: min(float(stage[kind][0].min()) for stage in stages) for kind in set(kinds)}
        total = sum(least[kind] for kind in kinds)
        largest = max(least.values())
        bound = micro_batches * max(total / candidate.pp, largest)
        if candidate.schedule in ("1f1b", "gpipe"):
            bound = max(bound, total / (1 - (1 - 1 / micro_batches) ** candidate.pp))
        return bound

    def stages_seconds(self, candidate: Candidate, stages: Sequence[Sequence[str]]) -> float:
        """Return seconds that a step of a complete candidate with these stages takes at least.

        Before the first forward of a rank, and after its last backward, the first stages of the
        ranks before it work.
        """
        level, pp = len(Space.LEVELS), candidate.pp
        if pp == 1:
            return self.seconds(candidate, level)
        costs = [
            {
                kind: self._counted(cost, kind, level, candidate.overlaps_dispatch, False)[0]
                for kind, cost in stage.items()
            }
            for stage in self._stage_costs(candidate, level)
        ]
        kinds = dict(zip(block_names(self._job.model), self._kinds, strict=True))
        each = [
            sum(float(costs[stage % pp][kinds[name]].min()) for name in names)
            for stage, names in enumerate(stages)
        ]
        fills = [0.0, *accumulate(each[: pp - 1])]
        if candidate.schedule == "zero-bubble":
            fills = [0.0] * pp
        return ROUNDING * max(
            candidate.micro_batches * sum(each[rank::pp]) + fill for rank, fill in enumerate(fills)
        )

    def _counted(
        self, cost: BlockCost, kind: str, level: int, is_overlapped: bool, is_open: bool
    ) -> tuple[Seconds, Seconds]:
        """Return the seconds of a block by micro-batch and by step that count at this level."""
        pass_s, update_s = cost.pass_s, cost.update_s
        if level < 3 and kind == "embed":  # Column shards look tokens up in another way.
            pass_s = 0.0 * pass_s
        if is_overlapped or self._has_loads:
            pass_s = pass_s - cost.exchange_s
        if self._has_loads or (is_open and self._is_measured):
            pass_s = pass_s - cost.routed_s
        return pass_s, update_s if level >= 3 else 0.0 * update_s

    def block_seconds(self, candidate: Candidate) -> list[list[float]]:
        """Return the seconds of a micro-batch by pipeline stage and block, [stages][blocks]."""
        costs, kinds = self._stage_costs(candidate, 3), self._kinds
        found = self._space.plan(candidate)
        assert found is not None
        rows = [[float(stage[kind].pass_s.max()) for kind in kinds] for stage in costs]
        return [rows[stage % candidate.pp] for stage in range(found[1].num_stages)]

    def exceeds_memory(self, candidate: Candidate, level: int) -> bool:
        """Return whether no plan below `candidate` fits, by what memory holds at least."""
        if self.state_fraction(candidate, level) > 1:
            return True
        if not level or self._job.memory is not None:
            return False
        if level < len(Space.LEVELS) or candidate.cuts != "even":
            return self._total_fraction(candidate, level) > 1
        found = self._space.plan(candidate)
        assert found is not None
        return self.stages_exceed_memory(candidate, stage_blocks(found[1], self._job.model))

    def stages_exceed_memory(self, candidate: Candidate, stages: Sequence[Sequence[str]]) -> bool:
        """Return whether some pipeline rank has too little memory for its stages."""
        if self._job.memory is not None:
            return False
        kinds = dict(zip(block_names(self._job.model), self._kinds, strict=True))
        listed = [[kinds[name] for name in stage] for stage in stages]
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
        self, candidate: Candidate, pp_rank: int, stages: Sequence[Sequence[str]]
    ) -> float:
        """Return bytes that the stages of a pipeline rank need at least, as a fraction of memory.

        The stages are kinds of blocks."""
        states, saved = self._states_of(candidate, 3), self._saved(candidate, 3)
        pp, micro_batches = candidate.pp, candidate.micro_batches
        kinds = [kind for stage in stages for kind in stage]
        own = [states[kind] for kind in kinds]
        lasting, total = sum(one.lasting for one in own), sum(one.total for one in own)
        held = [sum(saved[kind] for kind in stage) for stage in stages]
        if pp > 1:
            held = [one - saved["stream"] * (at > 0 or pp_rank > 0) for at, one in enumerate(held)]
        activations, has_gradients = _most_held(candidate, pp_rank, tuple(held))
        if has_gradients:
            lasting = total
        if "head" in kinds:
            activations += saved["logits"]
        if pp > 1:
            received = 2 * len(stages) - ("embed" in kinds) - ("head" in kinds)
            activations += received * micro_batches * saved["stream"]
        gathered = 0
        if candidate.dp_shard > 1:
            used = own if pp > 1 else [states[kind] for kind in {"embed", kinds[-2], "head"}]
            gathered = sum(one.gathered for one in used)
        most = max(total, lasting + activations + gathered)
        return most / self._capacities(pp)[pp_rank]

    def _capacities(self, pp: int) -> list[float]:
        """Return the largest memory of a device, by pipeline rank."""
        size = len(self._places) // pp
        return [max(self._memory[at : at + size]) for at in range(0, len(self._places), size)]

    def _states_of(self, candidate: Candidate, level: int) -> dict[str, StateBytes]:
        """Return the state of each kind of block on the first rank of a stage."""
        dp_shard, pp = candidate.dp_shard, candidate.pp
        if level < 2 and self._space.is_open("layout.dp_shard"):
            dp_shard = self._space.ranks // pp // candidate.tp
        key = candidate.tp, candidate.etp, candidate.ep, pp, dp_shard, candidate.embedding
        if key not in self._states:
            job, plan = self._reduced(candidate._replace(dp_shard=dp_shard))
            own: dict[str, StateBytes] = {}
            for spec in block_specs(job.model, plan, 0, job.finetune):
                one = _state_bytes(job, spec, dp_shard, pp)
                own[spec.model_block] = own.get(spec.model_block, StateBytes(0, 0, 0)) + one
            self._states[key] = own
        return self._states[key]

    def _saved(self, candidate: Candidate, level: int) -> dict[str, int]:
        """Return bytes that forward keeps of a micro-batch by kind of block, at least over stages;
        "stream": those of the input of a stage."""
        stages = self._stage_costs(candidate, level)
        saved = {kind: min(stage[kind].saved_bytes for stage in stages) for kind in stages[0]}
        saved["stream"] = min(stage["embed"].stream_bytes for stage in stages)
        saved["logits"] = min(stage["head"].logits_bytes for stage in stages)
        if candidate.recompute:
            saved |= {kind: saved["stream"] for kind in saved if kind.startswith("layers.")}
        return saved

    def _stage_costs(self, candidate: Candidate, level: int) -> list[dict[str, BlockCost]]:
        """Return the costs of each kind of block on each pipeline rank."""
        key = candidate._replace(cuts="even", schedule="1f1b")
        if level < 3:
            key = key._replace(embedding="whole")
        if level < 2:
            key = key._replace(dp_shard=1)
        if key not in self._costs:
            self._costs[key] = self._make_stage_costs(key)
        return self._costs[key]

    def _make_stage_costs(self, candidate: Candidate) -> list[dict[str, BlockCost]]:
        job, plan = self._reduced(candidate)
        size, made = plan.ranks, dict[object, dict[str, BlockCost]]()
        found = []
        for at in range(0, len(self._places), size):
            places = self._places[at : at + size]
            key = self._stage_key(places)
            if key not in made:
                made[key] = self._make_costs(job, plan, places)
            found.append(made[key])
        return found

    def _reduced(self, candidate: Candidate) -> tuple[Job, Plan]:
        """Return a job with one layer of each kind, and its plan on the ranks of one stage."""
        model, layout = self._job.model, self._job.layout
        small = model.model_copy(update={"layers": _num_kinds(model)})
        ranks = self._space.ranks // candidate.pp
        plan = Plan(
            ranks=ranks, ep=candidate.ep, tp=candidate.tp, etp=candidate.etp,
            dp_shard=candidate.dp_shard, dispatch=candidate.dispatch,
            dispatch_hosts=candidate.dispatch_hosts if candidate.ep > 1 else 1,
            chunks=candidate.chunks if candidate.ep > 1 else 1,
            overlap_local=candidate.overlap_local and candidate.ep > 1,
            embedding="whole" if ranks == 1 or candidate.tp > 1 else candidate.embedding,
            experts=model.experts, recompute=candidate.recompute,
        )  # fmt: skip
        train = self._job.train.model_copy(
            update={"micro_batches": candidate.micro_batches, "recompute": candidate.recompute}
        )
        layout = layout.model_copy(update={"pp": 1})
        update = {"model": small, "train": train, "layout": layout}
        return self._job.model_copy(update=update), plan

    def _make_costs(self, job: Job, plan: Plan, places: list[Place]) -> dict[str, BlockCost]:
        key = tuple(places)
        if key not in self._networks:
            self._networks[key] = NetworkModel(self._cluster, places)
        costs = JobCosts(plan, self._cluster, places, self._networks[key], job=job)
        # The last rank of each kind of device has the most samples.
        ranks = list({kind: rank for rank, kind in enumerate(costs.device_kinds())}.values())
        by_rank = [
            BlockBuilder(
                RankParams(job, plan, rank), Sizes(job, plan, rank, _on_cpu(costs, rank)), None
            ).blocks()
            for rank in ranks
        ]
        found: dict[str, BlockCost] = {}
        for row in zip(*by_rank, strict=True):
            name = row[0].spec.model_block
            one = _block_cost(costs, row, ranks)
            found[name] = one if name not in found else _sum(found[name], one)
        return found

    def _stage_key(self, places: Sequence[Place]) -> object:
        """Return a key that is equal for stages on like hosts."""
        hosts: dict[str, int] = {}
        return tuple(
            (hosts.setdefault(one.host, len(hosts)), self._host_kinds[one.host], one.device)
            for one in places
        )


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


def _on_cpu(costs: JobCosts, rank: int) -> bool:
    return costs.device(rank).kind == "cpu"


def _block_cost(costs: JobCosts, row: Sequence[Block], ranks: list[int]) -> BlockCost:
    """Return the cost of a block, given on each of some ranks."""
    own = [[rank] for rank in ranks]
    pass_s, exchange_s, routed_s = (np.zeros(len(ranks)) for _ in range(3))
    for phase in ("forward", "backward"):
        works: list[BlockWork] = [getattr(one, phase) for one in row]
        pass_s += costs.compute_s([_own_ops(one) for one in works], own)
        routed = [tuple(op for op in one.ops if op.name in _LAYOUT) for one in works]
        routed_s += costs.compute_s(routed, own)
        for at, (rank, work) in enumerate(zip(ranks, works, strict=True)):
            for call in work.collectives:
                if call.precedes_compute or call.name in ("gradients", "replicas"):
                    continue
                event = costs.collective_event(phase, row[0].name, [call], [_all(costs)])
                pass_s[at] += event.seconds[rank]
                exchange_s[at] += event.seconds[rank] * (event.name in (TOKENS, RESULTS))
    updates = np.array(costs.compute_s([_own_ops(one.update) for one in row], own))
    sizes = [Sizes(costs.job, costs.plan, rank, _on_cpu(costs, rank)) for rank in ranks]
    stream_bytes = min(one.stream_elements * one.stored_bytes for one in sizes)
    saved_bytes = min(one.saved_bytes for one in row)
    logits = min(map(logits_bytes, sizes))
    return BlockCost(pass_s, exchange_s, routed_s, updates, saved_bytes, stream_bytes, logits)


def _all(costs: JobCosts) -> list[int]:
    return list(range(costs.plan.ranks))


def _own_ops(work: BlockWork) -> tuple[Op, ...]:
    """Return operations without those of FSDP, which happen at other times in a pipeline."""
    return tuple(op for op in work.ops if op.name not in ("unshard", "reshard"))


def _state_bytes(job: Job, spec: BlockSpec, dp_shard: int, pp: int) -> StateBytes:
    """Return the state of a block; a pipeline keeps gradients unsharded."""
    stored, lasting, gradients = STORED_BYTES[job.train.precision], 0, 0
    for p in spec.parameters:
        size = p.size if not p.is_dense else local_size(p, dp_shard)
        lasting += size * stored
        if is_trainable(job.finetune, p):
            lasting += sum(moment_bytes(p, size, job))
            gradients += (p.size if pp > 1 or not p.is_dense else size) * stored
    gathered = sum(p.size for p in spec.dense if not p.is_column_shard) * stored
    return StateBytes(lasting, lasting + gradients, gathered)


def _sum(one: BlockCost, other: BlockCost) -> BlockCost:
    """Return the cost of two blocks in sequence, such as attention and network of a layer."""
    return BlockCost(
        one.pass_s + other.pass_s, one.exchange_s + other.exchange_s,
        one.routed_s + other.routed_s, one.update_s + other.update_s,
        one.saved_bytes + other.saved_bytes, one.stream_bytes, one.logits_bytes,
    )  # fmt: skip


def _num_kinds(model: ModelConfig) -> int:
    """Return the number of layers of a small model with a layer of each kind."""
    return min(model.layers, model.dense_layers + 1)


def _block_kinds(model: ModelConfig) -> list[str]:
    """Return for each block of `model` the block of the small model that costs as much."""
    last = _num_kinds(model) - 1
    layers = [f"layers.{min(layer, last)}" for layer in range(model.layers)]
    return ["embed", *layers, "head"]


def _is_measured(device: Device) -> bool:
    """Return whether matmuls have measured times, so that smaller ones may be faster."""
    return any(one.times is not None or one.grouped_times is not None for one in device.matmul)


def _host_kinds(cluster: Cluster) -> dict[str, int]:
    """Return a number for each host; hosts with a number in common have equal devices and links."""
    own = {host.name: host.model_copy(update={"name": "host"}) for host in cluster.hosts}
    uniform = (
        all(len(set(link.ends)) == 1 or link.ends == ["*", "*"] for link in cluster.links)
        and sum(link.ends == ["*", "*"] for link in cluster.links) <= 1
    )
    kinds: list[object] = []
    numbers = {}
    for name, host in own.items():
        inside = [
            link.model_dump(exclude={"ends"})
            for link in cluster.links_of_host[name]
            if link.ends == [name, name]
        ]
        key = (host, inside) if uniform else name
        if key not in kinds:
            kinds.append(key)
        numbers[name] = kinds.index(key)
    return numbers
