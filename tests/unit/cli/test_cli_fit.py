"""`moesaic plan --fit model`: the largest model of a job's shape."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moesaic import Cluster, Job
from moesaic.cli.main import main

JOB = """
[model]
preset = "olmoe-1b-7b"

[layout]
ep = 16

[data]
path = "nowhere"
sequence = 4096

[train]
steps = 10
batch = 64
micro_batches = 2
precision = "bf16"
recompute = true

[memory]
ssd = "/data/scratch"
"""

CLUSTER = """
name = "two nodes"

[[hosts]]
name = "node"
preset = "h100-8"
replicas = 2

[[links]]
ends = ["*", "*"]
kind = "infiniband"
latency_s = 5e-6
bandwidth = 4e11
"""

FIT = ["plan", "job.toml", "--cluster", "cluster.toml", "--fit", "model"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "cluster.toml").write_text(CLUSTER)


def test_both_methods_are_printed_with_limit_and_remedy(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*FIT, "--ssd", "1TB"]) == 0
    text = capfd.readouterr().out
    assert text.startswith("16 ranks on two nodes (16 x NVIDIA H100 SXM5), 2 hosts with 931.3 GiB")
    rows = re.findall(r"^(SE-MoE|moesaic) +(\S.*?)  +([\d,]+) +([\d,]+)( +bottleneck)? *$", text, re.M)  # fmt: skip  # noqa: E501
    assert [row[:2] for row in rows] == [
        ("SE-MoE", "GPU memory"), ("SE-MoE", "host memory"), ("SE-MoE", "drive"),
        ("moesaic", "expert numbers"), ("moesaic", "memory per rank"), ("moesaic", "drive"),
    ]  # fmt: skip
    assert [bool(row[4]) for row in rows] == [False, False, True, False, False, True]
    assert re.search(
        r"\nin memory +[\d,]+ blocks of experts per rank, .* 2 of 2 micro-batches", text
    )
    assert "larger: moesaic    add space on the drives" in text
    # SE-MoE: 2 TB / 12 bytes / 16 layers / 3 * 2048 * 1024 parameters. The drives of moesaic hold
    # gradients too, 16 bytes a parameter; experts are a multiple of 16.
    experts = [int(row[2].replace(",", "")) for row in rows]
    assert (experts[2], experts[5]) == (1655, 1232)


def test_json_has_the_figures_of_python(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*FIT, "--ssd", "1TB", "--nproc", "16", "--json"]) == 0
    figures = json.loads(capfd.readouterr().out)
    own = Job.load("job.toml").largest_model(Cluster.load("cluster.toml"), 1e12, nproc=16)
    assert json.loads(json.dumps(own)) == figures
    assert figures["largest"][1]["experts"] == 1232


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--fit", "modal", "--ssd=1TB"], '--fit = "modal" is not known: did you mean "model"'),
        (["--fit=model"], "--ssd is missing: cluster files do not have the space of drives"),
        (["--ssd=1TB"], "--ssd 1TB belongs to --fit model: add it, or remove --ssd"),
        (["--fit=model", "--ssd=much"], '--ssd: "much" is not a size: write one such as "2GB"'),
        (["--fit=model", "--ssd=1TB", "--out=a.json"], "cannot be combined with --out: remove one"),
        (["--fit=model", "--ssd=1TB", "--set=layout.pp=2"], "set layout.pp = 1"),
        (["--fit=model", "--ssd=1TB", "--set=memory.host=1TB"], "that each rank can have"),
        (["--fit=model", "--ssd=1TB", "--nproc=3"], "ep = 16"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(
    flags: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*FIT[:4], *flags]) == 2
    out, err = capfd.readouterr()
    assert words in err
    assert (out, err.count("error: "), err.strip().count("\n")) == ("", 1, 0)


def test_a_job_without_a_memory_budget_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    Path("job.toml").write_text(JOB.partition("[memory]")[0])
    assert main([*FIT, "--ssd", "1TB"]) == 2
    assert "[memory] is missing: add it with a directory, such as" in capfd.readouterr().err
    assert main([*FIT, "--ssd", "1TB", "--set", "memory.ssd=/data/scratch"]) == 0
