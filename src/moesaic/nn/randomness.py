"""Random numbers as a function of counters: Philox 4x32-10 (Salmon et al., SC 2011) in torch.

Every draw is a function of (seed, purpose, step, sample, position) and of nothing else: no state,
no order, no rank. The key is a hash of seed and purpose; step, sample and position are the counter.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_CHUNK = 1 << 15
"""Elements made at a time: what lies between two passes stays in the cache."""


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


def bits(seed: int, purpose: str, step: int, position: Tensor) -> Tensor:
    """32 random bits, in int32, for every int32 `position`; a hash for draws by the million.

    Philox takes longer than an update that only wants to round at random. Positions go through two
    rounds of shifts and odd multipliers (those of C. Wellons' search), after a key of seed, purpose
    and step.
    """
    result = position ^ _signed(make_key(seed, f"{purpose}/{step}")[0])
    for shift, multiplier in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        result ^= (result >> shift) & (_MASK >> shift)
        result *= _signed(multiplier)
    result ^= (result >> 16) & (_MASK >> 16)
    return result


def _signed(word: int) -> int:
    """The same 32 bits as int32 reads them."""
    return word - ((word & 0x80000000) << 1)


def normal(seed: int, purpose: str, start: int, stop: int) -> Tensor:
    """Elements `start` to `stop` of an endless fp64 sequence of standard normal numbers.

    Long ones are wanted here, so the counters run through numpy's Philox (4x64-10), which is
    compiled: elements 4n to 4n + 3 come of the four words of counter n.
    """
    first = start // 4 * 4
    result = torch.empty(-(-stop // 4) * 4 - first, dtype=torch.float64)
    key = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=16).digest()
    # numpy counts on before it draws.
    counter = (first // 4 - 1) % (1 << 256)
    source = np.random.Philox(key=int.from_bytes(key, "little"), counter=counter)
    for part in result.split(_CHUNK):
        _fill_normal(part, source)
    return result[start - first :][: stop - start]


def _fill_normal(out: Tensor, source: np.random.Philox) -> None:
    """Box and Muller: of two uniform numbers one gives the distance from zero, one the angle."""
    words = source.random_raw(len(out))
    # 52 bits under the exponent of one are a number from 1 and below 2; half a step lifts it off 0.
    words >>= np.uint64(12)
    words |= np.uint64(0x3FF0000000000000)
    unit = words.view(np.float64)
    unit -= 1.0 - 2.0**-53
    pairs = torch.from_numpy(unit).view(-1, 2).t().contiguous()
    radius = pairs[0].log_().mul_(-2.0).sqrt_()
    angle = pairs[1].mul_(2.0 * math.pi)
    places = out.view(-1, 2)
    torch.mul(radius, angle.cos(), out=places[:, 0])
    torch.mul(radius, angle.sin(), out=places[:, 1])


def _unit(high: Tensor, low: Tensor) -> Tensor:
    """A 52-bit number strictly between 0 and 1 from two 32-bit words."""
    return ((high << 20 | low >> 12).double() + 0.5) * 2.0**-52
