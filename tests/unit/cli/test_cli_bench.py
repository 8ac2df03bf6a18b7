"""`moesaic bench layer`: a layer measured against its limit, with tiny sizes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moesaic.cli.main import main
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.models.hf.config import config_text
from moesaic.models.speed import Batch, ExpertLayer, Limit

LINE = ["bench", "layer", "--model", "tiny-mixtral", "--set", "seconds=2"]
FEW = ["--set", "tokens=[1, 40]", "--set", 'dtypes=["fp32"]']


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_layer_is_held_against_its_limit(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*LINE, *FEW, "--json", "--out", "layer.json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert json.loads((place / "layer.json").read_text()) == found
    assert [one["least"]["tokens"] for one in found["speeds"]] == [1, 40]
    assert found["experts"].endswith(", 2 a token")
    assert found["left_out"] == []
    (limit,) = found["limits"]
    for one in found["speeds"]:
        assert one["forward_s"] > 0
        assert one["step_s"] > 0
        assert one["least"]["dtype"] == limit["dtype"] == "fp32"
        assert one["least"]["forward_s"] < one["least"]["step_s"]


def test_it_is_shown_as_a_table(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*LINE, *FEW]) == 0
    opening, engine, best, _, head, *rows = capfd.readouterr().out.splitlines()
    assert opening.startswith("8 experts of 128 x 256, 2 a token; ")
    assert engine.startswith(("experts in fp32 by torch.mm, one", "experts in fp32 by oneDNN ("))
    assert best.startswith("at best: products fp32 ")
    assert head.split()[:2] == ["tokens", "an"]
    assert [row.split()[:2] for row in rows[:2]] == [["fp32", "1"], ["fp32", "40"]]
    assert len({len(row.rsplit("  ", 1)[0]) for row in (head, *rows[:2])}) == 1
    assert rows[0].split()[-1] in ("memory", "products")


def test_lines_are_there_as_they_come(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whoever runs out of memory keeps what was measured before."""

    def stopped(layer: ExpertLayer, dtype: str, tokens: int, most_s: float) -> Batch:
        if tokens > 8:
            raise RuntimeError("no memory")
        return kept(layer, dtype, tokens, most_s)

    kept = ExpertLayer.batch
    monkeypatch.setattr(ExpertLayer, "batch", stopped)
    with pytest.raises(RuntimeError, match="no memory"):
        main([*LINE, *FEW])
    opening, _, best, _, _, row = capfd.readouterr().out.splitlines()
    assert opening.startswith("8 experts of 128 x 256")
    assert best.startswith("at best: ")
    assert row.split()[:2] == ["fp32", "1"]


def test_batches_that_there_is_no_time_for_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*LINE, "--set", "seconds=1e-6", "--set", 'dtypes=["fp32"]']) == 0
    said = capfd.readouterr().out
    assert "\nleft out: fp32 with 1, 16, 128, 512, 2,048 tokens: one takes up to " in said
    (enough,) = re.findall(r"to have them, --set seconds=(\d+)\n$", said)
    assert 0 < int(enough) <= 3600


def test_batches_that_there_is_no_memory_for_are_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("moesaic.dist.device.memory_bytes", lambda device: 50_000_000)
    sets = ["--set", "tokens=[1, 100000]", "--set", 'dtypes=["fp32"]']
    assert main([*LINE, *sets]) == 0
    said = capfd.readouterr().out
    assert "\nleft out: fp32 with 100,000 tokens: one takes up to " in said
    assert said.endswith("take fewer tokens (--set tokens=...)\n")


def test_a_limit_that_is_higher_afterwards_holds(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The machine was busy before: shares were up to a thousand times what they are."""
    found = iter([[Limit("fp32", 1e8, 1e9)], [Limit("fp32", 1e15, 1e15)]])
    monkeypatch.setattr(ExpertLayer, "limits", lambda *_: next(found))
    assert main([*LINE, "--set", "tokens=[1]", "--set", 'dtypes=["fp32"]']) == 0
    said = capfd.readouterr()
    first, second = [line for line in said.out.splitlines() if line.startswith("fp32")]
    assert first.split()[-1] == "products"
    assert second.split()[-2] == "0%"
    assert "\ntaken once more, it is higher; at best: products fp32 1e+03 TFLOP/s;" in said.out
    assert "which cannot be" not in said.err


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (
            Limit("fp32", 1e8, 1e9),
            "by products (tokens: fp32 with 1), which cannot be: the machine",
        ),
        (
            Limit("fp32", 1e15, 2e8),
            "by memory (tokens: fp32 with 1), which may be where weights of",
        ),
    ],
)
def test_what_can_hardly_be_is_warned_of(
    limit: Limit, words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ExpertLayer, "limits", lambda *_: [limit])
    sets = ["--set", "tokens=[1]", "--set", 'dtypes=["fp32"]', "--json"]
    assert main([*LINE, *sets]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["speeds"]
    assert f"% of the limit {words}" in said.err


def test_what_it_would_measure(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "layer", "--model", "olmoe", "--dry-run"]) == 0
    said = capfd.readouterr().out
    assert "tokens = [1, 16, 128, 512, 2048]" in said
    assert "experts = 64" in said


def test_a_layer_of_a_directory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = ModelConfig(**PRESETS["tiny-mixtral"])
    (tmp_path / "config.json").write_text(config_text(model, "float32"))
    assert main(["bench", "layer", "--set", f"model.from={tmp_path}", "--dry-run"]) == 0
    assert f"experts = {model.experts}\n" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("bench", "what to measure is missing: moesaic bench layer"),
        ("bench disk", "'disk' is nothing to measure: moesaic bench layer"),
        ("bench layer", "--model is missing: give a preset (tiny-dense, "),
        ("bench layer --model tiny", "--model tiny may be tiny-dense, tiny-mixtral, "),
        ("bench layer --model nope", "--model nope is not known: give tiny-dense, "),
        ("bench layer --set model.from=nope", 'model.from = "nope" is no directory: give a Hug'),
        ("bench layer --model olmoe --set tokens=8", "give a list of integers from 1 and up to"),
        ("bench layer --model tiny-dense", "model.experts = 0: a dense model has no expert layer"),
        ("bench layer --model olmoe --set tokens=[0]", "tokens[0] = 0 is out of range"),
        ("bench layer --model olmoe --set token=[1]", "did you mean 'tokens'?"),
        (
            "bench layer --model tiny-olmoe --set model.hidden=1000000000",
            "not even the 4 of a token fit, so lower model.hidden or model.ffn",
        ),
        (
            "bench layer --model tiny-olmoe --set model.preset=tiny-mixtral",
            "--model tiny-olmoe beside --set model.preset=tiny-mixtral: leave one of them out",
        ),
        ('bench layer --model olmoe --set dtypes=["fp32","fp32"]', 'dtypes has "fp32" more than'),
        ("bench layer --model olmoe --set tokens=[8,1,8]", "tokens has 8 more than once: leave"),
        (
            "bench layer --model deepseek --set model.ffn=1000000",
            "256 experts of model.hidden = 7168 and model.ffn = 1000000, with their gradients, ",
        ),
        ("bench layer --model olmoe --set device=abacus", "device = 'abacus' is no device"),
    ],
)
def test_mistakes(line: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert words in said.err
    assert said.err.count("\n") == 1


def test_a_mistake_between_settings_opens_with_what_was_typed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    line = ["bench", "layer", "--model", "olmoe", "--set", "model.experts=1", "--dry-run"]
    assert main(line) == 2
    assert capfd.readouterr().err.startswith("error: --set model.experts=1: ")
