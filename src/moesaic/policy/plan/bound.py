"""Lower bounds of a step's seconds and of memory, for candidates whose keys are partly open.

A bound adds up what a rank cannot do at the same time: its computing, and the collectives that it
waits for in forward and backward. It needs the blocks of one pipeline stage of a model with few
layers, so it takes milliseconds where the step simulator takes seconds. Gradient reductions,
FSDP's collectives and stage transfers may overlap, and do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moesaic.facts.cluster import Cluster, Device, Place, device_at, place_ranks
from moesaic.facts.job import Job, ModelConfig
from moesaic.facts.plan import Plan, block_names
from moesaic.facts.workload import EXPERTS, RESULTS, STORED_BYTES, TOKENS, Block, BlockWork, Op
from moesaic.facts.workload.parameters import is_trainable, local_size, moment_bytes
from moesaic.policy.cost.network import NetworkModel
from moesaic.policy.cost.step import JobCosts
from moesaic.policy.plan.space import Candidate, Space

ROUNDING = 1 - 1e-9
"""Factor on bounds, for sums in another order."""
_LAYOUT = ("dispatch", "combine", "concat chunks", EXPERTS)
"""Ops that depend on the dispatch method and its chunks."""

Seconds = NDArray[np.float64]


class BlockCost(NamedTuple):
    """One block of a model on the ranks of a stage."""

    pass_s: Seconds
    """Seconds of forward and backward of a micro-batch, by rank of the stage."""
    exchange_s: Seconds
    """Seconds of exchanges of tokens, of these."""
    routed_s: Seconds
    """Seconds of computing that depends on the dispatch method, of these."""
    update_s: Seconds
    """Seconds of computing once per step."""
    state_bytes: int
    """Bytes of parameters, moments and gradients on the first rank."""


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
        kinds = _block_kinds(self._job.model)
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
        costs, kinds = self._stage_costs(candidate, 3), _block_kinds(self._job.model)
        found = self._space.plan(candidate)
        assert found is not None
        rows = [[float(stage[kind].pass_s.max()) for kind in kinds] for stage in costs]
        return [rows[stage % candidate.pp] for stage in range(found[1].num_stages)]

    def exceeds_memory(self, candidate: Candidate, level: int) -> bool:
        """Return whether parameters, moments and gradients alone exceed the memory of the ranks."""
        return self.state_fraction(candidate, level) > 1

    def state_fraction(self, candidate: Candidate, level: int = 0) -> float:
        """Return bytes of parameters, moments and gradients as a fraction of memory, at least.

        A replica of the whole model has one rank on each stage.
        """
        if self._job.memory is not None:
            return 0.0
        relaxed, level = candidate, max(level, 0)
        if level < 2 and self._space.is_open("layout.dp_shard"):
            most = candidate._replace(dp_shard=self._space.ranks // candidate.pp // candidate.tp)
            relaxed = most if self._space.plan(most) is not None else candidate
        kinds = _block_kinds(self._job.model)
        stages = self._stage_costs(relaxed, 3)
        own = {kind: min(stage[kind].state_bytes for stage in stages) for kind in set(kinds)}
        if level < 3 and self._space.is_open("layout.embedding"):
            own["embed"] = 0
        size = len(self._places) // candidate.pp
        capacity = sum(
            max(self._memory[at : at + size]) for at in range(0, len(self._places), size)
        )
        return sum(own[kind] for kind in kinds) / capacity

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
                made[key] = self._make_costs(job, plan, places, candidate.pp)
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

    def _make_costs(
        self, job: Job, plan: Plan, places: list[Place], pp: int
    ) -> dict[str, BlockCost]:
        key = tuple(places)
        if key not in self._networks:
            self._networks[key] = NetworkModel(self._cluster, places)
        costs = JobCosts(plan, self._cluster, places, self._networks[key], job=job)
        groups = costs.equal_ranks()
        ranks = list(groups.values())
        found: dict[str, BlockCost] = {}
        for row in zip(*(costs.blocks(first) for first in groups), strict=True):
            name = row[0].spec.model_block
            if name in block_names(job.model):
                one = _block_cost(costs, row, ranks, pp)
                found[name] = one if name not in found else _sum(found[name], one)
        return found

    def _stage_key(self, places: Sequence[Place]) -> object:
        """Return a key that is equal for stages on like hosts."""
        hosts: dict[str, int] = {}
        return tuple(
            (hosts.setdefault(one.host, len(hosts)), self._host_kinds[one.host], one.device)
            for one in places
        )


def _block_cost(
    costs: JobCosts, row: Sequence[Block], ranks: list[list[int]], pp: int
) -> BlockCost:
    """Return the cost of a block, given on the first rank of each kind."""
    name, passes = row[0].name, [[one.forward for one in row], [one.backward for one in row]]
    zeros = np.zeros(costs.plan.ranks)
    pass_s, exchange_s, routed_s = zeros, zeros, zeros
    for phase, works in zip(("forward", "backward"), passes, strict=True):
        pass_s = pass_s + costs.seconds_by_rank(
            costs.compute_s([_own_ops(one) for one in works], ranks), ranks
        )
        routed = [tuple(op for op in one.ops if op.name in _LAYOUT) for one in works]
        routed_s = routed_s + costs.seconds_by_rank(costs.compute_s(routed, ranks), ranks)
        for first, event in costs.block_collectives(phase, name, works, ranks):
            if not first and event.name not in ("gradients", "replicas"):
                pass_s = pass_s + event.seconds
                exchange_s = exchange_s + event.seconds * (event.name in (TOKENS, RESULTS))
    updates = costs.compute_s([_own_ops(one.update) for one in row], ranks)
    return BlockCost(
        pass_s, exchange_s, routed_s, costs.seconds_by_rank(updates, ranks),
        _state_bytes(costs.job, row[0], costs.plan.dp_shard, pp),
    )  # fmt: skip


def _own_ops(work: BlockWork) -> tuple[Op, ...]:
    """Return operations without those of FSDP, which happen at other times in a pipeline."""
    return tuple(op for op in work.ops if op.name not in ("unshard", "reshard"))


def _state_bytes(job: Job, block: Block, dp_shard: int, pp: int) -> int:
    """Return bytes of parameters, moments and gradients of a block on the first rank."""
    stored, total = STORED_BYTES[job.train.precision], 0
    for p in block.spec.parameters:
        size = p.size if not p.is_dense else local_size(p, dp_shard)
        total += size * stored
        if is_trainable(job.finetune, p):
            gradient = p.size if pp > 1 or not p.is_dense else size
            total += sum(moment_bytes(p, size, job)) + gradient * stored
    return total


def _sum(one: BlockCost, other: BlockCost) -> BlockCost:
    """Return the cost of two blocks in sequence, such as attention and network of a layer."""
    return BlockCost(
        one.pass_s + other.pass_s, one.exchange_s + other.exchange_s,
        one.routed_s + other.routed_s, one.update_s + other.update_s,
        one.state_bytes + other.state_bytes,
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
