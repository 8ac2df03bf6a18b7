"""Keys of click data: 64-bit mixes of slot and id, in compiled loops."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.base.compiled import cached_njit

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


@cached_njit
def mix(word: Any) -> Any:
    """Scatter a 64-bit word so that each input bit affects each output bit (SplitMix64's
    finaliser)."""
    word = (word ^ (word >> _30)) * _FIRST
    word = (word ^ (word >> _27)) * _SECOND
    return word ^ (word >> _31)


@cached_njit
def slot_word(slot: int) -> Any:
    """Return the word that tells a slot's ids from those of other slots."""
    return mix(np.uint64(slot + 1) * GOLDEN)


@cached_njit
def integer_key(slot: Any, number: int) -> np.int64:
    """Return the key of an integer id; different ids of a slot have different keys.

    Args:
        slot: `slot_word` of the slot.
        number: the id.
    """
    return np.int64(mix(np.uint64(number) ^ slot))


@cached_njit
def integer_keys(slot: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the keys of the integer ids `numbers` of slot number `slot`."""
    keys, word = np.empty(len(numbers), np.int64), slot_word(slot)
    for index in range(len(numbers)):
        keys[index] = integer_key(word, numbers[index])
    return keys


@cached_njit
def bytes_key(
    slot: Any, data: NDArray[np.uint8], words: NDArray[np.uint64], start: int, stop: int
) -> np.int64:
    """Return the key of the string id `data[start:stop]`.

    It differs from the key of an integer id of the same digits.

    Args:
        slot: `slot_word` of the slot.
        data: bytes.
        words: `overlapping_words` of the bytes.
        start: first byte.
        stop: end of the bytes.
    """
    word = slot ^ (np.uint64(stop - start) * GOLDEN)
    while start + 8 <= stop:
        word = mix(word ^ words[start])
        start += 8
    if start < stop:
        rest = np.uint64(0)
        for index in range(stop - start):
            rest |= np.uint64(data[start + index]) << np.uint64(8 * index)
        word = mix(word ^ rest)
    return np.int64(word)


def overlapping_words(data: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return a view of the 64-bit words that start at each byte of `data`."""
    return np.ndarray(max(len(data) - 7, 0), np.dtype("<u8"), data.data, strides=(1,))


def string_keys(slot: int, strings: Iterable[str | bytes]) -> NDArray[np.int64]:
    """Return the keys of the string ids `strings` of slot number `slot`."""
    encoded = [one.encode() if isinstance(one, str) else one for one in strings]
    data = np.frombuffer(b"".join(encoded), np.uint8)
    words, ends = overlapping_words(data), np.cumsum([len(one) for one in encoded], dtype=np.int64)
    keys = np.empty(len(encoded), np.int64)
    for index, one in enumerate(encoded):
        keys[index] = bytes_key(slot_word(slot), data, words, ends[index] - len(one), ends[index])
    return keys
