"""Collectives with a group of one as the trivial case: no group means nobody else is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.dist.world import Group
from moesaic.facts.workload.messages import together
from moesaic.facts.workload.sizes import BUCKET_BYTES, batches


def sum_(tensor: Tensor, group: Group | None) -> Tensor:
    """Add up `tensor` over the group, in place."""
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor


def gather(tensor: Tensor, group: Group | None) -> Tensor:
    """The group's tensors (all of one shape), stacked by rank."""
    if group is None:
        return tensor[None]
    stacked = tensor.new_empty((group.size(), *tensor.shape))
    dist.all_gather(list(stacked.unbind(0)), tensor.contiguous(), group=group)
    return stacked


def sum_buckets_(
    tensors: Sequence[Tensor], group: Group | None, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Add up every tensor over the group, in place, in few messages: copies in flat buckets.

    All are of one dtype. `dist.buckets` does without one of the two copies, where tensors may move.
    """
    if group is None:
        return
    for places in together([tensor.nbytes for tensor in tensors], bucket_bytes):
        mine = [tensors[number] for number in places.members]
        if len(mine) == 1 and mine[0].is_contiguous():
            dist.all_reduce(mine[0], group=group)
            continue
        flat = mine[0].new_zeros(places.num_bytes // mine[0].itemsize)
        starts = (start // flat.itemsize for start in places.starts)
        parts = [flat[s : s + t.numel()].view(t.shape) for s, t in zip(starts, mine, strict=True)]
        torch._foreach_copy_(parts, mine)
        dist.all_reduce(flat, group=group)
        torch._foreach_copy_(mine, parts)


class JoinRuns(torch.autograd.Function):
    """The ranks' runs of rows, one after another; backward sums what each has to say of a run."""

    @staticmethod
    def forward(ctx: Any, run: Tensor, group: Group) -> Tensor:
        """All runs."""
        ctx.group = group
        return gather(run, group).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """The gradient of this rank's run."""
        return _sum_runs(grads[0], ctx.group), None


class SumRuns(torch.autograd.Function):
    """This rank's run of the sum of all ranks' rows: what `JoinRuns` does backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group) -> Tensor:
        """One run."""
        ctx.group = group
        return _sum_runs(rows, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """The gradient of a sum is that of each of its terms: all runs of it."""
        return gather(grads[0], ctx.group).flatten(0, 1), None


def _sum_runs(rows: Tensor, group: Group, run: Tensor | None = None) -> Tensor:
    if run is None:
        run = rows.new_empty((rows.shape[0] // group.size(), *rows.shape[1:]))
    # Older versions of torch have it by another name, which newer ones warn of.
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    reduce(run, rows.contiguous(), group=group)
    return run


class JoinColumns(torch.autograd.Function):
    """A matrix of which each rank has columns; backward sums what each has to say of a rank's.

    So many rows at a time that what is not in order yet is no larger than a bucket of gradients.
    """

    @staticmethod
    def forward(ctx: Any, own_VW: Tensor, group: Group, bucket_bytes: int = BUCKET_BYTES) -> Tensor:
        """The whole matrix, column by column of the ranks in their order."""
        ctx.group, ctx.bucket_bytes = group, bucket_bytes
        rows, width = own_VW.shape
        joined = own_VW.new_empty(rows, group.size() * width)
        row_bytes = joined.shape[1] * joined.itemsize
        for part in batches(rows, row_bytes, bucket_bytes):
            place = joined[part.start : part.stop].view(len(part), -1, width)
            place.copy_(gather(own_VW[part.start : part.stop], group).transpose(0, 1))
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of this rank's columns."""
        (grad,) = grads
        (rows, columns), ranks = grad.shape, ctx.group.size()
        own = grad.new_empty(rows, columns // ranks)
        for part in batches(rows, columns * grad.itemsize, ctx.bucket_bytes):
            by_rank = grad[part.start : part.stop].view(len(part), ranks, -1).transpose(0, 1)
            _sum_runs(by_rank.flatten(0, 1), ctx.group, own[part.start : part.stop])
        return own, None, None


class SumShares(torch.autograd.Function):
    """The sum of the ranks' shares on each of them; each goes on to a share of the loss."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, group: Group) -> Tensor:
        """The sum."""
        ctx.group = group
        return sum_(share.clone(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Every rank's share of the loss hangs on every rank's share of the sum."""
        return sum_(grads[0].clone(), ctx.group), None
