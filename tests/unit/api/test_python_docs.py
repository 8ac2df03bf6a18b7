"""The programs of docs/python.md run, each in a process of its own, in order in one directory."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from moesaic.testing.ranks import fork_server

PAGE = Path(__file__).parents[3] / "docs" / "python.md"
PROGRAMS = re.findall(
    r"^```python(?: ranks=([0-9,]+))?\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL
)
"""Numbers of ranks to start a program with (one by default), and its text."""


def run_as_users_do(path: Path, ranks: int) -> str:
    """Run a program by Python or torchrun, and return what it prints."""
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, *(start if ranks > 1 else []), path.name], cwd=path.parent,
            capture_output=True, text=True, timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        # gloo sometimes aborts when a process ends, without moesaic too; the page says so.
        if "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    return done.stdout


def _run_rank(path: Path, variables: dict[str, str], output: Path) -> None:
    """Run a program in this process, with `variables` as torchrun sets them."""
    for descriptor, suffix in ((1, ".txt"), (2, ".err")):
        with output.with_suffix(suffix).open("w") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ |= variables
    os.chdir(path.parent)
    sys.argv, sys.path[0] = [path.name], str(path.parent)
    torch.set_num_threads(1)
    runpy.run_path(path.name, run_name="__main__")


def run_forked(path: Path, ranks: int) -> str:
    """Run a program as torchrun would, in forks of a process that has imported torch already."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    variables = [
        {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        for rank in range(ranks)
    ]
    outputs = [path.parent.with_name(f"{path.stem}-{ranks}-{rank}") for rank in range(ranks)]
    processes = [
        fork_server().Process(target=_run_rank, args=(path, one, output))
        for one, output in zip(variables, outputs, strict=True)
    ]
    try:
        for process in processes:
            process.start()
        end = time.monotonic() + 100
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
    errors = [output.with_suffix(".err").read_text() for output in outputs]
    assert [process.exitcode for process in processes] == [0] * ranks, errors
    return "".join(output.with_suffix(".txt").read_text() for output in outputs)


@pytest.mark.timeout(300)
def test_the_programs_run(tmp_path: Path) -> None:
    outputs = []
    (tmp_path / "programs").mkdir()
    for number, (sizes, program) in enumerate(PROGRAMS):
        assert program.count("\n") < 40
        path = tmp_path / "programs" / f"program{number}.py"
        path.write_text(program)
        run = run_forked if number else run_as_users_do
        outputs += [run(path, int(ranks)) for ranks in (sizes or "1").split(",")]
    alone, together, saved, resumed, fsdp, upcycling, *others = outputs
    training, planning, loads, generating, serving, tables, mistakes = others
    for text in (alone, together):
        first, *_, last = (float(value) for value in re.findall(r"loss (\S+)", text))
        assert last < first
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
