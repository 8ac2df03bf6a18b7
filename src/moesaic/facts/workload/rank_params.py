"""Parameters of one rank: those of its pipeline stages as TP shards, and its checkpoint part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.workload.adapters import adapters, is_trainable
from moesaic.facts.workload.collectives import group_of, stage_ranks
from moesaic.facts.workload.parameter_placement import (
    blocks_of_rank,
    model_block,
    parameters_of_rank,
)
from moesaic.facts.workload.parameters import (
    Parameter,
    moment_bytes,
    parameters,
    unpadded_local_size,
)
from moesaic.facts.workload.sizes import BIAS_BYTES, LOAD_COUNT_BYTES, STORED_BYTES


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
            is_trained = p in adapter_params or is_trainable(job.finetune, p)
            num_bytes += shard.size * STORED_BYTES[job.train.precision]
            num_bytes += sum(moment_bytes(shard, shard.size, job)) if is_trained else 0
    return num_bytes


@dataclass(frozen=True)
class RankParams:
    """Parameters of the model on one rank, before FSDP shards them."""

    job: Job
    plan: Plan
    rank: int
    dense: Sequence[Parameter]
    """Dense parameters, as TP shards."""
    experts: Sequence[Parameter]
    biases: Sequence[Parameter]
    trainable: frozenset[str]
    """Names of the parameters with gradients and moments."""

    @classmethod
    def of_rank(cls, job: Job, plan: Plan, rank: int) -> RankParams:
        """Return the parameters of `rank`."""
        local_blocks = set(blocks_of_rank(job.model, plan, rank))
        adapter_params = [
            p.tp_shard(plan.tp if p.expert is None else plan.etp)
            for p in adapters(job.model, job.finetune)
            if model_block(p) in local_blocks
            and (p.expert is None or p.expert in plan.experts_of(rank, p.layer or 0))
        ]
        own = parameters_of_rank(job.model, plan, rank)
        trained = [p for p in own if is_trainable(job.finetune, p)]
        all_params = [*own, *adapter_params]
        return cls(
            job,
            plan,
            rank,
            [p for p in all_params if p.is_dense],
            [p for p in all_params if p.expert is not None],
            [p for p in all_params if p.kind == "bias"],
            frozenset(p.name for p in (*trained, *adapter_params)),
        )

    @cached_property
    def trainable_dense(self) -> list[Parameter]:
        """Dense parameters with gradients and moments."""
        return [p for p in self.dense if p.name in self.trainable]

    def is_tp_sharded(self, parameter: Parameter) -> bool:
        """Return whether TP splits a dense parameter."""
        return self.plan.tp > 1 and parameter.tp_dim is not None

    def unpadded_local_size(self, parameter: Parameter) -> int:
        """Return elements of a dense parameter on this rank, without padding."""
        return unpadded_local_size(parameter, self.plan.dp_shard, self.plan.dp_rank(self.rank))

    def moments_bytes(self) -> int:
        """Return bytes of the optimizer's moments."""
        experts = [p for p in self.experts if p.name in self.trainable]
        rows = [(p, self.unpadded_local_size(p)) for p in self.trainable_dense]
        rows += [(p, p.size) for p in experts]
        return sum(sum(moment_bytes(p, size, self.job)) for p, size in rows)

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
        plan, first_rank = self.plan, self.rank - self.rank % self.plan.ranks_per_stage
        shard = first_rank + plan.dp_rank(self.rank) % plan.dp_shard * plan.tp
        replica_starts = range(shard, first_rank + plan.ranks_per_stage, plan.dp_shard * plan.tp)
        dp_replicas = tuple(first + index for first in replica_starts for index in range(plan.tp))
        same_tp_replicas = group_of(plan.dp_replicate_groups(), self.rank)
        tied = [p for p in self.dense if p.name == "embed.weight"]
        tied = tied if self.job.model.tied and plan.pp > 1 else []
        untied = [p for p in self.dense if p not in tied and not p.is_column_shard]
        column_shards = [p for p in self.dense if p not in tied and p.is_column_shard]
        yield (
            dp_replicas,
            self._dense_tensor_bytes([p for p in untied if not self.is_tp_sharded(p)]),
        )
        yield (
            same_tp_replicas,
            self._dense_tensor_bytes([p for p in untied if self.is_tp_sharded(p)]),
        )
        yield (self.rank,), self._dense_tensor_bytes(column_shards)
        if tied:  # With TP the tied weight is always TP-sharded.
            tied_offsets = (-first_rank, plan.ranks - plan.ranks_per_stage - first_rank)
            tied_owners = (self.rank,) if plan.embedding_shards > 1 else same_tp_replicas
            yield (
                tuple(end + rank for end in tied_offsets for rank in tied_owners),
                self._dense_tensor_bytes(tied),
            )
        expert_replicas = group_of(plan.expert_dp_groups(), self.rank)
        yield expert_replicas, [n for p in self.experts for n in self._tensor_bytes(p, p.size)]
        yield stage_ranks(plan, self.rank), [p.size * BIAS_BYTES for p in self.biases]
        if self.job.balance.migrate_every and plan.ep > 1:
            rows = [plan.experts * LOAD_COUNT_BYTES for _ in self.job.model.expert_layers]
            yield tuple(range(plan.ranks)), rows

    def _dense_tensor_bytes(self, dense: Sequence[Parameter]) -> list[int]:
        return [n for p in dense for n in self._tensor_bytes(p, self.unpadded_local_size(p))]

    def _tensor_bytes(self, p: Parameter, size: int) -> list[int]:
        moments = moment_bytes(p, size, self.job) if p.name in self.trainable else ()
        return [size * STORED_BYTES[self.job.train.precision], *moments]
