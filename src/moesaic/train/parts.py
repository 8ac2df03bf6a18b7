"""Parts of a run: a part is one model with its optimizer and the ranks that share its work.

A run may have several, such as a teacher and a student. Each is on all ranks or on some, as its
`PartPlacement` says. Logical names of a part's tensors start with its prefix, so one state holds
all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from moesaic.dist.buckets import GradientBuckets, ReducedParameter
from moesaic.dist.checkpoint import Checkpoint
from moesaic.dist.collectives import all_reduce_buckets_
from moesaic.dist.state import ExternalSnapshot, Source, SplitSource, TensorShard
from moesaic.dist.world import Group, World
from moesaic.facts.plan import Plan
from moesaic.kernels import device as devices
from moesaic.kernels.norms import block_norms
from moesaic.models.state import EMBED_WEIGHT, LocalParam
from moesaic.train.kinds import AnyJob
from moesaic.train.loss_scale import num_updates
from moesaic.train.low_bit_adamw import LowBitAdamW
from moesaic.train.optim import AdamW, FlatParams, flatten_params
from moesaic.train.tiers import ExpertTiers

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class PartPlacement:
    """Ranks and layout of one part, known on every rank of the run."""

    prefix: str
    """Start of the logical names of the part's tensors; empty for one part, whose names start with
    no other prefix."""
    plan: Plan
    """Layout at the start over `ranks`, which it numbers from 0."""
    ranks: Sequence[int]
    """Ranks of the run that hold the part, ascending."""
    title: str = ""
    """Words for the part in messages; empty: its prefix."""
    lr: float | None = None
    """Peak learning rate; None: that of the job."""

    def __post_init__(self) -> None:
        """Check that the plan is one for these ranks."""
        if self.plan.ranks != len(self.ranks):
            raise ValueError(
                f'the plan of part "{self.prefix}" has {self.plan.ranks} ranks, and ranks = '
                f"{list(self.ranks)} are {len(self.ranks)}: make the plan for as many"
            )

    @property
    def label(self) -> str:
        """Words for the part in messages."""
        return self.title or f'part "{self.prefix}"'

    @property
    def start_counter(self) -> str:
        """Counter of the updates that the run had made before the part was added."""
        return f"{self.prefix}updates_before"

    def skip_counter(self, losses: frozenset[str]) -> str:
        """Return the counter of the updates that parameters trained by `losses` have skipped."""
        return f"{self.skip_prefix}{'+'.join(sorted(losses))}"

    @property
    def skip_prefix(self) -> str:
        """Start of the names of all `skip_counter`."""
        return f"{self.prefix}updates_without."

    @property
    def reduction_purpose(self) -> str:
        """Purpose of the groups that reduce the part's gradients.

        Each part has its own groups: a rank without samples reduces its parts in another order.
        """
        return f"gradients {self.prefix}".rstrip() if self.plan.pp == 1 else ""

    def subset(self, world: World) -> World | None:
        """Return the ranks that hold the part as a world, for `make_part`; None on other ranks.

        Every rank of the run must call this for every part, in one order.
        """
        partitions = [(groups, "") for groups in self.plan.partitions()]
        reductions = (
            self.plan.expert_dp_groups(), self.plan.stage_groups(), self.plan.dp_groups(),
        )  # fmt: skip
        partitions += [(groups, self.reduction_purpose) for groups in reductions]
        return world.subset(self.ranks, partitions)


@dataclass
class Part(Generic[M]):
    """One model of a run on this rank, as built by `make_part`."""

    model: M
    placement: PartPlacement
    plan: Plan
    """Layout now, after any expert migration."""
    world: World
    """Ranks that hold the part."""
    trainable: list[LocalParam]
    """Trainable parameters."""
    frozen: list[LocalParam]
    """Frozen parameters: no gradients, no moments, no part in the gradient norm."""
    flat_params: list[FlatParams]
    """Trainable parameters, grouped into tensors that are updated at once."""
    optimizer: AdamW
    buckets: GradientBuckets
    """Buckets of the gradients that ranks reduce."""
    tp_group: Group | None = None
    """Tensor-parallel ranks, over which FSDP does not reduce unsharded parameters."""
    tied_weight_group: Group | None = None
    """First and last pipeline rank that both hold the tied weight."""
    buffers: list[TensorShard] = field(default_factory=list)
    """State that no optimizer updates, such as router biases."""
    tiers: ExpertTiers | None = None
    """Expert state on a drive; None if all state is in memory."""
    external_snapshot: ExternalSnapshot | None = None
    """Snapshot of state outside the shards, which a checkpoint waits for."""
    trained_losses_at: Callable[[int], Collection[str]] | None = None
    """Function that returns the names of the losses that count after so many finished steps; None:
    all losses count in every step."""

    @property
    def prefix(self) -> str:
        """Start of the logical names of the part's tensors."""
        return self.placement.prefix

    def local_samples(self, samples: range) -> range:
        """Return this rank's share of the samples of a global micro-batch."""
        local = self.plan.sample_range(self.world.rank, len(samples))
        return samples[local.start : local.stop]

    def shards(self) -> list[TensorShard]:
        """Return parameters, moments and buffers, as live shards with owners among the run's
        ranks."""
        rank = self.world.rank
        shards: list[TensorShard] = []
        for item in self.trainable:
            shards += item.parameter_shards(rank)
            shards += self.optimizer.moment_shards(item, rank)
        for item in self.frozen:
            shards += item.parameter_shards(rank)
        shards += self.buffers
        ranks = self.placement.ranks
        return [
            replace(
                shard, name=f"{self.prefix}{shard.name}",
                owners=tuple(ranks[owner] for owner in shard.owners),
            )
            for shard in shards
        ]  # fmt: skip

    def begin_step(self, number: int, lr: float) -> None:
        """Prepare for a step that takes update `number`, from 1, with learning rate `lr`."""
        if self.tiers is not None:
            self.tiers.begin_step(self.optimizer, number, lr)

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Prepare for forward and backward of one micro-batch, the `is_last` or not of its step."""
        if self.plan.dp_shard > 1:
            # Each micro-batch reduce-scatters gradients; only the last one all-reduces over
            # replicas.
            cast("FSDPModule", self.model).set_requires_all_reduce(is_last)

    def reduce_gradients(self) -> None:
        """Finish the reduction of all gradients, and add up a tied weight's over both ends of a
        pipeline.

        Column-sharded embeddings need no reduction. FSDP has reduced its own over DP ranks;
        gradients of unsharded parameters still need a sum over TP ranks.
        """
        if self.plan.dp_shard > 1:
            params = (item for item in reversed(self.trainable) if not item.is_column_sharded)
            unsharded = [
                item.grad for item in params if item.bank is None and not item.is_tp_sharded
            ]
            all_reduce_buckets_(unsharded, self.tp_group)
        self.buckets.finish()
        if self.tied_weight_group is not None:
            all_reduce_buckets_(
                [item.grad for item in self.trainable if item.name == EMBED_WEIGHT],
                self.tied_weight_group,
            )

    def squared_grad_norm(self) -> Tensor:
        """Return this rank's share of the squared norm of the gradient, fp64 [1]; the first owner
        of each element counts it.

        Experts count one by one, so the bits do not depend on those in memory.
        """
        own = (item for item in self.trainable if item.owners[0] == self.world.rank)
        norms, local = list[Tensor](), list[Tensor]()
        for item in own:
            if item.places is None:
                local += item.grads()
                continue
            norms += [block_norms(local)] if local else []
            norms.append(item.places.pop_norms())
            local = []
        norms += [block_norms(local)] if local else []
        total = torch.zeros(1, dtype=torch.float64, device=self.world.device)
        return total + torch.cat(norms).double().square().sum() if norms else total

    def update(self, number: int, *, lr: float, clip: float, counters: dict[str, int]) -> None:
        """Take update `number`, from 1, block by block, and drop the gradients.

        Parameters without a loss in this step skip the update: they do not decay, and their moments
        stay.

        Args:
            number: number of the update.
            lr: learning rate.
            clip: factor on the gradients.
            counters: position in the run; updates that parameters skip are counted here.
        """
        if self.tiers is not None:
            self.tiers.begin_update()
        skipping = self._losses_without_update(counters["step"])
        for (_, losses), block in groupby(
            self.flat_params, key=lambda one: (one.block, one.losses)
        ):
            group, own_number = list(block), number
            if losses is not None:
                own_number -= counters.get(self.placement.skip_counter(losses), 0)
            if losses not in skipping:
                self.optimizer.update_block(group, self.world.rank, own_number, lr=lr, clip=clip)
            for item in (item for flat in group for item in flat.params):
                item.clear_grad()
        for key in map(self.placement.skip_counter, skipping):
            counters[key] = counters.get(key, 0) + 1

    def _losses_without_update(self, step: int) -> list[frozenset[str]]:
        """Return the `losses` of parameters of which none counts after `step` finished steps."""
        if self.trained_losses_at is None:
            return []
        counting = frozenset(self.trained_losses_at(step))
        kinds = {one.losses for one in self.trainable if one.losses is not None}
        return sorted((one for one in kinds if not one & counting), key=sorted)

    def drop_gradients(self) -> None:
        """Remove all gradients."""
        for item in self.trainable:
            item.clear_grad()

    def close(self) -> None:
        """Release model, gradients and moments."""
        self.trainable.clear()
        self.flat_params.clear()
        self.frozen.clear()
        self.buffers.clear()
        self.optimizer.close()
        self.buckets.close()
        self.trained_losses_at = None
        if self.tiers is not None:
            self.tiers.close()
        del self.model


def parts_source(
    checkpoint: Checkpoint,
    initial: Source,
    placements: Sequence[PartPlacement],
    counters: dict[str, int],
    log: Callable[[str], None],
) -> Source:
    """Return the source for a resume: `checkpoint`, and `initial` values for parts that it lacks.

    Added parts are named to `log`, and `counters` counts their updates from here on. Tensors of
    parts that the run no longer has are ignored.
    """
    prefixes = [part.prefix for part in placements]
    saved = {find_prefix(key.partition("/")[2], prefixes) for key in checkpoint.tensors}
    added = {part.prefix for part in placements if part.prefix not in saved}
    for part in placements:
        if part.prefix in added:
            for key in [one for one in counters if one.startswith(part.skip_prefix)]:
                del counters[key]  # An earlier part of this name has left.
            counters[part.start_counter] = num_updates(counters)
            log(f"the checkpoint has no {part.label}: it starts from initial values")
    return SplitSource(
        checkpoint, initial, lambda shard: find_prefix(shard.name, prefixes) in added
    )


def find_prefix(name: str, prefixes: Iterable[str]) -> str | None:
    """Return the longest of `prefixes` that a logical name starts with; None if there is none."""
    return max((one for one in prefixes if name.startswith(one)), key=len, default=None)


def make_part(
    model: M,
    placement: PartPlacement,
    world: World,
    params: Sequence[LocalParam],
    job: AnyJob,
    *,
    buffers: Sequence[TensorShard] = (),
    tp_group: Group | None = None,
) -> Part[M]:
    """Return a part with all gradient buckets and moments allocated; parameters have no values yet.

    Args:
        model: the model, with memory for its parameters.
        placement: ranks and layout of the part.
        world: these ranks, from `placement.subset`.
        params: local parameters of the model, in block order, with owners in `world`.
        job: job with the settings of the optimizer.
        buffers: state that no optimizer updates.
        tp_group: tensor-parallel ranks.
    """
    trainable = [item for item in params if item.parameter.requires_grad]
    plan, purpose = placement.plan, placement.reduction_purpose
    buckets = _make_buckets(plan, world, trainable, purpose)
    try:
        flat_params = flatten_params(trainable, buckets.flatten_parameters())
        devices.reset_peak_memory(world.device)  # Freed parameters leave holes in the cache.
        return Part(
            model, placement, plan, world, trainable,
            [item for item in params if not item.parameter.requires_grad],
            flat_params, _make_optimizer(job, placement.prefix, world, flat_params), buckets,
            tp_group=tp_group, buffers=list(buffers),
        )  # fmt: skip
    except BaseException:
        buckets.close()  # Parameter hooks keep the model alive.
        raise


def _make_buckets(
    plan: Plan, world: World, trainable: Sequence[LocalParam], purpose: str
) -> GradientBuckets:
    """Return gradient buckets, grouped by the ranks that reduce them.

    Expert gradients are summed over expert-DP ranks, those of TP shards over DP ranks, all others
    over the whole pipeline rank. Column-sharded embeddings and FSDP parameters need no reduction
    here.

    Without a pipeline, buckets are reduced during backward, which each rank reaches at a different
    point of its collectives. They therefore use process groups of their own. With a pipeline,
    backwards of several micro-batches interleave and torch's schedules may set gradients
    themselves, so reduction waits for the end.
    """
    overlaps_backward = plan.pp == 1
    expert_dp_group = world.partition(plan.expert_dp_groups(), purpose)
    stage_group = dp_group = None
    if plan.dp_shard == 1:
        stage_group = world.partition(plan.stage_groups(), purpose)
        dp_group = world.partition(plan.dp_groups(), purpose)
    reduced = [
        ReducedParameter(item.parameter, expert_dp_group, "experts", item.has_weight_decay)
        if item.bank is not None
        else ReducedParameter(
            item.parameter,
            dp_group if item.is_tp_sharded else stage_group,
            decays=item.has_weight_decay,
        )
        for item in reversed(trainable)
        if not item.is_column_sharded and item.places is None
    ]
    return GradientBuckets(reduced, overlaps_backward=overlaps_backward)


def _make_optimizer(
    job: AnyJob, prefix: str, world: World, flat_params: Sequence[FlatParams]
) -> AdamW:
    optimizer = (
        AdamW(job.optimizer)
        if job.optimizer.moments == "full"
        else LowBitAdamW(job.optimizer, job.seed, world.device, prefix)
    )
    for flat in flat_params:
        optimizer.init_moments(flat, world.rank)
    return optimizer
