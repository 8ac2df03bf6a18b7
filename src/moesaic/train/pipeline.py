"""A pipeline: the stages of a model on a chain of ranks, each at work on another micro-batch.

torch's schedules say which stage computes what when, and carry activations and their gradients from
rank to rank. All else of a micro-batch (tokens, positions, targets) each rank of the chain loads
itself, so that a stage is told no more than its number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from moesaic.dist.collectives import sum_
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, stages
from moesaic.models.lm import LanguageModel
from moesaic.nn.context import Context
from moesaic.train.data import Batch
from moesaic.train.objectives import lm

_ONE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MANY_STAGES = {
    "interleaved": ScheduleInterleaved1F1B, "zero-bubble": ScheduleInterleavedZeroBubble,
}  # fmt: skip


class Attach(torch.autograd.Function):
    """`x`, and a loss that backward starts from as well when the gradient of `x` comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        """`x`, not as a view of itself, which could not be cut off its graph afterwards."""
        del ctx, loss
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of `x` as it is, and one for the loss."""
        del ctx
        return grads[0], grads[0].new_ones(())


class Flow:
    """Micro-batches on their way through this rank's stages."""

    def __init__(
        self,
        batches: Sequence[Batch],
        begin: Callable[[Batch], Context],
        precision: Callable[[], AbstractContextManager[object]],
        scale: float,
    ) -> None:
        """`begin` makes the context of one when its first block is computed, in `precision`;
        backward starts from the loss times `scale`."""
        self.batches, self.precision, self.scale = batches, precision, scale
        self.losses: dict[int, lm.Losses] = {}
        self._begin = begin
        self._contexts: dict[int, Context] = {}

    def context(self, number: int) -> Context:
        """The context of a micro-batch."""
        if number not in self._contexts:
            self._contexts[number] = self._begin(self.batches[number])
        return self._contexts[number]

    def report(self, number: int, losses: lm.Losses) -> None:
        """Add what a stage has of a micro-batch's losses."""
        known = self.losses.get(number)
        if known is not None:
            losses = lm.Losses(
                known.loss + losses.loss, known.balance + losses.balance, known.z + losses.z,
                losses.context,
            )  # fmt: skip
        self.losses[number] = losses


class Stage(nn.Module):
    """Consecutive blocks, from what the stage before them sends to what the next one takes."""

    flow: Flow
    """What passes through now."""

    def __init__(self, model: LanguageModel, names: Sequence[str], job: Job, lets_go: bool) -> None:
        """With blocks of such `names`; `lets_go` of masks if nobody asks for them after it."""
        super().__init__()
        blocks = dict(model.blocks())
        self.blocks = nn.ModuleList(blocks[name] for name in names)
        self.layers = [i for i in job.model.expert_layers if f"layers.{i}" in names]
        self.first, self.last = "embed" in names, "head" in names
        self.job, self.lets_go = job, lets_go

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        """Micro-batch `number` through the blocks; the last stage returns what it adds to the loss.

        The auxiliary losses of any other one hang on what it sends.
        """
        at = int(number)
        context, routing = self.flow.context(at), self.job.routing
        if self.first:
            assert context.samples is not None
            x = self.flow.batches[at].inputs.to(context.samples.device)
        with self.flow.precision():
            for block in self.blocks:
                x = block(x, context)
        if self.lets_go:
            context.mask = None
        zero = x.new_zeros(())
        balance, z = lm.auxiliary(context, self.layers, zero, self.job)
        beside = routing.balance_loss * balance + routing.z_loss * z
        for layer in self.layers:  # What stays for the record must not keep the graph.
            facts = context.layers[layer]
            context.layers[layer] = replace(
                facts, balance=facts.balance.detach(), z=facts.z.detach()
            )
        loss = x.detach() / self.flow.scale if self.last else zero
        self.flow.report(at, lm.Losses(loss, balance.detach(), z.detach(), context))
        beside = self.flow.scale * beside
        result: Tensor = x + beside if self.last else Attach.apply(x, beside)
        return result


class Pipeline:
    """This rank's stages, and the order in which they work."""

    def __init__(self, job: Job, plan: Plan, world: World, model: LanguageModel) -> None:
        self._job, self._device, self._parts = job, world.device, plan.pp
        chain = world.partition(plan.chain_groups())
        assert chain is not None, "a pipeline has two parts at least"
        self._chain = chain
        names = stages(plan, job.model)
        recompute = job.train.recompute if plan.recompute is None else plan.recompute
        mine = range(plan.part(world.rank), len(names), plan.pp)
        self.stages = {
            index: Stage(model, names[index], job, index == mine[-1] and not recompute)
            for index in mine
        }
        self._count, self._dtype = len(names), next(model.parameters()).dtype
        self._hidden, self._slices = job.model.hidden, model.slices
        micro_batches = job.train.micro_batches
        rows = len(plan.rows(world.rank, job.train.batch // micro_batches))
        between = self._stream(rows, job.data.sequence)
        told: list[Any] = [self._told(index, between) for index in mine]
        more: dict[str, Any] = {"loss_fn": lambda total, _: total, "scale_grads": False}
        # Of a step that fails they would log, on every rank, what all ranks do when.
        logging.getLogger(Schedule1F1B.__module__).setLevel(logging.CRITICAL)
        self._schedule: Any
        if plan.schedule in _ONE_STAGE:
            self._schedule = _ONE_STAGE[plan.schedule](told[0], micro_batches, **more)
        else:
            self._schedule = _MANY_STAGES[plan.schedule](told, micro_batches, **more)

    def _stream(self, rows: int, sequence: int) -> tuple[int, int, int]:
        """The shape of what goes from stage to stage: of slices, a run of tokens."""
        if self._slices.count == 1:
            return rows, sequence, self._hidden
        run = self._slices.run(rows * sequence)
        return 1, run.stop - run.start, self._hidden

    def _told(self, index: int, shape: tuple[int, int, int]) -> PipelineStage:
        """A stage as torch's schedules know it, told what it takes and gives."""
        between = torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=True)
        stage = self.stages[index]
        wide = torch.promote_types(self._dtype, torch.float32)
        loss = torch.empty((), dtype=wide, device="meta", requires_grad=True)
        number = torch.empty(1, dtype=torch.int64, device="meta")
        return PipelineStage(
            stage, index, self._count, self._device, number if stage.first else between,
            loss if stage.last else between, group=self._chain,
        )  # fmt: skip

    def step(self, flow: Flow) -> list[lm.Losses]:
        """Forward and backward of all micro-batches; gradients stay where they are."""
        self._let_in(flow)
        numbers = torch.arange(len(flow.batches))
        root = (numbers,) if 0 in self.stages else ()
        try:
            self._schedule.step(*root, number=numbers, target=numbers, return_outputs=False)
        except RuntimeError as error:
            raise _cause(error) from None
        return [flow.losses[number] for number in range(len(flow.batches))]

    @torch.no_grad()
    def evaluate(self, flow: Flow) -> lm.Losses:
        """Forward of the one micro-batch of `flow`, of whatever size."""
        self._let_in(flow)
        rows, sequence = flow.batches[0].inputs.shape
        shape, number = self._stream(rows, sequence), torch.zeros(1)
        for index, stage in self.stages.items():
            x = number
            if index:
                x = torch.empty(shape, dtype=self._dtype, device=self._device)
                dist.recv(x, group=self._chain, group_src=(index - 1) % self._parts)
            x = stage(x, number)
            if index < self._count - 1:
                dist.send(x, group=self._chain, group_dst=(index + 1) % self._parts)
        return flow.losses[0]

    def all_layers(
        self, counts: dict[int, Tensor], dropped: dict[int, int]
    ) -> tuple[dict[int, Tensor], dict[int, int]]:
        """Tokens by expert, and drops, of each expert layer of all parts."""
        model = self._job.model
        table = torch.zeros(model.layers, model.experts + 1, dtype=torch.int64)
        for layer, tokens in counts.items():
            table[layer, :-1], table[layer, -1] = tokens, dropped[layer]
        table = sum_(table.to(self._device), self._chain).cpu()
        return (
            {layer: table[layer, :-1] for layer in model.expert_layers},
            {layer: int(table[layer, -1]) for layer in model.expert_layers},
        )

    def _let_in(self, flow: Flow) -> None:
        for stage in self.stages.values():
            stage.flow = flow


def _cause(error: BaseException) -> BaseException:
    """What torch's schedules wrap in an error that tells of their tensors."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error
