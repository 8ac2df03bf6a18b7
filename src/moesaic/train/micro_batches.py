"""Block-by-block walk: all micro-batches pass through one block before the next one.

A block is needed once per step and direction, whatever the number of micro-batches. So experts on a
drive are read once, and FSDP2 gathers a layer once. In return, the inputs of all blocks are kept
for all micro-batches of a group. With `train.recompute` no other activations are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from moesaic.models.lm import LanguageModel
from moesaic.nn.inputs import Inputs, autocast_to
from moesaic.nn.reports import BlockReport, MoEReport, moe_reports
from moesaic.train.data.batch import Batch
from moesaic.train.objectives import lm
from moesaic.train.objectives.objective import StepContext
from moesaic.train.parts import Part
from moesaic.train.phases import PhaseTimer

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class BlockObserver(Protocol):
    """Receiver of the walk's position, which prepares the state of coming blocks."""

    def begin_group(self, *, is_last: bool) -> None:
        """Begin the passes of a group of micro-batches, the `is_last` or not of a step."""

    def begin_validation(self) -> None:
        """Begin the forward passes of a validation batch."""

    def begin_forward(self, block: str) -> None:
        """Begin the forward passes of a block over a group of micro-batches."""

    def begin_backward(self, block: str) -> None:
        """Begin the backward passes of a block over a group of micro-batches."""

    def end_backward(self, block: str, *, is_last: bool) -> None:
        """End the backward passes of a block; `is_last` if its gradients are complete."""


@dataclass
class _Pass:
    """Forward pass of one micro-batch through one block."""

    x: Tensor
    """Input, a leaf of the pass's own graph."""
    y: Tensor
    """Output, with its graph."""
    report: BlockReport


class BlockWalk:
    """Forward and backward of a language model, block by block."""

    def __init__(
        self,
        precision: str,
        device: torch.device,
        group_size: int,
        observer: BlockObserver | None = None,
    ) -> None:
        """Create the walk.

        Args:
            precision: precision of matmuls.
            device: device of this rank.
            group_size: micro-batches that pass through a block together; the inputs that they keep
                must fit in memory.
            observer: receives the walk's position.
        """
        self._precision, self._device = precision, device
        self._group_size, self._observer = group_size, observer

    def forward_backward(
        self,
        objective: lm.LanguageModelObjective,
        parts: Sequence[Part[Any]],
        batches: Sequence[Batch],
        context: StepContext,
        phases: PhaseTimer,
    ) -> list[lm.Losses]:
        """Run forward and backward of all micro-batches; return their losses."""
        del parts
        losses, model = list[lm.Losses](), objective.part.model
        for start in range(0, len(batches), self._group_size):
            group = batches[start : start + self._group_size]
            is_last = start + len(group) == len(batches)
            if self._observer is not None:
                self._observer.begin_group(is_last=is_last)
            with phases("forward"):
                inputs = [objective.training_inputs(batch, context) for batch in group]
                passes = self._forward(model, group, inputs)
                found = _collect_losses(objective, passes, context.scale)
            losses += found
            with phases("backward"):
                gradients = _AuxGradients(objective, found, context.scale)
                self._backward(model, passes, gradients, is_last=is_last)
        return losses

    @torch.no_grad()
    def evaluate(self, objective: lm.LanguageModelObjective, batch: Batch) -> lm.Losses:
        """Return the losses of a validation batch."""
        if self._observer is not None:
            self._observer.begin_validation()
        inputs = [objective.validation_inputs(batch)]
        passes = self._forward(objective.part.model, [batch], inputs)
        return lm.Losses(passes[-1][1][0].y)

    def _forward(
        self, model: LanguageModel, group: Sequence[Batch], inputs: Sequence[Inputs]
    ) -> list[tuple[str, list[_Pass]]]:
        """Return the passes of a group through each block, in forward order."""
        blocks = list(model.blocks())
        xs = [batch.inputs.to(self._device) for batch in group]
        result = list[tuple[str, list[_Pass]]]()
        for index, (name, block) in enumerate(blocks):
            if self._observer is not None:
                self._observer.begin_forward(name)
            coming = blocks[index + 1][1] if index + 1 < len(blocks) else None
            with _gathered(block, coming):
                passes = [self._compute(block, x, own) for x, own in zip(xs, inputs, strict=True)]
            xs = [one.y.detach() for one in passes]
            result.append((name, passes))
        return result

    def _compute(self, block: nn.Module, x: Tensor, inputs: Inputs) -> _Pass:
        x = x.detach().requires_grad_(x.is_floating_point() and torch.is_grad_enabled())
        with autocast_to(self._precision, self._device):
            y, report = block(x, inputs)
        return _Pass(x, y, report)

    def _backward(
        self,
        model: LanguageModel,
        passes: list[tuple[str, list[_Pass]]],
        aux_gradients: _AuxGradients,
        *,
        is_last: bool,
    ) -> None:
        """Run the backward passes in reverse block order, and free each block's activations."""
        blocks = dict(model.blocks())
        gradients: list[Tensor | None] = [None] * len(passes[-1][1])
        while passes:
            name, group = passes.pop()
            if self._observer is not None:
                self._observer.begin_backward(name)
            coming = blocks[passes[-1][0]] if passes else None
            with _gathered(blocks[name], coming):
                for number in range(len(group)):
                    is_end = number == len(group) - 1
                    _sync_gradients(blocks[name], is_end, is_last=is_end and is_last)
                    one = group[number]
                    roots, grads = aux_gradients.of_report(number, one.report.moe)
                    torch.autograd.backward([one.y, *roots], [gradients[number], *grads])
                    gradients[number] = one.x.grad
            del group, one, roots, grads
            if self._observer is not None:
                self._observer.end_backward(name, is_last=is_last)


def _collect_losses(
    objective: lm.LanguageModelObjective,
    passes: Sequence[tuple[str, Sequence[_Pass]]],
    scale: float,
) -> list[lm.Losses]:
    """Return the losses of a group's micro-batches, and start to sum their expert counts."""
    losses = []
    for number, last in enumerate(passes[-1][1]):
        reports = lm.detach_all(moe_reports(group[number].report for _, group in passes))
        aux_losses = objective.sum_aux_losses(reports.values())
        losses.append(lm.Losses(last.y.detach() / scale, aux_losses, reports))
    return losses


class _AuxGradients:
    """Gradients of the auxiliary losses in the reports of MoE layers."""

    def __init__(
        self, objective: lm.LanguageModelObjective, losses: Sequence[lm.Losses], scale: float
    ) -> None:
        self._weights = objective.aux_weights(scale)
        self._losses = losses

    def of_report(self, number: int, report: MoEReport | None) -> tuple[list[Tensor], list[Tensor]]:
        """Return a report's tensors of micro-batch `number` that have a gradient, and these."""
        if report is None or not any(self._weights) or not report.probability_sum.requires_grad:
            return [], []
        (loss,), (balance_weight, z_weight) = self._losses[number].aux_losses, self._weights
        row = loss.layers.index(report.layer)
        balance_LE, z_L = loss.gradients()
        gradients = [balance_weight * balance_LE[row], z_weight * z_L[row]]
        return [report.probability_sum, report.z_sum], gradients


def _is_sharded(block: nn.Module) -> TypeGuard[FSDPModule]:
    return hasattr(block, "unshard")  # FSDP2's modules are slow to import.


@contextmanager
def _gathered(block: nn.Module, coming: nn.Module | None) -> Iterator[None]:
    """Gather FSDP2's parameters of `block` for all its passes, and those of `coming` meanwhile."""
    if _is_sharded(block):
        block.set_reshard_after_forward(False)
        block.set_reshard_after_backward(False)
        block.unshard()
    if coming is not None and _is_sharded(coming):
        coming.unshard(async_op=True)
    yield
    if _is_sharded(block):
        block.reshard()


def _sync_gradients(block: nn.Module, is_due: bool, *, is_last: bool) -> None:
    """Let FSDP2 reduce-scatter gradients after the next backward if `is_due`, and all-reduce them
    over replicas if it is the last one of the step."""
    if _is_sharded(block):
        block.set_requires_gradient_sync(is_due)
        block.set_requires_all_reduce(is_last)
