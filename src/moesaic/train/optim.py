"""AdamW that runs where a block lives, and the learning rate over steps.

`update(names, values, grads, step, ...)` needs nothing but the parameters' own tensors, so that a
block can be updated wherever and whenever its gradients are ready, all that is alike of it in a few
operations. Moments are plain tensors of the values' layout; they are state like any other.
`train.narrow` keeps them in fewer bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

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

    def apply(self, items: Sequence[Held], rank: int, step: int, *, lr: float, clip: float) -> None:
        """Update parameters of a block by their gradients, in place; see `update`."""
        del rank
        for decay in (True, False):
            alike = [item for item in items if item.decays == decay]
            names, values = [item.name for item in alike], [item.local for item in alike]
            grads = [item.grad for item in alike]
            self.update(names, values, grads, step, lr=lr, clip=clip, decay=decay)

    def attach(self, name: str, values: Tensor) -> tuple[Tensor, Tensor]:
        """Create zero moments for a parameter and return them."""
        first = torch.zeros_like(values, memory_format=torch.contiguous_format)
        second = torch.zeros_like(first)
        self.moments[name] = (first, second)
        return first, second

    def rename(self, names: Mapping[str, str]) -> None:
        """Moments of parameters that have other names from now on, by those that they had."""
        moments = self.moments
        kept = {new: moments.pop(old) for old, new in names.items() if old in moments}
        moments.update(kept)

    def update(
        self,
        names: Sequence[str],
        values: Sequence[Tensor],
        grads: Sequence[Tensor],
        step: int,
        *,
        lr: float,
        clip: float,
        decay: bool,
    ) -> None:
        """One step, in place.

        Args:
            names: the parameters' names, as given to `attach`.
            values: their values on this rank.
            grads: their gradients; they may be scaled in place.
            step: 1 for the first update.
            lr: learning rate.
            clip: factor on the gradients.
            decay: whether weight decay applies.
        """
        filled = [number for number, one in enumerate(values) if one.numel()]
        moments = [self.moments[names[number]] for number in filled]
        values, grads = [values[n] for n in filled], [grads[n] for n in filled]
        if filled:
            self._step(values, grads, moments, step, lr=lr, clip=clip, decay=decay)

    def _step(
        self,
        values: list[Tensor],
        grads: list[Tensor],
        moments: Sequence[tuple[Tensor, ...]],
        step: int,
        *,
        lr: float,
        clip: float,
        decay: bool,
    ) -> None:
        firsts, seconds = ([pair[which] for pair in moments] for which in (0, 1))
        if clip < 1.0:
            torch._foreach_mul_(grads, clip)
        steps = torch.full((len(values),), float(step - 1), device=values[0].device)
        adamw(
            values, grads, firsts, seconds, [], list(steps.unbind()),
            fused=True, amsgrad=False, maximize=False,
            beta1=self.config.betas[0], beta2=self.config.betas[1], eps=self.config.epsilon,
            lr=lr, weight_decay=self.config.weight_decay if decay else 0.0,
        )  # fmt: skip
        # The fused kernel writes without counting; whoever copies state relies on the count.
        increment_version((*values, *firsts, *seconds))


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """The learning rate of update `step` (1 is the first) of `steps`."""
    if step <= schedule.warmup:
        return peak * step / schedule.warmup
    if schedule.kind == "constant":
        return peak
    done = (step - schedule.warmup) / max(steps - schedule.warmup, 1)
    shape = 1.0 - done if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return peak * (schedule.final + (1.0 - schedule.final) * shape)
