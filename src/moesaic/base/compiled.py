"""numba compilation: a cached `njit` and a hook for the first compilation.

Importing numba takes long, so callers import this module where they use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba import njit
from numba.core.event import Event, Listener, install_listener


def cached_njit(function: Any) -> Any:
    """Return `function`, compiled on its first call and cached on disk where that is possible.

    Compiled code does not hold the GIL."""
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:  # Neither the source's directory nor the user's cache is writable.
        return njit(nogil=True)(function)


class _CompileListener(Listener):
    """A numba listener that reports the first compilation, not loads from the disk cache."""

    def __init__(self, on_compile: Callable[[bool], object]) -> None:
        self._on_compile: Callable[[bool], object] | None = on_compile

    def on_start(self, event: Event) -> None:
        """Report the first compilation."""
        callback, self._on_compile = self._on_compile, None
        if callback is not None:
            callback(event.data["dispatcher"].stats.cache_path is not None)

    def on_end(self, event: Event) -> None:
        """Do nothing; numba calls this method."""


@contextmanager
def notify_on_compile(on_compile: Callable[[bool], object]) -> Iterator[None]:
    """Call `on_compile` once, at the first compilation inside the block.

    Its argument is True if the compiled code is cached on disk.
    """
    with install_listener("numba:compile", _CompileListener(on_compile)):
        yield
