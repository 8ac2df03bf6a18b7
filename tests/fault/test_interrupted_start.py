"""An interrupt at any moment of a start ends all processes without a traceback, and leaves nothing
behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moesaic.testing.jobs import RUN_JOB

JOB = RUN_JOB.replace("steps = 4", "steps = 1000000")


def start(place: Path, *flags: str) -> subprocess.Popen[str]:
    """Start a run and return once it has begun to import."""
    place.mkdir()
    (place / "tmp").mkdir()
    (place / "text.txt").write_text("words and more words " * 40)
    (place / "job.toml").write_text(JOB)
    process = subprocess.Popen(
        [sys.executable, "-m", "moesaic", "train", "job.toml", "--out", "run", *flags],
        cwd=place, env={**os.environ, "TMPDIR": str(place / "tmp")}, start_new_session=True,
        # Background processes and their children may ignore interrupts by inheritance.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    # Until then the interpreter itself starts, which is out of our hands.
    wait_for(lambda: "pydantic_core" in Path(f"/proc/{process.pid}/maps").read_text())
    return process


def wait_for(true: Callable[[], bool], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def interrupt(process: subprocess.Popen[str]) -> str:
    """Interrupt the whole process group, as Ctrl-C on a terminal does; return its stderr."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        return process.communicate(timeout=30)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise


def children(parent: int) -> list[str]:
    """Return the children of a process."""
    return Path(f"/proc/{parent}/task/{parent}/children").read_text().split()


def living(group: int) -> Iterator[int]:
    """Yield the processes of a group that have not ended."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, own, *_ = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(own) == group and state != "Z":
            yield int(path.parent.name)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("flags", "tries"),
    [
        ([], 2),
        (["--nproc", "2"], 2),
        pytest.param([], 12, marks=pytest.mark.soak),
        pytest.param(["--nproc", "2"], 8, marks=pytest.mark.soak),
    ],
)
def test_an_interrupted_start_leaves_nothing(flags: list[str], tries: int, tmp_path: Path) -> None:
    process = start(tmp_path / "whole", *flags)
    began = time.monotonic()
    wait_for(lambda: (tmp_path / "whole/run/events/rank-0.jsonl").exists())
    start_s = time.monotonic() - began
    moments = [start_s * (index + 0.5) / tries for index in range(tries)]
    if flags:  # Also interrupt while the interpreters of ranks start.
        moments = [-0.02 * index for index in range(1, tries)] + moments[1:]
    for index, moment in enumerate([start_s, *moments]):
        if index:
            process = start(tmp_path / str(index), *flags)
            if moment < 0:
                wait_for(lambda parent=process.pid: children(parent))
            time.sleep(abs(moment))
        place = tmp_path / (str(index) if index else "whole")
        stderr = interrupt(process)
        where = f"{moment:.3f} of {start_s:.3f} s: {stderr}"
        assert process.returncode in (130, -signal.SIGINT), where
        assert "Traceback" not in stderr, where
        assert stderr.count("\n") <= 1, where
        wait_for(lambda group=process.pid: not list(living(group)), 20)
        assert not list((place / "tmp").iterdir()), where
        assert not (place / "run" / "LOCK").exists(), where
        assert not list(place.rglob("*.partial-*")), where
