"""Statistics of one training step of a recommender, and of the days that it finishes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from moesaic.ps.passes import PassStats
from moesaic.train.click_metrics import ClickMetrics
from moesaic.train.kinds import Recorder
from moesaic.train.table_passes import PassDecision


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
    new_pass: PassStats | None = None
    """Pass of this rank's rows that began with this step, if any."""
    decisions: Sequence[PassDecision] = ()
    """Decisions on the steps of coming passes of this rank's rows."""

    def figures(self, step_s: float) -> dict[str, float]:
        """Return scalars of the step, which took `step_s` seconds."""
        return {
            "loss": self.loss, "grad_norm": self.grad_norm, "lr": self.lr,
            "samples": self.samples, "samples_per_s": self.samples / max(step_s, 1e-9),
            "rows": self.rows, **self.rank_figures(), **self.metrics,
        }  # fmt: skip

    def rank_figures(self) -> dict[str, float]:
        """Return scalars of this rank alone."""
        figures: dict[str, float] = {"row_bytes_sent": self.bytes_sent}
        if self.new_pass is not None:
            figures |= {
                "pass_hit_rate": self.new_pass.hit_rate, "pass_stall_s": self.new_pass.stall_s,
            }  # fmt: skip
        return figures

    def write(self, record: Recorder) -> None:
        """Write an event for each day that ended, and for a pass that began."""
        if self.new_pass is not None:
            record.write_event("pass", step=self.step, **asdict(self.new_pass))
        if self.decisions:
            passes = [
                {**facts._asdict(), **outcome._asdict(), "planning_s": seconds}
                for facts, outcome, seconds in self.decisions
            ]
            record.write_event("decisions", step=self.step, passes=passes)
        for day in self.days:
            record.write_event("day", step=self.step, day=day.day, **day.figures())

    def messages(self) -> Iterator[str]:
        """Yield a line for each day that ended."""
        for day in self.days:
            names = day.metrics.figures()
            words = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in names.items()]
            evicted = f", {day.evicted:,} evicted" if day.evicted else ""
            yield f"day {day.day} ended: {', '.join([*words, f'{day.rows:,} rows'])}{evicted}"
