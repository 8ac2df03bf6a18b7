"""The directory of a run: one run at a time, and what stands in it before the first step."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import torch

import moesaic
from moesaic.base.errors import StoreError, unwritable
from moesaic.base.events import EventLog
from moesaic.base.lock import Held, leave, locked
from moesaic.dist import device as devices
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.models.tokenizer import Tokenizer
from moesaic.train.jobfile import refuse_run

LOCK, TOKENIZER = "LOCK", "tokenizer"


@contextmanager
def alone(out: Path, world: World, *, fresh: bool) -> Iterator[None]:
    """Hold `out`, which no run may have left anything in if this one starts `fresh`.

    A directory that is made here goes again if nothing was written to it.
    """
    made: list[Path] = []

    def hold() -> str:
        try:
            made.extend(path for path in (out, *out.parents) if not path.exists())
            out.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(out / LOCK, refuse))
        except OSError as error:
            raise unwritable(f"--out '{out}'", error) from None
        if fresh:
            refuse_run(out)
        return ""

    def refuse(holder: str) -> NoReturn:
        raise StoreError(
            f"--out '{out}' is in use by {holder}: wait for its end, or name another directory"
        )

    try:
        with ExitStack() as stack:
            world.led(hold)
            yield
    finally:
        for path in made:
            with suppress(OSError):  # It is not empty.
                path.rmdir()


def write_opening(
    out: Path, text: str, job: Job, plan: Plan, world: World, tokenizer: Tokenizer
) -> None:
    """The facts that a run starts from: job as written, job resolved, plan, versions, tokenizer."""
    versions = {
        "moesaic": moesaic.__version__, "torch": torch.__version__,
        "python": platform.python_version(), "platform": platform.platform(),
        "device": devices.describe(world.device), "command": sys.argv,
    }  # fmt: skip
    files = {
        "job.toml": text, "job.json": job.to_json(), "plan.json": plan.to_json(),
        "versions.json": json.dumps(versions, indent=2) + "\n",
    }  # fmt: skip

    def write() -> str:
        try:
            for name, content in files.items():
                (out / name).write_text(content, encoding="utf-8")
            for name, data in tokenizer.files().items():
                path = out / TOKENIZER / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        except OSError as error:
            raise unwritable(f"--out '{out}'", error) from None
        return ""

    world.led(write)


def note_end(out: Path, reason: str) -> None:
    """Say in the log of the run at `out` what ended it, unless another run is writing there."""
    log = out / "events" / "rank-0.jsonl"
    with suppress(Held, OSError, StoreError):  # It is told to the user in any case.
        if log.is_file():
            with locked(out / LOCK, leave):
                EventLog(log).emit("run_end", reason=reason)
