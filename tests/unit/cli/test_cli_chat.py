"""Fine-tuning example, from its tokenizer to an answer."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from moesaic.cli.main import main

ROOT = Path(__file__).parents[3]
JOB = "examples/chat/chat.toml"


def test_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    make = runpy.run_path(str(ROOT / "examples/chat/make_tokenizer.py"))
    make["main"](Path("build/chat/tokenizer"))
    capfd.readouterr()

    assert main(["inspect", JOB, "--json", "--samples", "3"]) == 0
    shown, notes = capfd.readouterr()
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

    assert main(["inspect", JOB, "--samples", "1"]) == 0
    text = capfd.readouterr().out
    first = facts["samples"][0]
    assert f"sample 0: {first['targets']} tokens in the loss" in text
    part = first["documents"][0]
    assert part[0]["text"] + f"\u27e6{part[1]['text']}\u27e7" in text

    small = ["train.steps=2", "schedule.warmup=1", "model.layers=1", "log.tensorboard=false"]
    sets = [word for item in small for word in ("--set", item)]
    assert main(["train", JOB, "--out", "run", *sets]) == 0
    assert 'moesaic generate run --chat --prompt "..."' in capfd.readouterr().out
    ask = ["generate", "run", "--chat", "--prompt", "Hello!", "--set", "max_tokens=2"]
    assert main(ask) == 0, capfd.readouterr().err


def test_samples_of_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.jsonl").write_text('{"text": "ab\\u001b[2J"}\n{"text": "cdefgh"}\n')
    Path("job.toml").write_text(
        '[model]\npreset = "tiny-olmoe"\n[train]\nsteps = 30\nbatch = 1\n'
        "[schedule]\nwarmup = 1\n"
        '[data]\npath = "text.jsonl"\nsequence = 13\ncache = "cache"\n'
    )
    assert main(["inspect", "job.toml", "--samples", "1", "--json"]) == 0
    (sample,) = json.loads(capfd.readouterr().out)["samples"]
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
    assert main(["inspect", "job.toml", "--samples", "1"]) == 0
    text = capfd.readouterr().out
    assert "a\u27e6b\N{REPLACEMENT CHARACTER}[2J<|endoftext|>\u27e7" in text
    assert "\x1b" not in text
    assert main(["inspect", "nothing.toml"]) == 2
    assert "nothing.toml" in capfd.readouterr().err
