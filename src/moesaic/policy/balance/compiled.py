"""Functions that numba compiles, which takes long to import: policies do so where they use it."""

from __future__ import annotations

from typing import Any

from numba import njit


def compiled(function: Any) -> Any:
    """By numba when it is called first, and kept on disk if there is a place for that."""
    try:
        return njit(cache=True)(function)
    except RuntimeError:  # Neither beside the source nor in the user's cache may be written.
        return njit(function)
