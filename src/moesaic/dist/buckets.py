"""Flat gradient buckets, all-reduced while backward runs; parameters can share the same flat
layout.

A bucket lays out the gradients of some parameters in the order in which backward finishes them, and
each `grad` is a view of it. It is allocated with the first gradient, all-reduced with the last, and
freed with the last view. A parameter alone in its bucket keeps the gradient tensor of autograd.

All ranks must launch collectives in one order. So a bucket launches after those before it, and
parameters without a gradient are filled with zeros at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moesaic.dist.state import is_dtensor, local_tensor
from moesaic.dist.world import Group
from moesaic.facts.workload.collectives import BucketLayout, split_into_buckets
from moesaic.facts.workload.sizes import BUCKET_BYTES


class ReducedParameter(NamedTuple):
    """A parameter whose gradient is reduced over a group."""

    parameter: nn.Parameter
    group: Group | None
    """Ranks that share the parameter; None for this rank alone."""
    kind: str = ""
    """Kind of gradient; a bucket holds one kind."""
    decays: bool = True
    """True if weight decay applies; in a bucket, parameters without it come last."""


class FlatView(NamedTuple):
    """Position of a parameter's values in a flat tensor."""

    flat: Tensor
    """One-dimensional tensor of several parameters, with zeros as padding."""
    start: int


class GradientBucket:
    """Gradients that are reduced in one collective."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], layout: BucketLayout, group: Group
    ) -> None:
        self.parameters, self.group = parameters, group
        self.missing: set[int] = set()
        """Indices of the parameters whose gradients are still missing."""
        self._layout = layout
        self._views: list[Tensor] = []
        self._work: dist.Work | None = None

    def store_gradient(self, index: int) -> None:
        """Copy the gradient of one parameter into the bucket, unless it is a view of it already."""
        parameter = self.parameters[index]
        if len(self.parameters) == 1:
            if parameter.grad is not None and not parameter.grad.is_contiguous():
                parameter.grad = parameter.grad.contiguous()
            return
        if not self._views:
            self._views = self._allocate()
        view = self._views[index]
        grad = None if parameter.grad is None else local_tensor(parameter.grad)
        if grad is None or grad.data_ptr() != view.data_ptr():
            view.copy_(grad) if grad is not None else view.zero_()
            parameter.grad = _wrap_gradient(view, parameter)

    def fill_missing(self) -> None:
        """Store all gradients in the bucket; parameters without one get zeros."""
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is None and len(self.parameters) == 1:
                parameter.grad = torch.zeros_like(parameter)
            self.store_gradient(number)

    def start_all_reduce(self) -> None:
        """Start the all-reduce over the group."""
        first = self.parameters[0].grad
        assert first is not None
        flat = local_tensor(first) if len(self.parameters) == 1 else self._views[0]._base
        assert flat is not None
        self._work = dist.all_reduce(flat, group=self.group, async_op=True)

    def wait(self) -> None:
        """Wait for the all-reduce. Then only the gradients keep the bucket's memory alive."""
        assert self._work is not None
        self._work.wait()
        self._work, self._views = None, []

    def flatten_parameters(self) -> Iterator[tuple[nn.Parameter, FlatView]]:
        """Move the parameters into one uninitialized flat tensor; a parameter alone keeps its own
        memory."""
        if len(self.parameters) == 1:
            return
        for parameter, view in zip(self.parameters, self._allocate(), strict=True):
            if is_dtensor(parameter):
                # FSDP2 does the same; `data` of a DTensor is not its local tensor.
                parameter._local_tensor = view
            else:
                parameter.data = view
            assert view._base is not None
            yield parameter, FlatView(view._base, int(view.storage_offset()))

    def _allocate(self) -> list[Tensor]:
        """Return the views of a new bucket, with zeros between them."""
        first = local_tensor(self.parameters[0])
        width, end = first.element_size(), 0
        flat = torch.empty(self._layout.num_bytes // width, dtype=first.dtype, device=first.device)
        starts = [start // width for start in self._layout.offsets]
        views = []
        for parameter, start in zip(self.parameters, starts, strict=True):
            own = local_tensor(parameter)
            views.append(flat[start : start + own.numel()].view(own.shape))
        for start, view in sorted(zip(starts, views, strict=True), key=lambda item: item[0]):
            if start > end:
                flat[end:start].zero_()
            end = start + view.numel()
        return views


def _wrap_gradient(values: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return `values`, this rank's shard, as a gradient that torch accepts for `parameter`."""
    if not is_dtensor(parameter):
        return values
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        values, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


class GradientBuckets:
    """All buckets of a rank."""

    def __init__(
        self,
        reduced: Sequence[ReducedParameter],
        *,
        overlaps_backward: bool,
        max_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Build the buckets; parameters without a group are skipped.

        Args:
            reduced: parameters in the order in which backward finishes them.
            overlaps_backward: fill and launch buckets during backward; else after it.
            max_bytes: maximum bytes of a bucket with several parameters.
        """
        classes: dict[tuple[Group, str, torch.dtype], list[int]] = {}
        for number, item in enumerate(reduced):
            if item.group is not None:
                key = item.group, item.kind, item.parameter.dtype
                classes.setdefault(key, []).append(number)
        buckets: list[tuple[int, GradientBucket]] = []
        for (group, *_), numbers in classes.items():
            sizes = [local_tensor(reduced[number].parameter).nbytes for number in numbers]
            no_decay = {index for index, number in enumerate(numbers) if not reduced[number].decays}
            for layout in split_into_buckets(sizes, max_bytes, no_decay):
                members = [numbers[index] for index in layout.members]
                parameters = [reduced[number].parameter for number in members]
                buckets.append((members[-1], GradientBucket(parameters, layout, group)))
        self.buckets = [bucket for _, bucket in sorted(buckets, key=lambda item: item[0])]
        """Buckets in launch order."""
        self._num_launched = 0
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, bucket, number))
            for bucket in self.buckets
            for number, parameter in enumerate(bucket.parameters)
            if overlaps_backward
        ]

    def flatten_parameters(self) -> dict[nn.Parameter, FlatView]:
        """Move parameters that share a bucket into one flat tensor, before they are initialized."""
        return dict(view for bucket in self.buckets for view in bucket.flatten_parameters())

    def expect_last_backward(self) -> None:
        """Launch buckets during the next backward pass, the last one of gradient accumulation."""
        self._num_launched = 0
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.parameters)))

    def finish(self) -> None:
        """Launch the remaining buckets, and wait for all."""
        for bucket in self.buckets[self._num_launched :]:
            bucket.fill_missing()
            bucket.start_all_reduce()
        for bucket in self.buckets:
            bucket.wait()
            bucket.missing.clear()
        self._num_launched = 0

    def close(self) -> None:
        """Remove the hooks and release the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.buckets.clear()

    def _on_gradient(self, bucket: GradientBucket, index: int, parameter: nn.Parameter) -> None:
        del parameter
        bucket.store_gradient(index)
        if bucket.missing:
            bucket.missing.remove(index)
            self._launch_ready()

    def _launch_ready(self) -> None:
        while (
            self._num_launched < len(self.buckets) and not self.buckets[self._num_launched].missing
        ):
            self.buckets[self._num_launched].start_all_reduce()
            self._num_launched += 1
