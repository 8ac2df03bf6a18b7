"""One rank's part in a training run, and the end of any rank that `--nproc` started.

Such a process says nothing of its own: a failure goes to the file that torch's agent names, and
the parent, which reads them all, tells the user once.
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
from moesaic.base.files import replacing
from moesaic.cli import screen
from moesaic.cli.progress import watcher
from moesaic.cli.start import at_once
from moesaic.train.jobfile import load_job, obey

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where torch's agent wants a failure written."""
LESS_MEMORY = (
    "take smaller batches or sequences, or more ranks (moesaic train JOB.toml --dry-run says what "
    "a rank needs)"
)


@dataclass(frozen=True)
class Part:
    """What a rank must know to take part; every rank is told the same."""

    job: str
    """Path of the job file."""
    sets: list[str]
    """Items of --set."""
    out: str | None
    """The run's directory; None: rank 0 chooses one."""
    resume: str | None
    """A checkpoint, or "auto"."""
    as_json: bool
    """Keep stdout for JSON."""
    command: list[str]
    """The command line as the user gave it."""
    plan: str | None = None
    """Path of the plan to obey; None: as the job says."""

    @property
    def goes_on_with(self) -> Path | None:
        """The run whose checkpoint it starts from, if there is one."""
        if self.resume in (None, "auto"):
            return Path(self.out) if self.resume and self.out else None
        return Path(self.resume).absolute().parent.parent


def take_part(part: Part) -> tuple[Path, bool]:
    """Train; returns the run's directory and whether this rank speaks for all."""
    with at_once():
        from moesaic.dist.world import World
        from moesaic.train.trainer import deadline, train

    loaded = load_job(Path(part.job), part.sets, part.goes_on_with)
    if part.plan is not None:
        loaded = obey(loaded, Path(part.plan), part.sets)
    with at_once():
        world = World.from_launcher(loaded.job.train.device, deadline(loaded.job))
    try:
        out = Path(world.led(lambda: part.out or str(default_out(Path(part.job)))))
        console = screen.err() if part.as_json else screen.out()
        watched = watcher(console, world.leads)
        try:
            train(loaded, out, part.resume, world, watched)
        finally:
            watched.done()
    except BaseException:
        world.abandon()
        raise
    world.leave()
    return out, world.leads


def default_out(job: Path) -> Path:
    """runs/NAME-DATE-TIME, for a directory that is not there yet."""
    moment = datetime.now().strftime("%Y%m%d-%H%M%S")
    wanted = [Path("runs") / f"{job.stem}-{moment}{end}" for end in ("", "-2", "-3", "-4", "-5")]
    return next((path for path in wanted if not path.exists()), wanted[-1])


def main() -> int:
    """The process of one rank, which `cli.start` begins with a part as JSON."""
    part = Part(**json.loads(sys.argv[1]))
    sys.argv = part.command
    return bounded(lambda: take_part(part), LESS_MEMORY)


def bounded(work: Callable[[], object], on_memory: str) -> int:
    """Do a rank's work; returns the exit status, what ended it being on record.

    `on_memory` is what helps against too little memory.
    """
    try:
        work()
    except UserError as error:
        _record(str(error), "user")
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - the boundary: the parent prints it
        mistake = as_user_error(error, on_memory)
        if mistake is not None:
            _record(str(mistake), "user")
            return 2
        from moesaic.dist.world import lost_peer

        _record(traceback.format_exc(), "lost" if lost_peer(error) else "bug")
        return 1
    return 0


def _record(text: str, kind: str) -> None:
    """Write a failure the way torch's agent reads it, and the parent too."""
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    record = {
        "message": {"message": text, "extraInfo": extra},
        "kind": kind, "text": text, "time": time.time(),
    }  # fmt: skip
    try:
        with replacing(Path(os.environ[ERROR_FILE])) as partial:  # The agent reads at any moment.
            partial.write_text(json.dumps(record), encoding="utf-8")
    except OSError:
        print(text, file=sys.stderr)


def encode(part: Part) -> str:
    """The argument of a rank's process."""
    return json.dumps(asdict(part))
