"""A run: a model on ranks that takes steps.

One step is named phases: data, forward, backward (a pair for every micro-batch), reduce, clip,
optimizer. A global batch is a list of global sample indices; this rank takes its rows of each
micro-batch. Losses are divided by counts over all ranks, so gradients are plain sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from moesaic.base.errors import DivergedError
from moesaic.dist.collectives import sum_, sum_buckets_
from moesaic.dist.state import FIRST_MOMENT, PARAMETER, SECOND_MOMENT, Piece, State
from moesaic.dist.world import Group, World
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.models.lm import LanguageModel
from moesaic.models.pieces import Held, biases
from moesaic.train.data import Batch, Samples
from moesaic.train.objectives import lm
from moesaic.train.optim import AdamW, learning_rate
from moesaic.train.phases import Phases
from moesaic.train.routes import RouteRecorder, RouteReplay

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


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
    phases: dict[str, float]


@dataclass
class Run:
    """See the module; made by `assemble`."""

    job: Job
    plan: Plan
    world: World
    model: LanguageModel
    holdings: list[Held]
    """What learns."""
    optimizer: AdamW
    replicas: Group | None
    """Ranks that hold copies of this rank's experts."""
    frozen: list[Held] = field(default_factory=list)
    """What does not: no gradient, no moments, and no part in the gradient's norm."""
    counters: dict[str, int] = field(default_factory=lambda: {"step": 0, "samples": 0, "tokens": 0})
    hook: Callable[[str], None] | None = None
    """Called as each phase begins."""
    recorder: RouteRecorder | None = None
    replay: RouteReplay | None = None

    def state(self) -> State:
        """Everything that training goes on from, as live pieces."""
        pieces: list[Piece] = []
        for item in self.holdings:
            first, second = self.optimizer.moments[item.name]
            values = ((PARAMETER, item.local), (FIRST_MOMENT, first), (SECOND_MOMENT, second))
            for kind, tensor in values:
                pieces += item.pieces(kind, tensor, self.world.rank)
        for item in self.frozen:
            pieces += item.pieces(PARAMETER, item.local, self.world.rank)
        pieces += biases(self.model, self.plan)
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
            norm = self.gradient_norm()
            if not math.isfinite(norm):
                raise DivergedError(
                    f"step {self.counters['step'] + 1}: the gradient's norm is {norm}, and nothing "
                    "was updated"
                )
        with phases("optimizer"):
            lr = self._update(norm)
            self._rebalance(losses)
        self.counters["step"] += 1
        self.counters["samples"] += self.job.train.batch
        self.counters["tokens"] += targets
        with phases("log"):
            return self._facts(losses, norm, lr, targets, phases)

    def gradients(self, samples: Samples) -> list[lm.Losses]:
        """Gradients of the next global batch, reduced and left in place, without an update."""
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
        local = sum(lm.num_targets(batch) for batch in micro)
        total = torch.tensor([local], device=self.world.device)
        return int(sum_(total, self.world.everyone))

    def _gradients(self, micro: Sequence[Batch], targets: int, phases: Phases) -> list[lm.Losses]:
        self.model.train()
        losses = []
        for index, batch in enumerate(micro):
            if self.plan.shard > 1:
                # Every micro-batch leaves a shard of the gradient; copies add up at the last one.
                sharded = cast("FSDPModule", self.model)
                sharded.set_requires_all_reduce(index == len(micro) - 1)
            with phases("forward"), self._precision():
                context = lm.make_context(self.model, batch, self.job, self.counters["step"])
                context.training = True
                context.keep_choices = self.recorder is not None
                if self.replay is not None:
                    choices = self.replay.choices(self.counters["step"], batch.samples)
                    context.replay = {n: c.to(self.world.device) for n, c in choices.items()}
                result = lm.compute(self.model, batch, context, self.job, targets)
            with phases("backward"):
                result.total.backward()
                result.context.mask = None  # The largest part of what the losses hold on to.
            if self.recorder is not None:
                step, choices = self.counters["step"], result.context.choices
                self.recorder.record(step, batch.samples, choices)
            losses.append(result)
        return losses

    def _precision(self) -> AbstractContextManager[object]:
        if self.job.train.precision != "bf16":
            return nullcontext()
        # Every weight is cast once a pass; the cache would only keep what layers have let go.
        kind = self.world.device.type
        return torch.autocast(kind, dtype=torch.bfloat16, cache_enabled=False)

    def _reduce(self) -> None:
        """Sum gradients: dense ones over all ranks (FSDP has done its own), experts over copies."""
        dense = [item.grad for item in self.holdings if item.bank is None]
        experts = [item.grad for item in self.holdings if item.bank is not None]
        if self.plan.shard == 1:
            sum_buckets_(dense, self.world.everyone)
        sum_buckets_(experts, self.replicas)

    def gradient_norm(self) -> float:
        """The norm of the whole gradient; its first owner counts an element, and nobody else."""
        mine = [item.grad for item in self.holdings if item.owners[0] == self.world.rank]
        total = torch.zeros(1, dtype=torch.float64, device=self.world.device)
        if mine:
            norms = torch._foreach_norm(mine)
            total += torch.stack(norms).double().square().sum()
        return math.sqrt(float(sum_(total, self.world.everyone)))

    def _update(self, norm: float) -> float:
        train = self.job.train
        step = self.counters["step"] + 1
        lr = learning_rate(step, train.steps, self.job.optimizer.lr, self.job.schedule)
        clip = min(1.0, train.clip / (norm + 1e-6)) if train.clip else 1.0
        for item in self.holdings:
            self.optimizer.update(
                item.name, item.local, item.grad, step, lr=lr, clip=clip, decay=item.decays
            )
            item.parameter.grad = None
        return lr

    def _rebalance(self, losses: list[lm.Losses]) -> None:
        """Biases follow what the whole batch asked of experts; every rank knows it."""
        if self.job.finetune is not None and self.job.finetune.router == "frozen":
            return
        for layer, router in self.model.sigmoid_routers():
            asked = torch.stack([one.context.layers[layer].asked for one in losses]).sum(0)
            router.rebalance(asked, self.job.routing.bias_step)

    def _facts(
        self, losses: list[lm.Losses], norm: float, lr: float, targets: int, phases: Phases
    ) -> StepFacts:
        flips = sum(f.flips for one in losses for f in one.context.layers.values())
        columns = [
            torch.stack([part.double() for part in (one.loss, one.balance, one.z)])
            for one in losses
        ]
        local = torch.cat((torch.stack(columns).sum(0), columns[0].new_tensor([flips])))
        loss, balance, z, all_flips = sum_(local, self.world.everyone).tolist()
        counts: dict[int, Tensor] = {}
        dropped: dict[int, int] = {}
        for one in losses:
            for layer, facts in one.context.layers.items():
                counts[layer] = facts.counts.sum(0) + counts.get(layer, 0)
                dropped[layer] = facts.dropped + dropped.get(layer, 0)
        routing = self.job.routing
        return StepFacts(
            step=self.counters["step"], loss=loss,
            total_loss=loss + routing.balance_loss * balance + routing.z_loss * z,
            balance_loss=balance, z_loss=z, grad_norm=norm, lr=lr, tokens=targets,
            flips=int(all_flips), dropped=dropped, counts=counts, phases=phases.seconds,
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
            with self._precision():
                context = lm.make_context(self.model, batch, self.job, 0)
                losses = lm.compute(self.model, batch, context, self.job, 1)
            total += torch.stack((losses.loss.double(), total.new_tensor(lm.num_targets(batch))))
        loss, targets = sum_(total, self.world.everyone).tolist()
        return loss / max(targets, 1.0), int(targets)

    def close(self) -> None:
        """Let go of the model; the world stays."""
        self.holdings.clear()
        self.frozen.clear()
        self.optimizer.moments.clear()
        del self.model
