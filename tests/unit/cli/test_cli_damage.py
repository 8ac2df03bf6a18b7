"""Damaged files and full disks: one sentence from every verb."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from commands import Commands
from moesaic.cli.main import main
from moesaic.dist.checkpoint import Saver
from moesaic.dist.state import State
from moesaic.dist.world import World
from moesaic.facts.workload import parameters
from moesaic.testing.jobs import RUN_JOB
from moesaic.testing.states import whole_shard
from moesaic.train.job_file import load_job

JOB = RUN_JOB + "\n[checkpoint]\nevery = 2\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("damage")
    (place / "text.txt").write_text("words and more words " * 40)
    (place / "job.toml").write_text(JOB)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(["train", "job.toml", "--out", "run"]) == 0
    return place


@pytest.fixture(autouse=True)
def place(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def newest(place: Path) -> Path:
    return place / "run" / "checkpoints" / "step-00000004"


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("generate run --prompt a --set max_tokens=2", "what follows is of step 2"),
        ("convert run --out hf", "what follows is of step 2"),
    ],
)
def test_using_an_older_checkpoint_causes_a_warning(
    line: str, words: str, place: Path, commands: Commands
) -> None:
    flip(newest(place) / "rank-0.safetensors")
    errors = commands.run(line).err
    assert "warning: passed over: checkpoint 'run/checkpoints/step-00000004' is damaged" in errors
    assert "'rank-0.safetensors' is not what was written" in errors
    assert words in errors


def test_resume_refuses_a_damaged_checkpoint(place: Path, commands: Commands) -> None:
    (newest(place) / "COMMIT").write_bytes(b"")
    line = "train --out run --set train.steps=6 --change --resume"
    errors = commands.run(line, status=2).err
    assert "step-00000004' is damaged: 'COMMIT' cannot be read; the newest whole one is" in errors
    commands.run([*line.split(), "run/checkpoints/step-00000002"])


def test_resume_needs_no_file_of_the_last_start(place: Path, commands: Commands) -> None:
    """A kill may leave them torn, or of two starts; a user may have edited them."""
    run, line = place / "run", "train --out run --resume --change --set train.steps=5"
    before = (run / "job.json").read_bytes()
    os.link(run / "job.json", place / "earlier")
    whole = {name: (run / name).read_bytes() for name in ("job.toml", "job.json", "versions.json")}
    for name, content in whole.items():
        (run / name).write_bytes(content[:20])
        errors = commands.run([*line.split(), "--dry-run"]).err
        assert errors.startswith(f"warning: 'run/{name}' was edited after the start, and a resume")
        assert errors.count("\n") == 1
        (run / name).write_bytes(content)
    older = json.loads(whole["versions.json"])
    del older["sha256"]
    (run / "versions.json").write_text(json.dumps(older))
    assert commands.run([*line.split(), "--dry-run"]).err == ""
    for name in whole:
        (run / name).unlink()
    assert "changed since the checkpoint: train.steps = 5, was 4\n" in commands.output(line)
    assert (place / "earlier").read_bytes() == before != (run / "job.json").read_bytes()
    assert '"train.steps=5"' in (run / "versions.json").read_text()
    text = commands.run("train --out run --resume --change --set train.steps=6 --dry-run")
    assert text.err == ""


def test_resume_from_an_older_checkpoint_is_final(place: Path, commands: Commands) -> None:
    line = ["train", "job.toml", "--out", "run", "--change"]
    back = [*line, "--resume", "run/checkpoints/step-00000002", "--set", "checkpoint.every=0"]
    # It diverges at once, before it saves anything.
    diverging = ["--set", "optimizer.lr=1e300", "--set", "train.steps=9"]
    text = commands.run([*back, *diverging], status=2).out
    assert (
        "going back to step-00000002: resume now continues from it, not from step-00000004" in text
    )
    for steps, origin in ((5, 2), (6, 5)):
        sets = ["--set", f"train.steps={steps}", "--set", "optimizer.lr=0.001"]
        text = commands.output([*line, *sets, "--resume"])
        assert f"resuming from run/checkpoints/step-0000000{origin}" in text


def test_inspect_lists_damage(place: Path, commands: Commands) -> None:
    (newest(place) / "rank-0.safetensors").unlink()
    (place / "run" / "plan.json").write_text("{")
    (place / "run" / "loads" / "part-000000.parquet").write_bytes(b"torn")
    captured = commands.run(["inspect", "run"], status=2)
    assert "plan.json' is not readable JSON" in captured.err
    assert "'rank-0.safetensors' is missing" in captured.err
    assert "step 2" in captured.out


@pytest.mark.parametrize("verb", ["report run", "inspect run"])
def test_damaged_records_cause_one_error(verb: str, place: Path, commands: Commands) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    loads = place / "run" / "loads"
    (loads / "part-000007.parquet").mkdir()
    (place / "run" / "events" / "rank-1.jsonl").mkdir()
    with (place / "run" / "events" / "rank-0.jsonl").open("a") as log:
        log.write('{"event": "step"}\n[1]\n{"event": "step", "step": "x"}\n' + "[" * 99_999 + "\n")
    commands.run(verb)
    pq.write_table(pa.table({"layer": [1]}), loads / "part-000008.parquet")
    errors = commands.run(verb, status=2).err
    assert errors == (
        "error: 'run/loads/part-000008.parquet' has no column 'step': another program wrote it, "
        "remove it\n"
    )


def test_weights_with_nan_cause_an_error(place: Path, commands: Commands) -> None:
    job = load_job(place / "job.toml").job
    shards = [whole_shard(p.name, torch.full(p.shape, torch.nan)) for p in parameters(job.model)]
    saver = Saver(place / "spoilt" / "checkpoints", World.solo(), keep=1)
    saver.save(State(shards, {"step": 1}), 1, {"job": job.model_dump(mode="json")})
    saver.wait()
    errors = commands.refusal(["generate", "spoilt", "--prompt", "a"])
    assert errors.startswith(
        "error: token 1 cannot be chosen, as the model's scores are not finite"
    )


def test_stdout_that_is_full_or_ascii(place: Path) -> None:
    line = [sys.executable, "-m", "moesaic", "generate", "run", "--set", "max_tokens=3"]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [*line, "--prompt", "a"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
            cwd=place,
        )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr == "error: No space left on device: make room, or name another place\n"
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    ended = subprocess.run(
        [*line, "--prompt", "\u00e9", "--prompt", "b"], capture_output=True, timeout=60, cwd=place,
        env=ascii_only,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(b"--- ?")


def test_dry_run_checks_initial_weights(place: Path, commands: Commands) -> None:
    commands.run("convert run --out hf")
    (place / "tune.toml").write_text(
        JOB.replace('preset = "tiny-olmoe"', 'from = "hf"').replace(
            "layers = 1\nhidden = 32\nhead_dim = 8\nffn = 16\n", ""
        )
    )
    commands.run(["train", "tune.toml", "--dry-run"])
    weights = place / "hf" / "model.safetensors"
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({**load_file(weights), buffer: torch.ones(4)}, weights)
    for line in (["inspect", "hf"], ["train", "tune.toml", "--dry-run"],
                 ["train", "tune.toml", "--out", "tuned", "--set", "train.steps=1"]):  # fmt: skip
        captured = commands.run(line)
        assert captured.err.count(f"tensor '{buffer}' is left out, and no export will have it") == 1
        assert "left out" not in captured.out
    weights.unlink()
    line = [
        "train",
        "tune.toml",
        "--out",
        "tuned",
        "--set",
        "train.steps=2",
        "--change",
        "--resume",
    ]
    commands.run(line)  # A checkpoint has all weights.
    assert "has neither model.safetensors nor" in commands.refusal("train tune.toml --dry-run")
