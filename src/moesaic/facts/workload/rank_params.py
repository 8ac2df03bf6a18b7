"""Parameters of one rank: those of its blocks, what is trainable, and its part of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.workload.parameters import (
    Parameter,
    adapters,
    is_trainable,
    moment_bytes,
    parameters,
    unpadded_local_size,
)
from moesaic.facts.workload.sizes import BIAS_BYTES, LOAD_COUNT_BYTES, STORED_BYTES, group_of
from moesaic.facts.workload.spec import BlockSpec, block_specs


def expert_bytes(job: Job, plan: Plan) -> int:
    """Return bytes of one expert of a layer on one expert TP rank.

    This includes parameters, adapters, and the moments of what is trainable.
    """
    first, num_bytes = job.model.expert_layers[0], 0
    own_params = [p for p in parameters(job.model, lambda _: [0]) if p.layer == first]
    adapter_params = [p for p in adapters(job.model, job.finetune) if p.layer == first]
    for p in (*own_params, *adapter_params):
        if p.expert == 0:
            shard = p.tp_shard(plan.etp)
            num_bytes += shard.size * STORED_BYTES[job.train.precision]
            if is_trainable(job.finetune, p):
                num_bytes += sum(moment_bytes(shard, shard.size, job))
    return num_bytes


@dataclass(frozen=True)
class RankParams:
    """Parameters of the model on one rank, before FSDP shards them."""

    job: Job
    plan: Plan
    rank: int
    blocks: Sequence[BlockSpec]

    @classmethod
    def of_rank(cls, job: Job, plan: Plan, rank: int) -> RankParams:
        """Return the parameters of `rank`."""
        return cls(job, plan, rank, block_specs(job.model, plan, rank, job.finetune))

    @cached_property
    def dense(self) -> list[Parameter]:
        """Dense parameters, as TP shards."""
        return [p for block in self.blocks for p in block.dense]

    @cached_property
    def experts(self) -> list[Parameter]:
        """Matrices of experts, as expert TP shards."""
        return [p for block in self.blocks for p in block.parameters if p.expert is not None]

    @cached_property
    def biases(self) -> list[Parameter]:
        """Router biases."""
        return [p for block in self.blocks for p in block.parameters if p.kind == "bias"]

    @cached_property
    def trainable_dense(self) -> list[Parameter]:
        """Dense parameters with gradients and moments."""
        return [p for p in self.dense if self.is_trained(p)]

    def is_trained(self, parameter: Parameter) -> bool:
        """Return whether `parameter` has a gradient and moments."""
        return is_trainable(self.job.finetune, parameter)

    def is_tp_sharded(self, parameter: Parameter) -> bool:
        """Return whether TP splits a dense parameter."""
        return self.plan.tp > 1 and parameter.tp_dim is not None

    def unpadded_local_size(self, parameter: Parameter) -> int:
        """Return elements of a dense parameter on this rank, without padding."""
        return unpadded_local_size(parameter, self.plan.dp_shard, self.plan.dp_rank(self.rank))

    def counts_in_grad_norm(self, parameter: Parameter) -> bool:
        """Return whether this is the first rank that holds these values of `parameter`.

        Only that rank counts them in the gradient norm.
        """
        plan = self.plan
        if parameter.expert is not None:
            return self.rank % plan.ranks_per_stage < plan.ep * plan.etp
        if parameter.kind == "head" and parameter.name.startswith("embed."):
            return False  # The first pipeline rank counts the tied weight.
        if parameter.is_column_shard:
            return True
        return plan.dp_rank(self.rank) < plan.dp_shard and (
            parameter.tp_dim is not None or not self.rank % plan.tp
        )

    def moments_bytes(self) -> int:
        """Return bytes of the optimizer's moments."""
        sizes = [(p, self.unpadded_local_size(p)) for p in self.trainable_dense]
        sizes += [(p, p.size) for p in self.experts if self.is_trained(p)]
        return sum(sum(moment_bytes(p, size, self.job)) for p, size in sizes)

    def checkpoint_bytes(self) -> int:
        """Return bytes that this rank writes to a checkpoint; owners of the same tensors divide
        them."""
        tensors: dict[tuple[int, ...], list[int]] = {}
        for owners, sizes in self._owners_and_tensors():
            tensors.setdefault(owners, []).extend(sizes)
        num_bytes = 0
        for owners, sizes in tensors.items():
            loads = [0] * len(owners)
            for size in sorted(sizes, reverse=True):
                loads[loads.index(min(loads))] += size
            num_bytes += loads[owners.index(self.rank)]
        return num_bytes

    def _owners_and_tensors(self) -> Iterator[tuple[tuple[int, ...], list[int]]]:
        """Yield owners of this rank's tensors, and the bytes of those tensors."""
        plan, model = self.plan, self.job.model
        stage = group_of(plan.stage_groups(), self.rank)
        shard = plan.dp_rank(self.rank) % plan.dp_shard
        replicas = tuple(rank for rank in stage if plan.dp_rank(rank) % plan.dp_shard == shard)
        for p in self.dense:
            owners = replicas
            if self.is_tp_sharded(p):
                owners = group_of(plan.dp_replicate_groups(), self.rank)
            if p.is_column_shard:
                owners = (self.rank,)
            if model.tied and plan.pp > 1 and p.name == "embed.weight":
                offsets = (-stage[0], plan.ranks - plan.ranks_per_stage - stage[0])
                owners = tuple(offset + rank for offset in offsets for rank in owners)
            yield owners, self._tensor_bytes(p, self.unpadded_local_size(p))
        expert_replicas = group_of(plan.expert_dp_groups(), self.rank)
        yield expert_replicas, [n for p in self.experts for n in self._tensor_bytes(p, p.size)]
        yield stage, [p.size * BIAS_BYTES for p in self.biases]
        if self.job.balance.migrate_every and plan.ep > 1:
            rows = [plan.experts * LOAD_COUNT_BYTES for _ in model.expert_layers]
            yield tuple(range(plan.ranks)), rows

    def _tensor_bytes(self, p: Parameter, size: int) -> list[int]:
        moments = moment_bytes(p, size, self.job) if self.is_trained(p) else ()
        return [size * STORED_BYTES[self.job.train.precision], *moments]
