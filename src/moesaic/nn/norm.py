"""RMS norm, over whole rows and over channels that are sharded by tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moesaic.facts.workload.sizes import NORM_CHUNK_BYTES
from moesaic.nn.tensor_parallel import TensorParallel, to_local


class RMSNorm(nn.Module):
    """x / root mean square(x) * weight over the last dimension."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised `x`, in the dtype of the weight."""
        wide = x.to(self.weight.dtype)  # Autocast may have narrowed `x`.
        # PyTorch has a fused kernel on a GPU, and widens narrow rows itself.
        if x.device.type != "cpu" or wide.itemsize < 4:
            return F.rms_norm(wide, (x.shape[-1],), self.weight, self.epsilon)
        normed: Tensor = _BlockedRMSNorm.apply(wide, self.weight, self.epsilon)
        return normed


class _BlockedRMSNorm(torch.autograd.Function):
    """RMS norm by blocks of rows, which stay in the cache between passes.

    Only the input and one factor per row are saved.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return the normalised `x`."""
        rows, normed = _as_rows(x), torch.empty_like(x, memory_format=torch.contiguous_format)
        factors = rows.new_empty((len(rows), 1))
        for row, factor, result in _blocks(rows, factors, _as_rows(normed)):
            torch.linalg.vector_norm(row, dim=1, keepdim=True, out=factor)
            factor.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
            torch.mul(row, factor, out=result)
            result.mul_(weight)
        ctx.save_for_backward(x, weight, factors)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of input and weight."""
        x, weight, factors = ctx.saved_tensors
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        grad_weight = torch.zeros_like(weight)
        tensors = _as_rows(x), factors, _as_rows(grads[0]), _as_rows(grad_x)
        for row, factor, grad, result in _blocks(*tensors):
            torch.mul(grad, row, out=result)
            grad_weight += result.mul_(factor).sum(dim=0)
            dot = result.mul_(weight).sum(dim=1, keepdim=True)
            dot.mul_(factor.square()).div_(-x.shape[-1])
            torch.mul(grad, weight, out=result)
            result.mul_(factor).addcmul_(row, dot)
        return grad_x, grad_weight, None


def _as_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _blocks(*tensors: Tensor) -> zip[tuple[Tensor, ...]]:
    """Yield blocks of rows of all tensors, sized by the first one, the widest."""
    if tensors[0].nbytes <= NORM_CHUNK_BYTES:  # Splits take longer than the norm of a few rows.
        return zip(*((tensor,) for tensor in tensors), strict=True)
    rows = max(1, NORM_CHUNK_BYTES // max(1, tensors[0][:1].nbytes))
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


class TensorParallelRMSNorm(RMSNorm):
    """RMS norm over channels that are sharded over TP ranks."""

    def __init__(self, width: int, epsilon: float, tp: TensorParallel) -> None:
        super().__init__(width, epsilon)
        self.weight = tp.parameter(width, shard_dim=0)
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised `x`, this rank's channels."""
        wide = x.to(self.weight.dtype)
        squares = self.tp.sum(wide.square().sum(dim=-1, keepdim=True))
        mean = squares / (x.shape[-1] * self.tp.size)
        return wide * torch.rsqrt(mean + self.epsilon) * to_local(self.weight)
