"""A plan, a run with it, and the report that compares prediction and measurement."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import moesaic
from commands import Commands
from moesaic.cli.main import main
from moesaic.facts.cluster import load_cluster
from moesaic.kernels import device
from moesaic.testing.jobs import RUN_JOB

JOB = RUN_JOB.replace("steps = 4", "steps = 6")

CLUSTER = """
name = "here"

[[hosts]]
name = "any name"
memory_bytes = 16e9
link = {{ kind = "loopback", latency_s = 2e-5, bandwidth = 2e9, skew_s = 0.01 }}

[[hosts.devices]]
kind = "cpu"
model = {model}
count = 2
memory_bytes = 8e9
memory_bandwidth = 1e10
matmul = [{{ dtype = "fp32", flops = 5e10 }}]

[[hosts.devices]]
kind = "cpu"
model = {model}
memory_bytes = 16e9
memory_bandwidth = 1e10
matmul = [{{ dtype = "fp32", flops = 5e10 }}]
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_inputs(tmp_path, monkeypatch)
    return tmp_path


def write_inputs(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    Path("text.txt").write_text("words and more words " * 40)
    Path("job.toml").write_text(JOB)
    model = json.dumps(device.model(torch.device("cpu")))
    Path("cluster.toml").write_text(CLUSTER.format(model=model))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with a run of a plan; tests copy it."""
    directory = tmp_path_factory.mktemp("original")
    with pytest.MonkeyPatch.context() as patch:
        write_inputs(directory, patch)
        plan("--set=layout.ep=2", "--set=layout.dp_shard=2")
        Path("facts.json").write_text(json.dumps(train()))
    return directory


@pytest.fixture
def trained(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copied = shutil.copytree(finished, tmp_path / "copy")
    monkeypatch.chdir(copied)
    return copied


def plan(*flags: str) -> dict[str, Any]:
    Path("plan.json").unlink(missing_ok=True)
    assert (
        main(["plan", "job.toml", "--cluster", "cluster.toml", "--out", "plan.json", *flags]) == 0
    )
    return read_json("plan.json")


def read_json(path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_text())
    return found


def train(*flags: str) -> dict[str, Any]:
    line = ["train", "job.toml", "--plan", "plan.json", "--out", "run", "--json", *flags]
    done = subprocess.run(
        [sys.executable, "-m", "moesaic", *line], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def test_a_run_follows_its_plan_and_records_measurements(trained: Path, commands: Commands) -> None:
    planned, facts = read_json("plan.json"), read_json("facts.json")
    assert (facts["ranks"], facts["step"]) == (2, 6)
    assert read_json("run/plan.json") == planned
    layout = read_json("run/job.json")["layout"]
    assert layout == {
        "ep": 2, "dp_shard": 2, "tp": 1, "etp": 1, "pp": 1, "schedule": "1f1b",
        "dispatch": planned["dispatch"], "dispatch_hosts": None, "overlap_local": "auto",
        "chunks": "auto", "embedding": "auto",
    }  # fmt: skip
    assert Path("run/job.toml").read_text() == f"{JOB.rstrip()}\n\n# --plan plan.json\n"
    measured = facts["prediction"]["measured"]
    assert (measured["steps"], measured["memory"]) == (3, "resident")
    assert measured["phases_s"].keys() >= planned["predictions"]["phases_s"].keys()
    assert facts["peak_memory_bytes"] == measured["peak_bytes"]
    assert "Predicted and measured" in Path("run/report.html").read_text()

    # The first plan assumed even loads; the next one uses the recorded loads.
    assert planned["predictions"]["loads"] is None
    loaded = plan("--set=layout.ep=2", "--set=layout.dp_shard=2", "--loads", "run")["predictions"]
    assert loaded["loads"] == "run"
    assert loaded["step_s"] > planned["predictions"]["step_s"]
    for flags, words in (
        (["--set", "model.experts=8"], "'run' has the loads of 16 experts in each of 1 "),
        (
            ["--set", "model.layers=3"],
            "but model.experts = 16 and model.layers = 3: take the loads of",
        ),
        (["--loads", "nowhere"], "there is no run directory 'nowhere'"),
    ):
        line = ["plan", "job.toml", "--cluster", "cluster.toml", "--loads", "run", *flags]
        assert words in commands.run(line, status=2).err

    # A plan edited by hand: other placement and recompute void its predictions.
    placement = [[15, 1, 13, 3, 11, 5, 9, 7], [8, 6, 10, 4, 12, 2, 14, 0]]
    edited = {**planned, "expert_placement": placement, "recompute": True}
    Path("plan.json").write_text(json.dumps(edited))
    facts = train("--resume", "--change", "--set", "train.steps=8")
    assert (facts["ranks"], facts["step"], facts["prediction"]) == (2, 8, None)
    assert read_json("run/plan.json") == {**edited, "predictions": None}
    assert "Predicted and measured" not in Path("run/report.html").read_text()


def test_measured_phases_of_a_pipeline_include_the_predicted_ones(directory: Path) -> None:
    sets = ("--set", "model.layers=2", "--set", "train.micro_batches=4")
    predicted = plan("--set=layout.pp=2", *sets)["predictions"]
    prediction = train(*sets)["prediction"]
    assert prediction["predicted"]["phases_s"] == predicted["phases_s"]
    assert predicted["phases_s"].keys() == {"pipeline", "clip", "optimizer", "log"}
    assert predicted["phases_s"].keys() <= prediction["measured"]["phases_s"].keys()
    phases = [one for rank in predicted["timeline"] for one in rank["phases"]]
    assert any(one["waiting_s"] for one in phases if one["phase"] == "pipeline")
    assert "Predicted and measured" in (directory / "run/report.html").read_text()


def test_loads_cover_sparse_layers_only(directory: Path, commands: Commands) -> None:
    sizes = """preset = "tiny-deepseek"
layers = 3
hidden = 32
ffn = 16
"""
    before, _, after = JOB.partition("[data]")
    assert before.startswith("\n[model]")
    Path("job.toml").write_text(f"[model]\n{sizes}\n[data]{after}")
    plan("--set=layout.ep=2")
    assert train()["step"] == 6
    assert "layer 0" not in Path("run/report.html").read_text().lower()
    assert plan("--set=layout.ep=2", "--loads", "run")["predictions"]["loads"] == "run"
    more = ["--loads", "run", "--set", "model.layers=4"]
    output = commands.refusal("plan job.toml --cluster cluster.toml", *more)
    assert "the loads of 16 experts in each of 2 layers, but model.experts = 16 and " in output
    assert "model.layers = 4, model.dense_layers = 1: take the loads of" in output


def set_measured_step(step_s: float, run: str = "run") -> None:
    """Set the measured step time of the run to `step_s`."""
    path = Path(run) / "events/rank-0.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for event in events:
        if event["event"] == "step":
            event["step_s"] = step_s
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def test_calibrate_from_runs(
    trained: Path, commands: Commands, capfd: pytest.CaptureFixture[str]
) -> None:
    """A second calibration changes nothing; an unsuitable run is rejected with the reason."""
    loads = ("--loads", "run", "--set=layout.ep=2", "--set=layout.dp_shard=2")
    first_s = plan(*loads)["predictions"]["step_s"]
    original = Path("cluster.toml").read_text()
    line = ["calibrate", "run", "--cluster", "cluster.toml"]
    set_measured_step(1.5 * first_s)
    before = set(Path().iterdir())
    commands.run(line)
    assert set(Path().iterdir()) == before
    output = commands.output(line, "--out", "calibrated.toml")
    assert "with them, of the same run, which tests nothing; give several runs" in output
    assert output.endswith("wrote calibrated.toml\n")
    calibrated = Path("calibrated.toml").read_text()
    again = moesaic.Cluster.load("cluster.toml").calibrate("run").facts
    assert again == load_cluster(Path("calibrated.toml"))
    assert calibrated.startswith(original.rstrip())
    again = plan(*loads, "--cluster", "calibrated.toml")
    assert "predicted, calibrated by 1 run, not measured" in capfd.readouterr().out
    assert again["predictions"]["calibration"]["runs"] == 1
    assert again["predictions"]["step_s"] == pytest.approx(1.5 * first_s, rel=0.05)

    # A run of the calibrated plan with the same step time gives the same factors.
    Path("run/plan.json").write_text(json.dumps(again))
    commands.run(line, "--out", "copy.toml", "--json")
    assert Path("copy.toml").read_text() == calibrated

    Path("other.toml").write_text(original.replace('"here"', '"there"'))
    Path("new.toml").write_text(original.replace("model = ", 'model = "A better CPU" # '))
    head, _, alone = original.split("[[hosts.devices]]")
    Path("few.toml").write_text(f"{head}[[hosts.devices]]{alone}")
    for flags, words in (
        (["--cluster", "few.toml"], "RUN 'run' had 2 ranks, for which 'few.toml' has no places ("),
        (["--cluster", "other.toml"], "planned for cluster 'here', but 'other.toml' describes 'th"),
        (["--cluster", "new.toml"], ", but it has 'A better CPU'; give the cluster as it was"),
        (["--out", "copy.toml"], "--out 'copy.toml' already exists"),
        (["run"], "RUN 'run' is given twice: give it once"),
        (["--cluster", "copy.toml", "--out", "a"], "--cluster 'copy.toml' is calibrated already"),
    ):
        assert words in commands.run(line, *flags, status=2).err
    set_measured_step(4.1 * first_s)
    assert "RUN 'run' took " in commands.run(line, status=2).err
    job = {**read_json("run/job.json"), "memory": {"ssd": "scratch"}}
    Path("run/job.json").write_text(json.dumps(job))
    assert "RUN 'run' had a memory budget ([memory]), so " in commands.refusal(line)
    assert Path("cluster.toml").read_text() == original


def test_calibrate_shows_the_step_times_of_later_plans(trained: Path, commands: Commands) -> None:
    """Waiting for stragglers does not scale with the factors."""
    loads = ("--loads", "run", "--set=layout.ep=2", "--set=layout.dp_shard=2")
    first_s = plan(*loads)["predictions"]["step_s"]
    set_measured_step(1.5 * first_s)
    shutil.copytree("run", "quick")
    set_measured_step(0.7 * first_s, "quick")
    shutil.copytree("run", "slower")
    set_measured_step(1.6 * first_s, "slower")
    for runs in (["run"], ["quick"], ["run", "slower"]):
        Path("new.toml").unlink(missing_ok=True)
        line = ["calibrate", *runs, "--cluster", "cluster.toml", "--out", "new.toml"]
        facts = commands.facts(line)
        for one in facts["runs"]:
            assert one["predicted_s"] == pytest.approx(first_s, rel=1e-4)
            assert one["calibrated_s"] == pytest.approx(one["measured_s"] * (1 + one["calibrated"]))
            expected_s = plan(*loads, "--cluster", "new.toml")["predictions"]["step_s"]
            assert one["calibrated_s"] == pytest.approx(expected_s, rel=1e-4)
    # One run is slower than predicted, the other faster: no factors fit both.
    line = "calibrate run quick --cluster cluster.toml --out worse.toml"
    output = commands.run(line, status=2)
    assert "of held-out runs (medians)" in output.out
    assert ", so nothing is written: give more runs, or leave out runs" in output.err
    assert not Path("worse.toml").exists()


def test_unsuitable_plans_are_rejected(directory: Path, commands: Commands) -> None:
    planned = plan("--nproc", "1")
    line = ["train", "job.toml", "--plan", "plan.json", "--out", "run"]
    other_device = {**planned["places"][0], "device": "Another CPU"}
    two = [{**other_device, "host": host} for host in ("a", "b")]
    again = {"recompute": True}
    for change, flags, words in (
        ({}, ["--nproc", "2"], "plan 'plan.json' is for 1 rank, but nproc is 2: start 1, or"),
        ({}, ["--set", "train.micro_batches=2"], "micro_batches = 1, but train.micro_batches = 2"),
        (
            again,
            ["--set", "train.recompute=false"],
            "'plan.json', which has recompute = true: leave one",
        ),
        (
            {},
            ["--set", "layout.dp_shard=2"],
            "layout.dp_shard=2 beside plan 'plan.json', which has dp_shard = 1: leave",
        ),
        (
            {},
            ["--set", "layout.dispatch=dedup"],
            "layout.dispatch=dedup beside plan 'plan.json', which has dispatch = ",
        ),
        ({"places": [other_device]}, [], "rank 0 is planned for a 'Another CPU', but it has '"),
        ({"places": two, "ranks": 2}, [], "plan 'plan.json' has its ranks on 2 hosts: start"),
    ):
        Path("plan.json").write_text(json.dumps({**planned, **change}))
        assert words in commands.refusal(line, *flags)
        assert not Path("run").exists()
    for change, words in ((again, "recompute = true"), ({"places": two, "ranks": 2}, "2 ranks")):
        Path("plan.json").write_text(json.dumps({**planned, **change}))
        assert words in commands.output(line, "--dry-run", "--verbose")
