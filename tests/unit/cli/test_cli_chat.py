"""Fine-tuning example, from its tokenizer to an answer."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from commands import Commands

ROOT = Path(__file__).parents[3]
JOB = "examples/chat/chat.toml"


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: Commands) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    make = runpy.run_path(str(ROOT / "examples/chat/make_tokenizer.py"))
    make["main"](Path("build/chat/tokenizer"))
    shown, notes = commands.run(["inspect", JOB, "--json", "--samples", "3"])
    assert " conversations in " in notes.replace("\n", " ")
    facts = json.loads(shown)
    assert facts["sequence"] == 128
    assert len(facts["samples"]) == 3
    for sample in facts["samples"]:
        assert sample["targets"] > 0
        for document in sample["documents"]:
            before = ""
            for part in document:
                if part["in_loss"]:
                    assert before.endswith("<|im_start|>assistant\n")
                    assert part["text"].endswith("<|im_end|>")
                    assert part["text"].count("<|im_end|>") == 1
                before = part["text"]
            assert document[-1]["in_loss"]

    text = commands.output(["inspect", JOB, "--samples", "1"])
    first = facts["samples"][0]
    assert f"sample 0: {first['targets']} tokens in the loss" in text
    part = first["documents"][0]
    assert part[0]["text"] + f"\u27e6{part[1]['text']}\u27e7" in text

    small = ["train.steps=2", "schedule.warmup=1", "model.layers=1", "log.tensorboard=false"]
    sets = [word for item in small for word in ("--set", item)]
    text = commands.output(["train", JOB, "--out", "run", *sets])
    assert 'moesaic generate run --chat --prompt "..."' in text
    commands.run("generate run --chat --prompt Hello! --set max_tokens=2")


def test_samples_of_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: Commands
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.jsonl").write_text('{"text": "ab\\u001b[2J"}\n{"text": "cdefgh"}\n')
    Path("job.toml").write_text(
        '[model]\npreset = "tiny-olmoe"\n[train]\nsteps = 30\nbatch = 1\n'
        "[schedule]\nwarmup = 1\n"
        '[data]\npath = "text.jsonl"\nsequence = 13\ncache = "cache"\n'
    )
    (sample,) = commands.facts("inspect job.toml --samples 1")["samples"]
    assert sample == {
        "targets": 12,
        "documents": [
            [
                {"in_loss": False, "text": "a"},
                {"in_loss": True, "text": "b\x1b[2J<|endoftext|>"},
            ],
            [{"in_loss": False, "text": "c"}, {"in_loss": True, "text": "defgh<|endoftext|>"}],
        ],
    }
    text = commands.output("inspect job.toml --samples 1")
    assert "a\u27e6b\N{REPLACEMENT CHARACTER}[2J<|endoftext|>\u27e7" in text
    assert "\x1b" not in text
    assert "nothing.toml" in commands.refusal("inspect nothing.toml")
