"""Checksum of a block in memory, to find out whether it has changed."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_WORDS_PER_PAGE = 512
"""64-bit words of 4 KiB, which divide the size of every block."""
_PAGES_PER_SUM = 32
"""Pages that are mixed at once and stay in the CPU's cache."""
_WEIGHTS = np.random.default_rng(0).integers(0, 1 << 64, _WORDS_PER_PAGE, np.uint64) | np.uint64(1)


def block_checksum(memory: NDArray[np.uint8]) -> int:
    """Return a checksum of `memory`, whose size is a multiple of 4 KiB.

    Each page becomes the sum of its words times odd weights, modulo 2**64, so that a flipped bit
    changes it. The highest bits of two words would cancel, so each word is first mixed with its own
    high bits. BLAKE2 joins the sums. numpy does not hold the GIL."""
    pages = memory.view(np.uint64).reshape(-1, _WORDS_PER_PAGE)
    sums = np.empty(len(pages), np.uint64)
    for start in range(0, len(pages), _PAGES_PER_SUM):
        some = pages[start : start + _PAGES_PER_SUM]
        mixed = some ^ (some >> np.uint64(29))
        mixed.dot(_WEIGHTS, out=sums[start : start + _PAGES_PER_SUM])
    return int.from_bytes(hashlib.blake2b(sums.tobytes(), digest_size=8).digest())
