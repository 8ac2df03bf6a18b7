"""The order of samples: a shuffle that is a function, not a list.

`Order` maps a global sample index to the sample it stands for: epoch after epoch, every sample
once, in an order keyed by seed and epoch. It is a Feistel network over [0, n) (mixed radix, so
that n need not be a power of two; cycle walking for the rest), so it needs no memory, and any
rank finds any sample of any step at once.
"""

from __future__ import annotations

import hashlib
from math import isqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

Words = NDArray[np.uint64]

_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Order:
    """A keyed order of `length` samples, for ever."""

    def __init__(self, length: int, seed: int) -> None:
        if length < 1:
            raise ValueError(f"an order of {length} samples")
        self._length = np.uint64(length)
        # Samples as (left, right) with left < high, right < low: high * low exceeds length by
        # less than high, so walking is rare.
        high = isqrt(length - 1) + 1
        self._high, self._low = np.uint64(high), np.uint64(-(-length // high))
        digest = hashlib.blake2b(f"{seed}/order".encode(), digest_size=8).digest()
        self._key = np.frombuffer(digest, "<u8").astype(np.uint64)

    def __call__(self, indices: ArrayLike) -> NDArray[np.int64]:
        """The samples (0 to length - 1) that the global sample `indices` stand for."""
        epochs, places = np.divmod(np.asarray(indices, np.uint64), self._length)
        keys = mix(self._key + (epochs + np.uint64(1)) * _GOLDEN)
        samples = self._permute(places, keys)
        outside = samples >= self._length
        while outside.any():
            samples[outside] = self._permute(samples[outside], keys[outside])
            outside = samples >= self._length
        return samples.astype(np.int64)

    def _permute(self, places: Words, keys: Words) -> Words:
        """A bijection on [0, high * low) for each key: each half in turn shifts by the other."""
        left, right = np.divmod(places, self._low)
        for _ in range(_ROUNDS // 2):
            keys = keys + _GOLDEN
            left = (left + mix(right ^ keys) % self._high) % self._high
            keys = keys + _GOLDEN
            right = (right + mix(left ^ keys) % self._low) % self._low
        return left * self._low + right


def mix(words: Words) -> Words:
    """Scatter 64-bit words: every input bit touches every output bit (the finish of SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
