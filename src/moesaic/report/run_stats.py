"""Statistics of one run, read once from its directory and typed.

Sources are `job.json`, `plan.json`, `versions.json`, `events/`, `loads/` and `balance/`.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from moesaic.base.errors import StoreError
from moesaic.base.events import find_run_log
from moesaic.report.divergence import Divergence, find_divergence
from moesaic.report.loads import BalanceStats, Loads, read_balance_stats, read_loads
from moesaic.report.log import (
    Checkpoint,
    Day,
    Launch,
    RankStats,
    Steps,
    Validation,
    read_log,
    read_rank,
)
from moesaic.report.prediction import Prediction, read_prediction

Status = Literal["finished", "stopped early", "diverged", "running", "stopped"]

DIVERGED = "diverged"
"""Reason of an end by a loss or gradient that is not finite."""
_PLANNED_ENDS: dict[str, Status] = {
    "finished": "finished", "stopped early": "stopped early",
}  # fmt: skip
"""Status by the reason of an end that the run or its caller chose."""
STUDENT_TERMS = ("logits", "attention", "relations", "hidden")
"""Figures of a student with its distances from its teacher, behind its name and a slash."""
SILENCE_S = 120.0
"""Seconds without an event after which an unfinished run counts as stopped ..."""
SILENT_STEPS = 20
"""... if that is also longer than this many steps."""


@dataclass(frozen=True)
class RunStats:
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
    launches: list[Launch]
    """Launches of the run, first to last; a resumed run has more than one."""
    steps: Steps
    """Steps as rank 0 logged them."""
    validations: list[Validation]
    """Validation passes, by step."""
    days: list[Day]
    """Days of click data that have ended, by step."""
    passes: dict[int, dict[str, float]]
    """Figures of passes over table rows on a drive, by their first step; rank 0 logs its own."""
    checkpoints: list[Checkpoint]
    """Saves, by step."""
    ranks: list[RankStats]
    """Averages of each rank that has a log."""
    loads: Loads | None
    """Expert loads; None for a dense model or before the first record."""
    balance: BalanceStats | None
    """Balance of each layer; None if no balance policy ran."""
    prediction: Prediction | None
    """Predicted and measured steps; None if the plan predicted nothing."""
    ended: str
    """Why the run ended; empty while its log has no end."""
    read_at_s: float
    """Time of the reading, in seconds since the epoch."""
    error: str = ""
    """Error that ended a diverged run."""

    @classmethod
    def read(cls, run_dir: Path, now_s: float | None = None) -> RunStats:
        """Read `run_dir`; `now_s` (default: the clock) tells a silent run from a running one."""
        log_path = find_run_log(run_dir)
        job, plan, versions = (
            _read_json(run_dir / name) for name in ("job.json", "plan.json", "versions.json")
        )
        log = read_log(log_path)
        steps, ranks = log.steps(), _read_ranks(run_dir / "events")
        last_step = int(steps.step[-1]) if len(steps) else 0
        return cls(
            name=run_dir.resolve().name,
            directory=run_dir,
            job=job,
            plan=plan,
            versions=versions,
            launches=log.launches,
            steps=steps,
            validations=[one for _, one in sorted(log.validations.items())],
            days=[one for _, one in sorted(log.days.items())],
            passes=dict(sorted(log.passes.items())),
            checkpoints=[one for _, one in sorted(log.checkpoints.items())],
            ranks=ranks,
            loads=read_loads(run_dir / "loads", last_step),
            balance=read_balance_stats(run_dir / "balance", last_step),
            prediction=read_prediction(plan, log.launches, steps, ranks),
            ended=log.ended,
            error=log.error,
            read_at_s=time.time() if now_s is None else now_s,
        )

    @property
    def unit(self) -> str:
        """Plural noun of the unit of progress."""
        return self.launches[-1].unit if self.launches else "tokens"

    @property
    def status(self) -> Status:
        """State of the run: running, diverged, finished, stopped early by its `on_step`, or cut
        off."""
        if not self.ended and not self._is_silent:
            return "running"
        if self.ended == DIVERGED or self.divergence is not None:
            return "diverged"
        return _PLANNED_ENDS.get(self.ended, "stopped")

    @property
    def _is_silent(self) -> bool:
        """True if the log has no event for longer than steps take."""
        step_s = float(np.nanmedian(self.steps.step_s)) if len(self.steps) else 0.0
        silence_s = self.read_at_s - self.last_event_s
        return silence_s > max(SILENCE_S, SILENT_STEPS * step_s)

    @cached_property
    def divergence(self) -> Divergence | None:
        """How the loss of a model diverged; None if none did.

        Students without a loss on logits do not learn the text, so theirs are not judged.
        """
        weights = {one["name"]: one.get("losses", {}) for one in self.setting("student") or ()}
        students = [
            name for name, one in weights.items() if one.get("text", 0) or one.get("logits", 0)
        ]
        return find_divergence(
            self.steps, has_error=self.ended == DIVERGED, is_frozen=self.is_frozen,
            students=students,
        )  # fmt: skip

    @property
    def last_event_s(self) -> float:
        """Time of the last event, in seconds since the epoch; 0 if there is none."""
        return self.launches[-1].end_s if self.launches else 0.0

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
        return sum(launch.end_s - launch.start_s for launch in self.launches)

    @property
    def newest_checkpoint(self) -> Checkpoint | None:
        """Committed checkpoint of the latest step."""
        done = [checkpoint for checkpoint in self.checkpoints if checkpoint.state == "done"]
        return done[-1] if done else None

    @property
    def kept_checkpoints(self) -> list[Checkpoint]:
        """Committed checkpoints that are still on disk."""
        return [one for one in self.checkpoints if (self.path_of(one) / "COMMIT").is_file()]

    def path_of(self, checkpoint: Checkpoint) -> Path:
        """Return where a checkpoint is now; its own path is that of the save."""
        return self.directory / "checkpoints" / Path(checkpoint.path).name

    @property
    def students(self) -> list[str]:
        """Names of the students that have logged a loss, in their order."""
        logged = [*self.steps.figures, *(name for one in self.validations for name in one.figures)]
        pairs = (name.rpartition("/") for name in logged)
        terms = {"loss", *STUDENT_TERMS}
        return list(dict.fromkeys(name for name, _, term in pairs if name and term in terms))

    @property
    def is_frozen(self) -> bool:
        """True if the job's own model is a teacher that does not train."""
        return bool(self.setting("distill.frozen"))

    def setting(self, key: str) -> Any:
        """Return the value of a dotted key of the job; None if it is absent."""
        value: Any = self.job
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(
            f"'{path}' is not readable JSON ({error}): restore the file, or report another run"
        ) from None
    return value


def _read_ranks(directory: Path) -> list[RankStats]:
    logs = (path for path in directory.glob("rank-*.jsonl") if path.is_file())
    numbers = (path.stem.removeprefix("rank-") for path in logs)
    ranks = sorted(int(number) for number in numbers if number.isdecimal())
    stats = (read_rank(directory / f"rank-{rank}.jsonl", rank) for rank in ranks)
    return [one for one in stats if one is not None]
