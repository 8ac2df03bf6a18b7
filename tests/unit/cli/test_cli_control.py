"""The example of control, from its texts to a text by attributes, and mistakes of `--control`."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from commands import Commands

ROOT = Path(__file__).parents[3]
JOB = "examples/control/control.toml"
SMALL = [
    "train.steps=2", "train.batch=2", "schedule.warmup=1", "model.hidden=32", "model.head_dim=8",
    "model.ffn=32", "log.tensorboard=false", "train.validate_every=2",
    "train.validation_samples=1",
]  # fmt: skip


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: Commands) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    runpy.run_path(str(ROOT / "examples/control/make_texts.py"))["main"](Path("build/control"))
    facts = commands.facts(f"inspect {JOB} --samples 4")
    for sample in facts["samples"]:
        for document in sample["documents"]:
            assert [part["in_loss"] for part in document] == [False, True]
            assert document[1]["text"].endswith("<|endoftext|>")
    prompts = [doc[0]["text"] for sample in facts["samples"] for doc in sample["documents"]]
    assert any(one.startswith(("[help-0][help-1]", "[source-0][source-1]")) for one in prompts)

    sets = [word for item in SMALL for word in ("--set", item)]
    text = commands.output(["train", JOB, "--out", "run", *sets])
    assert 'moesaic generate run --prompt "..."' in text
    short = "--set temperature=0 --set max_tokens=3"
    (found,) = commands.facts(
        f"generate run --control genre=source,keywords=a,b,length=100 {short}"
    )
    assert found["prompt"] == ""
    assert len(found["prompt_tokens"]) == 64 + len("a, b") + 2 + len("About 100 words") + 2
    (same,) = commands.facts(
        f"generate run --set control.genre=source --set control.length=100 {short}",
        "--set", 'control.keywords=["a", "b"]',
    )  # fmt: skip
    assert same["tokens"] == found["tokens"]
    commands.run("convert run --out hf")
    lines = [
        {"custom_id": "a", "body": {"prompt": "", "control": {"genre": "source", "length": 9}}},
        {"custom_id": "b", "body": {"prompt": "x", "control": {"genre": "novel"}}},
    ]
    Path("in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert commands.facts(f"generate hf --input in.jsonl --output out.jsonl {short}") == {
        "answered": 1, "failed": 1, "skipped": 0, "tokens": 3,
    }  # fmt: skip
    answers = {
        one["custom_id"]: one for one in map(json.loads, Path("out.jsonl").read_text().splitlines())
    }
    usage = answers["a"]["response"]["body"]["usage"]
    assert usage["prompt_tokens"] == 64 + len("About 9 words") + 2
    assert 'control.genre = "novel" is not known' in answers["b"]["error"]["message"]
    for given, words in (
        ("mood=sad", "unknown key 'control.mood'"),
        ("genre=help,law", "'law' is not of the form key=value"),
        ("length=long", "give an integer from 1"),
        ("sentiment=good", "was trained on genre, topic, keywords and length"),
    ):
        assert words in commands.refusal(["generate", "hf", "--control", given])
    assert "--control names attributes of a text, and --chat" in commands.refusal(
        "generate hf --chat --prompt Hi --control length=9"
    )
