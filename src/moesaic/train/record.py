"""Record of a run in its directory: events, and tables such as expert loads.

Rank 0 writes for all; every rank writes its own phases. TensorBoard, Weights & Biases and MLflow
sinks receive the same scalars.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from moesaic.base.errors import ConfigError
from moesaic.base.events import EventLog
from moesaic.base.records import RecordWriter
from moesaic.dist.world import World
from moesaic.kernels import device as devices
from moesaic.train.kinds import AnyJob, StepStats


class Sink(Protocol):
    """Destination of scalars besides the run's own events."""

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one step's figures."""

    def close(self) -> None:
        """Finish writing."""


class TensorBoardSink:
    """TensorBoard event files in the run's directory."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory), flush_secs=10)

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one step's figures."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandbSink:
    """A Weights & Biases run."""

    def __init__(self, project: str, job: AnyJob, name: str) -> None:
        try:
            import wandb
        except ImportError:
            raise _missing_package("log.wandb", project, "wandb") from None
        self._run: Any = wandb.init(project=project, name=name, config=job.model_dump(mode="json"))

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Send one step's figures."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MlflowSink:
    """An MLflow run."""

    def __init__(self, experiment: str, name: str) -> None:
        try:
            import mlflow
        except ImportError:
            raise _missing_package("log.mlflow", experiment, "mlflow") from None
        self._mlflow: Any = mlflow
        mlflow.set_experiment(experiment)
        mlflow.start_run(run_name=name)

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Send one step's figures."""
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


def _missing_package(key: str, value: str, extra: str) -> ConfigError:
    return ConfigError(
        f"{key} = '{value}' needs the {extra} package: pip install 'moesaic[{extra}]', "
        f"or unset {key}"
    )


def open_sinks(job: AnyJob, out: Path) -> list[Sink]:
    """Return the sinks that the job configures; raise for a missing package."""
    sinks: list[Sink] = []
    log = job.log
    if log.wandb:
        sinks.append(WandbSink(log.wandb, job, out.name))
    if log.mlflow:
        sinks.append(MlflowSink(log.mlflow, out.name))
    if log.tensorboard:
        sinks.append(TensorBoardSink(out / "tensorboard"))
    return sinks


class RunRecord:
    """Directory of one run, as this rank writes to it."""

    def __init__(self, out: Path, job: AnyJob, world: World) -> None:
        self.out, self._job, self._world = out, job, world
        self._events = EventLog(out / "events" / f"rank-{world.rank}.jsonl")
        self._sinks: list[Sink] = open_sinks(job, out) if world.is_rank_zero else []
        self._tables: dict[str, RecordWriter] = {}
        """Tables of the run by name, opened at their first rows."""

    def write_event(self, name: str, **fields: Any) -> None:
        """Write an event of the whole run, on rank 0 only."""
        if self._world.is_rank_zero:
            self._events.emit(name, **fields)

    def is_sampled(self, step: int) -> bool:
        """Return whether tables have rows of `step`: every `log.loads_every` steps."""
        return self._job.log.is_sampled(step)

    def write_rows(
        self, table: str, schema: pa.Schema, step: int, rows: Iterable[Mapping[str, Any]]
    ) -> None:
        """Append rows of `step` to a table if the step is sampled, on rank 0 only."""
        if not (self._world.is_rank_zero and self.is_sampled(step)):
            return
        if table not in self._tables:
            self._tables[table] = RecordWriter(self.out / table, schema)
        self._tables[table].add(rows)

    def write_step(
        self, stats: StepStats, step_s: float, machine: Mapping[str, float]
    ) -> dict[str, float]:
        """Write one step's figures to events, tables and sinks; return them.

        `machine` has seconds that describe the machine: of the reference work after the step, and
        of waits for a processor.
        """
        device = self._world.device
        used, peak = devices.used_bytes(device), devices.peak_bytes(device)
        self._events.emit(
            "rank_step", step=stats.step, phases=stats.phases, memory_bytes=used, peak_bytes=peak,
            **stats.rank_figures(), **machine,
        )  # fmt: skip
        figures = {**stats.figures(step_s), "step_s": step_s, "memory_bytes": used}
        if not self._world.is_rank_zero:
            return figures
        self._events.emit("step", step=stats.step, phases=stats.phases, **figures)
        self._write_scalars(stats.step, "train", figures)
        stats.write(self)
        return figures

    def write_validation(self, step: int, figures: Mapping[str, float], seconds: float) -> None:
        """Write the result of one validation pass: the loss, how many units it is taken over, and
        other figures of the kind."""
        self.write_event("validation", step=step, **figures, seconds=seconds)
        self._write_scalars(step, "validation", figures)

    def _write_scalars(self, step: int, prefix: str, figures: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.write_scalars(step, {f"{prefix}/{key}": value for key, value in figures.items()})

    def flush(self) -> None:
        """Write buffered rows of all tables."""
        for table in self._tables.values():
            table.flush()

    def close(self) -> None:
        """Close all files and sinks, even if one of them raises."""
        with ExitStack() as stack:
            stack.callback(self._events.close)
            for sink in self._sinks:
                stack.callback(sink.close)
            stack.callback(self.flush)
