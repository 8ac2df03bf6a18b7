"""Request to end a run after the step that it is in, as SIGTERM makes it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

ENDED_BY_SIGTERM = "ended by SIGTERM"
"""Reason of an end by request."""


class StopRequest:
    """Request of this process to end training; the ranks agree on it in each step."""

    def __init__(self) -> None:
        self.is_made = False
        """True once this process was asked to end."""
        self._is_heard = False

    def make(self) -> bool:
        """Ask for the end; return whether training is in its steps and will obey."""
        self.is_made |= self._is_heard
        return self._is_heard

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Obey requests meanwhile."""
        self._is_heard = True
        try:
            yield
        finally:
            self._is_heard = False
