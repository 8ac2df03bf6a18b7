"""The example of distillation, shortened: four models in one run, and one of them exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import Commands

EXAMPLE = Path(__file__).parents[3] / "examples/titan/titan.toml"
SHORT = [
    "train.steps=2", "train.batch=4", "data.sequence=32", "train.validate_every=2", "layout.ep=1",
    "train.validation_samples=4", "checkpoint.every=0", "schedule.warmup=1", "train.device=cpu",
    "log.tensorboard=false",
]  # fmt: skip


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("build/titan").mkdir(parents=True)
    rows = [json.dumps({"text": f"Topic {number}. " * 20}) for number in range(40)]
    Path("build/titan/topics.jsonl").write_text("\n".join(rows))
    return tmp_path


def test_the_example_trains_and_exports_a_student(commands: Commands) -> None:
    sets = [word for item in SHORT for word in ("--set", item)]
    captured = commands.run(["train", str(EXAMPLE), "--out", "run", *sets, "--json", "--verbose"])
    facts = json.loads(captured.out)
    figures = facts["students"]["assistant"]
    assert f", assistant {figures['validation_loss']:.4f}, small " in captured.err
    assert list(facts["students"]) == ["assistant", "small", "tiny"]
    for figures in facts["students"].values():
        assert figures["validation_loss"] > 0
        assert figures["logits"] >= 0
    assert commands.facts("inspect run")["students"][2]["teacher"] == "assistant"
    assert "\n    tiny " in commands.output("inspect run")
    page = Path("run/report.html").read_text()
    assert '"name":"student-losses"' in page
    commands.output("convert run --student tiny --out tiny")
    config = json.loads(Path("tiny/config.json").read_text())
    assert (config["model_type"], config["hidden_size"]) == ("llama", 48)
    text = commands.output(["generate", "tiny", "--prompt", "Topic", "--set", "max_tokens=2"])
    assert text.endswith("\n")
    more = ["--resume", "--change", "--set", "distill.frozen=true", "--set", "train.steps=3"]
    text = commands.output(["train", str(EXAMPLE), "--out", "run", *sets, *more])
    assert "trained 3 steps in " in text
    assert ", students alone: the teacher is frozen, " in text
    assert "moesaic convert run --student assistant --out assistant" in text
    assert '"name":"learning-rate"' not in Path("run/report.html").read_text()


def test_a_frozen_teacher_without_weights_warns(commands: Commands) -> None:
    line = ["train", str(EXAMPLE), "--dry-run", "--set", "distill.frozen=true"]
    captured = commands.run([*line, "--set", "layout.ep=1"])
    assert "warning: distill.frozen = true without model.from: students learn" in captured.err
    assert "  model" in captured.out
    assert "nothing, frozen" in captured.out


def test_a_mistake_in_a_set_of_a_student_names_it(commands: Commands) -> None:
    line = ["train", str(EXAMPLE), "--dry-run", "--set"]
    refused = commands.refusal([*line, "student.small.lr=-1"])
    assert refused.startswith("error: student.small.lr=-1: student[")
    assert "].lr = -1: " in refused
