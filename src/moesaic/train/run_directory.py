"""Run directory: a lock against concurrent runs, and the metadata written before the first step."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

import moesaic
from moesaic.base.errors import StoreError, write_error
from moesaic.base.events import RUN_LOG, EventLog
from moesaic.base.files import atomic_replace
from moesaic.base.lock import LockHeld, fail_if_locked, file_lock
from moesaic.dist.world import World
from moesaic.facts.plan import Plan
from moesaic.kernels import device as devices
from moesaic.train.job_file import LoadedJob
from moesaic.train.kinds import AnyJob
from moesaic.train.out_checks import LOCK, check_no_run, keep_failed_try
from moesaic.train.resumed_job import (
    JOB_TEXT,
    PLAN,
    RESOLVED_JOB,
    VERSIONS,
    file_hash,
    start_record,
)


@contextmanager
def lock_run_directory(out: Path, world: World, *, fresh: bool) -> Iterator[str]:
    """Lock the directory `out`; a `fresh` run raises if another run left a checkpoint in it.

    Yield a sentence about the files of a run without a checkpoint, which are kept aside; empty if
    there are none. A directory created here is removed again if it stays empty.
    """
    made: list[Path] = []

    def hold() -> str:
        try:
            made.extend(path for path in (out, *out.parents) if not path.exists())
            out.mkdir(parents=True, exist_ok=True)
            stack.enter_context(file_lock(out / LOCK, refuse))
        except OSError as error:
            raise write_error(f"'{out}'", error) from None
        if not fresh:
            return ""
        check_no_run(out)
        return keep_failed_try(out)

    def refuse(holder: str) -> NoReturn:
        raise StoreError(
            f"'{out}' is in use by {holder}: wait for its end, or name another directory"
        )

    try:
        with ExitStack() as stack:
            yield world.run_on_rank_zero(hold)
    finally:
        for path in made:
            with suppress(OSError):  # The directory is not empty.
                path.rmdir()


def write_run_metadata(
    out: Path,
    loaded: LoadedJob[AnyJob],
    plan: Plan,
    world: World,
    data_files: Mapping[str, bytes],
) -> dict[str, Any]:
    """Write the facts a run starts from: job as written, resolved job, plan, files of its data such
    as the tokenizer, and at last versions and hashes. Return what checkpoints keep of the start."""
    texts = {JOB_TEXT: loaded.text, RESOLVED_JOB: loaded.job.to_json(), PLAN: plan.to_json()}
    files = {name: text.encode() for name, text in texts.items()}
    start = start_record(loaded.text, loaded.sets, texts[PLAN], has_plan=loaded.plan is not None)
    versions = {
        "moesaic": moesaic.__version__, "torch": torch.__version__,
        "python": platform.python_version(), "platform": platform.platform(),
        "device": devices.describe(world.device), "command": sys.argv, "directory": os.getcwd(),
        "sets": start["sets"], "has_plan": start["has_plan"],
        "sha256": {name: file_hash(content) for name, content in files.items()},
    }  # fmt: skip
    files |= {**data_files, VERSIONS: (json.dumps(versions, indent=2) + "\n").encode()}

    def write() -> str:
        try:
            for name, content in files.items():
                path = out / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_replace(path) as partial:  # A killed resume leaves the earlier file.
                    partial.write_bytes(content)
        except OSError as error:
            raise write_error(f"'{out}'", error) from None
        return ""

    world.run_on_rank_zero(write)
    return start


def record_run_end(out: Path, reason: str) -> None:
    """Record in the log of the run at `out` why it ended, unless another run is writing there."""
    log = out / RUN_LOG
    with suppress(LockHeld, OSError, StoreError):  # The user sees the reason in any case.
        if log.is_file():
            with file_lock(out / LOCK, fail_if_locked):
                EventLog(log).emit("run_end", reason=reason)
