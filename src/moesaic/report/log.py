"""The event logs of a run as columns, resumes unravelled.

Rows stand in the order of steps. A start that names step S as the first to do makes void what was
written before it of S and later steps; a step that is written again replaces the earlier row and
whatever followed it.
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
    """Where a rank ran."""

    host: int
    """By number."""
    kind: str
    """Of its device, as a cluster's file calls it."""
    threads: int
    """Of its process."""


@dataclass(frozen=True)
class Part:
    """The log from one start of the run to the next, or to the end."""

    start_s: float
    end_s: float
    """Time of the last event."""
    step: int
    """Steps that were finished at the start."""
    resumed_from: str | None
    ranks: int
    device: str
    tokens_per_step: float
    parameters_total: float
    parameters_active: float
    peak_bytes: float = math.nan
    """The most that a rank held, saves and all; known at its end."""
    machines: tuple[Machine, ...] = ()
    """Of each rank; none where the run did not say so."""
    layout: str = ""
    """Who shares out what, as `--layout` takes it; empty: every rank has everything."""
    engines: str = ""
    """What multiplied experts and carried tokens, in words."""


@dataclass(frozen=True)
class Validation:
    """One validation pass."""

    step: int
    loss: float
    tokens: float
    seconds: float


@dataclass(frozen=True)
class Checkpoint:
    """One save."""

    step: int
    path: str
    state: Literal["writing", "done", "failed"]
    blocking_s: float
    """Time that training waited."""
    num_bytes: float = math.nan
    seconds: float = math.nan
    error: str = ""


class Moves(NamedTuple):
    """Experts of a layer that changed their ranks for good, behind a step."""

    step: int
    layer: int
    experts: int
    num_bytes: float
    before: float
    """Rows of the busiest rank over the mean, since experts moved last."""
    after: float
    """As they would have been where experts live now."""


@dataclass(frozen=True)
class Steps:
    """The steps of a run, one array a figure."""

    step: Floats
    time: Floats
    loss: Floats
    total_loss: Floats
    balance_loss: Floats
    z_loss: Floats
    grad_norm: Floats
    lr: Floats
    tokens: Floats
    step_s: Floats
    tokens_per_s: Floats
    dropped: Floats
    flips: Floats
    loss_scale: Floats
    """Of fp16 alone, as is `skipped`: 1 where nothing was updated."""
    skipped: Floats
    copies: Floats
    """Of experts, if a policy of balance was asked, as are the next three: rows of the busiest rank
    over the mean without copies and with them, and what deciding took."""
    busiest_before: Floats
    busiest_after: Floats
    planning_s: Floats
    memory_bytes: Floats
    phases: dict[str, Floats]
    """Seconds of each phase on rank 0."""

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class Log:
    """All that rank 0 wrote."""

    parts: list[Part]
    steps: Steps
    validations: list[Validation]
    checkpoints: list[Checkpoint]
    ended: str
    """Why the run ended: "finished", or what cut it off; empty while its log has no end."""
    prediction: Mapping[str, Any] | None = None
    """What the run said at its end of what its plan predicted."""
    moves: tuple[Moves, ...] = ()
    """In the order of steps and layers."""


class StepTable:
    """Rows of figures in the order of steps; a column appears with its first value."""

    def __init__(self) -> None:
        self._columns: dict[str, array[float]] = {"step": array("d"), "time": array("d")}

    def __len__(self) -> int:
        return len(self._columns["step"])

    def add(self, step: int, event: Mapping[str, Any]) -> None:
        """Append the row of `step`, in place of any row of that step or a later one."""
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
        """Forget the rows of steps after `step`."""
        steps = self._columns["step"]
        if steps and steps[-1] > step:
            keep = bisect.bisect_right(steps, step)
            for column in self._columns.values():
                del column[keep:]

    def column(self, name: str) -> Floats:
        """One column; all NaN if no event had it."""
        if name not in self._columns:
            return np.full(len(self), np.nan)
        return np.array(self._columns[name], dtype=np.float64)

    def phases(self) -> dict[str, Floats]:
        """The columns of phases by name, in the order they first appeared."""
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
    moves: dict[tuple[int, int], Moves] = field(default_factory=dict)


def read_log(path: Path) -> Log:
    """The log of rank 0."""
    draft = _Draft()
    for event in read_events(path):
        step, now_s = event.get("step"), number(event.get("time"))
        if event["event"] == "run_end":
            _end(draft, event)
        if not _counts_steps(step):
            continue
        if event["event"] == "run_start":
            _start(draft, event, step)
        elif draft.parts and now_s > draft.parts[-1].end_s:
            draft.parts[-1] = replace(draft.parts[-1], end_s=now_s)
        if event["event"] == "step":
            draft.table.add(step, event)
        elif event["event"] == "validation":
            draft.validations[step] = Validation(
                step, number(event.get("loss")), number(event.get("tokens")),
                number(event.get("seconds")),
            )  # fmt: skip
        elif event["event"] == "prediction":
            draft.prediction = event
        elif event["event"] == "rehomed":
            _note_moves(draft.moves, event, step)
        else:
            _note_checkpoint(draft.checkpoints, event, step)
    return Log(
        draft.parts,
        _steps(draft.table),
        sorted(draft.validations.values(), key=lambda validation: validation.step),
        sorted(draft.checkpoints.values(), key=lambda checkpoint: checkpoint.step),
        draft.ended,
        draft.prediction,
        tuple(one for _, one in sorted(draft.moves.items())),
    )


def _end(draft: _Draft, event: Mapping[str, Any]) -> None:
    draft.ended = str(event.get("reason", ""))
    if draft.parts:
        peak = number(event.get("peak_bytes"))
        draft.parts[-1] = replace(draft.parts[-1], peak_bytes=peak)


def read_rank(path: Path, parts: list[Part]) -> StepTable:
    """The `rank_step` rows of one rank's log, without those that a later start of `parts` voids."""
    table, starts = StepTable(), list(parts[1:])
    for event in read_events(path):
        step, now_s = event.get("step"), number(event.get("time"))
        if event["event"] != "rank_step" or not _counts_steps(step):
            continue
        while starts and starts[0].start_s <= now_s:
            table.cut(starts.pop(0).step)
        table.add(step, event)
    for part in starts:
        table.cut(part.step)
    return table


def _counts_steps(value: object) -> TypeGuard[int]:
    """Whether `value` is the number of a step, and no flag, nor more than is exact in a table."""
    return type(value) is int and 0 <= value <= _MOST_STEPS


def number(value: object) -> float:
    """`value` if it is a number, else NaN."""
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
    for where in [where for where in draft.moves if where[0] > done]:
        del draft.moves[where]
    ranks = event.get("ranks")
    draft.parts.append(
        Part(
            start_s=now_s,
            end_s=now_s,
            step=done,
            resumed_from=None if origin is None else str(origin),
            ranks=ranks if isinstance(ranks, int) else 1,
            device=str(event.get("device", "unknown")),
            tokens_per_step=number(event.get("tokens_per_step")),
            parameters_total=number(event.get("parameters_total")),
            parameters_active=number(event.get("parameters_active")),
            machines=_machines(event.get("machines")),
            layout=_layout(event.get("plan")),
            engines=str(event.get("engines") or ""),
        )
    )


def _layout(plan: object) -> str:
    """What is shared out, of a plan's decisions."""
    if not isinstance(plan, Mapping):
        return ""
    counted = [(key, plan.get(key)) for key in ("ep", "shard", "tp", "etp", "pp")]
    found = [f"{key}={value}" for key, value in counted if isinstance(value, int) and value > 1]
    return ",".join(
        [*found, *(["embedding=columns"] if plan.get("embedding") == "columns" else [])]
    )


def _machines(value: object) -> tuple[Machine, ...]:
    """As a start tells them; none if there is one that is not as it should be."""
    found = list[Machine]()
    for one in value if isinstance(value, list) else ():
        told: dict[str, Any] = one if isinstance(one, dict) else {}
        host, kind, threads = (told.get(name) for name in ("host", "kind", "threads"))
        if type(host) is not int or type(kind) is not str or type(threads) is not int:
            return ()
        found.append(Machine(host, kind, max(threads, 1)))
    return tuple(found)


def _note_moves(kept: dict[tuple[int, int], Moves], event: Mapping[str, Any], step: int) -> None:
    layer, moves = event.get("layer"), event.get("moves")
    if type(layer) is int and isinstance(moves, list):
        names = ("bytes", "busiest_before", "busiest_after")
        kept[step, layer] = Moves(
            step, layer, len(moves), *(number(event.get(name)) for name in names)
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


def _steps(table: StepTable) -> Steps:
    names = [name for name in Steps.__dataclass_fields__ if name != "phases"]
    return Steps(**{name: table.column(name) for name in names}, phases=table.phases())
