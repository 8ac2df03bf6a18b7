"""AdamW that runs where a block lives, and the learning rate over steps.

`update(name, values, grad, step, ...)` needs nothing but one parameter's own tensors, so that a
block can be updated wherever and whenever its gradient is ready. Moments are plain tensors of the
values' layout; they are state like any other. `train.narrow` keeps them in fewer bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw

from moesaic.dist.state import FIRST_MOMENT, SECOND_MOMENT, Piece
from moesaic.facts.job import OptimizerConfig, ScheduleConfig
from moesaic.models.pieces import Held


class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter), torch's fused kernel."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.config = config
        self.moments: dict[str, tuple[Tensor, ...]] = {}

    def hold(self, item: Held, rank: int) -> None:
        """Create zero moments for a parameter as `rank` holds it."""
        del rank
        self.attach(item.name, item.local)

    def pieces(self, item: Held, rank: int) -> Iterator[Piece]:
        """A parameter's moments as pieces of state."""
        kinds = (FIRST_MOMENT, SECOND_MOMENT)
        for kind, tensor in zip(kinds, self.moments[item.name], strict=True):
            yield from item.pieces(kind, tensor, rank)

    def apply(self, item: Held, rank: int, step: int, *, lr: float, clip: float) -> None:
        """Update a parameter by its gradient, in place; see `update`."""
        del rank
        self.update(item.name, item.local, item.grad, step, lr=lr, clip=clip, decay=item.decays)

    def attach(self, name: str, values: Tensor) -> tuple[Tensor, Tensor]:
        """Create zero moments for a parameter and return them."""
        first = torch.zeros_like(values, memory_format=torch.contiguous_format)
        second = torch.zeros_like(first)
        self.moments[name] = (first, second)
        return first, second

    def update(
        self,
        name: str,
        values: Tensor,
        grad: Tensor,
        step: int,
        *,
        lr: float,
        clip: float,
        decay: bool,
    ) -> None:
        """One step, in place.

        Args:
            name: the parameter's name, as given to `attach`.
            values: the parameter's values on this rank.
            grad: their gradient; it may be scaled in place.
            step: 1 for the first update.
            lr: learning rate.
            clip: factor on the gradient.
            decay: whether weight decay applies.
        """
        if values.numel():
            self._step(values, grad, self.moments[name], step, lr=lr, clip=clip, decay=decay)

    def _step(
        self,
        values: Tensor,
        grad: Tensor,
        moments: tuple[Tensor, ...],
        step: int,
        *,
        lr: float,
        clip: float,
        decay: bool,
    ) -> None:
        first, second = moments
        if clip < 1.0:
            grad.mul_(clip)
        adamw(
            [values], [grad], [first], [second], [],
            [torch.tensor(float(step - 1), device=values.device)],
            fused=True, amsgrad=False, maximize=False,
            beta1=self.config.betas[0], beta2=self.config.betas[1], eps=self.config.epsilon,
            lr=lr, weight_decay=self.config.weight_decay if decay else 0.0,
        )  # fmt: skip
        # The fused kernel writes without counting; whoever copies state relies on the count.
        increment_version((values, first, second))


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """The learning rate of update `step` (1 is the first) of `steps`."""
    if step <= schedule.warmup:
        return peak * step / schedule.warmup
    if schedule.kind == "constant":
        return peak
    done = (step - schedule.warmup) / max(steps - schedule.warmup, 1)
    shape = 1.0 - done if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return peak * (schedule.final + (1.0 - schedule.final) * shape)
