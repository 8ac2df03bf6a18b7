"""Host clock that accumulates seconds by kind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Clock:
    """Accumulated seconds by kind; nested intervals count for the inner kind only."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._all_s = 0.0

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Add the time of the block to `kind`."""
        before_s, start = self._all_s, time.perf_counter()
        try:
            yield
        finally:
            nested_s = self._all_s - before_s
            took_s = time.perf_counter() - start - nested_s
            self._seconds[kind] = self._seconds.get(kind, 0.0) + took_s
            self._all_s += took_s

    def pop_seconds(self) -> dict[str, float]:
        """Return the seconds by kind since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds


def timed(clock: Clock | None, kind: str) -> AbstractContextManager[None]:
    """Time the block with `clock`, if there is one."""
    return nullcontext() if clock is None else clock.timed(kind)
