"""Gradients in flat buckets, which are summed over ranks while backward goes on; and parameters
side by side as their gradients are, for an update to find either in one piece.

A bucket has the gradients of some parameters side by side, in the order in which backward finishes
them; each parameter's `grad` is a view of it. It is made when the first of them arrives, leaves
with the last one in a message of its own, and is gone when the last view is. A gradient that has no
company stays where autograd has put it.

Ranks must speak in one order, whatever reaches which of them: a bucket leaves when those before it
have left, and what a backward pass has left behind goes at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moesaic.dist.state import is_shared_out, local
from moesaic.dist.world import Group
from moesaic.facts.workload.messages import Together, together
from moesaic.facts.workload.sizes import BUCKET_BYTES


class Summed(NamedTuple):
    """A parameter whose gradient ranks add up."""

    parameter: nn.Parameter
    group: Group | None
    """Those ranks; None: nobody else has it."""
    kind: str = ""
    """Gradients of several kinds share no bucket."""
    decays: bool = True
    """Whether weight decay applies; in a bucket what has none stands behind what has."""


class Place(NamedTuple):
    """Where the values of a parameter are."""

    flat: Tensor
    """One dimension of many parameters' numbers, zeros between them."""
    start: int


class Bucket:
    """Gradients that travel together; of one parameter, the one that it has."""

    def __init__(self, parameters: Sequence[nn.Parameter], places: Together, group: Group) -> None:
        self.parameters, self.group = parameters, group
        self.missing: set[int] = set()
        """Numbers of those whose gradients a message waits for."""
        self._places = places
        self._views: list[Tensor] = []
        self._work: dist.Work | None = None

    def take(self, number: int) -> None:
        """The gradient of one parameter into its place, if it is not there yet."""
        parameter = self.parameters[number]
        if len(self.parameters) == 1:
            if parameter.grad is not None and not parameter.grad.is_contiguous():
                parameter.grad = parameter.grad.contiguous()
            return
        if not self._views:
            self._views = self._open()
        view = self._views[number]
        grad = None if parameter.grad is None else local(parameter.grad)
        if grad is None or grad.data_ptr() != view.data_ptr():
            view.copy_(grad) if grad is not None else view.zero_()
            parameter.grad = _as_gradient(view, parameter)

    def complete(self) -> None:
        """What has not arrived is taken; where nothing has reached a parameter, zeros are."""
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is None and len(self.parameters) == 1:
                parameter.grad = torch.zeros_like(parameter)
            self.take(number)

    def launch(self) -> None:
        """Begin to add up over the group."""
        first = self.parameters[0].grad
        assert first is not None
        flat = local(first) if len(self.parameters) == 1 else self._views[0]._base
        assert flat is not None
        self._work = dist.all_reduce(flat, group=self.group, async_op=True)

    def finish(self) -> None:
        """Wait for the sums; whoever has the gradients has the bucket then."""
        assert self._work is not None
        self._work.wait()
        self._work, self._views = None, []

    def settle(self) -> Iterator[tuple[nn.Parameter, Place]]:
        """Give parameters memory side by side, in which nothing is yet; one alone keeps its own."""
        if len(self.parameters) == 1:
            return
        for parameter, view in zip(self.parameters, self._open(), strict=True):
            if is_shared_out(parameter):
                parameter._local_tensor = view  # As FSDP2 does it; such a tensor's data is not it.
            else:
                parameter.data = view
            assert view._base is not None
            yield parameter, Place(view._base, int(view.storage_offset()))

    def _open(self) -> list[Tensor]:
        """The places of a new bucket, with zeros between them."""
        one = local(self.parameters[0])
        width, end = one.element_size(), 0
        flat = torch.empty(self._places.num_bytes // width, dtype=one.dtype, device=one.device)
        starts = [start // width for start in self._places.starts]
        views = []
        for parameter, start in zip(self.parameters, starts, strict=True):
            here = local(parameter)
            views.append(flat[start : start + here.numel()].view(here.shape))
        for start, view in sorted(zip(starts, views, strict=True), key=lambda one: one[0]):
            if start > end:
                flat[end:start].zero_()
            end = start + view.numel()
        return views


def _as_gradient(values: Tensor, parameter: nn.Parameter) -> Tensor:
    """What torch takes for the gradient of `parameter`, of which `values` are this rank's."""
    if not is_shared_out(parameter):
        return values
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        values, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


class Buckets:
    """All gradients of a rank that others have to add to."""

    def __init__(
        self,
        sums: Sequence[Summed],
        *,
        early: bool,
        most: int = BUCKET_BYTES,
    ) -> None:
        """Those of what nobody else has are left alone.

        Args:
            sums: parameters in the order in which backward finishes them.
            early: whether buckets fill and leave under backward; else when that is over.
            most: bytes of a bucket of several.
        """
        classes: dict[tuple[Group, str, torch.dtype], list[int]] = {}
        for number, one in enumerate(sums):
            if one.group is not None:
                kind = one.group, one.kind, one.parameter.dtype
                classes.setdefault(kind, []).append(number)
        found: list[tuple[int, Bucket]] = []
        for (group, *_), numbers in classes.items():
            sizes = [local(sums[number].parameter).nbytes for number in numbers]
            behind = {at for at, number in enumerate(numbers) if not sums[number].decays}
            for places in together(sizes, most, behind):
                mine = [numbers[at] for at in places.members]
                parameters = [sums[number].parameter for number in mine]
                found.append((mine[-1], Bucket(parameters, places, group)))
        self.buckets = [bucket for _, bucket in sorted(found, key=lambda one: one[0])]
        """In the order in which they leave."""
        self._left = 0
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket, number))
            for bucket in self.buckets
            for number, parameter in enumerate(bucket.parameters)
            if early
        ]

    def settle(self) -> dict[nn.Parameter, Place]:
        """Give parameters that share buckets memory side by side, before they have values."""
        return dict(place for bucket in self.buckets for place in bucket.settle())

    def expect(self) -> None:
        """The next gradients that come are the last ones of their parameters."""
        self._left = 0
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.parameters)))

    def finish(self) -> None:
        """Sum what has not left yet, and wait until all is summed."""
        for bucket in self.buckets[self._left :]:
            bucket.complete()
            bucket.launch()
        for bucket in self.buckets:
            bucket.finish()
            bucket.missing.clear()
        self._left = 0

    def close(self) -> None:
        """Let go of the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.buckets.clear()

    def _arrived(self, bucket: Bucket, number: int, parameter: nn.Parameter) -> None:
        del parameter
        bucket.take(number)
        if bucket.missing:
            bucket.missing.remove(number)
            self._launch()

    def _launch(self) -> None:
        """All that may leave."""
        while self._left < len(self.buckets) and not self.buckets[self._left].missing:
            self.buckets[self._left].launch()
            self._left += 1
