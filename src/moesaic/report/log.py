"""Event logs of a run as columns, in the order of steps.

A `run_start` event with first step S voids the earlier rows of S and later steps. A step that is
logged again replaces its earlier row and all rows after it.
"""

from __future__ import annotations

import bisect
import math
from array import array
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from moesaic.base.events import read_events

Floats = npt.NDArray[np.float64]
_PHASE = "phases."
_MOST_STEPS = 1 << 53


class Machine(NamedTuple):
    """Host and device of a rank."""

    host: int
    """Number of the host."""
    kind: str
    """Device kind, as in the cluster file."""
    threads: int
    """CPU threads of the process."""


@dataclass(frozen=True)
class Part:
    """One launch of the run: its log from a `run_start` event to the next one or to the end."""

    start_s: float
    """Time of the start, in seconds since the epoch."""
    end_s: float
    """Time of the last event, in seconds since the epoch."""
    step: int
    """Number of steps finished before the start."""
    resumed_from: str | None
    """Checkpoint that was resumed; None for a new run."""
    ranks: int
    """Number of ranks."""
    device: str
    """Device of rank 0."""
    tokens_per_step: float
    """Tokens of a step over all ranks."""
    parameters_total: float
    """Number of parameters."""
    parameters_active: float
    """Number of parameters that one token uses."""
    peak_bytes: float = math.nan
    """Peak memory of any rank, saves included; logged at the end."""
    machines: tuple[Machine, ...] = ()
    """Machine of each rank; empty if not logged."""
    layout: str = ""
    """Sharded dimensions, in the form that `--layout` takes; empty if all is replicated."""
    backends: str = ""
    """Expert kernels and token transport, in words."""
    unit: str = "tokens"
    """Plural noun of the unit in which the job counts progress; "tokens" here stands for it."""


@dataclass(frozen=True)
class Validation:
    """One validation pass."""

    step: int
    """Step after which it ran."""
    loss: float
    """Mean loss per token."""
    tokens: float
    """Number of tokens."""
    seconds: float
    """Time it took."""


@dataclass(frozen=True)
class Checkpoint:
    """One save."""

    step: int
    """Step after which it was taken."""
    path: str
    """Directory, relative to the run."""
    state: Literal["writing", "done", "failed"]
    """Progress; "done" means committed."""
    blocking_s: float
    """Seconds that training waited."""
    num_bytes: float = math.nan
    """Size."""
    seconds: float = math.nan
    """Seconds until it was committed."""
    error: str = ""
    """Reason of a failure."""


class Migration(NamedTuple):
    """Experts of one layer that migrated to another rank."""

    step: int
    """Step after which they migrated."""
    layer: int
    """Layer of the experts."""
    experts: int
    """Number of experts."""
    num_bytes: float
    """Bytes moved over all ranks."""
    before: float
    """Tokens of the busiest rank over the mean, since the previous migration."""
    after: float
    """The same tokens with the new owner ranks."""


@dataclass(frozen=True)
class Steps:
    """Steps of a run, one array per logged value."""

    step: Floats
    time: Floats
    loss: Floats
    balance_loss: Floats
    z_loss: Floats
    grad_norm: Floats
    lr: Floats
    tokens: Floats
    step_s: Floats
    tokens_per_s: Floats
    dropped: Floats
    num_replay_mismatches: Floats
    loss_scale: Floats
    """Loss scale of fp16."""
    skipped: Floats
    """1 where fp16 overflowed and the optimizer skipped its step."""
    replicas: Floats
    """Expert replicas over all layers; NaN if no balance policy ran, as in the next three."""
    imbalance_before: Floats
    """Tokens of the busiest rank over the mean without replicas, in the least even layer."""
    imbalance_after: Floats
    """The same with replicas."""
    planning_s: Floats
    """Seconds of planning replicas on rank 0."""
    memory_bytes: Floats
    phases: dict[str, Floats]
    """Seconds of each phase on rank 0."""

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class Log:
    """Content of the log of rank 0."""

    parts: list[Part]
    """Launches, first to last."""
    steps: Steps
    """Valid steps."""
    validations: list[Validation]
    """Validation passes, by step."""
    checkpoints: list[Checkpoint]
    """Saves, by step."""
    ended: str
    """Reason of the end: "finished" or what cut the run off; empty while the log has no end."""
    prediction: Mapping[str, Any] | None = None
    """The `prediction` event of the end of the run."""
    migrations: tuple[Migration, ...] = ()
    """Migrated experts, by step and layer."""


class StepTable:
    """Logged values by step; a column appears with its first value."""

    def __init__(self) -> None:
        self._columns: dict[str, array[float]] = {"step": array("d"), "time": array("d")}

    def __len__(self) -> int:
        return len(self._columns["step"])

    def add(self, step: int, event: Mapping[str, Any]) -> None:
        """Append the row of `step`; it replaces the rows of that step and later ones."""
        self.cut(step - 1)
        size = len(self)
        for name, value in _flat(event):
            if name not in self._columns:
                self._columns[name] = array("d", [math.nan]) * size
            self._columns[name].append(value)
        for column in self._columns.values():
            if len(column) == size:
                column.append(math.nan)

    def cut(self, step: int) -> None:
        """Delete the rows of steps after `step`."""
        steps = self._columns["step"]
        if steps and steps[-1] > step:
            keep = bisect.bisect_right(steps, step)
            for column in self._columns.values():
                del column[keep:]

    def column(self, name: str) -> Floats:
        """Return one column; all NaN if no event had it."""
        if name not in self._columns:
            return np.full(len(self), np.nan)
        return np.array(self._columns[name], dtype=np.float64)

    def phases(self) -> dict[str, Floats]:
        """Return the columns of phases by name, in order of first appearance."""
        names = [name for name in self._columns if name.startswith(_PHASE)]
        return {name.removeprefix(_PHASE): self.column(name) for name in names}


@dataclass
class _Draft:
    parts: list[Part] = field(default_factory=list)
    table: StepTable = field(default_factory=StepTable)
    validations: dict[int, Validation] = field(default_factory=dict)
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    ended: str = ""
    prediction: Mapping[str, Any] | None = None
    migrations: dict[tuple[int, int], Migration] = field(default_factory=dict)


def read_log(path: Path) -> Log:
    """Read the log of rank 0."""
    draft = _Draft()
    for event in read_events(path):
        step, now_s = event.get("step"), number(event.get("time"))
        if event["event"] == "run_end":
            _end(draft, event)
        if not _is_step(step):
            continue
        if event["event"] == "run_start":
            _start(draft, event, step)
        elif draft.parts and now_s > draft.parts[-1].end_s:
            draft.parts[-1] = replace(draft.parts[-1], end_s=now_s)
        if event["event"] == "step":
            draft.table.add(step, event)
        elif event["event"] == "validation":
            draft.validations[step] = Validation(
                step, number(event.get("loss")), number(event.get(_unit(draft.parts))),
                number(event.get("seconds")),
            )  # fmt: skip
        elif event["event"] == "prediction":
            draft.prediction = event
        elif event["event"] == "decisions":
            _note_migrations(draft.migrations, event, step)
        else:
            _note_checkpoint(draft.checkpoints, event, step)
    return Log(
        draft.parts,
        _steps(draft.table, _unit(draft.parts)),
        sorted(draft.validations.values(), key=lambda validation: validation.step),
        sorted(draft.checkpoints.values(), key=lambda checkpoint: checkpoint.step),
        draft.ended,
        draft.prediction,
        tuple(one for _, one in sorted(draft.migrations.items())),
    )


def _unit(parts: list[Part]) -> str:
    return parts[-1].unit if parts else "tokens"


def _end(draft: _Draft, event: Mapping[str, Any]) -> None:
    draft.ended = str(event.get("reason", ""))
    if draft.parts:
        peak = number(event.get("peak_bytes"))
        draft.parts[-1] = replace(draft.parts[-1], peak_bytes=peak)


def read_rank(path: Path, parts: list[Part]) -> StepTable:
    """Read the `rank_step` rows of one rank; a later start in `parts` voids rows."""
    table, starts = StepTable(), list(parts[1:])
    for event in read_events(path):
        step, now_s = event.get("step"), number(event.get("time"))
        if event["event"] != "rank_step" or not _is_step(step):
            continue
        while starts and starts[0].start_s <= now_s:
            table.cut(starts.pop(0).step)
        table.add(step, event)
    for part in starts:
        table.cut(part.step)
    return table


def _is_step(value: object) -> TypeGuard[int]:
    """Return whether `value` is a step number that a float represents exactly."""
    return type(value) is int and 0 <= value <= _MOST_STEPS


def number(value: object) -> float:
    """Return `value` if it is a number, else NaN."""
    if type(value) is float:
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with suppress(OverflowError):
            return float(value)
    return math.nan


def _start(draft: _Draft, event: Mapping[str, Any], step: int) -> None:
    now_s, origin = number(event.get("time")), event.get("resumed_from")
    done = max(step - 1, 0)
    draft.ended, draft.prediction = "", None
    draft.table.cut(done)
    for kept in (draft.validations, draft.checkpoints):
        for late in [key for key in kept if key > done]:
            del kept[late]
    for key in [key for key in draft.migrations if key[0] > done]:
        del draft.migrations[key]
    ranks, unit = event.get("ranks"), str(event.get("unit", "tokens"))
    draft.parts.append(
        Part(
            start_s=now_s,
            end_s=now_s,
            step=done,
            resumed_from=None if origin is None else str(origin),
            ranks=ranks if isinstance(ranks, int) else 1,
            device=str(event.get("device", "unknown")),
            tokens_per_step=number(event.get(f"{unit}_per_step")),
            parameters_total=number(event.get("parameters_total")),
            parameters_active=number(event.get("parameters_active")),
            machines=_machines(event.get("rank_hosts")),
            layout=_layout(event.get("plan")),
            backends=str(event.get("backends") or ""),
            unit=unit,
        )
    )


def _layout(plan: object) -> str:
    """Return the sharded dimensions of a plan."""
    if not isinstance(plan, Mapping):
        return ""
    counted = [(key, plan.get(key)) for key in ("ep", "dp_shard", "tp", "etp", "pp")]
    found = [f"{key}={value}" for key, value in counted if isinstance(value, int) and value > 1]
    return ",".join(
        [*found, *(["embedding=columns"] if plan.get("embedding") == "columns" else [])]
    )


def _machines(value: object) -> tuple[Machine, ...]:
    """Return the machines of a `run_start` event; none if one is malformed."""
    found = list[Machine]()
    for one in value if isinstance(value, list) else ():
        fields: dict[str, Any] = one if isinstance(one, dict) else {}
        host, kind, threads = (fields.get(name) for name in ("host", "kind", "threads"))
        if type(host) is not int or type(kind) is not str or type(threads) is not int:
            return ()
        found.append(Machine(host, kind, max(threads, 1)))
    return tuple(found)


def _note_migrations(
    kept: dict[tuple[int, int], Migration], event: Mapping[str, Any], step: int
) -> None:
    migrations = event.get("migration")
    for one in migrations if isinstance(migrations, list) else ():
        layer, moves = one.get("layer"), one.get("moves")
        if type(layer) is int and isinstance(moves, list):
            names = ("bytes", "imbalance_before", "imbalance_after")
            kept[step, layer] = Migration(
                step, layer, len(moves), *(number(one.get(name)) for name in names)
            )


def _note_checkpoint(kept: dict[int, Checkpoint], event: Mapping[str, Any], step: int) -> None:
    kind = event["event"]
    if kind == "checkpoint":
        path, blocking_s = str(event.get("path", "")), number(event.get("blocking_s"))
        kept[step] = Checkpoint(step, path, "writing", blocking_s)
    elif kind == "checkpoint_done":
        begun = kept.get(step, Checkpoint(step, str(event.get("path", "")), "done", math.nan))
        kept[step] = replace(
            begun,
            state="done",
            num_bytes=number(event.get("bytes")),
            blocking_s=number(event.get("blocking_s", begun.blocking_s)),
            seconds=number(event.get("seconds")),
        )
    elif kind == "checkpoint_failed":
        begun = kept.get(step, Checkpoint(step, "", "failed", math.nan))
        kept[step] = replace(begun, state="failed", error=str(event.get("error", "")))


def _flat(event: Mapping[str, Any]) -> list[tuple[str, float]]:
    row: list[tuple[str, float]] = []
    for name, value in event.items():
        if name == "phases" and isinstance(value, dict):
            row += [(f"{_PHASE}{phase}", number(seconds)) for phase, seconds in value.items()]
        elif name != "event":
            row.append((name, number(value)))
    return row


def _steps(table: StepTable, unit: str) -> Steps:
    columns = {name: name for name in Steps.__dataclass_fields__ if name != "phases"}
    columns |= {"tokens": unit, "tokens_per_s": f"{unit}_per_s"}
    values = {name: table.column(column) for name, column in columns.items()}
    return Steps(**values, phases=table.phases())
