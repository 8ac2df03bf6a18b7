"""Statistics of one training step of a recommender, and of the days that it finishes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moesaic.train.click_metrics import ClickMetrics
from moesaic.train.kinds import Recorder


@dataclass(frozen=True)
class DayStats:
    """Statistics of one day of samples, each scored before training on it."""

    day: int
    """Number of the day, from 0."""
    metrics: ClickMetrics
    """Metrics of the day's samples since this process started."""
    rows: int
    """Rows after the end of the day, over all ranks."""
    evicted: int
    """Rows that the end of the day evicted, over all ranks."""

    def figures(self) -> dict[str, float]:
        """Return all scalars by name."""
        counts = {"samples": self.metrics.samples, "rows": self.rows, "evicted": self.evicted}
        return counts | self.metrics.figures()


@dataclass(frozen=True)
class CtrStepStats:
    """Statistics of one step, equal on every rank except for `phases` and `bytes_sent`."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    samples: int
    rows: int
    """Rows over all ranks."""
    bytes_sent: int
    """Bytes of keys, rows and gradients that this rank sent to others in this step."""
    metrics: Mapping[str, float]
    """Metrics of the step's samples; empty in steps that are not sampled."""
    phases: Mapping[str, float]
    days: Sequence[DayStats] = ()
    """Days that ended after this step."""

    def figures(self, step_s: float) -> dict[str, float]:
        """Return scalars of the step, which took `step_s` seconds."""
        return {
            "loss": self.loss, "grad_norm": self.grad_norm, "lr": self.lr,
            "samples": self.samples, "samples_per_s": self.samples / max(step_s, 1e-9),
            "rows": self.rows, **self.rank_figures(), **self.metrics,
        }  # fmt: skip

    def rank_figures(self) -> dict[str, float]:
        """Return scalars of this rank alone."""
        return {"row_bytes_sent": self.bytes_sent}

    def write(self, record: Recorder) -> None:
        """Write an event for each day that ended."""
        for day in self.days:
            record.write_event("day", step=self.step, day=day.day, **day.figures())

    def messages(self) -> Iterator[str]:
        """Yield a line for each day that ended."""
        for day in self.days:
            names = day.metrics.figures()
            words = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in names.items()]
            evicted = f", {day.evicted:,} evicted" if day.evicted else ""
            yield f"day {day.day} ended: {', '.join([*words, f'{day.rows:,} rows'])}{evicted}"
