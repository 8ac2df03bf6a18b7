"""A run: a model on ranks that takes steps.

One step is named phases: data, forward, backward (a pair for every micro-batch; with a pipeline
they mingle, and all of them are one phase of that name), reduce, clip, optimizer, and rehome where
experts may move. A global batch is a list of global sample indices; this rank takes its rows of
each micro-batch. Losses are divided by counts over all ranks, so gradients are plain sums. Slices
hold the same samples, and shares of their losses: what counts samples counts those of the first
slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from moesaic.dist.buckets import Buckets
from moesaic.dist.collectives import gather, sum_, sum_buckets_
from moesaic.dist.products import engine
from moesaic.dist.squares import sum_of_squares
from moesaic.dist.state import PARAMETER, Piece, State
from moesaic.dist.world import Group, World
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.models.lm import LanguageModel
from moesaic.models.pieces import EMBED, Held, biases
from moesaic.nn.context import NARROW, Context, computing_in
from moesaic.policy.balance import stands_aside
from moesaic.train import scale
from moesaic.train.balancing import Balancer
from moesaic.train.data import Batch, Samples
from moesaic.train.objectives import lm
from moesaic.train.optim import AdamW, Stretch, learning_rate
from moesaic.train.phases import Phases
from moesaic.train.rehoming import Moved, Rehoming
from moesaic.train.routes import RouteRecorder, RouteReplay
from moesaic.train.spread import Spread

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from moesaic.train.pipeline import Flow, Pipeline


@dataclass(frozen=True)
class StepFacts:
    """What one step did, the same on every rank but for `phases`."""

    step: int
    loss: float
    total_loss: float
    balance_loss: float
    z_loss: float
    grad_norm: float
    lr: float
    tokens: int
    flips: int
    dropped: dict[int, int]
    counts: dict[int, Tensor]
    """Tokens by expert for each expert layer, over the whole batch."""
    by_rank: dict[int, Tensor]
    """The same by rank and expert, for layers of this rank's part of the pipeline: of its ranks
    that between them send each token once."""
    phases: dict[str, float]
    scale: float | None = None
    """The loss scale of fp16 that the step had."""
    skipped: bool = False
    """Whether the gradient overflowed, and nothing was updated."""
    spread: dict[int, Spread] = field(default_factory=dict)
    """What became of rows by layer, if a policy was asked; of layers and groups of this rank."""
    moved: Sequence[Moved] = ()
    """Experts that live elsewhere now, of all layers."""


@dataclass
class Run:
    """See the module; made by `assemble`."""

    job: Job
    plan: Plan
    world: World
    model: LanguageModel
    holdings: list[Held]
    """What learns."""
    updated: list[Stretch]
    """The same, by what is updated in one piece."""
    optimizer: AdamW
    part: Group | None
    """Ranks that hold the same blocks; all of them but for a pipeline."""
    ends: Group | None
    """Ranks of the first and the last part of a pipeline that hold the same tied weight."""
    buckets: Buckets
    """Gradients that ranks add up."""
    pipeline: Pipeline | None
    frozen: list[Held] = field(default_factory=list)
    """What does not: no gradient, no moments, and no part in the gradient's norm."""
    counters: dict[str, int] = field(default_factory=lambda: {"step": 0, "samples": 0, "tokens": 0})
    hook: Callable[[str], None] | None = None
    """Called as each phase begins."""
    recorder: RouteRecorder | None = None
    replay: RouteReplay | None = None
    rehoming: Rehoming | None = None
    """Who moves experts between steps; nobody: they stay."""

    def state(self) -> State:
        """Everything that training goes on from, as live pieces."""
        pieces: list[Piece] = []
        for item in self.holdings:
            pieces += item.pieces(PARAMETER, item.local, self.world.rank)
            pieces += self.optimizer.pieces(item, self.world.rank)
        for item in self.frozen:
            pieces += item.pieces(PARAMETER, item.local, self.world.rank)
        pieces += biases(self.model, self.plan, self.world.rank)
        pieces += () if self.rehoming is None else self.rehoming.pieces()
        return State(pieces, dict(self.counters))

    def step(self, samples: Samples) -> StepFacts:
        """One optimizer step on the next global batch of `samples`."""
        phases = Phases(self.world.device, self.hook)
        with phases("data"):
            micro = self._load(samples)
            targets = self._count(micro)
        losses = self._gradients(micro, targets, phases)
        with phases("reduce"):
            self._reduce()
        with phases("clip"):
            factor = scale.scale_of(self.counters)
            norm = self.gradient_norm() / factor
            finite = math.isfinite(norm)  # The same on all ranks, whoever met an overflow.
        with phases("optimizer"):
            lr = self._update(norm, factor) if finite else self._skip(norm, losses)
            if finite:
                self._rebalance(losses)
        self.counters["step"] += 1
        self.counters["samples"] += self.job.train.batch
        self.counters["tokens"] += targets
        with phases("log"):
            spread = {
                layer: moe.balancer.told()
                for layer, moe in self.model.expert_layers()
                if isinstance(moe.balancer, Balancer)
            }
            facts = self._facts(losses, norm, lr, targets, phases)
        scaled = scale.EXPONENT in self.counters
        facts = replace(facts, spread=spread, moved=self._rehome(facts.counts, phases))
        return replace(facts, scale=factor, skipped=not finite) if scaled else facts

    def gradients(self, samples: Samples) -> list[lm.Losses]:
        """Gradients of the next global batch, reduced and left in place, without an update.

        Those of fp16 are times the loss scale.
        """
        micro = self._load(samples)
        losses = self._gradients(micro, self._count(micro), Phases(self.world.device))
        self._reduce()
        return losses

    def _load(self, samples: Samples) -> list[Batch]:
        """This rank's rows of every micro-batch of the next global batch."""
        train = self.job.train
        size = train.batch // train.micro_batches
        rows = self.plan.rows(self.world.rank, size)
        start = self.counters["samples"]
        firsts = range(start, start + train.batch, size)
        return [samples.batch(range(f + rows.start, f + rows.stop)) for f in firsts]

    def _count(self, micro: Sequence[Batch]) -> int:
        local = sum(self._targets(batch) for batch in micro)
        total = torch.tensor([local], device=self.world.device)
        return int(sum_(total, self.part))

    def _context(self, batch: Batch) -> Context:
        """The context of a micro-batch to learn from."""
        context = lm.make_context(self.model, batch, self.job, self.counters["step"])
        context.training = True
        context.keep_choices = self.recorder is not None
        if self.replay is not None:
            choices = self.replay.choices(self.counters["step"], batch.samples)
            context.replay = {
                layer: chosen[context.run].to(self.world.device)
                for layer, chosen in choices.items()
            }
        return context

    def _targets(self, batch: Batch) -> int:
        return lm.num_targets(batch) if self.plan.counts(self.world.rank) else 0

    def _gradients(self, micro: Sequence[Batch], targets: int, phases: Phases) -> list[lm.Losses]:
        self.model.train()
        if self.pipeline is None:
            losses = self._in_turn(micro, targets, phases)
        else:
            with phases("pipeline"):
                factor = scale.scale_of(self.counters)
                losses = self.pipeline.step(self._flow(micro, self._context, targets, factor))
        if self.recorder is not None:
            for batch, result in zip(micro, losses, strict=True):
                self._record(self.recorder, batch, result.context.choices)
        return losses

    def _flow(
        self,
        micro: Sequence[Batch],
        begin: Callable[[Batch], Context],
        targets: int,
        factor: float = 1.0,
    ) -> Flow:
        """Micro-batches for the pipeline."""
        from moesaic.train.pipeline import Flow

        def aimed(batch: Batch) -> Context:
            context = begin(batch)
            lm.aim(context, batch, targets, self.world.device, factor)
            return context

        return Flow(micro, aimed, self.precision, factor)

    def _in_turn(self, micro: Sequence[Batch], targets: int, phases: Phases) -> list[lm.Losses]:
        """Forward and backward of one micro-batch after the other."""
        losses = []
        for index, batch in enumerate(micro):
            if self.plan.shard > 1:
                # Every micro-batch leaves a shard of the gradient; copies add up at the last one.
                sharded = cast("FSDPModule", self.model)
                sharded.set_requires_all_reduce(index == len(micro) - 1)
            with phases("forward"), self.precision():
                factor = scale.scale_of(self.counters)
                context = self._context(batch)
                total, result = lm.compute(self.model, batch, context, self.job, targets, factor)
            with phases("backward"):
                if index == len(micro) - 1:
                    self.buckets.expect()
                total.backward()
                result.context.mask = None  # The largest part of what the losses hold on to.
            losses.append(result)
        return losses

    def _record(self, recorder: RouteRecorder, batch: Batch, own: dict[int, Tensor]) -> None:
        """Of choices, all slices' together: a slice's own need not be of whole samples."""
        group = self.model.slices.group
        choices = {layer: gather(chosen, group).flatten(0, 1) for layer, chosen in own.items()}
        if self.plan.counts(self.world.rank):
            recorder.record(self.counters["step"], batch.samples, choices)

    def precision(self) -> AbstractContextManager[object]:
        """A stretch in which products take the job's precision."""
        return computing_in(self.job.train.precision, self.world.device)

    def engines(self) -> str | None:
        """What multiplies experts on this rank, and what carries tokens to those of others, for a
        person; None where it has no experts."""
        moe = next((moe for _, moe in self.model.expert_layers()), None)
        if moe is None:
            return None
        kind = NARROW.get(self.job.train.precision, moe.bank.arena.dtype)
        found = f"experts: {engine(self.world.device, kind, moe.bank.by)}"
        carriers = [one.name for one in moe.dispatcher.ranks.carriers]
        return f"{found}; tokens carried by {' and then '.join(carriers)}" if carriers else found

    def balance(self) -> str | None:
        """Who balances experts' loads, and what is counted on, for a person; None: nobody does."""
        prices, config = self.plan.prices, self.job.balance
        asked = any(moe.balancer for _, moe in self.model.expert_layers())
        why = stands_aside(self.job, self.plan)
        if prices is None or not (asked or self.rehoming):
            return None if why is None else f"balance: no copies, {why}"
        moves = f"; experts may move every {config.rehome_every} steps" if self.rehoming else ""
        policy = config.name if asked else "no copies" if why is None else f"no copies, {why}"
        idle = asked and config.early and not prices.hides
        hidden = "; nothing hides early copies here (balance.early): leave that out" * idle
        return f"balance: {policy}{moves}; {prices.words()}{hidden}"

    def _reduce(self) -> None:
        """Sum what is left of gradients over ranks that learn the same, and wait for all sums; then
        a tied weight's over both ends of a pipeline.

        Of columns of a table nobody else in the part has any. FSDP has done its own, over ranks
        that are alike; what is not cut is left to the slices.
        """
        if self.plan.shard > 1:
            held = (item for item in reversed(self.holdings) if not item.columns)
            whole = [item.grad for item in held if item.bank is None and not item.sliced]
            sum_buckets_(whole, self.model.slices.group)
        self.buckets.finish()
        if self.ends is not None:
            sum_buckets_([item.grad for item in self.holdings if item.name == EMBED], self.ends)

    def gradient_norm(self) -> float:
        """The norm of the whole gradient; its first owner counts an element, and nobody else."""
        mine = [item.grad for item in self.holdings if item.owners[0] == self.world.rank]
        total = torch.zeros(1, dtype=torch.float64, device=self.world.device)
        if mine:
            total += sum_of_squares(mine)
        return math.sqrt(float(sum_(total, self.world.everyone)))

    def _update(self, norm: float, factor: float) -> float:
        """Update everything by gradients that are `factor` times what they should be."""
        train, lr = self.job.train, self._learning_rate()
        clip = min(1.0, train.clip / (norm + 1e-6)) if train.clip else 1.0
        update = scale.updates(self.counters) + 1
        for _, block in groupby(self.updated, key=lambda one: one.block):
            some = list(block)
            self.optimizer.apply(some, self.world.rank, update, lr=lr, clip=clip / factor)
            for item in (item for one in some for item in one.items):
                item.parameter.grad = None
        scale.keep(self.counters)
        return lr

    def _skip(self, norm: float, losses: list[lm.Losses]) -> float:
        """Update nothing, for a gradient that has overflowed; the scale of the loss changes."""
        scale.shrink(self.counters, norm, self._summed(losses)[0])
        for item in self.holdings:
            item.parameter.grad = None
        return self._learning_rate()

    def _learning_rate(self) -> float:
        """Of this step; skipped ones count, so that a run ends where its schedule does."""
        step, steps = self.counters["step"] + 1, self.job.train.steps
        return learning_rate(step, steps, self.job.optimizer.lr, self.job.schedule)

    def _rebalance(self, losses: list[lm.Losses]) -> None:
        """Biases follow what the whole batch asked of experts; every rank knows it."""
        if self.job.finetune is not None and self.job.finetune.router == "frozen":
            return
        for layer, router in self.model.sigmoid_routers():
            asked = torch.stack([one.context.layers[layer].asked for one in losses]).sum(0)
            router.rebalance(asked, self.job.routing.bias_step)

    def _rehome(self, counts: Mapping[int, Tensor], phases: Phases) -> list[Moved]:
        """Experts to where they should live, if it is time for that."""
        if self.rehoming is None:
            return []
        self.rehoming.add(counts)
        if not self.rehoming.due(self.counters["step"]):
            return []
        with phases("rehome"):
            self.plan, moved = self.rehoming.settle(self.plan)
        return moved

    def _summed(self, losses: list[lm.Losses]) -> tuple[float, float, float, float, float]:
        """All losses weighed, each by itself, and flips, over all ranks."""
        flips = sum(f.flips for one in losses for f in one.context.layers.values())
        columns = [
            torch.stack([part.double() for part in (one.loss, one.balance, one.z)])
            for one in losses
        ]
        local = torch.cat((torch.stack(columns).sum(0), columns[0].new_tensor([flips])))
        loss, balance, z, all_flips = sum_(local, self.world.everyone).tolist()
        routing = self.job.routing
        total = loss + routing.balance_loss * balance + routing.z_loss * z
        return total, loss, balance, z, all_flips

    def _facts(
        self, losses: list[lm.Losses], norm: float, lr: float, targets: int, phases: Phases
    ) -> StepFacts:
        total, loss, balance, z, flips = self._summed(losses)
        by_rank: dict[int, Tensor] = {}
        dropped: dict[int, int] = {}
        for one in losses:
            for layer, facts in one.context.layers.items():
                by_rank[layer] = facts.counts + by_rank.get(layer, 0)
                dropped[layer] = facts.dropped + dropped.get(layer, 0)
        by_rank = _on_host(by_rank)
        counts = {layer: rows.sum(0) for layer, rows in by_rank.items()}
        if self.pipeline is not None:
            counts, dropped = self.pipeline.all_layers(counts, dropped)
        return StepFacts(
            step=self.counters["step"], loss=loss, total_loss=total, balance_loss=balance,
            z_loss=z, grad_norm=norm, lr=lr, tokens=targets, flips=int(flips), dropped=dropped,
            counts=counts, by_rank=by_rank, phases=phases.seconds,
        )  # fmt: skip

    @torch.no_grad()
    def validate(self, samples: Samples, limit: int) -> tuple[float, int]:
        """Mean loss over the first `limit` samples, and the number of targets."""
        self.model.eval()
        count = min(limit, len(samples))
        size = max(self.job.train.batch // self.job.train.micro_batches, 1)
        total = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        for start in range(0, count, size):
            rows = self.plan.rows(self.world.rank, min(size, count - start))
            batch = samples.batch(range(start + rows.start, start + rows.stop), shuffled=False)
            losses = self._judge(batch)
            # In a pipeline those count who have the loss.
            counted = self._targets(batch) if "head" in self.model.names else 0
            total += torch.stack((losses.loss.double(), total.new_tensor(counted)))
        loss, targets = sum_(total, self.world.everyone).tolist()
        return loss / max(targets, 1.0), int(targets)

    def _judge(self, batch: Batch) -> lm.Losses:
        """The losses of a batch, of which a part of a pipeline has its own."""

        def begin(batch: Batch) -> Context:
            return lm.make_context(self.model, batch, self.job, 0)

        if self.pipeline is not None:
            return self.pipeline.evaluate(self._flow([batch], begin, 1))
        with self.precision():
            return lm.compute(self.model, batch, begin(batch), self.job, 1)[1]

    def close(self) -> None:
        """Let go of the model; the world stays."""
        self.holdings.clear()
        self.updated.clear()
        self.frozen.clear()
        self.optimizer.close()
        self.buckets.close()
        self.pipeline = self.rehoming = None
        del self.model


def _on_host(tables: dict[int, Tensor]) -> dict[int, Tensor]:
    """Tables of one shape by layer, brought from the device, if they are there, at one go."""
    if all(one.device.type == "cpu" for one in tables.values()):
        return tables
    return dict(zip(tables, torch.stack(list(tables.values())).cpu(), strict=True))
