"""Objective protocol: the forward passes and losses of a run over its parts.

A run asks its objective for batches and losses; the walk decides the order of forward and backward.
Types of samples, batches and losses are the objective's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from moesaic.dist.state import TensorShard
from moesaic.train.kinds import StepStats
from moesaic.train.phases import PhaseTimer


@dataclass(frozen=True)
class StepContext:
    """Facts of a step that its forward passes need."""

    step: int
    """Finished steps."""
    units: int
    """Units of the whole global batch, which divide its loss."""
    scale: float = 1.0
    """Factor on the loss for backward."""
    batches: Sequence[Any] = ()
    """This rank's samples of each micro-batch."""


@dataclass(frozen=True)
class StepResult:
    """Results of a step after the update."""

    step: int
    """Number of the step, from 1."""
    batches: Sequence[Any]
    """This rank's samples of each micro-batch."""
    losses: Sequence[Any]
    """Losses of each micro-batch."""
    units: int
    """Units of the whole global batch."""
    grad_norms: Mapping[str, float]
    """Norm of the gradient of each part, by its prefix; the first part comes first."""
    learning_rates: Mapping[str, float]
    """Learning rate of each part, by its prefix."""
    loss_scale: float | None
    """Loss scale of fp16 in this step; None in other precisions."""
    is_skipped: bool
    """True if the gradient overflowed and the update was skipped."""

    @property
    def grad_norm(self) -> float:
        """Norm of the gradient of the first part."""
        return next(iter(self.grad_norms.values()))

    @property
    def lr(self) -> float:
        """Learning rate of the first part."""
        return next(iter(self.learning_rates.values()))


S = TypeVar("S", bound=StepStats, covariant=True)


class Objective(Protocol[S]):
    """Losses over the parts of a run, on a rank that holds all parts, some or none."""

    @property
    def unit(self) -> str:
        """Plural noun of the units that divide the loss; their counter has this name."""

    def load(self, samples: Any, indices: range, *, shuffled: bool) -> Any:
        """Return this rank's batch of a global micro-batch with these sample indices: the
        `Part.local_samples` of each part that it holds."""

    def num_units(self, batch: Any) -> int:
        """Return the units of a batch that this rank counts; ranks that load the same samples count
        them once."""

    def compute_loss(self, batch: Any, context: StepContext) -> tuple[Tensor, Any]:
        """Return the loss to backpropagate for one micro-batch, times the scale, and its losses to
        report. It needs no gradient on a rank without trainable parameters."""

    def evaluate(self, batch: Any) -> Any:
        """Return the losses of a validation batch, summed over units."""

    def validation_loss(self, batch: Any, losses: Any) -> tuple[Tensor, int]:
        """Return this rank's share of a validation batch's loss, and of its units."""

    def validation_figures(self, losses: Sequence[Any]) -> dict[str, float]:
        """Return figures of a validation pass besides the loss, from the losses of its batches;
        every rank must call this."""

    def total_loss(self, losses: Sequence[Any]) -> float:
        """Return the unscaled loss of a step over all ranks; every rank must call this."""

    def after_update(self, losses: Sequence[Any]) -> None:
        """Change state that follows the losses of a step, such as router biases."""

    def finish_step(self, result: StepResult, phases: PhaseTimer) -> S:
        """Return the statistics of a step, after the work that is due between steps."""

    def state_shards(self) -> Sequence[TensorShard]:
        """Return state beyond that of the parts."""

    def flush(self) -> None:
        """Write what is buffered."""
