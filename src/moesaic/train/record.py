"""What a run leaves in its directory: facts at the start, events as they happen, bulk loads
and balance.

Rank 0 writes for all; every rank writes its own phases. TensorBoard, Weights & Biases and MLflow
are sinks of the same scalars.
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
from moesaic.dist import device as devices
from moesaic.dist.world import World
from moesaic.facts.job import Job, LogConfig
from moesaic.train.run import StepFacts
from moesaic.train.spread import BALANCE, Spread

LOADS = pa.schema(
    [
        ("step", pa.int32()),
        ("layer", pa.int16()),
        ("counts", pa.list_(pa.int64())),
        ("dropped", pa.int64()),
        ("by_rank", pa.list_(pa.int64())),
    ]
)


class Sink(Protocol):
    """Where scalars go besides the run's own events."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take one step's figures."""

    def close(self) -> None:
        """Finish."""


class TensorBoardSink:
    """TensorBoard event files under the run."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory), flush_secs=10)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
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
            raise _missing("log.wandb", project, "wandb") from None
        self._run: Any = wandb.init(project=project, name=name, config=job.model_dump(mode="json"))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
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
            raise _missing("log.mlflow", experiment, "mlflow") from None
        self._mlflow: Any = mlflow
        mlflow.set_experiment(experiment)
        mlflow.start_run(run_name=name)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Send one step's figures."""
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


def _missing(key: str, value: str, extra: str) -> ConfigError:
    return ConfigError(
        f"{key} = '{value}' needs the {extra} package: pip install 'moesaic[{extra}]', "
        f"or unset {key}"
    )


def open_sinks(log: LogConfig, job: Job, out: Path) -> list[Sink]:
    """The sinks that the job asks for; an error names a package that is missing."""
    sinks: list[Sink] = []
    if log.wandb:
        sinks.append(WandbSink(log.wandb, job, out.name))
    if log.mlflow:
        sinks.append(MlflowSink(log.mlflow, out.name))
    if log.tensorboard:
        sinks.append(TensorBoardSink(out / "tensorboard"))
    return sinks


def _spread(layers: Sequence[Spread]) -> dict[str, float]:
    """Copies of all layers and what they took, and the least even layer's rows."""
    exposed_s = sum(one.exposed_s for one in layers)
    return {
        "copies": sum(one.copies for one in layers),
        "bytes_moved": sum(one.bytes_moved for one in layers),
        "planning_s": sum(one.planning_s for one in layers),
        "busiest_before": max(one.before for one in layers),
        "busiest_after": max(one.after for one in layers),
        **({} if math.isnan(exposed_s) else {"exposed_s": exposed_s}),
    }


class RunRecord:
    """The directory of one run, as this rank writes to it."""

    def __init__(self, out: Path, job: Job, world: World) -> None:
        self.out, self._job, self._world = out, job, world
        self._own = EventLog(out / "events" / f"rank-{world.rank}.jsonl")
        self._sinks: list[Sink] = open_sinks(job.log, job, out) if world.leads else []
        self._loads = RecordWriter(out / "loads", LOADS) if world.leads else None
        self._balance: RecordWriter | None = None
        """There once a policy has been asked."""

    def event(self, name: str, **fields: Any) -> None:
        """An event of the whole run: rank 0 writes it."""
        if self._world.leads:
            self._own.emit(name, **fields)

    def step(self, facts: StepFacts, step_s: float) -> dict[str, float]:
        """One step's figures, to events, loads and sinks; returns them."""
        device = self._world.device
        held, peak = devices.held_bytes(device), devices.peak_bytes(device)
        self._own.emit(
            "rank_step", step=facts.step, phases=facts.phases, memory_bytes=held, peak_bytes=peak
        )
        figures = {
            "loss": facts.loss, "total_loss": facts.total_loss,
            "balance_loss": facts.balance_loss, "z_loss": facts.z_loss,
            "grad_norm": facts.grad_norm, "lr": facts.lr, "tokens": facts.tokens,
            "step_s": step_s, "tokens_per_s": facts.tokens / max(step_s, 1e-9),
            "dropped": sum(facts.dropped.values()), "flips": facts.flips, "memory_bytes": held,
        }  # fmt: skip
        if facts.spread:
            figures |= _spread(list(facts.spread.values()))
        if facts.scale is not None:
            figures |= {"loss_scale": facts.scale, "skipped": float(facts.skipped)}
        if not self._world.leads:
            return figures
        self._own.emit("step", step=facts.step, phases=facts.phases, **figures)
        for one in facts.moved:
            self._own.emit(
                "rehomed", step=facts.step, layer=one.layer, moves=one.to.moves,
                bytes=one.num_bytes, seconds=one.seconds, gain_s=one.to.gain_s,
                busiest_before=one.to.before, busiest_after=one.to.after,
            )  # fmt: skip
        for sink in self._sinks:
            sink.scalars(facts.step, {f"train/{key}": value for key, value in figures.items()})
        if self._loads is not None and facts.step % self._job.log.loads_every == 0:
            self._bulk(self._loads, facts)
        return figures

    def _bulk(self, loads: RecordWriter, facts: StepFacts) -> None:
        none = torch.zeros(0, dtype=torch.int64)  # Of layers of other parts.
        loads.add(
            {
                "step": facts.step, "layer": layer, "counts": counts.tolist(),
                "dropped": facts.dropped[layer],
                "by_rank": facts.by_rank.get(layer, none).flatten().numpy(),
            }
            for layer, counts in facts.counts.items()
        )  # fmt: skip
        if facts.spread:
            self._balance = self._balance or RecordWriter(self.out / "balance", BALANCE)
            self._balance.add(one.record(facts.step, at) for at, one in facts.spread.items())

    def validation(self, step: int, loss: float, tokens: int, seconds: float) -> None:
        """One validation pass."""
        self.event("validation", step=step, loss=loss, tokens=tokens, seconds=seconds)
        for sink in self._sinks:
            sink.scalars(step, {"validation/loss": loss})

    def flush(self) -> None:
        """Write bulk facts that are still in memory."""
        for writer in (self._loads, self._balance):
            if writer is not None:
                writer.flush()

    def close(self) -> None:
        """Close everything, whatever any of it says."""
        with ExitStack() as stack:
            stack.callback(self._own.close)
            for sink in self._sinks:
                stack.callback(sink.close)
            stack.callback(self.flush)
