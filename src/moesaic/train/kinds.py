"""Jobs of any kind, the statistics of their steps, and the record that these are written to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import pyarrow as pa

from moesaic.facts.job import (
    CheckpointConfig,
    LogConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)


class AnyJob(Protocol):
    """Tables and keys that jobs of every kind have."""

    @property
    def kind(self) -> str:
        """Name of the kind."""

    @property
    def seed(self) -> int:
        """Seed of all randomness."""

    @property
    def train(self) -> TrainConfig:
        """Length, batch and precision."""

    @property
    def optimizer(self) -> OptimizerConfig:
        """Settings of AdamW."""

    @property
    def schedule(self) -> ScheduleConfig:
        """Learning rate over steps."""

    @property
    def checkpoint(self) -> CheckpointConfig:
        """Checkpoints that a run writes and keeps."""

    @property
    def log(self) -> LogConfig:
        """Loggers besides the run's own events."""

    def model_dump(self, *, mode: str) -> dict[str, Any]:
        """Return the job as plain data."""

    def to_json(self) -> str:
        """Return the job as JSON text."""


class StepStats(Protocol):
    """Statistics of one step."""

    @property
    def step(self) -> int:
        """Number of the step, from 1."""

    @property
    def phases(self) -> Mapping[str, float]:
        """Seconds by phase on this rank."""

    def figures(self, step_s: float) -> dict[str, float]:
        """Return scalars of a step that took `step_s` seconds, by name."""

    def rank_figures(self) -> dict[str, float]:
        """Return scalars of this rank alone, by name."""

    def write(self, record: Recorder) -> None:
        """Write events and tables beyond the figures."""

    def messages(self) -> Iterator[str]:
        """Yield news for the user."""


class Recorder(Protocol):
    """Record of a run, as far as statistics write to it."""

    def write_event(self, name: str, **fields: Any) -> None:
        """Write an event of the whole run, on rank 0 only."""

    def is_sampled(self, step: int) -> bool:
        """Return whether tables have rows of `step`: every `log.loads_every` steps."""

    def write_rows(
        self, table: str, schema: pa.Schema, step: int, rows: Iterable[Mapping[str, Any]]
    ) -> None:
        """Append rows of `step` to a table if the step is sampled, on rank 0 only."""
