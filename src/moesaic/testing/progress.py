"""Progress object for tests that records messages and figures."""

from __future__ import annotations

from collections.abc import Mapping


class RecordingProgress:
    """Recorder of messages and figures of a run."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.figures: list[dict[str, float]] = []

    @property
    def losses(self) -> list[float]:
        """Loss of each step."""
        return [figures["loss"] for figures in self.figures]

    def message(self, text: str) -> None:
        """Record a message."""
        self.messages.append(text)

    def detail(self, text: str) -> None:
        """Record a message."""
        self.messages.append(text)

    def start(self, total: int, done: int) -> None:
        """Do nothing."""

    def step(self, figures: Mapping[str, float]) -> None:
        """Record the figures of a step."""
        self.figures.append(dict(figures))

    def done(self) -> None:
        """Do nothing."""
