"""Keys of click data: 64-bit mixes of slot and id, in compiled loops."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.base.compiled import cached_njit

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


@cached_njit
def mix(word: Any) -> Any:
    """Scatter a 64-bit word so that each input bit affects each output bit (SplitMix64's
    finaliser)."""
    word = (word ^ (word >> _S30)) * _FIRST
    word = (word ^ (word >> _S27)) * _SECOND
    return word ^ (word >> _S31)


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


def string_keys(
    first_slot: int, offsets: NDArray[np.int32] | NDArray[np.int64], data: NDArray[np.uint8]
) -> NDArray[np.int64]:
    """Return the keys of string ids, [slots, n]; a number has other keys as a string of digits.

    Args:
        first_slot: number of the first slot.
        offsets: starts of the ids of each slot in `data`, and the end of the last, [slots, n + 1].
        data: bytes of the ids.
    """
    keys = np.empty((len(offsets), offsets.shape[1] - 1), np.int64)
    # The 64-bit words that start at each byte.
    words = np.ndarray(max(len(data) - 7, 0), np.dtype("<u8"), data.data, strides=(1,))
    _hash_strings(first_slot, offsets.astype(np.int64, copy=False), data, words, keys)
    return keys


@cached_njit
def _hash_strings(first_slot: int, offsets: Any, data: Any, words: Any, keys: Any) -> None:
    for row in range(len(offsets)):
        slot = slot_word(first_slot + row)
        for index in range(keys.shape[1]):
            start, stop = offsets[row, index], offsets[row, index + 1]
            word = slot ^ (np.uint64(stop - start) * GOLDEN)
            while start + 8 <= stop:
                word = mix(word ^ words[start])
                start += 8
            rest, shift = np.uint64(0), np.uint64(0)
            while start < stop:
                rest |= np.uint64(data[start]) << shift
                start, shift = start + 1, shift + np.uint64(8)
            keys[row, index] = np.int64(mix(word ^ rest))
