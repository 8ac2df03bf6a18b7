"""`moesaic bench layer` with tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import Commands
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.models.expert_benchmark import DeviceLimit, ExpertLayerBenchmark
from moesaic.models.hf.config import config_text

LINE = ["bench", "layer", "--set", "model.preset=tiny-mixtral", "--set", "seconds=20"]
FEW = ["--set", "tokens=[1, 40]", "--set", 'dtypes=["fp32"]']


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_layer_is_compared_with_its_limit(commands: Commands) -> None:
    result = commands.facts([*LINE, *FEW])
    assert [speed["roofline"]["tokens"] for speed in result["speeds"]] == [1, 40]
    assert result["experts"].endswith(", 2 per token")
    assert result["left_out"] == []
    (limit,) = result["limits"]
    for speed in result["speeds"]:
        assert speed["forward_s"] > 0
        assert speed["step_s"] > 0
        assert speed["roofline"]["dtype"] == limit["dtype"] == "fp32"
        assert speed["roofline"]["forward_s"] < speed["roofline"]["step_s"]


def test_output_is_a_table(commands: Commands) -> None:
    text = commands.output([*LINE, *FEW])
    heading, backend, limits, _, titles, *rows = text.splitlines()
    assert heading.startswith("8 experts of 128 x 256, 2 per token; ")
    assert backend.startswith(("experts in fp32: torch.mm per", "experts in fp32: oneDNN ("))
    assert limits.startswith("limits: matmul fp32 ")
    assert titles.split()[:2] == ["tokens", "per"]
    assert [row.split()[:2] for row in rows[:2]] == [["fp32", "1"], ["fp32", "40"]]
    assert rows[0].split()[-1] in ("memory", "matmul")


def test_batches_without_time_are_named(commands: Commands) -> None:
    text = commands.output([*LINE, "--set", "seconds=1e-6", "--set", 'dtypes=["fp32"]'])
    assert "\nskipped: fp32 with 1, 16, 128, 512, 2,048 tokens: a batch takes " in text
    assert "; raise seconds (--set seconds=...), or use fewer tokens" in text


def test_batches_without_memory_are_named(
    monkeypatch: pytest.MonkeyPatch, commands: Commands
) -> None:
    monkeypatch.setattr("moesaic.kernels.device.memory_bytes", lambda device: 50_000_000)
    sets = ["--set", "tokens=[1, 100000]", "--set", 'dtypes=["fp32"]']
    text = commands.output([*LINE, *sets])
    assert "\nskipped: fp32 with 100,000 tokens: a batch needs up to " in text
    assert text.endswith("use fewer tokens (--set tokens=...)\n")


def test_an_efficiency_above_one_causes_a_warning(
    monkeypatch: pytest.MonkeyPatch, commands: Commands
) -> None:
    slow = DeviceLimit("fp32", 1e8, 1e9)
    monkeypatch.setattr(ExpertLayerBenchmark, "measure_limits", lambda *_: [slow])
    captured = commands.run([*LINE, "--set", "tokens=[1]", "--set", 'dtypes=["fp32"]', "--json"])
    assert json.loads(captured.out)["speeds"]
    assert "% of the limit (tokens: fp32 with 1): the machine was busy" in captured.err


def test_a_layer_of_a_directory(tmp_path: Path, commands: Commands) -> None:
    model = ModelConfig(**PRESETS["tiny-mixtral"])
    (tmp_path / "config.json").write_text(config_text(model, "float32"))
    line = ["bench", "layer", "--set", f"model.from={tmp_path}", "--set", "seconds=1e-6"]
    assert commands.facts([*line])["experts"].startswith(f"{model.experts} experts")


@pytest.mark.parametrize(
    ("subject", "preset", "sets", "words"),
    [
        ("", "", [], "the subject is missing: use moesaic bench layer"),
        ("disk", "", [], "'disk' cannot be measured: use moesaic bench layer"),
        ("layer", "", [], "model is missing: add --set model.preset=NAME (tiny-dense, "),
        ("layer", "tiny", [], "model.preset=tiny: "),
        ("layer", "", ["model.from=nope"], 'model.from = "nope" is no directory: give a Hug'),
        (
            "layer", "tiny-dense", [],
            "model.preset=tiny-dense: model.experts = 0: a dense model has no expert layer",
        ),
        ("layer", "", ["model.presett=tiny-olmoe"], "did you mean 'model.preset'?\n"),
        ("layer", "tiny-olmoe", ["tokens=8"], "give a list of one or more integers from 1 "),
        ("layer", "tiny-olmoe", ["tokens=[0]"], "tokens[0] = 0: tokens takes a list"),
        ("layer", "tiny-olmoe", ["token=[1]"], "did you mean 'tokens'?"),
        ("layer", "tiny-olmoe", ["tokens=[8,1,8]"], "tokens has 8 more than once: leave"),
        ("layer", "tiny-olmoe", ["model.experts=1"], "error: model.experts=1: "),
        ("layer", "tiny-olmoe", ["device=abacus"], "device = 'abacus' is not a device"),
        (
            "layer", "tiny-olmoe", ["model.hidden=1000000000"],
            "not even the 4 of a token fit, so lower model.hidden or model.ffn",
        ),
        (
            "layer", "deepseek-v3", ["model.ffn=1000000"],
            "256 experts of model.hidden = 7168 and model.ffn = 1000000, with their gradients, ",
        ),
    ],
)  # fmt: skip
def test_mistakes(
    subject: str, preset: str, sets: list[str], words: str, commands: Commands
) -> None:
    items = [f"model.preset={preset}"] * bool(preset) + sets
    line = ["bench", *subject.split(), *(f"--set={item}" for item in items)]
    assert words in commands.refusal(line)
