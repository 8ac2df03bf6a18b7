"""AdamW that runs where a block lives, and the learning rate over steps.

A block is updated in stretches: parameters that lie side by side in memory, as their gradients do
(`dist.buckets`), are one tensor with one pair of moments; what lies alone is a stretch of its own.
`update(values, grads, moments, step, ...)` needs nothing but such tensors, so that a block can be
updated wherever and whenever its gradients are ready, all that is alike of it in a few operations.
Moments are plain tensors of the values' layout; they are state like any other. `train.narrow` keeps
them in fewer bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw

from moesaic.dist.buckets import Place
from moesaic.dist.state import FIRST_MOMENT, SECOND_MOMENT, Piece
from moesaic.facts.job import OptimizerConfig, ScheduleConfig
from moesaic.models.pieces import Held


@dataclass(frozen=True)
class Stretch:
    """Parameters of one block, alike to the optimizer, that lie side by side; or one by itself."""

    items: Sequence[Held]
    starts: Sequence[int] = (0,)
    """Where each of them begins in `values`."""
    flat: Tensor | None = None
    """All their numbers, and zeros between them; of one by itself it is asked for, as FSDP2 may put
    it elsewhere."""

    @property
    def values(self) -> Tensor:
        """What is updated, in place."""
        if self.flat is None:
            return self.items[0].local
        for item, start in zip(self.items, self.starts, strict=True):
            there, here = self.flat.data_ptr() + start * self.flat.element_size(), item.local
            lies = here.data_ptr() == there or not here.numel()
            assert lies, f"{item.name} has left the memory that it shares"
        return self.flat

    @property
    def block(self) -> str:
        """The block that they belong to."""
        return self.items[0].block

    @property
    def decays(self) -> bool:
        """Whether weight decay applies to them."""
        return self.items[0].decays

    def parts(self, tensor: Tensor) -> Iterator[tuple[Held, Tensor]]:
        """The parameters, and what of `tensor`, which is laid out as their values, is each one's;
        as a view."""
        if self.flat is None:
            yield self.items[0], tensor
            return
        for item, start in zip(self.items, self.starts, strict=True):
            here = item.local
            yield item, tensor[start : start + here.numel()].view(here.shape)

    def grads(self) -> Tensor:
        """Their gradients as they lie; those that lie elsewhere are put together."""
        grads = [item.grad for item in self.items]
        if self.flat is None:
            return grads[0]
        first = grads[0].storage_offset() - self.starts[0]
        memory = grads[0].untyped_storage().data_ptr()
        if all(
            grad.untyped_storage().data_ptr() == memory and grad.storage_offset() == first + start
            for grad, start in zip(grads, self.starts, strict=True)
        ):
            return grads[0].as_strided(self.flat.shape, (1,), first)
        found = torch.zeros_like(self.flat)
        for (_, place), grad in zip(self.parts(found), grads, strict=True):
            place.copy_(grad)
        return found


def stretches(items: Sequence[Held], places: Mapping[nn.Parameter, Place]) -> list[Stretch]:
    """All of `items`, of one block after another, by where those that share memory are."""
    groups: dict[tuple[str, int, bool], list[Held]] = {}
    for item in items:
        place = places.get(item.parameter)
        where = id(item) if place is None else id(place.flat)
        groups.setdefault((item.block, where, item.decays), []).append(item)
    found = []
    for group in groups.values():
        if len(group) == 1:
            found.append(Stretch(group))
            continue
        flat = places[group[0].parameter].flat
        starts = [places[item.parameter].start for item in group]
        ends = [start + item.local.numel() for start, item in zip(starts, group, strict=True)]
        first = min(starts)
        inside = [
            one for one in places.values() if one.flat is flat and first <= one.start < max(ends)
        ]
        assert len(inside) == len(group), f"others lie among {group[0].name} and its like"
        found.append(Stretch(group, [at - first for at in starts], flat[first : max(ends)]))
    return found


class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter), torch's fused kernel."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.config = config
        self.moments: dict[str, tuple[Tensor, ...]] = {}
        """By parameter; of those in one stretch, views of that of the stretch."""
        self._together: dict[str, tuple[Tensor, Tensor]] = {}
        """By the first parameter of a stretch."""

    def hold(self, stretch: Stretch, rank: int) -> None:
        """Create zero moments for parameters as `rank` holds them."""
        del rank
        first, second = zeros(stretch.values)
        self._together[stretch.items[0].name] = first, second
        for (item, one), (_, two) in zip(stretch.parts(first), stretch.parts(second), strict=True):
            self.moments[item.name] = one, two

    def pieces(self, item: Held, rank: int) -> Iterator[Piece]:
        """A parameter's moments as pieces of state."""
        kinds = (FIRST_MOMENT, SECOND_MOMENT)
        for kind, tensor in zip(kinds, self.moments[item.name], strict=True):
            yield from item.pieces(kind, tensor, rank)

    def apply(
        self, some: Sequence[Stretch], rank: int, step: int, *, lr: float, clip: float
    ) -> None:
        """Update a block, or some of it, by its gradients, in place; see `update`."""
        del rank
        for decay in (True, False):
            alike = [one for one in some if one.decays == decay]
            self.update(
                [one.values for one in alike], [one.grads() for one in alike],
                [self._together[one.items[0].name] for one in alike],
                step, lr=lr, clip=clip, decay=decay,
            )  # fmt: skip
            # Parameters count for themselves what is written to the memory that they share.
            sharing = (one for one in alike if one.flat is not None)
            increment_version([item.local for one in sharing for item in one.items])

    def rename(self, names: Mapping[str, str]) -> None:
        """Moments of parameters that have other names from now on, by those that they had."""
        moments = self.moments
        kept = {new: moments.pop(old) for old, new in names.items() if old in moments}
        moments.update(kept)

    def update(
        self,
        values: Sequence[Tensor],
        grads: Sequence[Tensor],
        moments: Sequence[tuple[Tensor, ...]],
        step: int,
        *,
        lr: float,
        clip: float,
        decay: bool,
    ) -> None:
        """One step, in place.

        Args:
            values: what is updated.
            grads: of each its gradient; they may be scaled in place.
            moments: of each both moments.
            step: 1 for the first update.
            lr: learning rate.
            clip: factor on the gradients.
            decay: whether weight decay applies.
        """
        filled = [number for number, one in enumerate(values) if one.numel()]
        if not filled:
            return
        values, grads = [values[n] for n in filled], [grads[n] for n in filled]
        firsts, seconds = ([moments[n][which] for n in filled] for which in (0, 1))
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

    def close(self) -> None:
        """Let go of all moments."""
        self.moments.clear()
        self._together.clear()


def zeros(values: Tensor) -> tuple[Tensor, Tensor]:
    """Both moments of what has never been updated."""
    first = torch.zeros_like(values, memory_format=torch.contiguous_format)
    return first, torch.zeros_like(first)


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """The learning rate of update `step` (1 is the first) of `steps`."""
    if step <= schedule.warmup:
        return peak * step / schedule.warmup
    if schedule.kind == "constant":
        return peak
    done = (step - schedule.warmup) / max(steps - schedule.warmup, 1)
    shape = 1.0 - done if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return peak * (schedule.final + (1.0 - schedule.final) * shape)
