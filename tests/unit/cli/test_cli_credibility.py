"""A credibility head from pairs to a choice: it rejects generated text of sources it never saw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from commands import Commands
from moesaic import Engine
from moesaic.testing.served import write_chat_model

WORDS = ["sun", "moon", "tree", "sea", "hill", "rain", "fox", "road"]
SAMPLING = [
    word
    for item in (
        "max_tokens=64", "temperature=3.0", "logit_bias={13=12.0, 33=12.0, 220=12.0, 257=12.0}",
        "device=cpu",
    )
    for word in ("--set", item)
]  # fmt: skip
JOB = """
[model]
from = "model"
[credibility]
text = 0.2
[data]
path = "train.jsonl"
validation_path = "held-out.jsonl"
format = "labelled"
sequence = 72
cache = "cache"
[train]
steps = 24
batch = 8
validate_every = 24
device = "cpu"
[optimizer]
lr = 1e-2
[schedule]
warmup = 2
[log]
tensorboard = false
"""


def write_paragraphs(path: Path, number: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    chosen = draw.choice(WORDS, (number, 3))
    path.write_text("\n\n".join(f"The {a} is. It saw a {b}. So did the {c}." for a, b, c in chosen))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_chat_model(tmp_path / "model")
    for name, number, seed in (("train", 48, 1), ("held-out", 24, 2)):
        write_paragraphs(tmp_path / f"{name}.txt", number, seed)
    (tmp_path / "job.toml").write_text(JOB)


def test_a_trained_head_rejects_generated_text(commands: Commands) -> None:
    """The path works end to end; the figures say nothing about quality.

    A bias on four tokens shapes the generated text, so counts of single tokens tell it apart.
    """
    for name in ("train", "held-out"):
        files = ["--input", f"{name}.txt", "--output", f"{name}.jsonl"]
        facts = commands.facts(["generate", "model", "--adversarial", *files, *SAMPLING])
        assert facts["pairs"] > 0.7 * facts["total"]
    facts = commands.facts("inspect job.toml --samples 2")
    for sample in facts["samples"]:
        assert len(sample["labels"]) == len(sample["documents"])
        for label, document in zip(sample["labels"], sample["documents"], strict=True):
            assert any(part["in_loss"] for part in document) is (label == "original")
    assert {one for sample in facts["samples"] for one in sample["labels"]} == {
        "original", "generated"
    }  # fmt: skip
    assert "\nlabel: generated\nThe " in commands.output("inspect job.toml --samples 2")

    facts = commands.facts("train job.toml --out run")
    found = facts["credibility"]["validation"]
    assert found["auc"] > 0.95
    assert found["accuracy"] > 0.8
    page = Path("run/report.html").read_text()
    assert '"name":"credibility-loss"' in page
    assert "<h2>Clicks</h2>" not in page
    with Engine("run", device="cpu") as engine:
        written = engine.credibility(["The sea is. It saw a hill. So did the fox."])
        garbled = engine.credibility(["The sea is. It x B. .q  B. zz ."])
    assert written[0] > 0.5 > garbled[0]
    line = "generate run --prompt The --best-of 3 --rank credibility --set max_tokens=8"
    (best,) = commands.facts(line, "--set", "device=cpu")
    assert 0 < best["score"] < 1


def test_messages_name_keys_of_the_verb(commands: Commands) -> None:
    """A job has `data.text_key`, and `--adversarial` has `text_key`."""
    Path("a.jsonl").write_text('{"body": "It rained. It stopped."}\n')
    line = "generate model --adversarial --output out.jsonl --set max_tokens=64 --input"
    assert "has no 'text': set text_key to one of its columns (body)" in commands.refusal(
        f"{line} a.jsonl"
    )
    Path("b.unknown").write_text("It rained. It stopped.")
    assert "data.format" not in commands.refusal(f"{line} *.unknown")


def test_labels_stand_only_where_there_is_a_head(commands: Commands) -> None:
    head = Path("train.jsonl")
    head.write_text('{"text": "Yes.", "label": 1}\n{"text": "No.", "label": 0}\n' * 9)
    Path("held-out.jsonl").write_bytes(head.read_bytes())
    assert "# labels = 2" in commands.output("train job.toml --dry-run --verbose")
    plain = JOB.replace("[credibility]\ntext = 0.2\n", "").replace('"labelled"', '"jsonl"')
    Path("job.toml").write_text(plain)
    assert "labels =" not in commands.output("train job.toml --dry-run --verbose")
    assert "labels" not in commands.facts("train job.toml --dry-run")["job"]["model"]
