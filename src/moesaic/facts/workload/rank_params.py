"""Parameters of one rank: those of its blocks, what is trainable, and its part of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

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
from moesaic.facts.workload.sizes import BIAS_BYTES, INDEX_BYTES, STORED_BYTES
from moesaic.facts.workload.spec import BlockSpec, block_specs


def expert_bytes(job: Job, plan: Plan) -> int:
    """Return bytes of one expert of a layer on one expert TP rank.

    This includes parameters, adapters, and the moments of what is trainable.
    """
    one_expert = (
        parameters(job.model, lambda _: [0]),
        adapters(job.model, job.finetune, lambda _: [0]),
    )
    shards = [
        p.tp_shard(plan.etp)
        for p in chain(*one_expert)
        if p.expert is not None and p.layer == job.model.expert_layers[0]
    ]
    return sum(_stored_bytes(job, p, p.size) for p in shards)


def _stored_bytes(job: Job, p: Parameter, elements: int) -> int:
    """Return bytes of `elements` elements of a parameter, with their moments."""
    moments = moment_bytes(p, elements, job) if is_trainable(job.finetune, p) else ()
    return elements * STORED_BYTES[job.train.precision] + sum(moments)


@dataclass(frozen=True)
class RankParams:
    """Parameters of the model on one rank, before FSDP shards them."""

    job: Job
    plan: Plan
    rank: int
    with_experts: bool = True
    """False to leave out matrices of experts, which a budget (`[memory]`) counts as blocks."""

    @cached_property
    def blocks(self) -> list[BlockSpec]:
        """Blocks of the rank."""
        return block_specs(
            self.job.model, self.plan, self.rank, self.job.finetune, with_experts=self.with_experts
        )

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
        sizes = [(p, self.unpadded_local_size(p)) for p in self.dense if self.is_trained(p)]
        sizes += [(p, p.size) for p in self.experts if self.is_trained(p)]
        return sum(sum(moment_bytes(p, size, self.job)) for p, size in sizes)

    def checkpoint_bytes(self) -> int:
        """Return bytes that this rank writes to a checkpoint; owners of the same tensors share
        them evenly."""
        plan, model = self.plan, self.job.model
        num_bytes = sum(p.size * BIAS_BYTES for p in self.biases) / plan.ranks_per_stage
        if self.job.balance.migrate_every and plan.ep > 1:
            num_bytes += plan.experts * INDEX_BYTES * len(model.expert_layers) / plan.ranks
        expert_replicas = plan.ranks_per_stage // (plan.ep * plan.etp)
        for p in self.experts:
            num_bytes += _stored_bytes(self.job, p, p.size) / expert_replicas
        for p in self.dense:
            replicas = plan.ranks_per_stage // plan.dp_shard
            if self.is_tp_sharded(p):
                replicas //= plan.tp
            if p.is_column_shard:
                replicas = 1
            if model.tied and plan.pp > 1 and p.name == "embed.weight":
                replicas *= 2
            num_bytes += _stored_bytes(self.job, p, self.unpadded_local_size(p)) / replicas
        return round(num_bytes)
