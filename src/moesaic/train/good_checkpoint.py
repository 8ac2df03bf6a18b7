"""Newest good checkpoint of a run: the one that pruning spares, so that a run whose loss diverges
can go back."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

_WINDOW = 5
"""Losses whose mean is that of a checkpoint. The last one is that of the step after the checkpoint:
the first loss of its own weights."""
_SLACK = 0.05
"""Share by which the loss of a good checkpoint may exceed the lowest one."""


class GoodCheckpoint:
    """Losses of the checkpoints of one start: the one that it resumed from, and its own."""

    def __init__(self) -> None:
        self._recent: dict[str, deque[float]] = {}
        """Last losses, by the name of the figure."""
        self._losses: dict[int, dict[str, float]] = {}
        """Losses of checkpoints, by step."""
        self._steps: dict[str, int] = {}
        """Steps of checkpoints, by name."""
        self._lowest: dict[str, float] = {}
        """Lowest losses of checkpoints so far."""

    def add_step(self, step: int, figures: Mapping[str, float]) -> None:
        """Add the losses of a step that has ended."""
        if figures.get("skipped"):
            return  # An overflow in fp16 leaves the weights as they were.
        for name, value in figures.items():
            if name.rpartition("/")[2] == "loss":
                self._recent.setdefault(name, deque(maxlen=_WINDOW)).append(value)
        if step - 1 in self._losses:
            self._losses[step - 1] = self._means()

    def add_checkpoint(self, step: int, name: str) -> None:
        """Add a checkpoint, by its step and the name of its directory."""
        self._steps[name] = step
        self._losses.setdefault(step, {})

    def begin_save(self, step: int) -> None:
        """Take the losses up to `step` for those of its checkpoint until the next step ends."""
        self._losses[step] = self._means()

    def find(self, checkpoints: Sequence[Path]) -> Path | None:
        """Return the newest of `checkpoints`, which begin with the newest, whose loss is nearly the
        lowest; without one, that of the lowest loss. None if no loss is known."""
        known = [
            (path, self._losses[self._steps[path.name]])
            for path in checkpoints
            if path.name in self._steps and self._losses[self._steps[path.name]]
        ]
        for _, losses in known:
            for name, loss in losses.items():
                self._lowest[name] = min(loss, self._lowest.get(name, math.inf))
        excess = {
            path: max(map(self._excess, *zip(*losses.items(), strict=True)))
            for path, losses in known
        }
        good = next((path for path, one in excess.items() if one <= _SLACK), None)
        return good or min(excess, key=lambda path: excess[path], default=None)

    def _means(self) -> dict[str, float]:
        means = {name: sum(values) / len(values) for name, values in self._recent.items()}
        return {name: math.inf if math.isnan(mean) else mean for name, mean in means.items()}

    def _excess(self, name: str, loss: float) -> float:
        """Return the share by which a loss exceeds the lowest one of its name."""
        lowest = self._lowest[name]
        return 0.0 if loss == lowest else (loss - lowest) / max(abs(lowest), 1e-12)
