"""Bytes of parameters on one rank, and the least seconds of their traffic and their update.

FSDP gathers and reduces dense parameters, replicas reduce gradients, and the optimizer updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from moesaic.facts.job import Job
from moesaic.facts.plan.partition import Partition
from moesaic.facts.workload import STORED_BYTES, BlockSpec, Op, block_specs
from moesaic.facts.workload.blocks import update_ops
from moesaic.facts.workload.collectives import CollectiveCall, CollectiveKind
from moesaic.facts.workload.gradient_reduction import (
    Gradient,
    GradientReduction,
    gradient_reductions,
)
from moesaic.facts.workload.parameters import is_trainable, local_size, moment_bytes
from moesaic.facts.workload.rank_params import RankParams
from moesaic.facts.workload.sizes import Sizes
from moesaic.policy.cost.step import JobCosts
from moesaic.policy.plan.block_costs import (
    BlockCosts,
    Seconds,
    block_kinds,
    on_cpu,
    rank_of_each_kind,
)
from moesaic.policy.plan.space import Candidate, Space

ENDS = "ends"
"""FSDP group of embedding and head without a pipeline."""


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


class Sharding(NamedTuple):
    """Seconds of FSDP's work on one group of parameters, [ranks]."""

    gather_s: Seconds
    unshard_s: Seconds
    """Seconds of the copies after an all-gather."""
    scatter_s: Seconds
    reshard_s: Seconds
    """Seconds of the copies before a reduce-scatter."""
    replicas_s: Seconds
    """Seconds of the all-reduce over replicas, once per step."""

    @property
    def total_s(self) -> Seconds:
        """Seconds of all of it, once."""
        return self.gather_s + self.unshard_s + self.scatter_s + self.reshard_s + self.replicas_s


class Update(NamedTuple):
    """Seconds of a block's work once per step, [ranks]."""

    accumulate_s: Seconds
    norm_s: Seconds
    """Seconds of its share of the gradient norm."""
    rest_s: Seconds
    """Seconds of clipping and of the optimizer."""

    @property
    def total_s(self) -> Seconds:
        """Seconds of all of it."""
        return self.accumulate_s + self.norm_s + self.rest_s


class Bucket(NamedTuple):
    """A bucket of gradients without a pipeline."""

    block: int
    """Position of the model's block whose backward completes it; 0: the step waits for it."""
    is_inter_host: bool
    seconds: Seconds
    """Seconds of its all-reduce, [ranks]."""


class StageState(NamedTuple):
    """Costs of parameters on the ranks of one pipeline rank."""

    sharding: Mapping[str, Sharding]
    """By block of the reduced model, or `ends`; empty without FSDP."""
    update: Mapping[str, Update]
    """By block of the reduced model."""
    buckets: Sequence[Bucket]
    """Buckets without a pipeline, in the order of backward."""
    gradients: Mapping[str, Mapping[str, int]]
    """Bytes to reduce after a pipeline, by block of the reduced model and reduction."""
    s_per_byte: Mapping[str, tuple[Seconds, Seconds]]
    """Latency and seconds per byte of each reduction, [ranks]."""


class StateCosts:
    """Costs of the parameters of a job under the candidates of a space."""

    def __init__(self, space: Space, block_costs: BlockCosts) -> None:
        self._space, self._job, self._blocks = space, space.job, block_costs
        self._bytes: dict[object, dict[str, StateBytes]] = {}
        self._stages: dict[object, list[StageState]] = {}
        self._has_curves = any(link.collectives for link in space.cluster.links)

    def bytes(self, candidate: Candidate, dp_shard: int) -> dict[str, StateBytes]:
        """Return the state of each kind of block on the first rank of a stage."""
        one = candidate
        key = one.tp, one.etp, one.ep, one.pp, dp_shard, one.embedding
        if key not in self._bytes:
            job, plan = self._blocks.reduced(candidate._replace(dp_shard=dp_shard))
            own: dict[str, StateBytes] = {}
            for spec in block_specs(job.model, plan, 0, job.finetune):
                state = _state_bytes(job, spec, dp_shard, one.pp)
                own[spec.model_block] = own.get(spec.model_block, StateBytes(0, 0, 0)) + state
            self._bytes[key] = own
        return self._bytes[key]

    def stages(self, candidate: Candidate) -> list[StageState]:
        """Return the costs by pipeline rank; they do not depend on the dispatch method."""
        one = candidate
        key = one.micro_batches, one.pp, one.tp, one.etp, one.ep, one.dp_shard, one.embedding
        if key not in self._stages:
            plain = one._replace(dispatch="all_to_all", dispatch_hosts=1, chunks=1)
            job, plan = self._blocks.reduced(plain._replace(overlap_local=False, recompute=False))
            found = dict[object, StageState]()
            places = self._blocks.stage_places(one.pp)
            for own in places:
                if own not in found:
                    found[own] = self._make(self._blocks.costs(job, plan, own), one.pp)
            self._stages[key] = [found[own] for own in places]
        return self._stages[key]

    def _make(self, costs: JobCosts, pp: int) -> StageState:
        ranks = rank_of_each_kind(costs)
        params = [RankParams(costs.job, costs.plan, rank) for rank in ranks]
        traffic = _Traffic(costs, ranks)
        sharding = {}
        if costs.plan.dp_shard > 1:
            groups = dict[str, list[BlockSpec]]()
            for spec in params[0].blocks:
                name = spec.model_block if spec.layer is not None or pp > 1 else ENDS
                groups.setdefault(name, []).append(spec)
            sharding = {name: traffic.sharding(specs) for name, specs in groups.items()}
        reductions = gradient_reductions(params[-1])
        if pp == 1:
            buckets = self._buckets(traffic, reductions)
            return StageState(sharding, traffic.update(params), buckets, {}, {})
        names = [spec.model_block for spec in params[0].blocks]
        gradients: dict[str, dict[str, int]] = {name: {} for name in names}
        slopes = {}
        for one in reductions:
            if len(one.ranks) == 1 or self._has_curves:
                continue
            slopes[one.name] = traffic.line(one)
            for gradient in one.gradients:
                sizes = gradients[model_block(gradient.block)]
                sizes[one.name] = sizes.get(one.name, 0) + gradient.num_bytes
        return StageState(sharding, traffic.update(params), [], gradients, slopes)

    def _buckets(self, traffic: _Traffic, reductions: Sequence[GradientReduction]) -> list[Bucket]:
        """Return the buckets of the whole model, from the reductions of the reduced one."""
        kinds, found = block_kinds(self._job.model), list[Bucket]()
        for one in reductions:
            by_kind: dict[str, list[Gradient]] = {}
            for gradient in one.gradients:
                by_kind.setdefault(model_block(gradient.block), []).append(gradient)
            positions, gradients = list[int](), list[Gradient]()
            for at in reversed(range(len(kinds))):
                own = by_kind.get(kinds[at], [])
                gradients += own
                positions += [at] * len(own)
            for bucket in replace(one, gradients=gradients).buckets:
                seconds, is_inter_host = traffic.all_reduce(one, bucket.num_bytes)
                at = positions[bucket.members[-1]] if one.overlaps_backward else 0
                found.append(Bucket(at, is_inter_host, seconds))
        return sorted(found, key=lambda one: -one.block)


class _Traffic:
    """Seconds of collectives and updates of parameters on a rank of each kind."""

    def __init__(self, costs: JobCosts, ranks: Sequence[int]) -> None:
        self._costs, self._ranks = costs, ranks
        self._zeros = np.zeros(len(ranks))
        self._all = [list(range(costs.plan.ranks))]

    def sharding(self, specs: Sequence[BlockSpec]) -> Sharding:
        """Return the seconds of FSDP's work on the dense parameters of some blocks."""
        costs, plan, job = self._costs, self._costs.plan, self._costs.job
        dense = [p for spec in specs for p in spec.dense if not p.is_column_shard]
        element_bytes, size = STORED_BYTES[job.train.precision], plan.dp_shard
        shard_bytes, gradient_bytes = (
            sum(local_size(p, size) for p in own) * element_bytes
            for own in (dense, [p for p in dense if is_trainable(job.finetune, p)])
        )
        gathered, scattered = shard_bytes * size, gradient_bytes * size
        shards, replicas = plan.dp_shard_groups(), plan.dp_replicate_groups()
        return Sharding(
            self._collective("all_gather", shards, gathered * (shard_bytes > 0)),
            self._ops([Op("unshard", (), 2 * (gathered + shard_bytes), 2)] if dense else []),
            self._collective("reduce_scatter", shards, scattered),
            self._ops([Op("reshard", (), 2 * scattered, 1)] if gradient_bytes else []),
            self._collective("all_reduce", replicas, gradient_bytes)
            if costs.plan.dp > plan.dp_shard
            else self._zeros,
        )

    def update(self, params: Sequence[RankParams]) -> dict[str, Update]:
        """Return the seconds of the work once per step, by block."""
        costs, found = self._costs, dict[str, Update]()
        sizes = [Sizes(one.job, one.plan, one.rank, on_cpu(costs, one.rank)) for one in params]
        for specs in zip(*(one.blocks for one in params), strict=True):
            ops = [update_ops(*each) for each in zip(params, sizes, specs, strict=True)]
            own = Update(
                *(self._ops_by_rank([_named(each, name) for each in ops]) for name in (*_NAMED, ""))
            )
            name = specs[0].model_block
            if name in found:
                own = Update(*(a + b for a, b in zip(found[name], own, strict=True)))
            found[name] = own
        return found

    def all_reduce(self, one: GradientReduction, num_bytes: int) -> tuple[Seconds, bool]:
        """Return the seconds of an all-reduce, and whether its groups span several hosts."""
        call = CollectiveCall(one.name, "all_reduce", one.ranks, num_bytes)
        event = self._costs.collective_event("", "", [call], self._all)
        return event.seconds[self._ranks], self._costs.is_inter_host(event)

    def line(self, one: GradientReduction) -> tuple[Seconds, Seconds]:
        """Return latency and seconds per byte of an all-reduce."""
        small, large = (self.all_reduce(one, num_bytes)[0] for num_bytes in (0, 1 << 30))
        return small, (large - small) / (1 << 30)

    def _collective(
        self, operation: CollectiveKind, partition: Partition, num_bytes: int
    ) -> Seconds:
        if not num_bytes:
            return self._zeros
        group = partition.of(self._ranks[0])
        call = CollectiveCall("", operation, group, num_bytes)
        return self._costs.collective_event("", "", [call], self._all).seconds[self._ranks]

    def _ops(self, ops: Sequence[Op]) -> Seconds:
        return self._ops_by_rank([ops] * len(self._ranks))

    def _ops_by_rank(self, ops: Sequence[Sequence[Op]]) -> Seconds:
        return np.array(self._costs.compute_s(ops, [[rank] for rank in self._ranks]))


_NAMED = ("accumulate", "norm")


def _named(ops: Sequence[Op], name: str) -> list[Op]:
    """Return the ops of a name, or those without any of `_NAMED` for an empty one."""
    return [op for op in ops if (op.name if op.name in _NAMED else "") == name]


def model_block(block: str) -> str:
    """Return the model's block that a block is part of."""
    return ".".join(block.split(".")[:2])


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
