"""Peak memory of a process with a budget: the budget, the interpreter and a little more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from test_tiers import smallest

from moesaic.testing.jobs import tiny_job

SLACK_BYTES = 64 << 20
NUM_BLOCKS = 8
TABLES: dict[str, dict[str, Any]] = {
    "model": {"vocab": 256, "hidden": 512, "ffn": 1024, "experts": 8},
    "data": {"sequence": 128},
    "train": {"batch": 4, "micro_batches": 2, "precision": "fp32"},
}
"""Experts whose matmuls use compiled kernels and buffers."""
TRAIN = """
import json
import sys
from pathlib import Path

from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.runs import start_run


def peak_bytes():
    if group is not None:  # It counts page cache too.
        return int((group / "memory.max_usage_in_bytes").read_text())
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


def take_steps(job, number):
    run = start_run(job)
    for _ in range(number):
        run.step(RandomSamples(job.model.vocab, job.data.sequence))
    run.close()


tables, slack, group = json.loads(sys.argv[1]), int(sys.argv[2]), None
if len(sys.argv) > 3:
    group = Path(sys.argv[3])
take_steps(tiny_job(), 1)
interpreter, job = peak_bytes(), tiny_job(**tables)
if group is not None:
    limit = interpreter + job.memory.host_bytes + slack
    (group / "memory.limit_in_bytes").write_text(str(limit))
take_steps(job, 2)
print(interpreter, peak_bytes())
"""


def enter(group: Path | None) -> None:
    """Move this process into the group, before it takes memory."""
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))


def test_the_budget_bounds_the_process(tmp_path: Path, memory_group: Path | None) -> None:
    memory = {"ssd": str(tmp_path)}
    memory["host"] = smallest(tiny_job(**TABLES, memory=memory), NUM_BLOCKS, 1)
    tables = json.dumps({**TABLES, "memory": memory})
    command = [sys.executable, "-c", TRAIN, tables, str(SLACK_BYTES)]
    done = subprocess.run(
        [*command, *([str(memory_group)] if memory_group else [])],
        preexec_fn=partial(enter, memory_group), capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    interpreter, peak = map(int, done.stdout.split())
    assert peak <= int(memory["host"].removesuffix("B")) + interpreter + SLACK_BYTES
