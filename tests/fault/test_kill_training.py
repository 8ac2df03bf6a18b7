"""Training on two ranks is killed and resumed, and gives the same result as without the kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moesaic.base.events import read_events
from moesaic.dist.checkpoint import Checkpoint
from moesaic.testing.jobs import RUN_JOB

SETS = (
    "layout.ep=2", "train.steps=30", "train.batch=8", "checkpoint.every=3", "checkpoint.keep=100",
)  # fmt: skip


def start(job: Path, out: Path, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "moesaic", "train", str(job), "--nproc", "2"]
    sets = [word for item in SETS for word in ("--set", item)]
    return subprocess.Popen(
        [*command, "--out", str(out), *sets, *flags], cwd=job.parent,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def finish(process: subprocess.Popen[bytes]) -> str:
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output.decode()
    return output.decode()


def losses(out: Path) -> dict[int, float]:
    """Return losses by step; a step done again counts its last time."""
    found = {}
    for event in read_events(out / "events" / "rank-0.jsonl"):
        if event["event"] == "step":
            found[event["step"]] = event["loss"]
    return found


def weights(out: Path) -> list[tuple[str, str]]:
    manifest = json.loads((out / "checkpoints" / "step-00000030" / "manifest.json").read_text())
    return sorted((name, file["sha256"]) for name, file in manifest["files"].items())


@pytest.mark.timeout(240)
def test_killed_and_resumed_is_bit_identical(tmp_path: Path) -> None:
    text, job = tmp_path / "text.txt", tmp_path / "job.toml"
    text.write_text("all happy families are alike; " * 400)
    job.write_text(RUN_JOB)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    finish(start(job, straight))
    process = start(job, killed)
    until = time.monotonic() + 60
    while not (killed / "checkpoints" / "step-00000009" / "COMMIT").exists():
        assert process.poll() is None, process.communicate()[0].decode()
        assert time.monotonic() < until, "no checkpoint came"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (killed / "checkpoints" / "step-00000030").exists()
    finish(start(job, killed, "--resume", "auto"))
    assert losses(killed) == losses(straight)
    assert weights(killed) == weights(straight)
    Checkpoint.open(killed / "checkpoints" / "step-00000030").verify()
