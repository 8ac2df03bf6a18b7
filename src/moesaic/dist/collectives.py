"""Collectives with a group of one as the trivial case: no group means nobody else is there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.dist.world import Group
from moesaic.facts.workload.messages import BUCKET_BYTES


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
    """Add up every tensor over the group, in place, in few messages: flat buckets of one dtype."""
    if group is None or not tensors:
        return
    bucket: list[Tensor] = []
    held = 0
    for tensor in tensors:
        full = held + tensor.nbytes > bucket_bytes
        if bucket and (full or bucket[0].dtype != tensor.dtype):
            _sum_bucket_(bucket, group)
            bucket, held = [], 0
        bucket.append(tensor)
        held += tensor.nbytes
    _sum_bucket_(bucket, group)


def _sum_bucket_(bucket: list[Tensor], group: Group) -> None:
    if len(bucket) == 1 and bucket[0].is_contiguous():
        dist.all_reduce(bucket[0], group=group)
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(bucket, flat.split([math.prod(t.shape) for t in bucket]), strict=True):
        tensor.copy_(part.view(tensor.shape))


class Exchange(torch.autograd.Function):
    """Rows to ranks: `send[i]` consecutive rows go to rank i of the group; zero is allowed.

    The exchange is launched and not awaited; whoever reads the result first calls `wait` on the
    work that was appended to `works`. Its backward is the exchange in the other direction.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: Group, works: list[Any]
    ) -> Tensor:
        """Launch the exchange."""
        ctx.send, ctx.receive, ctx.group = send, receive, group
        result = rows.new_empty((sum(receive), *rows.shape[1:]))
        work = dist.all_to_all_single(
            result, rows.contiguous(), receive, send, group=group, async_op=True
        )
        works.append(work)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Send every row's gradient back to where the row came from."""
        (grad,) = grads
        result = grad.new_empty((sum(ctx.send), *grad.shape[1:]))
        dist.all_to_all_single(result, grad.contiguous(), ctx.send, ctx.receive, group=ctx.group)
        return result, None, None, None, None
