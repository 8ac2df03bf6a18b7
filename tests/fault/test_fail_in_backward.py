"""A rank that fails in backward, with gradient reductions in flight, ends the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from moesaic.testing.jobs import RUN_JOB

FAULT = """
import os

if os.environ.get("RANK") == "1":
    from moesaic.models import lm

    forward, passes = lm.Embedding.forward, []

    def fail(_):
        raise ArithmeticError("a fault in backward")

    def faulty(self, x, inputs):
        out, report = forward(self, x, inputs)
        passes.append(out.requires_grad and out.register_hook(fail) if len(passes) == 2 else None)
        return out, report

    lm.Embedding.forward = faulty
"""
"""Code that Python runs at startup. When the gradient reaches the embedding, the experts'
reductions are in flight, and the other rank waits for this one."""


def test_the_run_ends_with_the_error(tmp_path: Path) -> None:
    """The run ends long before the timeout of the waiting rank."""
    (tmp_path / "text.txt").write_text("the quick brown fox " * 400)
    (tmp_path / "job.toml").write_text(RUN_JOB)
    (tmp_path / "fault").mkdir()
    (tmp_path / "fault" / "sitecustomize.py").write_text(FAULT)
    paths = [str(tmp_path / "fault"), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "moesaic", "train", "job.toml", "--nproc", "2", "--out", "run"]
    sets = ["--set", "layout.tp=2", "--set", "train.collective_timeout_s=1000"]
    done = subprocess.run(
        [*command, *sets],
        capture_output=True, text=True, check=False, timeout=110, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ArithmeticError: a fault in backward" in done.stdout + done.stderr
