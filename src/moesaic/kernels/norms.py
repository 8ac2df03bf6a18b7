"""Sum of squares with an accuracy that does not depend on the size of a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 1 << 16
"""Elements per block on a CPU. torch sums squares in the dtype of the tensor: for 100 million fp32
elements the norm is 1% too small; for one block the error is below 1e-6."""


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of all elements of `tensors`, which share a device, in fp64."""
    return block_norms(tensors).double().square().sum()


def zero_norms(tensor: Tensor) -> Tensor:
    """Return `block_norms` of zeros in the shape of `tensor`, which is on a CPU."""
    return tensor.new_zeros(-(-tensor.numel() // _BLOCK))


def block_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norms of consecutive parts of `tensors`, whose squares add up to theirs."""
    blocks = list(tensors)
    if blocks[0].device.type == "cpu":
        blocks = [block for tensor in blocks for block in tensor.flatten().split(_BLOCK)]
    return torch.stack(torch._foreach_norm(blocks))
