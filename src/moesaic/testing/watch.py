"""Watching a run in a test: keeps what the trainer says."""

from __future__ import annotations

from collections.abc import Mapping


class Silent:
    """A progress object that remembers messages and figures."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.figures: list[dict[str, float]] = []

    def message(self, text: str) -> None:
        """Remember."""
        self.messages.append(text)

    def start(self, total: int, done: int) -> None:
        """Nothing to show."""

    def step(self, figures: Mapping[str, float]) -> None:
        """Remember."""
        self.figures.append(dict(figures))

    def done(self) -> None:
        """Nothing to show."""
