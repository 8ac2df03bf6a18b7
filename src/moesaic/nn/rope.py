"""Frequencies of the rotary embedding, stretched for longer sequences than those of first training.

The formulas are those of `modeling_rope_utils` of transformers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moesaic.facts.job.model import RopeScaling

_NARROWEST = 1e-3
"""Channels between the two ends of yarn's blend, where they would fall together."""


def frequencies(width: int, theta: float, scaling: RopeScaling | None, like: Tensor) -> Tensor:
    """Angle per position of each of the `width / 2` channel pairs, in type and place of `like`."""
    pairs = torch.arange(width // 2, device=like.device).to(like.dtype)
    plain: Tensor = 1.0 / theta ** (2 * pairs / width)
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        turns = scaling.original_positions * plain / (2 * math.pi)
        stretched = (scaling.high - turns) / (scaling.high - scaling.low)
    else:
        first, last = _blend(width, theta, scaling)
        stretched = (pairs - first) / (last - first)
    return torch.lerp(plain, plain / scaling.factor, stretched.clamp(0, 1))


def _blend(width: int, theta: float, scaling: RopeScaling) -> tuple[float, float]:
    """The channel pairs that yarn begins and ceases to blend at."""
    first, last = (
        width * math.log(scaling.original_positions / (2 * math.pi * turns)) / 2 / math.log(theta)
        for turns in (scaling.fast, scaling.slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    return first, last + _NARROWEST * (first == last)


def sharpness(scaling: RopeScaling | None) -> float:
    """What cosines and sines are multiplied by."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.sharpness is not None:
        return scaling.sharpness
    if scaling.mscale is None or scaling.mscale_all is None:
        return mscale(scaling.factor)
    return mscale(scaling.factor, scaling.mscale) / mscale(scaling.factor, scaling.mscale_all)


def mscale(factor: float, weight: float = 1.0) -> float:
    """How much yarn sharpens attention over sequences that are `factor` times as long."""
    return 0.1 * weight * math.log(factor) + 1.0
