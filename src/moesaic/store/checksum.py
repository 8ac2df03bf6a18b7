"""Checksums of blocks in memory, compiled. The first word of a small block is that of the rest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moesaic.base.compiled import cached_loop

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(32)


@cached_loop
def _mix(state: np.uint64, word: np.uint64) -> np.uint64:
    """Return `state` mixed with a word. For one of them fixed, the map of the other is one-to-one,
    so a change of one word always changes the result."""
    mixed = (state ^ word) * _FACTOR
    return mixed ^ (mixed >> _SHIFT)


@cached_loop
def block_sum(words: NDArray[np.uint64]) -> np.uint64:
    """Return the checksum of all 64-bit words after the first, as uint64.

    The number of words is a multiple of 4. Four states take turns, so that multiplications
    overlap."""
    a, b, c, d = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)
    b, c, d = _mix(b, words[1]), _mix(c, words[2]), _mix(d, words[3])
    for index in range(4, words.shape[0], 4):
        a = _mix(a, words[index])
        b = _mix(b, words[index + 1])
        c = _mix(c, words[index + 2])
        d = _mix(d, words[index + 3])
    total: np.uint64 = _mix(_mix(_mix(a, b), c), d)
    return total


def block_checksum(memory: NDArray[np.uint8]) -> int:
    """Return a checksum of `memory`, whose size is a multiple of 32 bytes."""
    return int(_whole_sum(memory.view(np.uint64)))


@cached_loop
def _whole_sum(words: NDArray[np.uint64]) -> np.uint64:
    """Return the checksum of all 64-bit words."""
    total: np.uint64 = _mix(block_sum(words), words[0])
    return total


@cached_loop
def seal_blocks(words: NDArray[np.uint64]) -> None:
    """Write the checksum of each block into its first word, [blocks, words of a block]."""
    for block in range(words.shape[0]):
        words[block, 0] = block_sum(words[block])


@cached_loop
def find_damaged(words: NDArray[np.uint64]) -> int:
    """Return the index of the first block whose checksum is wrong, or -1."""
    for block in range(words.shape[0]):
        if words[block, 0] != block_sum(words[block]):
            return block
    return -1
