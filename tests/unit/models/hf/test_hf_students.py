"""Exports of a run with students: each of its models alone, without auxiliary weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.cli.main import main
from moesaic.dist.checkpoint import Checkpoint, Saver
from moesaic.dist.state import PARAMETER, State
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.workload import parameters
from moesaic.models.hf.convert import convert
from moesaic.models.hf.origin import open_origin
from moesaic.models.lm import LanguageModel
from moesaic.models.state import tensor_shards
from moesaic.nn.attention_backends import AttentionMetadata
from moesaic.nn.inputs import Inputs
from moesaic.testing.jobs import TINY
from moesaic.testing.states import whole_shard

SIZES = {
    "vocab": 61, "hidden": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "ffn": 12,
}  # fmt: skip
STUDENTS = [
    {"name": "small", "model": {"family": "llama", **SIZES}},
    {"name": "mixed", "model": {"family": "mixtral", **SIZES, "experts": 4, "top_k": 2,
                                "renormalise": True}, "teacher": "small"},
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a teacher, two students and their auxiliary weights."""
    job = parse(Job, {**TINY, "student": STUDENTS}, "job")
    models = {"": job.model, **{f"students.{one.name}.": one.model for one in job.student}}
    generator = torch.Generator().manual_seed(3)
    shards = [
        whole_shard(f"{prefix}{one.name}", torch.randn(one.shape, generator=generator) / 4)
        for prefix, model in models.items()
        for one in parameters(model)
    ]
    shards.append(whole_shard("students.small.auxiliary.layer.q.weight", torch.ones(16, 16)))
    directory = tmp_path_factory.mktemp("students") / "run"
    saver = Saver(directory / "checkpoints", World.solo(), keep=2)
    saver.save(State(shards, {"step": 5}), 5, {"job": job.model_dump(mode="json"), "plan": {}})
    saver.wait()
    return directory


def logits(run: Path, student: str | None, tokens: Tensor) -> Tensor:
    """Return the logits of the network in the run itself."""
    origin = open_origin(run, student=student)
    model = LanguageModel(origin.model)
    origin.fill(tensor_shards(model))
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    with torch.no_grad():
        attention = AttentionMetadata.causal(*tokens.shape)
        found: Tensor = model.eval()(tokens, Inputs(model.rotary(positions), attention))[0]
    return found


@pytest.mark.parametrize("student", ["small", "mixed", None])
def test_transformers_gives_the_logits_of_the_run(
    run: Path,
    student: str | None,
    their_logits: Callable[[Path, Tensor], Tensor],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [] if student is None else ["--student", student]
    assert main(["convert", str(run), "--out", str(tmp_path / "out"), *flags]) == 0
    assert capsys.readouterr().err == ""
    tokens = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(4))
    theirs = their_logits(tmp_path / "out", tokens)
    ours = logits(run, student, tokens)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_of_one_model_holds_nothing_of_the_others(run: Path, tmp_path: Path) -> None:
    for student in ("small", None):
        out = tmp_path / f"{student}"
        convert(run, out, to="checkpoint", student=student)
        written = Checkpoint.open(out)
        model = open_origin(run, student=student).model
        assert set(written.tensors) == {f"{PARAMETER}/{one.name}" for one in parameters(model)}
        assert parse(Job, written.facts["job"], "job").model == model
        again = open_origin(out)
        assert torch.equal(
            again.tensors.read("embed.weight"),
            open_origin(run, student=student).tensors.read("embed.weight"),
        )
        with pytest.raises(ConfigError, match="is of a run without students: leave out"):
            open_origin(out, student="small")


def test_an_unknown_student_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert main(["convert", str(run), "--out", out, "--student", "smal"]) == 2
    assert capsys.readouterr().err.startswith(
        'error: student = "smal" is not known: did you mean "small" (it takes "small" or "mixed")'
    )
    convert(run, tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "olmoe"
    assert main(["convert", str(tmp_path / "hf"), "--out", out, "--student", "small"]) == 2
    assert "which holds one model: give a run with students" in capsys.readouterr().err


def test_a_student_that_was_dropped_is_found_in_an_earlier_checkpoint(
    run: Path, tmp_path: Path
) -> None:
    """The run goes on with one student, then with none."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    facts = Checkpoint.open(next((copy / "checkpoints").glob("step-*"))).facts
    job = facts["job"]
    for step, students in ((6, [one for one in job["student"] if one["name"] == "small"]), (7, [])):
        saver = Saver(copy / "checkpoints", World.solo(), keep=9)
        shards = [whole_shard("embed.weight", torch.zeros(61, 16))]
        saver.save(
            State(shards, {"step": step}), step, {**facts, "job": {**job, "student": students}}
        )
        saver.wait()
    for name, step in (("small", 6), ("mixed", 5)):
        words = rf"is not in '.*step-00000007', because .* holds it, '.*step-0000000{step}'"
        with pytest.raises(ConfigError, match=words):
            convert(copy, tmp_path / "out", student=name)
    with pytest.raises(ConfigError, match="is of a run without students: leave out"):
        convert(copy, tmp_path / "out", student="smal")
    early = next((copy / "checkpoints").glob("step-00000005"))
    convert(early, tmp_path / "out", student="mixed")


def test_a_checkpoint_lists_its_students(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    assert main(["inspect", str(checkpoint)]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split() for line in lines[lines.index("  students") + 1 :][:2]]
    assert shown == [
        ["small", "4,720", "parameters,", "learns", "from", "the", "teacher"],
        ["mixed", "8,304", "parameters,", "learns", "from", "small"],
    ]
