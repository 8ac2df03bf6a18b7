"""Pipeline parallelism: stages of a model on a chain of ranks, each working on another micro-batch.

torch's schedules order the stages' work and send activations and their gradients from rank to rank.
Each rank loads the rest of a micro-batch (tokens, positions, targets) itself, so a stage receives
only its number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
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

from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, stage_blocks
from moesaic.models.lm import LanguageModel
from moesaic.nn.inputs import Inputs, autocast_to
from moesaic.nn.reports import BlockReport, moe_reports
from moesaic.train.data.batch import Batch
from moesaic.train.objectives import lm
from moesaic.train.objectives.objective import StepContext
from moesaic.train.parts import Part
from moesaic.train.phases import PhaseTimer

_SINGLE_STAGE_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MULTI_STAGE_SCHEDULES = {
    "interleaved": ScheduleInterleaved1F1B, "zero-bubble": ScheduleInterleavedZeroBubble,
}  # fmt: skip


class MicroBatchFlow:
    """Micro-batches that pass through this rank's stages."""

    def __init__(
        self,
        batches: Sequence[Batch],
        make_inputs: Callable[[Batch], Inputs],
        autocast: Callable[[], AbstractContextManager[object]],
        objective: lm.LanguageModelObjective,
        loss_scale: float | None,
    ) -> None:
        """Store the micro-batches; `make_inputs` makes the inputs when the first block of one is
        computed, under `autocast`. Backward starts from the loss times `loss_scale`; None:
        evaluation."""
        self.batches, self.autocast = batches, autocast
        self.objective, self.loss_scale = objective, loss_scale
        self.losses: dict[int, lm.Losses] = {}
        self._make_inputs = make_inputs
        self._inputs: dict[int, Inputs] = {}

    def inputs(self, number: int) -> Inputs:
        """Return the inputs of a micro-batch."""
        if number not in self._inputs:
            self._inputs[number] = self._make_inputs(self.batches[number])
        return self._inputs[number]

    def add_losses(self, number: int, losses: lm.Losses) -> None:
        """Add a stage's share of a micro-batch's losses."""
        previous = self.losses.get(number)
        if previous is not None:
            losses = lm.Losses(
                previous.loss + losses.loss,
                previous.aux_losses + losses.aux_losses,
                {**previous.moe_reports, **losses.moe_reports},
            )
        self.losses[number] = losses


class Stage(nn.Module):
    """Pipeline stage: consecutive blocks, from the previous stage's output to the next one's
    input."""

    flow: MicroBatchFlow
    """Micro-batches of the current step."""

    def __init__(self, model: LanguageModel, names: Sequence[str]) -> None:
        """Take the blocks called `names`."""
        super().__init__()
        blocks = dict(model.blocks())
        self.blocks = nn.ModuleList(blocks[name] for name in names)
        self.is_first, self.is_last = "embed" in names, "head" in names

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        """Compute micro-batch `number`; the last stage returns its share of the loss.

        Other stages attach their auxiliary losses to the activation they send. The flow collects
        the reports.
        """
        index, flow = int(number), self.flow
        inputs = flow.inputs(index)
        if self.is_first:
            x = flow.batches[index].inputs.to(inputs.rotary.cosine.device)
        block_reports = list[BlockReport]()
        with flow.autocast():
            for block in self.blocks:
                x, report = block(x, inputs)
                block_reports.append(report)
        loss = x.detach() if self.is_last else x.new_zeros(())
        if flow.loss_scale is None:
            flow.add_losses(index, lm.Losses(loss))
            return x
        x, aux_losses = flow.objective.attach_aux_losses(x, block_reports, flow.loss_scale)
        reports = lm.detach_all(moe_reports(block_reports))
        flow.add_losses(index, lm.Losses(loss / flow.loss_scale, aux_losses, reports))
        return x


class Pipeline:
    """Stages of this rank and their schedule, as the walk of a language model."""

    def __init__(self, job: Job, plan: Plan, world: World, model: LanguageModel) -> None:
        self._job, self._device, self._num_ranks = job, world.device, plan.pp
        chain = world.partition(plan.pp_groups())
        assert chain is not None, "a pipeline has two parts at least"
        self._group = chain
        names = stage_blocks(plan, job.model)
        local_stages = range(plan.pp_rank(world.rank), len(names), plan.pp)
        self.stages = {index: Stage(model, names[index]) for index in local_stages}
        self._num_stages, self._dtype = len(names), next(model.parameters()).dtype
        self._hidden, self._tp = job.model.hidden, model.tp
        micro_batches = job.train.micro_batches
        num_samples = len(plan.sample_range(world.rank, job.train.batch // micro_batches))
        activation_shape = self._activation_shape(num_samples, job.data.sequence)
        pipeline_stages: list[Any] = [
            self._make_stage(index, activation_shape) for index in local_stages
        ]
        options: dict[str, Any] = {"loss_fn": lambda total, _: total, "scale_grads": False}
        # When a step fails, they would log the schedule of all ranks on every rank.
        logging.getLogger(Schedule1F1B.__module__).setLevel(logging.CRITICAL)
        self._schedule: Any
        if plan.schedule in _SINGLE_STAGE_SCHEDULES:
            self._schedule = _SINGLE_STAGE_SCHEDULES[plan.schedule](
                pipeline_stages[0], micro_batches, **options
            )
        else:
            self._schedule = _MULTI_STAGE_SCHEDULES[plan.schedule](
                pipeline_stages, micro_batches, **options
            )

    def _activation_shape(self, num_samples: int, sequence: int) -> tuple[int, int, int]:
        """Return the shape of activations between stages; with TP, one sequence shard."""
        if self._tp.size == 1:
            return num_samples, sequence, self._hidden
        shard = self._tp.shard_slice(num_samples * sequence)
        return 1, shard.stop - shard.start, self._hidden

    def _make_stage(self, index: int, shape: tuple[int, int, int]) -> PipelineStage:
        """Return a stage for torch's schedules, with the shapes of its input and output."""
        activation = torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=True)
        stage = self.stages[index]
        loss_dtype = torch.promote_types(self._dtype, torch.float32)
        loss = torch.empty((), dtype=loss_dtype, device="meta", requires_grad=True)
        number = torch.empty(1, dtype=torch.int64, device="meta")
        return PipelineStage(
            stage, index, self._num_stages, self._device, number if stage.is_first else activation,
            loss if stage.is_last else activation, group=self._group,
        )  # fmt: skip

    def forward_backward(
        self,
        objective: lm.LanguageModelObjective,
        parts: Sequence[Part[Any]],
        batches: Sequence[Batch],
        context: StepContext,
        phases: PhaseTimer,
    ) -> list[lm.Losses]:
        """Run forward and backward of all micro-batches; gradients stay in place."""
        del parts
        flow = MicroBatchFlow(
            batches,
            lambda batch: objective.training_inputs(batch, context),
            self._autocast,
            objective,
            context.scale,
        )
        self._set_flow(flow)
        numbers = torch.arange(len(batches))
        root = (numbers,) if 0 in self.stages else ()
        with phases("pipeline"):
            try:
                self._schedule.step(*root, number=numbers, target=numbers, return_outputs=False)
            except RuntimeError as error:
                raise _root_cause(error) from None
        return [flow.losses[number] for number in range(len(batches))]

    @torch.no_grad()
    def evaluate(self, objective: lm.LanguageModelObjective, batch: Batch) -> lm.Losses:
        """Return this rank's share of the losses of a batch, which may have any size."""
        flow = MicroBatchFlow([batch], objective.validation_inputs, self._autocast, objective, None)
        self._set_flow(flow)
        num_samples, sequence = batch.inputs.shape
        shape, number = self._activation_shape(num_samples, sequence), torch.zeros(1)
        for index, stage in self.stages.items():
            x = number
            if index:
                x = torch.empty(shape, dtype=self._dtype, device=self._device)
                dist.recv(x, group=self._group, group_src=(index - 1) % self._num_ranks)
            x = stage(x, number)
            if index < self._num_stages - 1:
                dist.send(x, group=self._group, group_dst=(index + 1) % self._num_ranks)
        return flow.losses[0]

    def _autocast(self) -> AbstractContextManager[object]:
        return autocast_to(self._job.train.precision, self._device)

    def _set_flow(self, flow: MicroBatchFlow) -> None:
        for stage in self.stages.values():
            stage.flow = flow


def _root_cause(error: BaseException) -> BaseException:
    """Return the error that torch's schedules wrap in one about their tensors."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error
