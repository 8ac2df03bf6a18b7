"""Walks: the order in which forward and backward passes of a step's micro-batches run.

`MicroBatchWalk` takes one micro-batch after the other. `train.pipeline` is the other walk.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

from moesaic.nn.inputs import autocast_to
from moesaic.train.objectives.objective import Objective, StepContext
from moesaic.train.parts import Part
from moesaic.train.phases import PhaseTimer

ObjectiveT = TypeVar("ObjectiveT", contravariant=True)


class Walk(Protocol[ObjectiveT]):
    """Order of the passes over the micro-batches of a step."""

    def forward_backward(
        self,
        objective: ObjectiveT,
        parts: Sequence[Part[Any]],
        batches: Sequence[Any],
        context: StepContext,
        phases: PhaseTimer,
    ) -> list[Any]:
        """Run forward and backward of all micro-batches; return their losses. Gradients stay in
        place."""

    def evaluate(self, objective: ObjectiveT, batch: Any) -> Any:
        """Return the losses of a validation batch on this rank."""


class MicroBatchWalk:
    """Forward and backward of one micro-batch after the other."""

    def __init__(self, precision: str, device: torch.device) -> None:
        """Run matmuls of passes in `precision`."""
        self._precision, self._device = precision, device

    def forward_backward(
        self,
        objective: Objective[Any],
        parts: Sequence[Part[Any]],
        batches: Sequence[Any],
        context: StepContext,
        phases: PhaseTimer,
    ) -> list[Any]:
        """Run forward and backward of all micro-batches; return their losses."""
        losses = []
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            for part in parts:
                part.begin_micro_batch(is_last=is_last)
            with phases("forward"), self._autocast():
                total, result = objective.compute_loss(batch, context)
            with phases("backward"):
                if is_last:
                    for part in parts:
                        part.buckets.expect_last_backward()
                if total.requires_grad or any(part.trainable for part in parts):
                    total.backward()
            losses.append(result)
        return losses

    def evaluate(self, objective: Objective[Any], batch: Any) -> Any:
        """Return the losses of a validation batch."""
        with self._autocast():
            return objective.evaluate(batch)

    def _autocast(self) -> AbstractContextManager[object]:
        return autocast_to(self._precision, self._device)
