"""Counter-based random numbers: Philox 4x32-10 (Salmon et al., SC 2011) in torch.

Every draw is a function of (seed, purpose, step, sample, position) alone, independent of state,
order and rank. The key is a hash of seed and purpose; step, sample and position are the counter.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moesaic.kernels import threads

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_CHUNK = 1 << 15
"""Elements per chunk, so that intermediate results stay in the cache."""


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int] | tuple[Tensor, Tensor]
) -> list[Tensor]:
    """Return four 32-bit words (in int64) for every element of the four counter words; the key
    may have elements too."""
    c0, c1, c2, c3 = counter
    k0: int | Tensor
    k1: int | Tensor
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
    """Return the Philox key of a purpose under a seed."""
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def uniform(
    seed: int | Sequence[int], purpose: str, step: int, sample: Tensor, position: Tensor
) -> Tensor:
    """Return fp64 numbers in (0, 1), one for each element of the broadcast of `sample` and
    `position`; `seed` may be one per element along the last dimension."""
    sample, position = torch.broadcast_tensors(sample.long(), position.long())
    key: tuple[int, int] | tuple[Tensor, Tensor]
    if isinstance(seed, int):
        key = make_key(seed, purpose)
    else:
        words = torch.tensor([make_key(one, purpose) for one in seed], device=sample.device)
        key = words[:, 0], words[:, 1]
    counter = (
        position & _MASK,
        sample & _MASK,
        (sample >> 32) & _MASK,
        torch.full_like(sample, step & _MASK),
    )
    high, low, _, _ = philox(counter, key)
    return _unit(high, low)


def bits(seed: int, purpose: str, step: int, position: Tensor) -> Tensor:
    """Return 32 random bits, in int32, for every int32 `position`: a fast hash for stochastic
    rounding.

    Philox takes longer than the update that rounds. Positions are mixed with a key of seed, purpose
    and step, then go through two rounds of shifts and odd multipliers (found by C. Wellons).
    """
    result = position ^ _signed(make_key(seed, f"{purpose}/{step}")[0])
    for shift, multiplier in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        result ^= (result >> shift) & (_MASK >> shift)
        result *= _signed(multiplier)
    result ^= (result >> 16) & (_MASK >> 16)
    return result


def _signed(word: int) -> int:
    """Return the int32 with the same 32 bits."""
    return word - ((word & 0x80000000) << 1)


def normal(seed: int, purpose: str, start: int, stop: int) -> Tensor:
    """Return elements `start` to `stop` of an endless fp64 sequence of standard normal numbers.

    Sequences are long, so numpy's compiled Philox (4x64-10) draws them: elements 4n to 4n + 3 come
    from the four words of counter n.
    """
    first = start // 4 * 4
    result = torch.empty(-(-stop // 4) * 4 - first, dtype=torch.float64)
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=16).digest()
    key, chunks = int.from_bytes(digest, "little"), result.split(_CHUNK)

    def fill(index: int) -> None:
        # numpy increments the counter before it draws.
        counter = ((first + index * _CHUNK) // 4 - 1) % (1 << 256)
        _fill_normal(chunks[index], np.random.Philox(key=key, counter=counter))

    pool = threads.thread_pool() if len(chunks) > 1 else None
    if pool is None:
        for index in range(len(chunks)):
            fill(index)
    else:  # A chunk is too small for several threads, which torch would use for each operation.
        pool.run_each(fill, range(len(chunks)))
    return result[start - first :][: stop - start]


def _fill_normal(out: Tensor, source: np.random.Philox) -> None:
    """Fill `out` by the Box-Muller transform; uniform numbers give radius and angle."""
    words = source.random_raw(len(out))
    # 52 bits as the mantissa of a number in [1, 2); half a step keeps it above zero.
    words >>= np.uint64(12)
    words |= np.uint64(0x3FF0000000000000)
    unit = words.view(np.float64)
    unit -= 1.0 - 2.0**-53
    pairs = torch.from_numpy(unit).view(-1, 2).t().contiguous()
    radius = pairs[0].log_().mul_(-2.0).sqrt_()
    angle = pairs[1].mul_(2.0 * math.pi)
    pairs_out = out.view(-1, 2)
    torch.mul(radius, angle.cos(), out=pairs_out[:, 0])
    torch.mul(radius, angle.sin(), out=pairs_out[:, 1])


def _unit(high: Tensor, low: Tensor) -> Tensor:
    """Return a 52-bit number strictly between 0 and 1 from two 32-bit words."""
    return ((high << 20 | low >> 12).double() + 0.5) * 2.0**-52
