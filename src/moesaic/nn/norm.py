"""RMS norm, of whole rows and of rows whose channels lie on several slices."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moesaic.facts.workload.sizes import NORM_BYTES
from moesaic.nn.slices import Slices, here


class RMSNorm(nn.Module):
    """x / root mean square(x) * weight over the last dimension."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        wide = x.to(self.weight.dtype)  # Under autocast it may be narrower.
        if (
            x.device.type != "cpu" or wide.itemsize < 4
        ):  # Torch has a kernel, or widens rows itself.
            return F.rms_norm(wide, (x.shape[-1],), self.weight, self.epsilon)
        normed: Tensor = _Normed.apply(wide, self.weight, self.epsilon)
        return normed


class _Normed(torch.autograd.Function):
    """RMS norm by blocks of rows, between whose passes they stay in the cache; only the input and
    a factor a row are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Normalise."""
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
        """Gradients of input and weight."""
        x, weight, factors = ctx.saved_tensors
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        grad_weight = torch.zeros_like(weight)
        tensors = _as_rows(x), factors, _as_rows(grads[0]), _as_rows(grad_x)
        for row, factor, grad, result in _blocks(*tensors):
            torch.mul(grad, row, out=result)
            grad_weight += result.mul_(factor).sum(dim=0)
            along = result.mul_(weight).sum(dim=1, keepdim=True)
            along.mul_(factor.square()).div_(-x.shape[-1])
            torch.mul(grad, weight, out=result)
            result.mul_(factor).addcmul_(row, along)
        return grad_x, grad_weight, None


def _as_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _blocks(*tensors: Tensor) -> zip[tuple[Tensor, ...]]:
    """Tensors of as many rows, as wide as the first at most, a block of rows at a time."""
    rows = max(1, NORM_BYTES // max(1, tensors[0][:1].nbytes))
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


class SlicedNorm(RMSNorm):
    """The same over channels that lie on several slices."""

    def __init__(self, width: int, epsilon: float, slices: Slices) -> None:
        super().__init__(width, epsilon)
        self.weight = slices.parameter(width, cut=0)
        self.slices = slices

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        wide = x.to(self.weight.dtype)
        squares = self.slices.sum(wide.square().sum(dim=-1, keepdim=True))
        mean = squares / (x.shape[-1] * self.slices.count)
        return wide * torch.rsqrt(mean + self.epsilon) * here(self.weight)
