"""Checks of a run's directory before a start, and files of an earlier try. Imports no torch."""

from __future__ import annotations

import glob
import itertools
import shlex
import shutil
import tempfile
from fnmatch import fnmatch
from itertools import takewhile
from pathlib import Path

from moesaic.base import keys
from moesaic.base.errors import ConfigError, write_error
from moesaic.base.units import format_bytes
from moesaic.facts.job import Job, LayoutConfig
from moesaic.facts.plan import plan_from_layout
from moesaic.facts.workload import job_parts
from moesaic.train.job_file import TrainingJob
from moesaic.train.resumed_job import PLAN, RESOLVED_JOB, VERSIONS

LOCK = "LOCK"
"""Lock file of a run directory."""
FAILED_TRY = "failed-"
"""Start of the names of directories that keep runs without a checkpoint."""

_METADATA = (RESOLVED_JOB, PLAN, VERSIONS)
"""Files that tell a run's directory from any other."""
_RUN_FILES = ("rank-0.jsonl", "part-000000.parquet")
"""Names of files of a run that are in a format of texts."""


def holds_checkpoint(run: Path) -> bool:
    """Return whether a run has a checkpoint to resume from."""
    return any((run / "checkpoints").glob("step-*/COMMIT"))


def check_is_checkpoint(path: Path) -> None:
    """Raise if `path` is no checkpoint to resume from."""
    if (path / "COMMIT").is_file():
        return
    others = sorted(one.parent.name for one in path.parent.glob("step-*/COMMIT"))
    if others and not path.exists():
        raise ConfigError(
            f"'{path}' does not exist: checkpoint.keep limits how many stay, and "
            f"'{path.parent}' has {', '.join(others)}"
        )
    raise ConfigError(
        f"'{path}' is not a checkpoint to resume from: give a directory such as "
        "RUN/checkpoints/step-00000100, or auto"
    )


def check_no_run(out: Path) -> None:
    """Raise if `out` cannot take a new run, because something is there already."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"'{out}' is a file: give a directory for the run")
    if holds_checkpoint(out):
        raise ConfigError(
            f"'{out}' already holds a run: resume it (moesaic train --out {shlex.quote(str(out))} "
            "--resume), or give another directory"
        )
    names = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    found = [name for name in names if name != LOCK]
    if found and not holds_failed_try(out):
        raise ConfigError(
            f"'{out}' is not empty and holds no run (it has '{found[0]}'): give a new or an "
            "empty directory"
        )


def holds_failed_try(out: Path) -> bool:
    """Return whether `out` has a run without a checkpoint, or what was kept of earlier ones."""
    tries = (out, *out.glob(f"{FAILED_TRY}*"))
    is_run = any(all((one / name).is_file() for name in _METADATA) for one in tries)
    return is_run and not holds_checkpoint(out)


def keep_failed_try(out: Path) -> str:
    """Move the files of a run without a checkpoint to a directory of their own in `out`.

    Return a sentence about them; empty if there are none.
    """
    found = [
        path for path in out.iterdir()
        if path.name != LOCK and not path.name.startswith(FAILED_TRY)
    ]  # fmt: skip
    if not found:
        return ""
    numbers = itertools.count(1)
    places = (out / f"{FAILED_TRY}{number}" for number in numbers)
    aside = next(place for place in places if not place.exists())
    try:
        aside.mkdir()
        for path in found:
            path.rename(aside / path.name)
    except OSError as error:
        raise write_error(f"'{aside}'", error) from None
    return f"'{out}' held a run without a checkpoint: kept as '{aside}', and starting anew"


def check_writable(out: Path) -> None:
    """Raise if the directory `out` cannot be made, or no file can be written there."""
    nearest = next(path for path in (out, *out.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(dir=nearest):  # Leaves nothing behind.
            pass
    except OSError as error:
        raise write_error(f"'{out}'", error) from None


def disk_warnings(out: Path, job: TrainingJob) -> list[str]:
    """Return a warning if the disk of `out` has no room for one checkpoint of a language model."""
    if not isinstance(job, Job):
        return []
    needed = checkpoint_bytes(job)
    nearest = next(path for path in (out, *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    if needed <= free:
        return []
    return [
        f"a checkpoint takes about {format_bytes(needed)}, and the disk of '{out}' has "
        f"{format_bytes(free)} free: name another disk with --out, or make room"
    ]


def checkpoint_bytes(job: Job) -> int:
    """Return bytes of a checkpoint of `job`, which hardly depend on its layout."""
    alone = job.model_copy(update={"layout": LayoutConfig()})
    parts = job_parts(alone, plan_from_layout(alone.layout, alone.model, 1))
    return sum(part.checkpoint_bytes(0) for part in parts)


def check_out_is_not_data(out: Path, job: TrainingJob) -> None:
    """Raise if `job` would read files of its own run in `out` as data from the next start on."""
    kind_of_data = "text" if isinstance(job, Job) else "samples"
    for key in ("path", "validation_path"):
        value = getattr(job.data, key)
        path = Path(value).expanduser() if value else None
        if path is None:
            continue
        root = Path(*takewhile(lambda part: not glob.has_magic(part), path.parts))
        if path.is_dir():
            reads_run = job.data.format != "text"
        else:
            reads_run = "**" in path.parts and any(fnmatch(name, path.name) for name in _RUN_FILES)
        if reads_run and out.resolve().is_relative_to(root.resolve()):
            raise ConfigError(
                f"'{out}' is inside data.{key} = {keys.show(value)}, so files of the run "
                f"would become {kind_of_data}: give a directory elsewhere"
            )
