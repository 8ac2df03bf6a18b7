"""Work of one rank in a training run, and error reports of all ranks that `--nproc` starts.

Such a rank prints no errors. It writes a failure to the file that torch's agent names; the parent
reads all files and prints one message.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from moesaic.base.errors import UserError, as_user_error
from moesaic.base.files import atomic_replace
from moesaic.cli import screen
from moesaic.cli.progress import make_progress
from moesaic.cli.start import exit_on_interrupt
from moesaic.train.job_file import load_job

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable of torch's agent: path for the report of a failure."""
MEMORY_HINT = (
    "use smaller batches or sequences, or more ranks (moesaic train JOB.toml --dry-run shows the "
    "memory of a rank)"
)


@dataclass(frozen=True)
class TrainTask:
    """Task of a training run, the same on every rank."""

    job: str
    """Path of the job file."""
    sets: list[str]
    """Items of `--set`."""
    out: str | None
    """Run directory; None: rank 0 chooses one."""
    resume: str | None
    """Path of a checkpoint, or "auto" for the newest; None: a new run."""
    as_json: bool
    """Keep stdout for JSON."""
    command: list[str]
    """Command line of the user."""
    plan: str | None = None
    """Path of the plan; None: the job's own."""

    @property
    def resumed_run(self) -> Path | None:
        """Run of the checkpoint to resume from; None for a new run."""
        if self.resume in (None, "auto"):
            return Path(self.out) if self.resume and self.out else None
        return Path(self.resume).absolute().parent.parent


def run_train_task(task: TrainTask) -> tuple[Path, bool]:
    """Train; return the run directory and whether this is rank 0."""
    with exit_on_interrupt():
        from moesaic.dist.world import World
        from moesaic.train.lm import LanguageModelKind
        from moesaic.train.trainer import collective_timeout, train

    plan = None if task.plan is None else Path(task.plan)
    loaded = load_job(Path(task.job), task.sets, task.resumed_run, plan)
    with exit_on_interrupt():
        world = World.from_launcher(loaded.job.train.device, collective_timeout(loaded.job))
    try:
        out = Path(world.run_on_rank_zero(lambda: task.out or str(default_out(Path(task.job)))))
        console = screen.err() if task.as_json else screen.out()
        progress = make_progress(console, world.is_rank_zero)
        try:
            train(loaded, out, task.resume, world, progress, LanguageModelKind())
        finally:
            progress.done()
    except BaseException:
        world.close_transports()
        raise
    world.leave()
    return out, world.is_rank_zero


def default_out(job: Path) -> Path:
    """Return runs/NAME-DATE-TIME, a directory that does not exist yet."""
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    paths = [Path("runs") / f"{job.stem}-{now}{suffix}" for suffix in ("", "-2", "-3", "-4", "-5")]
    return next((path for path in paths if not path.exists()), paths[-1])


def main() -> int:
    """Run the task in the first argument, as one rank; return the exit status."""
    task = TrainTask(**json.loads(sys.argv[1]))
    sys.argv = task.command
    return run_reporting_errors(lambda: run_train_task(task), MEMORY_HINT)


def run_reporting_errors(work: Callable[[], object], memory_hint: str) -> int:
    """Do a rank's work; write errors to the error file and return the exit status.

    `memory_hint` is the remedy against a lack of memory.
    """
    try:
        work()
    except UserError as error:
        _write_error(str(error), "user")
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - the parent prints it
        user_error = as_user_error(error, memory_hint)
        if user_error is not None:
            _write_error(str(user_error), "user")
            return 2
        from moesaic.dist.world import is_peer_lost

        _write_error(traceback.format_exc(), "lost" if is_peer_lost(error) else "bug")
        return 1
    return 0


def _write_error(text: str, kind: str) -> None:
    """Write a failure in the form that torch's agent and the parent read."""
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    record = {
        "message": {"message": text, "extraInfo": extra},
        "kind": kind, "text": text, "time": time.time(),
    }  # fmt: skip
    try:
        # Atomically: the agent may read at any moment.
        with atomic_replace(Path(os.environ[ERROR_FILE])) as partial:
            partial.write_text(json.dumps(record), encoding="utf-8")
    except OSError:
        print(text, file=sys.stderr)


def encode(task: TrainTask) -> str:
    """Return the task as an argument of a rank's process."""
    return json.dumps(asdict(task))
