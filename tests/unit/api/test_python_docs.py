"""The programs of docs/python.md run, each in a process of its own, in order in one directory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "python.md"
PROGRAMS = re.findall(
    r"^```python(?: ranks=([0-9,]+))?\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL
)
"""Numbers of ranks to start a program with (one by default), and its text."""


def run(path: Path, ranks: str) -> str:
    """Run a program as users do, and return what it prints."""
    start = ["-m", "torch.distributed.run", "--nproc-per-node", ranks, "--standalone"]
    before = path.parent.with_name("before")
    shutil.copytree(path.parent, before)
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, *(start if ranks != "1" else []), path.name], cwd=path.parent,
            capture_output=True, text=True, timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        # gloo sometimes aborts when a process ends, without moesaic too; the page says so.
        if "terminate called without an active exception" not in done.stderr:
            break
        shutil.rmtree(path.parent)  # The program begins anew, without the files that it wrote.
        shutil.copytree(before, path.parent)
    shutil.rmtree(before)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(300)
def test_the_programs_run(tmp_path: Path) -> None:
    outputs = []
    (tmp_path / "programs").mkdir()
    for number, (sizes, program) in enumerate(PROGRAMS):
        assert program.count("\n") < 40
        path = tmp_path / "programs" / f"program{number}.py"
        path.write_text(program)
        outputs += [run(path, ranks) for ranks in (sizes or "1").split(",")]
    alone, together, saved, resumed, fsdp, upcycling, *others = outputs
    training, planning, loads, generating, serving, tables, mistakes = others
    for text in (alone, together):
        first, *_, last = (float(value) for value in re.findall(r"loss (\S+)", text))
        assert last < first
    # Both ranks print, and their lines may mix.
    sums = [re.findall(r"-?\d+\.\d{6}", text) for text in (saved, resumed)]
    assert [len(one) for one in sums] == [2, 1]
    assert len({*sums[0], *sums[1]}) == 1
    assert (saved.split(",")[0], resumed.split(",")[0]) == ("saved", "resumed")
    assert fsdp.count("gradient norm") == 2
    assert float(re.findall(r"largest change of a logit: (\S+)", upcycling)[0]) < 1e-5
    steps = training.count("loss ")
    assert 1 < steps < 100
    assert f"{steps} steps, report in run/report.html" in training
    assert planning.count(" nodes: fits") == 2
    assert "layer 1: the busiest expert has " in loads
    assert "'A loss says' -> " in generating
    assert (tmp_path / "programs" / "exported" / "config.json").is_file()
    assert serving.count("length") + serving.count("stop") >= 6
    assert "4 rows torch.Size([2, 8])" in tables
    assert "did you mean 'train.steps'?" in mistakes
