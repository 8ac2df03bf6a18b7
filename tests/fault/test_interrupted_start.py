"""An interrupt at any moment of a start ends all of it: no traceback, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

JOB = """
[model]
preset = "tiny-olmoe"
layers = 1
hidden = 32
head_dim = 8
ffn = 16

[data]
path = "text.txt"
sequence = 16
cache = "cache"

[train]
steps = 1000000
batch = 4
device = "cpu"

[log]
tensorboard = false
"""


def start(place: Path, *flags: str) -> subprocess.Popen[str]:
    """A run, which has begun to import."""
    place.mkdir()
    (place / "tmp").mkdir()
    (place / "text.txt").write_text("words and more words " * 40)
    (place / "job.toml").write_text(JOB)
    process = subprocess.Popen(
        [sys.executable, "-m", "moesaic", "train", "job.toml", "--out", "run", *flags],
        cwd=place, env={**os.environ, "TMPDIR": str(place / "tmp")}, start_new_session=True,
        # Whoever is started in the background may not hear interrupts, nor do its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    # Before, it is the interpreter's own start, which nobody but Python itself can mend.
    wait_for(lambda: "pydantic_core" in Path(f"/proc/{process.pid}/maps").read_text())
    return process


def wait_for(true: Callable[[], bool], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def interrupt(process: subprocess.Popen[str]) -> str:
    """As Ctrl-C on a terminal does: everybody hears it. What was said then."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        return process.communicate(timeout=30)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise


def children(parent: int) -> list[str]:
    """The processes that one has started."""
    return Path(f"/proc/{parent}/task/{parent}/children").read_text().split()


def living(group: int) -> Iterator[int]:
    """The processes of a group that have not ended."""
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
        ([], 3),
        (["--nproc", "2"], 2),
        pytest.param([], 12, marks=pytest.mark.soak),
        pytest.param(["--nproc", "2"], 8, marks=pytest.mark.soak),
    ],
)
def test_nothing_is_left_of_a_start_that_is_interrupted(
    flags: list[str], tries: int, tmp_path: Path
) -> None:
    process = start(tmp_path / "whole", *flags)
    began = time.monotonic()
    wait_for(lambda: (tmp_path / "whole/run/events/rank-0.jsonl").exists())
    start_s = time.monotonic() - began
    moments = [start_s * (index + 0.5) / tries for index in range(tries)]
    if flags:  # And while the interpreters of ranks start.
        moments = [-0.02 * index for index in range(1, tries)] + moments[1:]
    for index, moment in enumerate([start_s, *moments]):
        if index:
            process = start(tmp_path / str(index), *flags)
            if moment < 0:
                wait_for(lambda parent=process.pid: children(parent))
            time.sleep(abs(moment))
        place = tmp_path / (str(index) if index else "whole")
        said = interrupt(process)
        where = f"{moment:.3f} of {start_s:.3f} s: {said}"
        assert process.returncode in (130, -signal.SIGINT), where
        assert "Traceback" not in said, where
        assert said.count("\n") <= 1, where
        wait_for(lambda group=process.pid: not list(living(group)), 20)
        assert not list((place / "tmp").iterdir()), where
        assert not (place / "run" / "LOCK").exists(), where
        assert not list(place.rglob("*.partial-*")), where
