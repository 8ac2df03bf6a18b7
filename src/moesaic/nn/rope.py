"""Frequencies of rotary embeddings, and their scaling for longer sequences.

The formulas are those of `modeling_rope_utils` in transformers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moesaic.facts.job.model import RopeScaling

_MIN_BLEND_WIDTH = 1e-3
"""Minimum width of YaRN's blend, in channel pairs, where its two ends coincide."""


def frequencies(width: int, theta: float, scaling: RopeScaling | None, like: Tensor) -> Tensor:
    """Return the angle per position of each of the `width / 2` channel pairs, in dtype and device
    of `like`."""
    pairs = torch.arange(width // 2, device=like.device).to(like.dtype)
    plain: Tensor = 1.0 / theta ** (2 * pairs / width)
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        turns = scaling.original_max_positions * plain / (2 * math.pi)
        ramp = (scaling.high_freq_factor - turns) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
    else:
        first, last = _yarn_range(width, theta, scaling)
        ramp = (pairs - first) / (last - first)
    return torch.lerp(plain, plain / scaling.factor, ramp.clamp(0, 1))


def _yarn_range(width: int, theta: float, scaling: RopeScaling) -> tuple[float, float]:
    """Return the channel pairs where YaRN's blend starts and ends."""
    first, last = (
        width
        * math.log(scaling.original_max_positions / (2 * math.pi * turns))
        / 2
        / math.log(theta)
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    return first, last + _MIN_BLEND_WIDTH * (first == last)


def attention_factor(scaling: RopeScaling | None) -> float:
    """Return the factor on cosines and sines."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is None or scaling.mscale_all_dim is None:
        return mscale(scaling.factor)
    return mscale(scaling.factor, scaling.mscale) / mscale(scaling.factor, scaling.mscale_all_dim)


def mscale(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's attention factor for sequences that are `factor` times as long."""
    return 0.1 * weight * math.log(factor) + 1.0
