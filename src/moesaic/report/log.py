"""Event logs of a run as typed values, in the order of steps.

A `run_start` event with first step S voids all earlier events of S and later steps, and so does a
step that is logged again. An event with missing or malformed values is skipped, like a broken line.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from moesaic.base.events import read_events
from moesaic.report.series import Floats

Event = Mapping[str, Any]
_DAMAGE = (AttributeError, KeyError, OverflowError, TypeError, ValueError)
_SHARDED = ("ep", "dp_shard", "tp", "etp", "pp")
CheckpointState = Literal["writing", "done", "failed"]
_CHECKPOINT_STATES: dict[str, CheckpointState] = {
    "checkpoint": "writing", "checkpoint_done": "done", "checkpoint_failed": "failed",
}  # fmt: skip
"""Progress of a save, by event."""


class Machine(NamedTuple):
    """Host and device of a rank."""

    host: int
    """Number of the host."""
    kind: str
    """Device kind, as in the cluster file."""
    threads: int
    """CPU threads of the process."""


class Student(NamedTuple):
    """Student of a run."""

    name: str
    teacher: str
    """Name of the student that it learns from; "model": the job's own model."""
    parameters_total: float
    """Number of parameters."""


@dataclass(frozen=True)
class Launch:
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
    """Tokens of a step over all ranks, or other units of progress."""
    parameters_total: float
    """Number of parameters."""
    parameters_active: float
    """Number of parameters that one token uses."""
    peak_bytes: float = math.nan
    """Peak memory of any rank, saves included; logged at the end."""
    machines: tuple[Machine, ...] = ()
    """Machine of each rank; empty if not logged."""
    layout: str = ""
    """Sharded dimensions of the first part, in the form that `--layout` takes; empty if all is
    replicated. If a part is on some of the ranks: ranks and sharded dimensions of each."""
    backends: str = ""
    """Expert kernels and token transport, in words."""
    unit: str = "tokens"
    """Plural noun of the unit of progress."""
    students: tuple[Student, ...] = ()
    """Students of the job."""


@dataclass(frozen=True)
class Validation:
    """One validation pass."""

    step: int
    """Step after which it ran."""
    loss: float
    """Mean loss per unit."""
    figures: dict[str, float] = field(default_factory=dict)
    """Other numbers of the event, such as metrics of clicks, by name."""


@dataclass(frozen=True)
class Day:
    """End of a day of click data."""

    day: int
    """Number of the day."""
    figures: dict[str, float]
    """Numbers of the event by name: metrics of the day's samples before their updates, and rows."""


@dataclass(frozen=True)
class Checkpoint:
    """One save."""

    step: int
    """Step after which it was taken."""
    path: str
    """Directory, as the save named it."""
    state: CheckpointState
    """Progress; "done" means committed."""
    error: str = ""
    """Reason of a failure."""


@dataclass(frozen=True)
class Steps:
    """Steps of a run, one array per logged value; NaN where a value is missing."""

    step: Floats
    loss: Floats
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
    memory_hit_rate: Floats
    """Uses of expert state that found it in memory, 0 to 1; NaN without a memory budget, as in the
    next five."""
    memory_stall_s: Floats
    """Seconds that rank 0 waited for the drive."""
    memory_read_bytes: Floats
    memory_written_bytes: Floats
    memory_read_s: Floats
    """Seconds in which rank 0 had reads in flight."""
    memory_write_s: Floats
    phases: dict[str, Floats]
    """Seconds of each phase on rank 0."""
    figures: dict[str, Floats]
    """Other logged numbers by name, such as metrics of clicks."""

    def __len__(self) -> int:
        return len(self.step)


_COLUMNS = tuple(name for name in Steps.__dataclass_fields__ if name not in ("phases", "figures"))
_Row = tuple[list[float], dict[str, float], dict[str, float]]
"""Values of `_COLUMNS`, seconds by phase, and other numbers by name, for one step."""


@dataclass(frozen=True)
class RankStats:
    """Averages of one rank."""

    rank: int
    """Global rank."""
    phases_s: dict[str, float]
    """Mean seconds of each phase."""
    peak_bytes: float
    """Peak memory."""
    reference_s: dict[int, float] = field(default_factory=dict)
    """Seconds of the reference work, by the step that it followed."""
    cpu_wait_s: dict[int, float] = field(default_factory=dict)
    """Seconds that each step's main thread, ready to run, waited for a processor."""


@dataclass
class Log:
    """Content of the log of rank 0."""

    launches: list[Launch] = field(default_factory=list)
    """Launches, first to last."""
    validations: dict[int, Validation] = field(default_factory=dict)
    """Validation passes, by step."""
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    """Saves, by step."""
    ended: str = ""
    """Reason of the end: "finished", "stopped early", "diverged", or what cut the run off; empty
    while the log has no end."""
    error: str = ""
    """Error that ended a diverged run."""
    days: dict[int, Day] = field(default_factory=dict)
    """Ends of days, by step."""
    passes: dict[int, dict[str, float]] = field(default_factory=dict)
    """Figures of passes over rows on a drive, by the step that began them."""
    rows: dict[int, _Row] = field(default_factory=dict)
    """Values of each step."""

    def add(self, event: Event) -> None:
        """Add one event; raise one of `_DAMAGE` if it is malformed."""
        kind = event["event"]
        if kind == "run_end":
            self._end(event)
            return
        step, time_s = int(event["step"]), number(event["time"])
        if kind == "run_start":
            self._start(event, step - 1, time_s)
        elif self.launches:
            end_s = max(self.launches[-1].end_s, time_s)
            self.launches[-1] = replace(self.launches[-1], end_s=end_s)
        unit = self.launches[-1].unit if self.launches else "tokens"
        if kind == "step":
            self._add_step(event, step, unit)
        elif kind == "validation":
            figures = _figures(event, ("loss", "seconds", unit))
            self.validations[step] = Validation(step, number(event["loss"]), figures)
        elif kind == "day":
            self.days[step] = Day(int(event["day"]), _figures(event, ("day",)))
        elif kind == "pass":
            self.passes[step] = _figures(event, ())
        elif kind in _CHECKPOINT_STATES:
            path, error = (str(event.get(name, "")) for name in ("path", "error"))
            self.checkpoints[step] = Checkpoint(step, path, _CHECKPOINT_STATES[kind], error)

    def steps(self) -> Steps:
        """Return the valid steps, ascending."""
        rows = [row for _, row in sorted(self.rows.items())]
        values = np.array([values for values, _, _ in rows]).reshape(len(rows), len(_COLUMNS)).T
        return Steps(
            **dict(zip(_COLUMNS, values, strict=True)),
            phases=_columns([phases for _, phases, _ in rows]),
            figures=_columns([figures for _, _, figures in rows]),
        )

    def _add_step(self, event: Event, step: int, unit: str) -> None:
        keys = {"tokens": unit, "tokens_per_s": f"{unit}_per_s"}
        names = [keys.get(name, name) for name in _COLUMNS]
        row = [number(event.get(name)) for name in names], _phases(event), _figures(event, names)
        if step in self.rows:
            self._void(step - 1)
        self.rows[step] = row

    def _start(self, event: Event, num_done: int, time_s: float) -> None:
        unit = str(event.get("unit", "tokens"))
        launch = Launch(
            start_s=time_s, end_s=time_s, step=num_done, resumed_from=event.get("resumed_from"),
            ranks=int(event.get("ranks", 0)), device=str(event.get("device", "unknown")),
            tokens_per_step=number(event.get(f"{unit}_per_step")),
            parameters_total=number(event.get("parameters_total")),
            parameters_active=number(event.get("parameters_active")),
            machines=_machines(event.get("rank_hosts") or ()),
            layout=_layout(event),
            backends=str(event.get("backends") or ""), unit=unit,
            students=tuple(
                Student(str(one["name"]), str(one["teacher"]), number(one["parameters_total"]))
                for one in event.get("students") or ()
            ),
        )  # fmt: skip
        self.launches.append(launch)
        self.ended = self.error = ""
        self._void(num_done)

    def _end(self, event: Event) -> None:
        self.ended, self.error = str(event["reason"]), str(event.get("error") or "")
        if self.launches:
            peak = number(event.get("peak_bytes"))
            self.launches[-1] = replace(self.launches[-1], peak_bytes=peak)

    def _void(self, step: int) -> None:
        """Delete the values of steps after `step`."""
        for kept in (self.rows, self.validations, self.checkpoints, self.days, self.passes):
            for late in [key for key in kept if key > step]:
                del kept[late]


def read_log(path: Path) -> Log:
    """Read the log of rank 0."""
    log = Log()
    for event in read_events(path):
        with suppress(*_DAMAGE):
            log.add(event)
    return log


def read_rank(path: Path, rank: int) -> RankStats | None:
    """Return the averages of one rank's log; None if it has no steps."""
    seconds: dict[str, list[float]] = {}
    peaks, machine = [], {"reference_s": dict[int, float](), "cpu_wait_s": dict[int, float]()}
    for event in read_events(path):
        with suppress(*_DAMAGE):
            if event["event"] == "rank_step":
                for name, one in _phases(event).items():
                    seconds.setdefault(name, []).append(one)
                peaks.append(number(event["peak_bytes"]))
                step = int(event["step"])
                for name, by_step in machine.items():
                    for late in [one for one in by_step if one >= step]:
                        del by_step[late]  # The run was resumed from before it.
                    if name in event:
                        by_step[step] = number(event[name])
    if not peaks:
        return None
    means = {name: float(np.mean(values)) for name, values in seconds.items()}
    return RankStats(rank, means, float(np.max(peaks)), **machine)


def number(value: object) -> float:
    """Return `value` if it is a number, else NaN."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return math.nan


def _layout(event: Event) -> str:
    """Return `Launch.layout` of a `run_start` event."""
    parts = event.get("parts") or ()
    if all(len(part["ranks"]) == event.get("ranks") for part in parts):
        return _sharding(event.get("plan") or {})
    return "; ".join(
        f"{part['prefix']} on {','.join(map(str, part['ranks']))} {_sharding(part['plan'])}".strip()
        for part in parts
    )


def _sharding(plan: Mapping[str, Any]) -> str:
    return ",".join(f"{key}={plan[key]}" for key in _SHARDED if plan.get(key, 1) > 1)


def _machines(ranks: Iterable[Mapping[str, Any]]) -> tuple[Machine, ...]:
    """Return the host and device of each rank; none if any rank is damaged."""
    machines = tuple(Machine(one["host"], one["kind"], one["threads"]) for one in ranks)
    return machines if all(isinstance(one.threads, int) for one in machines) else ()


def _figures(event: Event, but: Collection[str]) -> dict[str, float]:
    """Return the numbers of an event by name, except for those in `but`, step and time."""
    return {
        name: number(value)
        for name, value in event.items()
        if name not in but and name not in ("step", "time") and not math.isnan(number(value))
    }


def _columns(rows: Sequence[Mapping[str, float]]) -> dict[str, Floats]:
    """Return an array of each name; NaN where a row lacks it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([row.get(name, math.nan) for row in rows]) for name in names}


def _phases(event: Event) -> dict[str, float]:
    return {name: number(seconds) for name, seconds in event.get("phases", {}).items()}
