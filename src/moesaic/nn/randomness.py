"""Random numbers as a function of counters: Philox 4x32-10 (Salmon et al., SC 2011) in torch.

Every draw is a function of (seed, purpose, step, sample, position) and of nothing else: no state,
no order, no rank. The key is a hash of seed and purpose; step, sample and position are the counter.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_CHUNK = 1 << 20


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Four 32-bit words (in int64) for every element of the four counter words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((right >> 32) & _MASK) ^ c1 ^ k0,
            right & _MASK,
            ((left >> 32) & _MASK) ^ c3 ^ k1,
            left & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return [c0, c1, c2, c3]


def make_key(seed: int, purpose: str) -> tuple[int, int]:
    """The Philox key of one purpose under one seed."""
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def uniform(seed: int, purpose: str, step: int, sample: Tensor, position: Tensor) -> Tensor:
    """Numbers in (0, 1), fp64, one for each element of the broadcast of `sample` and `position`."""
    sample, position = torch.broadcast_tensors(sample.long(), position.long())
    counter = (
        position & _MASK,
        sample & _MASK,
        (sample >> 32) & _MASK,
        torch.full_like(sample, step & _MASK),
    )
    words = philox(counter, make_key(seed, purpose))
    return _unit(words[0], words[1])


def normal(seed: int, purpose: str, start: int, stop: int) -> Tensor:
    """Elements `start` to `stop` of an endless fp64 sequence of standard normal numbers."""
    key = make_key(seed, purpose)
    parts = [
        _normal_chunk(key, first, min(first + _CHUNK, -(-stop // 2) * 2))
        for first in range(start // 2 * 2, stop, _CHUNK)
    ]
    whole = torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)
    return whole[start - start // 2 * 2 :][: stop - start]


def _normal_chunk(key: tuple[int, int], start: int, stop: int) -> Tensor:
    index = torch.arange(start // 2, stop // 2)
    zero = torch.zeros_like(index)
    words = philox((index & _MASK, (index >> 32) & _MASK, zero, zero), key)
    radius = (-2.0 * _unit(words[0], words[1]).log()).sqrt()
    angle = _unit(words[2], words[3]) * (2.0 * math.pi)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1).flatten()


def _unit(high: Tensor, low: Tensor) -> Tensor:
    """A 52-bit number strictly between 0 and 1 from two 32-bit words."""
    return ((high << 20 | low >> 12).double() + 0.5) * 2.0**-52
