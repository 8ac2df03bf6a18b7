"""What a rank has of the model: the parameters of its own stages, each as wide as its slice, and
what it writes of them into a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.workload.finetune import adapters, learns
from moesaic.facts.workload.holdings import blocks_on, held, model_block
from moesaic.facts.workload.messages import group_of, part_of
from moesaic.facts.workload.parameters import Parameter, moment_bytes, parameters, rank_size
from moesaic.facts.workload.sizes import BIAS_BYTES, ROW_BYTES, STORED_BYTES


def expert_bytes(job: Job, plan: Plan) -> int:
    """Of all that there is of one expert of a layer, as a slice has it: parameters, adapters, and
    moments of what learns."""
    first, found = job.model.expert_layers[0], 0
    own = [p for p in parameters(job.model, lambda _: [0]) if p.layer == first]
    beside = [p for p in adapters(job.model, job.finetune) if p.layer == first]
    for p in (*own, *beside):
        if p.expert == 0:
            here = p.on_slice(plan.etp)
            learning = p in beside or learns(job.finetune, p)
            found += here.size * STORED_BYTES[job.train.precision]
            found += sum(moment_bytes(here, here.size, job)) if learning else 0
    return found


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
        here = set(blocks_on(job.model, plan, rank))
        beside = [
            p.on_slice(plan.tp if p.expert is None else plan.etp)
            for p in adapters(job.model, job.finetune)
            if model_block(p) in here
            and (p.expert is None or p.expert in plan.homes(rank, p.layer or 0))
        ]
        own = held(job.model, plan, rank)
        learning = [p for p in own if learns(job.finetune, p)]
        found = [*own, *beside]
        return cls(
            job,
            plan,
            rank,
            [p for p in found if p.is_dense],
            [p for p in found if p.expert is not None],
            [p for p in found if p.kind == "bias"],
            frozenset(p.name for p in (*learning, *beside)),
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
        shard = part + plan.replica(self.rank) % plan.shard * plan.tp
        firsts = range(shard, part + plan.span, plan.shard * plan.tp)
        whole = tuple(first + index for first in firsts for index in range(plan.tp))
        alike = group_of(plan.shard_replica_groups(), self.rank)
        tied = [p for p in self.dense if p.name == "embed.weight"]
        tied = tied if self.job.model.tied and plan.pp > 1 else []
        alone = [p for p in self.dense if p not in tied and not p.columns]
        own = [p for p in self.dense if p not in tied and p.columns]
        yield whole, self._dense([p for p in alone if not self.is_cut(p)])
        yield alike, self._dense([p for p in alone if self.is_cut(p)])
        yield (self.rank,), self._dense(own)
        if tied:  # It is cut, or there are no slices.
            ends = (-part, plan.ranks - plan.span - part)
            here = (self.rank,) if plan.columns > 1 else alike
            yield tuple(end + rank for end in ends for rank in here), self._dense(tied)
        copies = group_of(plan.replica_groups(), self.rank)
        yield copies, [n for p in self.experts for n in self._tensors(p, p.size)]
        yield part_of(plan, self.rank), [p.size * BIAS_BYTES for p in self.biases]
        if self.job.balance.rehome_every and plan.ep > 1:
            rows = [plan.experts * ROW_BYTES for _ in self.job.model.expert_layers]
            yield tuple(range(plan.ranks)), rows

    def _dense(self, some: Sequence[Parameter]) -> list[int]:
        return [n for p in some for n in self._tensors(p, self.rank_size(p))]

    def _tensors(self, p: Parameter, size: int) -> list[int]:
        moments = moment_bytes(p, size, self.job) if p.name in self.learning else ()
        return [size * STORED_BYTES[self.job.train.precision], *moments]
