"""What a rank has of the model: the parameters of its own stages, each as wide as its slice, and
what it writes of them into a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from moesaic.facts.job import Job, ModelConfig
from moesaic.facts.plan import Plan, stages
from moesaic.facts.workload.finetune import adapters, learnt
from moesaic.facts.workload.parameters import (
    Parameter,
    moment_bytes,
    parameters,
    rank_size,
)
from moesaic.facts.workload.sizes import BIAS_BYTES, STORED_BYTES

_EMBED = "embed.weight"


def own_stages(plan: Plan, model: ModelConfig, rank: int) -> list[list[str]]:
    """Names of the blocks of each stage that `rank` has; without a pipeline there is one stage."""
    return stages(plan, model)[plan.part(rank) :: plan.pp]


@dataclass(frozen=True)
class Share:
    """Parameters of the model as one rank holds them, shards of FSDP put together."""

    job: Job
    plan: Plan
    rank: int
    dense: Sequence[Parameter]
    """As wide as the rank's slice of them."""
    experts: Sequence[Parameter]
    biases: Sequence[Parameter]
    learning: frozenset[str]
    """Names of what has gradients and moments."""

    @classmethod
    def of(cls, job: Job, plan: Plan, rank: int) -> Share:
        """Those of `rank`."""
        own = {name for stage in own_stages(plan, job.model, rank) for name in stage}
        homes = set(plan.homes(rank))
        held = [
            p
            for p in (*parameters(job.model), *adapters(job.model, job.finetune))
            if (p.expert is None or p.expert in homes)
            and not own.isdisjoint(_blocks_of(p, job.model))
        ]
        return cls(
            job,
            plan,
            rank,
            [p.on_slice(plan.tp) for p in held if p.is_dense],
            [p for p in held if p.expert is not None],
            [p for p in held if p.kind == "bias"],
            frozenset(p.name for p in learnt(job)),
        )

    @cached_property
    def learning_dense(self) -> list[Parameter]:
        """Dense parameters that have gradients and moments."""
        return [p for p in self.dense if p.name in self.learning]

    def is_cut(self, parameter: Parameter) -> bool:
        """Whether slices share out a dense parameter."""
        return self.plan.tp > 1 and parameter.cut is not None

    def rank_size(self, parameter: Parameter) -> int:
        """Elements of a dense parameter that lie on this rank, without what is padded."""
        return rank_size(parameter, self.plan.shard, self.plan.replica(self.rank))

    def moments_bytes(self) -> int:
        """What the optimizer keeps."""
        experts = [p for p in self.experts if p.name in self.learning]
        rows = [(p, self.rank_size(p)) for p in self.learning_dense]
        rows += [(p, p.size) for p in experts]
        return sum(sum(moment_bytes(p, size, self.job)) for p, size in rows)

    def staged_bytes(self) -> int:
        """What this rank writes of a checkpoint: the owners of a piece share pieces out."""
        shared: dict[tuple[int, ...], list[int]] = {}
        for owners, sizes in self._pieces():
            shared.setdefault(owners, []).extend(sizes)
        staged = 0
        for owners, sizes in shared.items():
            loads = [0] * len(owners)
            for size in sorted(sizes, reverse=True):
                loads[loads.index(min(loads))] += size
            staged += loads[owners.index(self.rank)]
        return staged

    def _pieces(self) -> Iterator[tuple[tuple[int, ...], list[int]]]:
        """Owners of tensors of this rank, and bytes of those tensors."""
        plan, part = self.plan, self.rank - self.rank % self.plan.span
        first, step = part + plan.replica(self.rank) % plan.shard * plan.tp, plan.shard * plan.tp
        alike = range(first + self.rank % plan.tp, part + plan.span, step)
        slices = tuple(
            rank + index
            for rank in range(first, part + plan.span, step)
            for index in range(plan.tp)
        )
        for p in self.dense:
            owners = tuple(alike) if self.is_cut(p) else slices
            if p.name == _EMBED and self.job.model.tied and plan.pp > 1:
                ends = (0, plan.ranks - plan.span)
                owners = tuple(end + rank - part for end in ends for rank in owners)
            yield owners, self._tensors(p, self.rank_size(p))
        copies = tuple(range(part + self.rank % plan.ep, part + plan.span, plan.ep))
        for p in self.experts:
            yield copies, self._tensors(p, p.size)
        everyone = tuple(range(part, part + plan.span))
        yield everyone, [p.size * BIAS_BYTES for p in self.biases]

    def _tensors(self, p: Parameter, size: int) -> list[int]:
        moments = moment_bytes(p, size, self.job) if p.name in self.learning else ()
        return [size * STORED_BYTES[self.job.train.precision], *moments]


def _blocks_of(parameter: Parameter, model: ModelConfig) -> set[str]:
    """Names of the blocks that need it; a tied weight is the embedding's and the head's."""
    if parameter.layer is not None:
        return {f"layers.{parameter.layer}"}
    if parameter.name == _EMBED and model.tied:
        return {"embed", "head"}
    return {parameter.name.partition(".")[0]}
