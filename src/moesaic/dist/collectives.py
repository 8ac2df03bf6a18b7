"""Collectives over an optional group: None means this rank alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.dist.world import Group
from moesaic.facts.workload.collectives import split_into_buckets
from moesaic.facts.workload.sizes import BUCKET_BYTES, row_batches


def all_reduce_(tensor: Tensor, group: Group | None) -> Tensor:
    """Sum `tensor` over the group, in place."""
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor


def all_gather(tensor: Tensor, group: Group | None) -> Tensor:
    """Return the tensors of all ranks, all of one shape, stacked by rank."""
    if group is None:
        return tensor[None]
    stacked = tensor.new_empty((group.size(), *tensor.shape))
    dist.all_gather(list(stacked.unbind(0)), tensor.contiguous(), group=group)
    return stacked


def gather(tensor: Tensor, group: Group | None) -> Tensor | None:
    """Return the tensors of all ranks stacked by rank on the first rank, None on the others."""
    if group is None:
        return tensor[None]
    if group.rank():
        dist.gather(tensor, group=group, group_dst=0)
        return None
    stacked = tensor.new_empty((group.size(), *tensor.shape))
    dist.gather(tensor, list(stacked.unbind(0)), group=group, group_dst=0)
    return stacked


def all_reduce_buckets_(tensors: Sequence[Tensor], group: Group | None) -> None:
    """Sum every tensor over the group, in place, through flat buckets to save collectives.

    All tensors have one dtype. `dist.buckets` saves a copy where gradients can live in the bucket.
    """
    if group is None:
        return
    for layout in split_into_buckets([tensor.nbytes for tensor in tensors], BUCKET_BYTES):
        members = [tensors[number] for number in layout.members]
        if len(members) == 1 and members[0].is_contiguous():
            dist.all_reduce(members[0], group=group)
            continue
        flat = members[0].new_zeros(layout.num_bytes // members[0].itemsize)
        starts = (start // flat.itemsize for start in layout.offsets)
        views = [
            flat[start : start + tensor.numel()].view(tensor.shape)
            for start, tensor in zip(starts, members, strict=True)
        ]
        torch._foreach_copy_(views, members)
        dist.all_reduce(flat, group=group)
        torch._foreach_copy_(members, views)


class GatherSequence(torch.autograd.Function):
    """All-gather of sequence shards; backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: Group) -> Tensor:
        """Return the shards of all ranks, concatenated."""
        ctx.group = group
        return all_gather(shard, group).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of this rank's shard."""
        return _reduce_scatter(grads[0], ctx.group), None


class ReduceScatterSequence(torch.autograd.Function):
    """Reduce-scatter to sequence shards; backward is an all-gather."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group) -> Tensor:
        """Return this rank's shard of the sum over ranks."""
        ctx.group = group
        return _reduce_scatter(rows, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradients of all shards: each rank's rows enter every one of them."""
        return all_gather(grads[0], ctx.group).flatten(0, 1), None


def _reduce_scatter(rows: Tensor, group: Group, out: Tensor | None = None) -> Tensor:
    if out is None:
        out = rows.new_empty((rows.shape[0] // group.size(), *rows.shape[1:]))
    # Older versions of torch only have the other name, which newer ones deprecate.
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    reduce(out, rows.contiguous(), group=group)
    return out


class GatherColumns(torch.autograd.Function):
    """All-gather of the columns of a sharded matrix; backward is a reduce-scatter.

    It goes through batches of rows, so that the unordered copy is no larger than a gradient bucket.
    """

    @staticmethod
    def forward(ctx: Any, own_VW: Tensor, group: Group, bucket_bytes: int = BUCKET_BYTES) -> Tensor:
        """Return the whole matrix, columns ordered by rank."""
        ctx.group, ctx.bucket_bytes = group, bucket_bytes
        rows, width = own_VW.shape
        joined = own_VW.new_empty(rows, group.size() * width)
        row_bytes = joined.shape[1] * joined.itemsize
        for batch in row_batches(rows, row_bytes, bucket_bytes):
            target = joined[batch.start : batch.stop].view(len(batch), -1, width)
            target.copy_(all_gather(own_VW[batch.start : batch.stop], group).transpose(0, 1))
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of this rank's columns."""
        (grad,) = grads
        (rows, columns), ranks = grad.shape, ctx.group.size()
        own = grad.new_empty(rows, columns // ranks)
        for batch in row_batches(rows, columns * grad.itemsize, ctx.bucket_bytes):
            by_rank = grad[batch.start : batch.stop].view(len(batch), ranks, -1).transpose(0, 1)
            _reduce_scatter(by_rank.flatten(0, 1), ctx.group, own[batch.start : batch.stop])
        return own, None, None


class AllReduce(torch.autograd.Function):
    """All-reduce whose backward is an all-reduce too: each rank uses the sum in its own part of the
    loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """Return the sum over ranks."""
        ctx.group = group
        return all_reduce_(x.clone(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the sum of the gradients over ranks."""
        return all_reduce_(grads[0].clone(), ctx.group), None
