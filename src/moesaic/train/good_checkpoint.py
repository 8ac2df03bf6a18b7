"""Newest good checkpoint of a run: the one that pruning spares, so that a run whose loss diverges
can go back. A resumed run takes earlier losses from its own events."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from moesaic.base.events import RUN_LOG, read_events

_WINDOW = 5
"""Losses whose mean is that of a checkpoint. The last one is that of the step after the checkpoint:
the first loss of its own weights."""
_NOISE_WINDOW = 50
"""Losses whose noise is that of a checkpoint."""
_SLACK = 2.5
"""Standard deviations of its noise by which the loss of a good checkpoint may exceed the lowest
one."""


class _Loss(NamedTuple):
    """Loss of a checkpoint."""

    mean: float
    """Mean of the last losses; infinite if one of them is not finite."""
    noise: float
    """Robust standard deviation of a single loss."""


class GoodCheckpoint:
    """Losses of the checkpoints of a run."""

    def __init__(self) -> None:
        self._recent: dict[str, deque[float]] = {}
        """Last losses, by the name of the figure."""
        self._losses: dict[int, dict[str, _Loss]] = {}
        """Losses of checkpoints, by step."""
        self._steps: dict[str, int] = {}
        """Steps of checkpoints, by name."""
        self._lowest: dict[str, _Loss] = {}
        """Lowest losses of checkpoints so far."""

    def resume(self, run: Path, origin: Path, num_steps: int) -> None:
        """Add the checkpoint that a run resumes from, and what the run in the directory `run` has
        logged before it; nothing for another run's checkpoint, which is not pruned."""
        if origin.resolve().parent != (run / "checkpoints").resolve():
            return
        if (run / RUN_LOG).is_file():
            self._restore(read_events(run / RUN_LOG), num_steps)
        self.add_checkpoint(num_steps, origin.name)

    def _restore(self, events: Iterable[Mapping[str, Any]], num_steps: int) -> None:
        """Add the first `num_steps` steps of a run and their checkpoints, from its events."""
        figures: dict[int, dict[str, float]] = {}
        names: dict[int, str] = {}
        for event in events:
            kind, step = event["event"], event.get("step")
            if not isinstance(step, int):
                continue  # Damaged, or of no step.
            if kind == "run_start":  # It voids later steps.
                for by_step in (figures, names):
                    for late in [one for one in by_step if one >= step]:
                        del by_step[late]
            elif kind == "step":
                figures[step] = _losses_of(event)
            elif kind == "checkpoint_done":
                names[step] = Path(str(event.get("path"))).name
        for step in sorted(one for one in figures if one <= num_steps):
            self.add_step(step, figures[step])
            if step in names:
                self.begin_save(step)
                self.add_checkpoint(step, names[step])

    def add_step(self, step: int, figures: Mapping[str, float]) -> None:
        """Add the losses of a step that has ended."""
        for name, value in _losses_of(figures).items():
            self._recent.setdefault(name, deque(maxlen=_NOISE_WINDOW)).append(value)
        if step - 1 in self._losses:
            self._judge(step - 1)

    def add_failure(self, step: int) -> None:
        """Add a step whose loss or gradient is not finite: the weights before it are wrong."""
        self.add_step(step, dict.fromkeys(self._recent or ("loss",), math.nan))

    def add_checkpoint(self, step: int, name: str) -> None:
        """Add a checkpoint, by its step and the name of its directory."""
        self._steps[name] = step
        self._losses.setdefault(step, {})

    def begin_save(self, step: int) -> None:
        """Take the losses up to `step` for those of its checkpoint until the next step ends."""
        self._judge(step)

    def find(self, checkpoints: Sequence[Path]) -> Path | None:
        """Return the newest of `checkpoints`, which begin with the newest, whose loss is nearly the
        lowest; without one, the one with the lowest loss. None if no finite loss is known."""
        excess: dict[Path, float] = {}
        for path in checkpoints:
            losses = self._losses[self._steps[path.name]] if path.name in self._steps else {}
            if losses and all(math.isfinite(loss.mean) for loss in losses.values()):
                excess[path] = max(self._excess(*item) for item in losses.items())
        good = next((path for path, one in excess.items() if one <= _SLACK), None)
        return good or min(excess, key=lambda path: excess[path], default=None)

    def _judge(self, step: int) -> None:
        """Take the last losses for those of the checkpoint of `step`."""
        losses = {name: _loss_of(list(last)) for name, last in self._recent.items()}
        for name, loss in losses.items():
            self._lowest[name] = min(loss, self._lowest.get(name, loss))
        self._losses[step] = losses  # Last, since `find` runs in another thread.

    def _excess(self, name: str, loss: _Loss) -> float:
        """Return by how many standard deviations a loss exceeds the lowest one of its name."""
        lowest = self._lowest[name]
        return (loss.mean - lowest.mean) / max(lowest.noise, 1e-12)


def _losses_of(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the losses among the figures of a step; none if fp16 overflowed, which leaves the
    weights as they were."""
    return {
        name: value
        for name, value in figures.items()
        if name.rpartition("/")[2] == "loss"
        and isinstance(value, int | float)
        and not figures.get("skipped")
    }


def _loss_of(last: Sequence[float]) -> _Loss:
    """Return the loss of a checkpoint from the last losses."""
    recent = last[-_WINDOW:]
    mean = sum(recent) / len(recent)
    # Differences measure noise even while the loss falls.
    changes = [abs(after - before) for before, after in pairwise(last)]
    finite = [change for change in changes if math.isfinite(change)]
    noise = median(finite) * 1.4826 / math.sqrt(2) if finite else 0.0
    return _Loss(mean if math.isfinite(mean) else math.inf, noise)
