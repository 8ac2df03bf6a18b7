"""AdamW per block, and the learning-rate schedule.

Parameters of a block that are contiguous in memory, as their gradients are (`dist.buckets`), are
updated as one tensor with one pair of moments. `update` takes tensors only, so a block can be
updated as soon as its gradients are ready. Moments are plain tensors in the layout of the values
and part of the state. `train.low_bit_adamw` stores them in fewer bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw

from moesaic.dist.buckets import FlatView
from moesaic.dist.state import FIRST_MOMENT, SECOND_MOMENT, TensorShard
from moesaic.facts.expert_blocks import STATE
from moesaic.facts.job import OptimizerConfig, ScheduleConfig
from moesaic.models.state import LocalParam
from moesaic.nn.experts.places import StatePlaces

_CACHED_ELEMENTS = 1 << 17
"""Elements of parameters and moments that the CPU's cache holds. It is a multiple of a cache line,
in which the kernel works."""


@dataclass(frozen=True)
class FlatParams:
    """Parameters of one block that are contiguous in memory, decay alike and have the same losses,
    or a single parameter."""

    params: Sequence[LocalParam]
    offsets: Sequence[int] = (0,)
    """Offset of each parameter in `values`, elements."""
    flat: Tensor | None = None
    """All values in one dimension, zero-padded. None for a single parameter, whose local tensor is
    read on each use because FSDP2 may move it."""

    @property
    def values(self) -> Tensor:
        """Tensor that is updated in place."""
        if self.flat is None:
            return self.params[0].local
        for item, start in zip(self.params, self.offsets, strict=True):
            expected, local = self.flat.data_ptr() + start * self.flat.element_size(), item.local
            is_in_place = local.data_ptr() == expected or not local.numel()
            assert is_in_place, f"{item.name} no longer shares the memory of its block"
        return self.flat

    @property
    def block(self) -> str:
        """Name of the block that the parameters belong to."""
        return self.params[0].block

    @property
    def losses(self) -> frozenset[str] | None:
        """Names of the losses with a gradient in the parameters; None: all losses of the model."""
        return self.params[0].losses

    @property
    def has_weight_decay(self) -> bool:
        """True if weight decay applies to the parameters."""
        return self.params[0].has_weight_decay

    @property
    def places(self) -> StatePlaces | None:
        """Places of the experts; None if all values are always in memory."""
        return self.params[0].places

    def zero_moments(self) -> tuple[Tensor, Tensor]:
        """Return zero first and second moments in the layout of all values."""
        return zero_moments(self.values)

    def split(self, tensor: Tensor) -> Iterator[tuple[LocalParam, Tensor]]:
        """Yield each parameter and its view of `tensor`, which has the layout of `values`."""
        if self.flat is None:
            yield self.params[0], tensor
            return
        for item, start in zip(self.params, self.offsets, strict=True):
            local = item.local
            yield item, tensor[start : start + local.numel()].view(local.shape)

    def grads(self) -> Tensor:
        """Return the gradients in the layout of `values`: a view if they are contiguous, else a
        copy."""
        grads = [item.grad for item in self.params]
        if self.flat is None:
            return grads[0]
        first = grads[0].storage_offset() - self.offsets[0]
        memory = grads[0].untyped_storage().data_ptr()
        if all(
            grad.untyped_storage().data_ptr() == memory and grad.storage_offset() == first + start
            for grad, start in zip(grads, self.offsets, strict=True)
        ):
            return grads[0].as_strided(self.flat.shape, (1,), first)
        copied = torch.zeros_like(self.flat)
        for (_, target), grad in zip(self.split(copied), grads, strict=True):
            target.copy_(grad)
        return copied


def flatten_params(
    params: Sequence[LocalParam], places: Mapping[nn.Parameter, FlatView]
) -> list[FlatParams]:
    """Group `params`, which are in block order, by the flat tensors of `places`."""
    groups: dict[tuple[str, int, bool, frozenset[str] | None], list[LocalParam]] = {}
    for item in params:
        view = places.get(item.parameter)
        key = id(item) if view is None else id(view.flat)
        together = (item.block, key, item.has_weight_decay, item.losses)
        groups.setdefault(together, []).append(item)
    result = []
    for group in groups.values():
        if len(group) == 1:
            result.append(FlatParams(group))
            continue
        flat = places[group[0].parameter].flat
        starts = [places[item.parameter].start for item in group]
        ends = [start + item.local.numel() for start, item in zip(starts, group, strict=True)]
        first = min(starts)
        members = [
            one for one in places.values() if one.flat is flat and first <= one.start < max(ends)
        ]
        assert len(members) == len(group), f"other parameters interleave with {group[0].name}"
        result.append(
            FlatParams(group, [offset - first for offset in starts], flat[first : max(ends)])
        )
    return result


class AdamW:
    """AdamW with decoupled weight decay (Loshchilov and Hutter), by torch's fused kernel."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.config = config
        self.moments: dict[str, tuple[Tensor, ...]] = {}
        """Moments by parameter name; those of flattened parameters are views of `_flat_moments`."""
        self._flat_moments: dict[str, tuple[Tensor, Tensor]] = {}
        """Moments by the first parameter's name of each `FlatParams`."""
        self._places: list[StatePlaces] = []
        """Places of experts, which may skip updates."""
        self._updates: list[tuple[int, float]] = []
        """Number and learning rate of the last updates of this process, as far as experts have
        skipped them."""
        self._num_dropped = 0
        """Updates before the first of `_updates`."""
        self._coming: tuple[int, float] | None = None
        """The update that has begun, until the first expert takes it."""

    def init_moments(self, flat_params: FlatParams, rank: int) -> None:
        """Create zero moments for the parameters as `rank` stores them."""
        del rank
        if flat_params.places is not None:
            self.register_places(flat_params.places)
            return
        first, second = flat_params.zero_moments()
        self._flat_moments[flat_params.params[0].name] = first, second
        for (item, first_view), (_, second_view) in zip(
            flat_params.split(first), flat_params.split(second), strict=True
        ):
            self.moments[item.name] = first_view, second_view

    def register_places(self, places: StatePlaces) -> None:
        """Apply the updates that experts of `places` skip when they are used again."""
        places.apply_skipped = partial(self._apply_skipped, places)
        self._places.append(places)

    def moment_shards(self, param: LocalParam, rank: int) -> Iterator[TensorShard]:
        """Yield a parameter's moments as state shards."""
        kinds = (FIRST_MOMENT, SECOND_MOMENT)
        if param.places is not None:
            for kind, block in zip(kinds, STATE[1:], strict=True):
                yield from param.borrowed_shards(kind, block)
            return
        for kind, tensor in zip(kinds, self.moments[param.name], strict=True):
            yield from param.tensor_shards(kind, tensor, rank)

    def update_block(
        self, flat_params: Sequence[FlatParams], rank: int, step: int, *, lr: float, clip: float
    ) -> None:
        """Update parameters of a block in place by their gradients; see `update`.

        Experts are updated one by one, so the bits do not depend on those in memory.
        """
        del rank
        for one in flat_params:
            if one.places is not None:
                self.update_places(one.places, step, lr=lr, clip=clip)
        for decay in (True, False):
            selected = [
                one for one in flat_params if one.places is None and one.has_weight_decay == decay
            ]
            tensors = [found for one in selected for found in self._tensors(one)]
            values, grads, moments = zip(*tensors, strict=True) if tensors else ((), (), ())
            self.update(values, grads, moments, step, lr=lr, clip=clip, decay=decay)
            # Version counters of parameters do not see writes to the flat tensor.
            flattened = (one for one in selected if one.flat is not None)
            increment_version([item.local for one in flattened for item in one.params])

    def _tensors(
        self, flat_params: FlatParams
    ) -> Iterator[tuple[Tensor, Tensor, tuple[Tensor, ...]]]:
        """Yield (values, gradient, moments) of the tensors to update: of each expert, or all."""
        values, grads = flat_params.values, flat_params.grads()
        moments = self._flat_moments[flat_params.params[0].name]
        if flat_params.params[0].bank is None:
            yield values, grads, moments
            return
        columns = [
            [row for _, tensor in flat_params.split(one) for row in tensor.unbind()]
            for one in (values, grads, *moments)
        ]
        for row, grad, *row_moments in zip(*columns, strict=True):
            yield row, grad, tuple(row_moments)

    def begin_update(self, step: int, lr: float) -> None:
        """Begin update `step`, from 1, which experts without gradients skip at first."""
        self._coming = step, lr
        # Forget what all experts have applied.
        num_applied = min((min(places.num_applied) for places in self._places), default=0)
        del self._updates[: num_applied - self._num_dropped]
        self._num_dropped = num_applied

    def update_places(
        self, places: StatePlaces, step: int, *, lr: float, clip: float, keep_norms: bool = False
    ) -> None:
        """Update the experts of `places` that have a gradient, one by one, and drop the gradients.

        The others skip the update; `_apply_skipped` applies it before they are used.

        Args:
            places: the experts' state.
            step: number of the update, from 1.
            lr: learning rate.
            clip: factor on the gradients.
            keep_norms: keep the norms of the gradients for the step's figures.
        """
        if self._coming is not None:
            self._updates.append(self._coming)
            self._coming = None
        places.num_updates = self._num_dropped + len(self._updates)
        for slot in sorted(places.touched):
            with places.update(slot) as found:
                values, *moments, grad = (places.memory[place] for place in found)
                if keep_norms:
                    places.keep_norm(slot, grad)
                self.update([values], [grad], [tuple(moments)], step, lr=lr, clip=clip, decay=True)

    def _apply_skipped(self, places: StatePlaces, slot: int) -> None:
        """Apply the updates that an expert has skipped, with a gradient of zero.

        All of them are applied to one part of its state after the other, while the CPU caches the
        part."""
        first, end = (n - self._num_dropped for n in (places.num_applied[slot], places.num_updates))
        skipped = self._updates[first:end]
        places.num_applied[slot] = places.num_updates
        with torch.no_grad(), places.hold_blocks(slot, STATE) as blocks:
            zeros = blocks[0].new_zeros(_CACHED_ELEMENTS)
            for values, *moments in zip(
                *(one.split(_CACHED_ELEMENTS) for one in blocks), strict=True
            ):
                grad = zeros[: values.numel()]
                for step, lr in skipped:
                    self.update(
                        [values], [grad], [tuple(moments)], step, lr=lr, clip=1.0, decay=True
                    )

    def rename_params(self, names: Mapping[str, str]) -> None:
        """Rename the parameters of moments; `names` maps old names to new ones."""
        moments = self.moments
        renamed = {new: moments.pop(old) for old, new in names.items() if old in moments}
        moments.update(renamed)

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
        """Apply one step in place.

        Args:
            values: tensors to update.
            grads: gradient of each value; may be scaled in place.
            moments: both moments of each value.
            step: number of the update, from 1.
            lr: learning rate.
            clip: factor on the gradients.
            decay: apply weight decay if true.
        """
        nonempty = [index for index, one in enumerate(values) if one.numel()]
        if not nonempty:
            return
        values, grads = [values[n] for n in nonempty], [grads[n] for n in nonempty]
        firsts, seconds = ([moments[n][which] for n in nonempty] for which in (0, 1))
        if clip < 1.0:
            torch._foreach_mul_(grads, clip)
        steps = torch.full((len(values),), float(step - 1), device=values[0].device)
        adamw(
            values, grads, firsts, seconds, [], list(steps.unbind()),
            fused=True, amsgrad=False, maximize=False,
            beta1=self.config.betas[0], beta2=self.config.betas[1], eps=self.config.epsilon,
            lr=lr, weight_decay=self.config.weight_decay if decay else 0.0,
        )  # fmt: skip
        # The fused kernel bypasses version counters, which copies of state rely on.
        increment_version((*values, *firsts, *seconds))

    def close(self) -> None:
        """Release all moments."""
        self.moments.clear()
        self._flat_moments.clear()
        self._places.clear()


def zero_moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return zero first and second moments for `values`."""
    first = torch.zeros_like(values, memory_format=torch.contiguous_format)
    return first, torch.zeros_like(first)


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """Return the learning rate of update `step` of `steps`; the first update is 1."""
    if step <= schedule.warmup:
        return peak * step / schedule.warmup
    if schedule.kind == "constant":
        return peak
    done = (step - schedule.warmup) / max(steps - schedule.warmup, 1)
    shape = 1.0 - done if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return peak * (schedule.final + (1.0 - schedule.final) * shape)
