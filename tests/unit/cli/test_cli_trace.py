"""`moesaic trace` and `moesaic plan --workload`."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import Commands
from moesaic.facts.workload import load_traced

NETS = """
import torch
from torch import nn

def make(batch=4):
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    target = torch.randint(10, (batch,))
    return model, torch.randn(batch, 64), lambda out: nn.functional.cross_entropy(out, target)

def fixed():
    return nn.Linear(4, 4), torch.randn(2, 4)

def asks():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.weight * x if x.sum() > 0 else x
    return Asks(), torch.ones(3)

def nothing():
    return 3

def broken():
    raise ValueError("no such size")

def runs_wrong():
    return nn.Linear(3, 4), torch.ones(2, 2)

def leaves():
    raise SystemExit(0)

"""

CLUSTER = """
name = "a node"

[[hosts]]
name = "node"
preset = "h100-8"
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    name = f"nets_{tmp_path.name.replace('-', '_')}"  # A module is imported once a process.
    (tmp_path / f"{name}.py").write_text(NETS)
    (tmp_path / f"{name}_needy.py").write_text("import surely_not_there\n")
    (tmp_path / f"{name}_wrong.py").write_text("1 / 0\n")
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return tmp_path


def named(line: str, place: Path) -> str:
    """Return a line with the name of the module in `place`."""
    return line.replace("nets", f"nets_{place.name.replace('-', '_')}")


def test_a_model_becomes_a_file_and_the_file_a_prediction(place: Path, commands: Commands) -> None:
    text = commands.output(named("trace nets:make --batch 32 --out workload.json", place))
    assert text.startswith("Sequential: 9,610 parameters, 1.29 MFLOP and ")
    assert "per micro-batch of 32x64 float32" in text
    assert "wrote workload.json" in text
    traced = load_traced(place / "workload.json")
    assert [block.name for block in traced.blocks] == ["0", "1", "2", "(outside)"]
    assert traced.batch == 32

    line = "plan --workload workload.json --cluster cluster.toml"
    facts = commands.facts(f"{line} --nproc 4")
    assert (facts["ranks"], facts["parameters"], facts["fits"]) == (4, 9610, True)
    assert set(facts["phases_s"]) == {"forward", "backward", "reduce", "clip", "optimizer"}
    assert sum(facts["phases_s"].values()) == pytest.approx(facts["step_s"])
    assert facts["samples_per_s"] == pytest.approx(4 * 32 / facts["step_s"])
    assert facts["memory_per_rank"]["moments_bytes"] == 2 * 9610 * 4
    text = commands.output(line)
    verdict, opening, *_ = text.splitlines()
    assert verdict.startswith("fits: 174 KiB of 68.8 GiB per rank (5.73 of 74.5 GiB are kept ")
    assert opening.startswith("Sequential, a replica on each of 8 ranks on a node (NVIDIA H100")
    assert "blocks " in text


def test_replicas_must_fit_the_smallest_device(place: Path, commands: Commands) -> None:
    slow = "devices = { count = 1, memory_bandwidth = 1e6 }"
    small = "devices = { count = 1, memory_bytes = 1e3 }"
    hosts = "".join(
        f'[[hosts]]\nname = "{name}"\npreset = "h100-8"\n{devices}\n'
        for name, devices in (("slow", slow), ("small", small))
    )
    link = '[[links]]\nends = ["*", "*"]\nkind = "wire"\nlatency_s = 1e-5\nbandwidth = 1e9\n'
    (place / "unlike.toml").write_text(f'name = "unlike"\n{hosts}{link}')
    commands.run(named("trace nets:make --out workload.json", place))
    facts = commands.facts("plan --workload workload.json --cluster unlike.toml", status=3)
    assert (facts["fits"], facts["device_memory_bytes"]) == (False, 1e3)
    assert (facts["step_s"], facts["samples_per_s"]) == (None, None)


def test_blocks_and_real_numbers(place: Path, commands: Commands) -> None:
    assert commands.facts(named("trace nets:asks --real", place))["batch"] == 3
    text = commands.output(named("trace nets:make --block 0 --block 2", place))
    rows = [line.split()[0] for line in text.splitlines() if line]
    assert rows == ["Sequential:", "block", "0", "2", "(outside)"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("trace", "MODULE:FACTORY is missing"),
        ("trace nets", "is not of the form MODULE:FACTORY"),
        ("trace none_such:make --json", "there is no module 'none_such'"),
        ("trace nets_needy:make --json", "needs surely_not_there, which is not installed"),
        ("trace nets_wrong:make --json", "raised ZeroDivisionError at nets"),
        ("trace nets:none --json", "has no function 'none'"),
        ("trace nets:fixed --batch 3 --json", "--batch 3: fixed takes no argument called batch"),
        ("trace nets:nothing --json", "nothing() returned int: return (model, inputs)"),
        ("trace nets:broken --json", "broken() raised ValueError at nets"),
        ("trace nets:runs_wrong --json", "running the model raised RuntimeError"),
        ("trace nets:asks --json", "asks for values of a tensor (aten._local_scalar_dense"),
        ("trace nets:make --block 7 --json", "blocks = '7' is no module of the model"),
        ("trace nets:leaves --json", "leaves() raised SystemExit at nets"),
        ("trace nets:make --out no/where.json", "is in a directory that does not exist: create"),
        (
            "plan --workload none.json --cluster cluster.toml",
            "'none.json' cannot be read (No",
        ),
        ("plan --workload a.json", "--cluster is missing"),
        ("plan job.toml --workload a.json --cluster cluster.toml", "combined with JOB.toml, which"),
        ("plan --workload a.json --cluster cluster.toml --set a=1", "combined with --set, which"),
    ],
)
def test_mistakes(line: str, words: str, place: Path, commands: Commands) -> None:
    assert words in commands.refusal(named(line, place))
