"""The programs of docs/python.md run, each in a process of its own, in order in one directory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "python.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_the_programs_run(tmp_path: Path) -> None:
    outputs = []
    for number, program in enumerate(PROGRAMS):
        assert program.count("\n") < 40
        path = tmp_path / f"program{number}.py"
        path.write_text(program)
        done = subprocess.run(
            [sys.executable, path.name], cwd=tmp_path, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    training, planning, loads, generating, mistakes = outputs
    steps = training.count("loss ")
    assert 1 < steps < 100
    assert f"{steps} steps, report in run/report.html" in training
    assert "2 nodes: " in planning
    assert "layer 1: the busiest expert has " in loads
    assert "'A loss says' -> " in generating
    assert (tmp_path / "exported" / "config.json").is_file()
    assert "did you mean 'train.steps'?" in mistakes
