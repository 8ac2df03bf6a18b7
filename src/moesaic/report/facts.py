"""What a run directory says of its run, read once and typed.

Only files of the run are read: `job.json`, `plan.json`, `versions.json`, `events/`, `loads/`
and `balance/`.
A log is appended to on resume: what an earlier part wrote of the steps that the later part does
again is void. Every column is a float array; what an event lacks is NaN.
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
from moesaic.report.loads import Loads, read_loads
from moesaic.report.log import Checkpoint, Log, Moves, Part, Steps, Validation, read_log, read_rank
from moesaic.report.prediction import Prediction, read_prediction
from moesaic.report.spreads import Spreads, read_spreads

Floats = npt.NDArray[np.float64]
Status = Literal["finished", "running", "stopped"]

SILENCE_S = 120.0
"""A run without an end that has been silent for this long, and for many steps, has stopped."""
SILENT_STEPS = 20


@dataclass(frozen=True)
class RankSteps:
    """What one rank says of its own steps."""

    rank: int
    step: Floats
    memory_bytes: Floats
    peak_bytes: Floats
    phases: dict[str, Floats]
    """Seconds of each phase, step by step."""


@dataclass(frozen=True)
class RunFacts:
    """One run, as its directory tells it."""

    name: str
    directory: Path
    job: dict[str, Any]
    plan: dict[str, Any]
    versions: dict[str, Any]
    parts: list[Part]
    """From one start to the end or the next start; more than one for a resumed run."""
    steps: Steps
    validations: list[Validation]
    checkpoints: list[Checkpoint]
    ranks: list[RankSteps]
    loads: Loads | None
    """Expert loads; none for a dense model, or before the first were written."""
    spreads: Spreads | None
    """What a policy of balance made of each layer; none where nobody was asked."""
    prediction: Prediction | None
    """What its plan predicted, and what came of it; none where nothing was predicted."""
    moves: tuple[Moves, ...]
    """Experts that changed their ranks for good."""
    ended: str
    """Why it ended; empty while its log has no end."""
    read_at_s: float

    @property
    def laid_out_at(self) -> int:
        """Steps that were finished when it began to be on such ranks, in such a layout, as now."""
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
                f"there is no run directory '{run_dir}': give the one that `moesaic train` wrote"
            )
        log_path = run_dir / "events" / "rank-0.jsonl"
        if not log_path.is_file():
            raise StoreError(
                f"'{run_dir}' has no events/rank-0.jsonl, so it is not the directory of a started "
                "run: give the one that `moesaic train` wrote"
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
            spreads=read_spreads(run_dir / "balance", last_step),
            moves=log.moves,
            ended=log.ended,
            read_at_s=time.time() if now_s is None else now_s,
        )

    @property
    def status(self) -> Status:
        """Whether the run finished, is going on, or fell silent before its end."""
        if self.ended:
            return "finished" if self.ended == "finished" else "stopped"
        step_s = float(np.nanmedian(self.steps.step_s)) if len(self.steps) else 0.0
        silence_s = self.read_at_s - self.last_event_s
        return "running" if silence_s <= max(SILENCE_S, SILENT_STEPS * step_s) else "stopped"

    @property
    def last_event_s(self) -> float:
        """When the run last wrote of itself; 0 if it never did."""
        return self.parts[-1].end_s if self.parts else 0.0

    @property
    def last_step(self) -> int:
        """Finished optimizer steps; 0 before the first."""
        return int(self.steps.step[-1]) if len(self.steps) else 0

    @property
    def planned_steps(self) -> int | None:
        """Steps that the job asks for."""
        steps = self.setting("train.steps")
        return steps if isinstance(steps, int) else None

    @property
    def seconds(self) -> float:
        """Time over all parts, work that a resume threw away included."""
        return sum(part.end_s - part.start_s for part in self.parts)

    @property
    def newest_checkpoint(self) -> Checkpoint | None:
        """The committed checkpoint of the greatest step."""
        done = [checkpoint for checkpoint in self.checkpoints if checkpoint.state == "done"]
        return done[-1] if done else None

    def setting(self, key: str) -> Any:
        """The value of a dotted key of the job; None where there is none."""
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
            f"'{run_dir}' has no {name}, which every run writes before its first step: "
            "restore the file, or report another run"
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
