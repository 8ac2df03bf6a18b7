"""Job kinds: what the trainer needs to know about a kind of job.

The trainer itself opens directories, resumes, takes steps, validates and saves. A kind reads the
data, chooses the layout, assembles the run, and names the unit in which progress is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from moesaic.base.decisions import Decision
from moesaic.dist.checkpoint import Checkpoint
from moesaic.dist.state import State
from moesaic.dist.world import World
from moesaic.facts.job import (
    CheckpointConfig,
    LogConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from moesaic.facts.plan import Plan
from moesaic.train.job_file import LoadedJob


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


J = TypeVar("J", bound=AnyJob)


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


class Data(Protocol):
    """Data of a run."""

    @property
    def train(self) -> Any:
        """Samples to train on; their type is the kind's own."""

    @property
    def validation(self) -> Any:
        """Samples to validate on, or None."""

    @property
    def digest(self) -> str:
        """Digest of everything that fixes the samples: a run resumes on the same ones only."""

    def files(self) -> dict[str, bytes]:
        """Return files for the run's directory, by relative path, such as those of a tokenizer."""


class AnyRun(Protocol):
    """Run that the trainer drives."""

    counters: dict[str, int]
    phase_hook: Callable[[str], None] | None

    @property
    def plan(self) -> Plan:
        """Layout over ranks."""

    def state(self) -> State:
        """Return everything that training resumes from."""

    def step(self, samples: Any) -> StepStats:
        """Take one optimizer step on the next global batch."""

    def validate(self, samples: Any, max_samples: int) -> tuple[float, int]:
        """Return the mean loss of the first samples, and over how many units it is taken."""

    def flush(self) -> None:
        """Write what the run has buffered."""

    def close(self) -> None:
        """Release models, optimizers and files."""


class JobKind(Protocol[J]):
    """One kind of job."""

    unit: str
    """Plural noun of the unit of progress, such as "tokens": figures have `tokens_per_s`."""

    def units_per_step(self, job: J) -> int:
        """Return the units in one step."""

    def plan(self, loaded: LoadedJob[J], world: World, decisions: list[Decision[Any, Any]]) -> Plan:
        """Return the layout over `world`, and add what policies decided to `decisions`; raise if
        the ranks do not match the plan of the job."""

    def open_data(self, job: J, world: World, log: Callable[[str], None]) -> Data:
        """Open the data; raise if they do not fit the job."""

    def assemble(
        self,
        loaded: LoadedJob[J],
        plan: Plan,
        world: World,
        checkpoint: Checkpoint | None,
        data: Any,
        log: Callable[[str], None],
    ) -> AnyRun:
        """Return a run that is ready to step, from `checkpoint` or from initial values."""

    def describe(self, run: Any) -> Iterator[str]:
        """Yield what the user should know before the first step."""

    def start_fields(self, run: Any) -> dict[str, Any]:
        """Return the kind's own fields of the event `run_start`."""
