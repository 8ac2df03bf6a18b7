"""`moesaic bench layer` with tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moesaic.cli.main import main
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.models.expert_benchmark import DeviceLimit, ExpertLayerBenchmark, Passes
from moesaic.models.hf.config import config_text

LINE = ["bench", "layer", "--model", "tiny-mixtral", "--set", "seconds=5"]
FEW = ["--set", "tokens=[1, 40]", "--set", 'dtypes=["fp32"]']


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_layer_is_compared_with_its_limit(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*LINE, *FEW, "--json", "--out", "layer.json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert json.loads((place / "layer.json").read_text()) == result
    assert [speed["roofline"]["tokens"] for speed in result["speeds"]] == [1, 40]
    assert result["experts"].endswith(", 2 per token")
    assert result["left_out"] == []
    (limit,) = result["limits"]
    for speed in result["speeds"]:
        assert speed["forward_s"] > 0
        assert speed["step_s"] > 0
        assert speed["roofline"]["dtype"] == limit["dtype"] == "fp32"
        assert speed["roofline"]["forward_s"] < speed["roofline"]["step_s"]


def test_output_is_a_table(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*LINE, *FEW]) == 0
    heading, backend, limits, _, titles, *rows = capfd.readouterr().out.splitlines()
    assert heading.startswith("8 experts of 128 x 256, 2 per token; ")
    assert backend.startswith(("experts in fp32: torch.mm per", "experts in fp32: oneDNN ("))
    assert limits.startswith("limits: matmul fp32 ")
    assert titles.split()[:2] == ["tokens", "per"]
    assert [row.split()[:2] for row in rows[:2]] == [["fp32", "1"], ["fp32", "40"]]
    assert len({len(row.rsplit("  ", 1)[0]) for row in (titles, *rows[:2])}) == 1
    assert rows[0].split()[-1] in ("memory", "matmul")


def test_rows_are_printed_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A later lack of memory does not hide earlier results."""

    def fail(layer: ExpertLayerBenchmark, dtype: str, tokens: int) -> Passes:
        if tokens > 8:
            raise RuntimeError("no memory")
        return original(layer, dtype, tokens)

    original = ExpertLayerBenchmark.passes
    monkeypatch.setattr(ExpertLayerBenchmark, "passes", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        main([*LINE, *FEW])
    heading, _, limits, _, _, row = capfd.readouterr().out.splitlines()
    assert heading.startswith("8 experts of 128 x 256")
    assert limits.startswith("limits: ")
    assert row.split()[:2] == ["fp32", "1"]


def test_batches_without_time_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*LINE, "--set", "seconds=1e-6", "--set", 'dtypes=["fp32"]']) == 0
    text = capfd.readouterr().out
    assert "\nskipped: fp32 with 1, 16, 128, 512, 2,048 tokens: a batch takes " in text
    assert "; raise seconds (--set seconds=...)" in text


def test_batches_without_memory_are_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("moesaic.kernels.device.memory_bytes", lambda device: 50_000_000)
    sets = ["--set", "tokens=[1, 100000]", "--set", 'dtypes=["fp32"]']
    assert main([*LINE, *sets]) == 0
    text = capfd.readouterr().out
    assert "\nskipped: fp32 with 100,000 tokens: a batch needs up to " in text
    assert text.endswith("use fewer tokens (--set tokens=...)\n")


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (
            DeviceLimit("fp32", 1e8, 1e9),
            "matmul limit (tokens: fp32 with 1): the machine was busy",
        ),
        (
            DeviceLimit("fp32", 1e15, 2e8),
            "memory limit (tokens: fp32 with 1): weights of few experts",
        ),
    ],
)
def test_efficiencies_above_one_cause_warnings(
    limit: DeviceLimit,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ExpertLayerBenchmark, "measure_limits", lambda *_: [limit])
    sets = ["--set", "tokens=[1]", "--set", 'dtypes=["fp32"]', "--json"]
    assert main([*LINE, *sets]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["speeds"]
    assert f"% of the {words}" in captured.err


def test_a_dry_run_shows_the_settings(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "layer", "--model", "olmoe", "--dry-run"]) == 0
    text = capfd.readouterr().out
    assert "tokens = [1, 16, 128, 512, 2048]" in text
    assert "experts = 64" in text


def test_a_layer_of_a_directory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = ModelConfig(**PRESETS["tiny-mixtral"])
    (tmp_path / "config.json").write_text(config_text(model, "float32"))
    assert main(["bench", "layer", "--set", f"model.from={tmp_path}", "--dry-run"]) == 0
    assert f"experts = {model.experts}\n" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("bench", "the subject is missing: use moesaic bench layer"),
        ("bench disk", "'disk' cannot be measured: use moesaic bench layer"),
        ("bench layer", "--model is missing: give a preset (tiny-dense, "),
        ("bench layer --model tiny", "--model tiny may be tiny-dense, tiny-mixtral, "),
        ("bench layer --model nope", "--model nope is not known: give tiny-dense, "),
        ("bench layer --set model.from=nope", 'model.from = "nope" is no directory: give a Hug'),
        ("bench layer --model olmoe --set tokens=8", "give a list of integers from 1 and up to"),
        ("bench layer --model tiny-dense", "model.experts = 0: a dense model has no expert layer"),
        ("bench layer --model olmoe --set tokens=[0]", "tokens[0] = 0: tokens takes a list of"),
        ("bench layer --model olmoe --set token=[1]", "did you mean 'tokens'?"),
        (
            "bench layer --model tiny-olmoe --set model.hidden=1000000000",
            "not even the 4 of a token fit, so lower model.hidden or model.ffn",
        ),
        (
            "bench layer --model tiny-olmoe --set model.preset=tiny-mixtral",
            "--model tiny-olmoe beside --set model.preset=tiny-mixtral: remove one of them",
        ),
        ('bench layer --model olmoe --set dtypes=["fp32","fp32"]', 'dtypes has "fp32" more than'),
        ("bench layer --model olmoe --set tokens=[8,1,8]", "tokens has 8 more than once: leave"),
        (
            "bench layer --model deepseek --set model.ffn=1000000",
            "256 experts of model.hidden = 7168 and model.ffn = 1000000, with their gradients, ",
        ),
        ("bench layer --model olmoe --set device=abacus", "device = 'abacus' is not a device"),
    ],
)
def test_mistakes(line: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.count("\n") == 1


def test_an_error_about_several_settings_quotes_the_flag(
    capfd: pytest.CaptureFixture[str],
) -> None:
    line = ["bench", "layer", "--model", "olmoe", "--set", "model.experts=1", "--dry-run"]
    assert main(line) == 2
    assert capfd.readouterr().err.startswith("error: --set model.experts=1: ")
