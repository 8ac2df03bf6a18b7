"""Shuffled order of samples, computed by a function instead of stored.

`Shuffle` maps a global sample index to a sample: every epoch visits each sample once, in an order
keyed by seed and epoch. It is a Feistel network over [0, n), with mixed radix for any n and cycle
walking for the rest. It needs no memory, and any rank finds any sample of any step at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import isqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

Words = NDArray[np.uint64]

_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Shuffle:
    """Keyed order of `length` samples, without end."""

    def __init__(self, length: int, seed: int) -> None:
        if length < 1:
            raise ValueError(f"an order of {length} samples")
        self._length = np.uint64(length)
        # Samples are (left, right) with left < high and right < low. The product high * low exceeds
        # length by less than high, so walking is rare.
        high = isqrt(length - 1) + 1
        self._high, self._low = np.uint64(high), np.uint64(-(-length // high))
        digest = hashlib.blake2b(f"{seed}/order".encode(), digest_size=8).digest()
        self._key = np.frombuffer(digest, "<u8").astype(np.uint64)

    def windows(
        self, indices: Sequence[int], *, shuffled: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the global `indices` as an array, and their samples, in text order unless
        `shuffled`."""
        given = np.asarray(indices, np.int64).reshape(-1)
        if len(given) and (given.min() < 0 or (not shuffled and given.max() >= self._length)):
            raise IndexError(f"samples {given.min()} to {given.max()} of {self._length}")
        return given, self(given) if shuffled else given

    def __call__(self, indices: ArrayLike) -> NDArray[np.int64]:
        """Return the samples in [0, length) of the global sample `indices`."""
        epochs, positions = np.divmod(np.asarray(indices, np.uint64), self._length)
        keys = mix(self._key + (epochs + np.uint64(1)) * _GOLDEN)
        samples = self._permute_indices(positions, keys)
        outside = samples >= self._length
        while outside.any():
            samples[outside] = self._permute_indices(samples[outside], keys[outside])
            outside = samples >= self._length
        return samples.astype(np.int64)

    def _permute_indices(self, places: Words, keys: Words) -> Words:
        """Permute [0, high * low) by each key: the halves shift each other in turn."""
        left, right = np.divmod(places, self._low)
        for _ in range(_ROUNDS // 2):
            keys = keys + _GOLDEN
            left = (left + mix(right ^ keys) % self._high) % self._high
            keys = keys + _GOLDEN
            right = (right + mix(left ^ keys) % self._low) % self._low
        return left * self._low + right


def mix(words: Words) -> Words:
    """Scatter 64-bit words so that each input bit affects each output bit (SplitMix64's
    finaliser)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
