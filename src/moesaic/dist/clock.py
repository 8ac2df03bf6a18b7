"""A host's clock for what is done over and over: seconds by kind of stretch, added up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Clock:
    """Seconds of stretches; what a stretch inside another takes counts for the inner one alone."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._all_s = 0.0

    @contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """A stretch of this kind."""
        before_s, began = self._all_s, time.perf_counter()
        try:
            yield
        finally:
            inside_s = self._all_s - before_s
            took_s = time.perf_counter() - began - inside_s
            self._seconds[kind] = self._seconds.get(kind, 0.0) + took_s
            self._all_s += took_s

    def told(self) -> dict[str, float]:
        """Seconds by kind since this was asked last."""
        seconds, self._seconds = self._seconds, {}
        return seconds


def during(clock: Clock | None, kind: str) -> AbstractContextManager[None]:
    """A stretch by `clock`, if there is one."""
    return nullcontext() if clock is None else clock.during(kind)
