"""`moesaic plan --fit model`: the largest model of a job's shape."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_cli_plan import CLUSTER, JOB

from commands import Commands
from moesaic import Cluster, Job

MEMORY = '[memory]\nssd = "/data/scratch"\n'

CPUS = """
name = "two nodes"

[[hosts]]
name = "node"
replicas = 2
memory_bytes = 2e12

[[hosts.devices]]
kind = "cpu"
model = "64 cores"
count = 8
memory_bytes = 2.5e11
memory_bandwidth = 1e11
matmul = [{ dtype = "bf16", flops = 1e12 }]
"""

FIT = ["plan", "job.toml", "--cluster", "cluster.toml", "--fit", "model"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = JOB.replace("ep = 8", "ep = 16").replace("[train]", "[train]\nrecompute = true")
    (tmp_path / "job.toml").write_text(f"{job}\n{MEMORY}")
    (tmp_path / "cluster.toml").write_text(CPUS)
    (tmp_path / "gpus.toml").write_text(CLUSTER)


def test_both_methods_are_printed_with_limit_and_remedy(commands: Commands) -> None:
    text = commands.output([*FIT, "--ssd", "1TB"])
    assert text.startswith("16 ranks on two nodes (16 x 64 cores), 2 hosts with 931.3 GiB")
    rows = re.findall(r"^(SE-MoE|moesaic) +(\S.*?)  +([\d,]+) +([\d,]+)( +bottleneck)? *$", text, re.M)  # fmt: skip  # noqa: E501
    assert [row[:2] for row in rows] == [
        ("SE-MoE", "host memory"), ("SE-MoE", "drive"),
        ("moesaic", "expert numbers"), ("moesaic", "memory per rank"), ("moesaic", "drive"),
    ]  # fmt: skip
    assert [bool(row[4]) for row in rows] == [False, True, False, False, True]
    assert re.search(
        r"\nin memory +[\d,]+ blocks of experts per rank, .* 2 of 2 micro-batches", text
    )
    assert "larger: moesaic    add space on the drives" in text
    # SE-MoE: 2 TB / 12 bytes / 16 layers / 3 * 2048 * 1024 parameters. The drives of moesaic hold
    # gradients too, 16 bytes a parameter; experts are a multiple of 16.
    experts = [int(row[2].replace(",", "")) for row in rows]
    assert (experts[1], experts[4]) == (1655, 1232)


def test_gpus_get_the_limits_of_se_moe(commands: Commands) -> None:
    line = ["plan", "job.toml", "--cluster", "gpus.toml"]
    text = commands.output([*line, "--fit", "model", "--ssd", "1TB"])
    assert re.search(r"^SE-MoE +GPU memory +[\d,]+", text, re.M)
    assert re.search(r"^moesaic +CPU ranks +0 +0 +bottleneck", text, re.M)
    words = "[memory] on NVIDIA H100 SXM5: expert state on a drive is for CPU ranks, use these or"
    assert words in commands.refusal(line)


def test_json_has_the_figures_of_python(commands: Commands) -> None:
    figures = commands.facts([*FIT, "--ssd", "1TB", "--nproc", "16"])
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
def test_a_mistake_is_one_sentence(flags: list[str], words: str, commands: Commands) -> None:
    assert words in commands.refusal([*FIT[:4], *flags])


def test_a_job_without_a_memory_budget_is_refused(commands: Commands) -> None:
    Path("job.toml").write_text(JOB)
    layout = ["--set", "layout.ep=16"]
    text = commands.refusal([*FIT, "--ssd", "1TB"])
    assert "[memory] is missing: add it with a directory, such as" in text
    commands.run([*FIT, "--ssd", "1TB", "--set", "memory.ssd=/data/scratch", *layout])
