"""Record of a run in its directory: events, expert loads and balance statistics.

Rank 0 writes for all; every rank writes its own phases. TensorBoard, Weights & Biases and MLflow
sinks receive the same scalars.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import torch

from moesaic.base.errors import ConfigError
from moesaic.base.events import EventLog
from moesaic.base.records import RecordWriter
from moesaic.dist.world import World
from moesaic.facts.job import Job, LogConfig
from moesaic.kernels import device as devices
from moesaic.train.balance_stats import BALANCE_SCHEMA, BalanceStats
from moesaic.train.run import StepFacts

LOADS_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("layer", pa.int16()),
        ("counts", pa.list_(pa.int64())),
        ("dropped", pa.int64()),
        ("counts_by_rank", pa.list_(pa.int64())),
    ]
)


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

    def __init__(self, project: str, job: Job, name: str) -> None:
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


def open_sinks(log: LogConfig, job: Job, out: Path) -> list[Sink]:
    """Return the sinks that the job configures; raise for a missing package."""
    sinks: list[Sink] = []
    if log.wandb:
        sinks.append(WandbSink(log.wandb, job, out.name))
    if log.mlflow:
        sinks.append(MlflowSink(log.mlflow, out.name))
    if log.tensorboard:
        sinks.append(TensorBoardSink(out / "tensorboard"))
    return sinks


def _balance_figures(layers: Sequence[BalanceStats]) -> dict[str, float]:
    """Return replica totals over all layers, and the imbalance of the worst layer."""
    exposed_s = sum(one.exposed_s for one in layers)
    return {
        "replicas": sum(one.replicas for one in layers),
        "replica_bytes": sum(one.replica_bytes for one in layers),
        "planning_s": sum(one.planning_s for one in layers),
        "imbalance_before": max(one.imbalance_before for one in layers),
        "imbalance_after": max(one.imbalance_after for one in layers),
        **({} if math.isnan(exposed_s) else {"replica_exposed_s": exposed_s}),
    }


class RunRecord:
    """Directory of one run, as this rank writes to it."""

    def __init__(self, out: Path, job: Job, world: World) -> None:
        self.out, self._job, self._world = out, job, world
        self._events = EventLog(out / "events" / f"rank-{world.rank}.jsonl")
        self._sinks: list[Sink] = open_sinks(job.log, job, out) if world.is_rank_zero else []
        self._loads = RecordWriter(out / "loads", LOADS_SCHEMA) if world.is_rank_zero else None
        self._balance: RecordWriter | None = None
        """None until a step has balance statistics."""

    def write_event(self, name: str, **fields: Any) -> None:
        """Write an event of the whole run, on rank 0 only."""
        if self._world.is_rank_zero:
            self._events.emit(name, **fields)

    def write_step(self, facts: StepFacts, step_s: float) -> dict[str, float]:
        """Write one step's figures to events, loads and sinks; return them."""
        device = self._world.device
        used, peak = devices.used_bytes(device), devices.peak_bytes(device)
        self._events.emit(
            "rank_step", step=facts.step, phases=facts.phases, memory_bytes=used, peak_bytes=peak
        )
        figures = {
            "loss": facts.loss, "total_loss": facts.total_loss,
            "balance_loss": facts.balance_loss, "z_loss": facts.z_loss,
            "grad_norm": facts.grad_norm, "lr": facts.lr, "tokens": facts.tokens,
            "step_s": step_s, "tokens_per_s": facts.tokens / max(step_s, 1e-9),
            "dropped": sum(facts.dropped.values()),
            "num_replay_mismatches": facts.num_replay_mismatches, "memory_bytes": used,
        }  # fmt: skip
        if facts.balance_stats:
            figures |= _balance_figures(list(facts.balance_stats.values()))
        if facts.loss_scale is not None:
            figures |= {"loss_scale": facts.loss_scale, "skipped": float(facts.is_skipped)}
        if not self._world.is_rank_zero:
            return figures
        self._events.emit("step", step=facts.step, phases=facts.phases, **figures)
        for one in facts.migrations:
            self._events.emit(
                "experts_migrated", step=facts.step, layer=one.layer, moves=one.decision.moves,
                bytes=one.num_bytes, seconds=one.seconds, gain_s=one.decision.gain_s,
                imbalance_before=one.decision.imbalance_before,
                imbalance_after=one.decision.imbalance_after,
            )  # fmt: skip
        for sink in self._sinks:
            sink.write_scalars(
                facts.step, {f"train/{key}": value for key, value in figures.items()}
            )
        if self._loads is not None and facts.step % self._job.log.loads_every == 0:
            self._write_loads(self._loads, facts)
        return figures

    def _write_loads(self, loads: RecordWriter, facts: StepFacts) -> None:
        none = torch.zeros(0, dtype=torch.int64)  # For layers of other pipeline ranks.
        loads.add(
            {
                "step": facts.step, "layer": layer, "counts": counts.tolist(),
                "dropped": facts.dropped[layer],
                "counts_by_rank": facts.counts_by_rank.get(layer, none).flatten().numpy(),
            }
            for layer, counts in facts.counts.items()
        )  # fmt: skip
        if facts.balance_stats:
            self._balance = self._balance or RecordWriter(self.out / "balance", BALANCE_SCHEMA)
            self._balance.add(
                stats.to_row(facts.step, layer) for layer, stats in facts.balance_stats.items()
            )

    def write_validation(self, step: int, loss: float, tokens: int, seconds: float) -> None:
        """Write the result of one validation pass."""
        self.write_event("validation", step=step, loss=loss, tokens=tokens, seconds=seconds)
        for sink in self._sinks:
            sink.write_scalars(step, {"validation/loss": loss})

    def flush(self) -> None:
        """Write buffered loads and balance statistics."""
        for writer in (self._loads, self._balance):
            if writer is not None:
                writer.flush()

    def close(self) -> None:
        """Close all files and sinks, even if one of them raises."""
        with ExitStack() as stack:
            stack.callback(self._events.close)
            for sink in self._sinks:
                stack.callback(sink.close)
            stack.callback(self.flush)
