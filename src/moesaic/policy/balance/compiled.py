"""Functions that numba compiles, which takes long to import: policies do so where they use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba import njit
from numba.core.event import Event, Listener, install_listener


def compiled(function: Any) -> Any:
    """By numba when it is called first, and kept on disk if there is a place for that."""
    try:
        return njit(cache=True)(function)
    except RuntimeError:  # Neither beside the source nor in the user's cache may be written.
        return njit(function)


class _Ear(Listener):
    """Hears of the first function that is compiled, and not of those that are read from disk."""

    def __init__(self, begins: Callable[[bool], None]) -> None:
        self._begins: Callable[[bool], None] | None = begins

    def on_start(self, event: Event) -> None:
        """Tell, at first."""
        begins, self._begins = self._begins, None
        if begins is not None:
            begins(event.data["dispatcher"].stats.cache_path is not None)

    def on_end(self, event: Event) -> None:
        """Nothing."""


@contextmanager
def heard(begins: Callable[[bool], None]) -> Iterator[None]:
    """Meanwhile, as soon as anything has to be compiled, `begins` is called, once: with whether it
    is kept."""
    with install_listener("numba:compile", _Ear(begins)):
        yield
