"""Sums of squares that do not depend on how many numbers a tensor has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 1 << 16
"""Numbers whose squares torch may add up by itself on a CPU: it does so in the numbers' own type, a
few sums at a time, so that of 100 million in fp32 the norm is a hundredth too small, and of one
block the rounding is below 1e-6."""


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Of all numbers of `tensors`, of one device, in fp64."""
    parts = list(tensors)
    if parts[0].device.type == "cpu":
        parts = [block for one in parts for block in one.flatten().split(_BLOCK)]
    return torch.stack(torch._foreach_norm(parts)).double().square().sum()
