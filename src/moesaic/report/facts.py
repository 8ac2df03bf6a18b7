"""Facts of one run, read once from its directory and typed.

Sources are `job.json`, `plan.json`, `versions.json`, `events/`, `loads/` and `balance/`. A resume
appends to the log: steps that it repeats replace the earlier ones. Every column is a float array;
a value that an event lacks is NaN.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from moesaic.base.errors import StoreError
from moesaic.report.balance_stats import BalanceStats, read_balance_stats
from moesaic.report.loads import Loads, read_loads
from moesaic.report.log import (
    Checkpoint,
    Log,
    Migration,
    Part,
    Steps,
    Validation,
    read_log,
    read_rank,
)
from moesaic.report.prediction import Prediction, read_prediction

Floats = npt.NDArray[np.float64]
Status = Literal["finished", "running", "stopped"]

SILENCE_S = 120.0
"""Seconds without an event after which an unfinished run counts as stopped ..."""
SILENT_STEPS = 20
"""... if that is also longer than this many steps."""


@dataclass(frozen=True)
class RankSteps:
    """Steps as one rank logged them."""

    rank: int
    """Global rank."""
    step: Floats
    """Step numbers, ascending."""
    memory_bytes: Floats
    """Memory held after each step."""
    peak_bytes: Floats
    """Peak memory of each step."""
    phases: dict[str, Floats]
    """Seconds of each phase, by step."""


@dataclass(frozen=True)
class RunFacts:
    """One run."""

    name: str
    """Name of the run directory."""
    directory: Path
    """Path as given."""
    job: dict[str, Any]
    """Content of `job.json`."""
    plan: dict[str, Any]
    """Content of `plan.json`."""
    versions: dict[str, Any]
    """Content of `versions.json`."""
    parts: list[Part]
    """Launches of the run, first to last; a resumed run has more than one."""
    steps: Steps
    """Steps as rank 0 logged them."""
    validations: list[Validation]
    """Validation passes, by step."""
    checkpoints: list[Checkpoint]
    """Saves, by step."""
    ranks: list[RankSteps]
    """Steps of each rank that has a log."""
    loads: Loads | None
    """Expert loads; None for a dense model or before the first record."""
    balance: BalanceStats | None
    """Balance of each layer; None if no balance policy ran."""
    prediction: Prediction | None
    """Predicted and measured steps; None if the plan predicted nothing."""
    migrations: tuple[Migration, ...]
    """Experts that migrated to another rank."""
    ended: str
    """Why the run ended; empty while its log has no end."""
    read_at_s: float
    """Time of the reading, in seconds since the epoch."""

    @property
    def unit(self) -> str:
        """Plural noun of the unit in which the job counts progress."""
        return self.parts[-1].unit if self.parts else "tokens"

    @property
    def layout_since(self) -> int:
        """Steps that were finished when the current ranks and layout came into use."""
        found = 0
        for part in reversed(self.parts):
            now = self.parts[-1]
            if (part.ranks, part.layout, part.device) != (now.ranks, now.layout, now.device):
                break
            found = part.step
        return found

    @classmethod
    def read(cls, run_dir: Path, now_s: float | None = None) -> RunFacts:
        """Read `run_dir`; `now_s` (default: the clock) tells a silent run from a running one."""
        if not run_dir.is_dir():
            raise StoreError(
                f"there is no run directory '{run_dir}': name one that `moesaic train` wrote"
            )
        log_path = run_dir / "events" / "rank-0.jsonl"
        if not log_path.is_file():
            raise StoreError(
                f"'{run_dir}' has no events/rank-0.jsonl, so no run started in it: name a "
                "directory that `moesaic train` wrote"
            )
        job, plan, versions = (
            _read_json(run_dir, name) for name in ("job.json", "plan.json", "versions.json")
        )
        log = read_log(log_path)
        ranks = _read_ranks(run_dir / "events", log)
        last_step = int(log.steps.step[-1]) if len(log.steps) else 0
        return cls(
            name=run_dir.resolve().name,
            directory=run_dir,
            job=job,
            plan=plan,
            versions=versions,
            parts=log.parts,
            steps=log.steps,
            validations=log.validations,
            checkpoints=log.checkpoints,
            ranks=ranks,
            prediction=read_prediction(plan, log, _peaks(ranks)),
            loads=read_loads(run_dir / "loads", last_step),
            balance=read_balance_stats(run_dir / "balance", last_step),
            migrations=log.migrations,
            ended=log.ended,
            read_at_s=time.time() if now_s is None else now_s,
        )

    @property
    def status(self) -> Status:
        """State of the run: finished, running, or stopped before its end."""
        if self.ended:
            return "finished" if self.ended == "finished" else "stopped"
        step_s = float(np.nanmedian(self.steps.step_s)) if len(self.steps) else 0.0
        silence_s = self.read_at_s - self.last_event_s
        return "running" if silence_s <= max(SILENCE_S, SILENT_STEPS * step_s) else "stopped"

    @property
    def last_event_s(self) -> float:
        """Time of the last event, in seconds since the epoch; 0 if there is none."""
        return self.parts[-1].end_s if self.parts else 0.0

    @property
    def last_step(self) -> int:
        """Number of finished optimizer steps."""
        return int(self.steps.step[-1]) if len(self.steps) else 0

    @property
    def planned_steps(self) -> int | None:
        """Steps that the job requests."""
        steps = self.setting("train.steps")
        return steps if isinstance(steps, int) else None

    @property
    def seconds(self) -> float:
        """Seconds over all launches, including steps that a resume repeated."""
        return sum(part.end_s - part.start_s for part in self.parts)

    @property
    def newest_checkpoint(self) -> Checkpoint | None:
        """Committed checkpoint of the latest step."""
        done = [checkpoint for checkpoint in self.checkpoints if checkpoint.state == "done"]
        return done[-1] if done else None

    def setting(self, key: str) -> Any:
        """Return the value of a dotted key of the job; None if it is absent."""
        value: Any = self.job
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value


def _read_json(run_dir: Path, name: str) -> dict[str, Any]:
    path = run_dir / name
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(
            f"'{run_dir}' has no {name}, which a run writes before its first step: restore the "
            "file, or report another run"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"'{path}' is not readable JSON ({error}): restore the file") from None
    if not isinstance(value, dict):
        raise StoreError(f"'{path}' holds no JSON object: restore the file")
    return value


def _peaks(ranks: list[RankSteps]) -> Floats:
    return np.concatenate([np.zeros(0), *(rank.peak_bytes for rank in ranks)])


def _read_ranks(directory: Path, log: Log) -> list[RankSteps]:
    paths = {
        int(path.stem[5:]): path
        for path in directory.glob("rank-*.jsonl")
        if path.stem[5:].isdecimal() and path.is_file()
    }
    tables = ((rank, read_rank(paths[rank], log.parts)) for rank in sorted(paths))
    return [
        RankSteps(
            rank, table.column("step"), table.column("memory_bytes"), table.column("peak_bytes"),
            table.phases(),
        )
        for rank, table in tables if len(table)
    ]  # fmt: skip
