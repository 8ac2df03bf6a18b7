"""fp8 weights with one scale per block: exact in every slice, with errors for other formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from directories import experts_in_place, put_sharded, tune
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from moesaic.base.errors import ConfigError, WeightsError
from moesaic.cli.main import main
from moesaic.dist.state import PARAMETER, TensorShard
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import Family
from moesaic.facts.workload import expert_name, parameters
from moesaic.models.hf import fp8, names
from moesaic.models.hf.config import config_text, from_huggingface
from moesaic.models.hf.convert import convert
from moesaic.models.hf.origin import open_origin
from moesaic.models.hf.reader import SINGLE_NAME, HFSource
from moesaic.models.state import tensor_shards
from moesaic.serve.loading import load_model
from moesaic.testing.states import live_values

SCHEME: dict[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"],
}  # fmt: skip
RAGGED = ModelConfig(
    family="olmoe", vocab=40, hidden=136, layers=1, heads=4, kv_heads=4, head_dim=34, ffn=130,
    experts=3, top_k=2,
)  # fmt: skip

MORE: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "layers": 2, "dense_layers": 1, "dense_ffn": 140, "shared_experts": 1,
        "latent": {"kv_lora_rank": 10, "q_lora_rank": 12, "qk_rope_head_dim": 4, "v_head_dim": 6},
    },
}  # fmt: skip


def quantise(weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return fp8 values and scales of `weight`, block by block."""
    rows, columns = (-(-extent // 128) for extent in weight.shape)
    bits = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, columns, dtype=scale_dtype)
    for row in range(rows):
        for column in range(columns):
            at = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
            scales[row, column] = weight[at].abs().max() / 448
            bits[at] = (weight[at] / scales[row, column].float()).to(bits.dtype)
    return bits, scales


def meaning(bits: Tensor, scales: Tensor) -> Tensor:
    """Return each element as its fp8 value times the scale of its block."""
    row, column = (torch.arange(extent) // 128 for extent in bits.shape)
    return bits.float() * scales.float()[row[:, None], column]


def put(
    directory: Path, model: ModelConfig, scale_dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Write a directory with quantised projections, and return its values by logical name."""
    draws = torch.Generator().manual_seed(3)
    expected_values, tensors = {}, {}
    for parameter in parameters(model):
        name = names.written_name(model, parameter)
        weight = torch.randn(parameter.shape, generator=draws) / 8
        if ".mlp." in name and ".gate." not in name:
            tensors[name], scales = quantise(weight, scale_dtype)
            tensors[f"{name}_scale_inv"] = scales
            expected_values[parameter.name] = meaning(tensors[name], scales)
        else:
            expected_values[parameter.name] = tensors[name] = weight.bfloat16()
    directory.mkdir(exist_ok=True)
    raw = json.loads(config_text(model, "bfloat16"))
    (directory / "config.json").write_text(json.dumps({**raw, "quantization_config": SCHEME}))
    save_file(tensors, directory / SINGLE_NAME)
    return expected_values


def change(directory: Path, **changes: Tensor | None) -> None:
    tensors = {**load_file(directory / SINGLE_NAME), **changes}
    save_file({n: t for n, t in tensors.items() if t is not None}, directory / SINGLE_NAME)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_elements_are_values_times_scales(scale_dtype: torch.dtype, tmp_path: Path) -> None:
    expected_values = put(tmp_path, RAGGED, scale_dtype)
    source = HFSource(tmp_path, RAGGED)
    assert source.notes == []
    for name, expected in expected_values.items():
        assert source.dtype(name) == expected.dtype
        assert torch.equal(source.read(name), expected), name
    check_in_place(tmp_path, expected_values)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [((0, 5), (0, 136)), ((127, 129), (120, 136)), ((128, 130), (3, 4)), ((60, 130), (130, 136))],
)
def test_shard_reads_its_blocks_only(
    rows: tuple[int, int], columns: tuple[int, int], tmp_path: Path
) -> None:
    name = expert_name(0, 2, "up")
    whole = put(tmp_path, RAGGED)[name]
    tensor = torch.empty(rows[1] - rows[0], columns[1] - columns[0])
    offset = (rows[0], columns[0])
    HFSource(tmp_path, RAGGED).fill(
        [TensorShard.of_tensor(PARAMETER, name, tuple(whole.shape), offset, tensor, (0,))]
    )
    assert torch.equal(tensor, whole[slice(*rows), slice(*columns)])


def test_scales_in_another_file_and_fused_experts(tmp_path: Path) -> None:
    expected_values = put(tmp_path, RAGGED)
    tensors = load_file(tmp_path / SINGLE_NAME)
    at, bits, scales = "model.layers.0.mlp.experts", [], []
    for expert in range(3):
        weight = torch.cat(
            [expected_values[expert_name(0, expert, part)] for part in ("gate", "up")]
        )
        for part in ("gate", "up"):
            for suffix in ("weight", "weight_scale_inv"):
                del tensors[f"{at}.{expert}.{part}_proj.{suffix}"]
        pair = quantise(weight, torch.float32)
        bits.append(pair[0])
        scales.append(pair[1])
        gate, up = meaning(*pair).chunk(2)
        (
            expected_values[expert_name(0, expert, "gate")],
            expected_values[expert_name(0, expert, "up")],
        ) = gate, up
    tensors[f"{at}.gate_up_proj"] = torch.stack(bits)
    tensors[f"{at}.gate_up_proj_scale_inv"] = torch.stack(scales)
    (tmp_path / SINGLE_NAME).unlink()
    put_sharded(tmp_path, tensors, lambda _, name: f"{'scale' in name}.safetensors")
    source = HFSource(tmp_path, RAGGED)
    for name, expected in expected_values.items():
        assert torch.equal(source.read(name), expected), name
    check_in_place(tmp_path, expected_values)


def check_in_place(directory: Path, expected_values: dict[str, Tensor]) -> None:
    for dtype in ("F32", "BF16"):
        found = experts_in_place(open_origin(directory), dtype)
        assert len(found) == 3 * 3
        for name, values in found.items():
            assert torch.equal(values, expected_values[name].to(values.dtype)), name


def test_values_match_transformers(tmp_path: Path) -> None:
    bits, scales = quantise(torch.randn(256, 384), torch.float32)
    # Some releases of transformers return a tensor for the bare name "weight", others a list.
    stored = {"up.weight": [bits], "up.weight_scale_inv": [scales]}
    (theirs,) = Fp8Dequantize(None).convert(stored)["up.weight"]
    box = (slice(0, 256), slice(0, 384))
    assert torch.equal(fp8.dequantise(bits, scales, box), theirs)


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "deepseek_v3"])
def test_export_is_not_quantised(family: Family, tmp_path: Path) -> None:
    ragged = ModelConfig(**{**RAGGED.model_dump(), **MORE.get(family, {}), "family": family})
    expected_values = put(tmp_path / "from", ragged)
    for dtype, stored_dtype in (("keep", None), ("bf16", torch.bfloat16)):
        out = tmp_path / dtype
        convert(tmp_path / "from", out, dtype=dtype)
        assert "quantization_config" not in json.loads((out / "config.json").read_text())
        source = HFSource(out, ragged)
        for name, expected in expected_values.items():
            assert torch.equal(source.read(name), expected.to(stored_dtype or expected.dtype)), name
    model = load_model(open_origin(tmp_path / "from"), torch.device("cpu"), "bf16").model
    for shard in tensor_shards(model):
        assert torch.equal(live_values(shard), expected_values[shard.name].bfloat16()), shard.name
    convert(tmp_path / "from", tmp_path / "checkpoint", to="checkpoint")
    kept = open_origin(tmp_path / "checkpoint").tensors
    assert all(torch.equal(kept.read(name), expected) for name, expected in expected_values.items())


def test_commands_read_fp8_and_report_skipped_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = RAGGED.model_copy(
        update={"vocab": 260, "extras": {"num_nextn_predict_layers": 1, "eos_token_id": None}}
    )
    expected_values = put(Path("base"), model)
    raw = json.loads(Path("base/config.json").read_text())
    raw["num_nextn_predict_layers"] = 1
    Path("base/config.json").write_text(json.dumps(raw))
    change(Path("base"), **{f"model.layers.1.{n}.weight": torch.ones(2) for n in "ab"})
    exact = ("train.steps=1", "train.precision=fp32", "optimizer.lr=1e-30")
    for call in (
        lambda: main(["inspect", "base"]),
        lambda: main(["convert", "base", "--out", "plain"]),
        lambda: tune(*exact),
    ):
        assert call() == 0, capfd.readouterr().err
        captured = capfd.readouterr()
        text = " ".join((captured.out + captured.err).split())
        assert text.count("'model.layers.1.b.weight') are left out, and no export will") == 1
    plain, trained = (open_origin(Path(name)).tensors for name in ("plain", "run"))
    for name, expected in expected_values.items():
        assert torch.equal(plain.read(name), expected), name
        assert (trained.read(name) - expected).abs().max() < 1e-20, name


UP = "model.layers.0.mlp.experts.1.up_proj.weight"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{UP}_scale_inv": None}, ("up_proj.weight", "missing")),
        ({f"{UP}_scale_inv": torch.ones(1, 2)}, ("F32 [1, 2]", "F32 or BF16 [2, 2]", "128 by 128")),
        ({f"{UP}_scale_inv": torch.ones(2, 2).half()}, ("F16 [2, 2]", "F32 or BF16 [2, 2]")),
        ({"model.norm.weight": torch.ones(136).to(torch.float8_e4m3fn),
          "model.norm.weight_scale_inv": torch.ones(1)}, ("model.norm.weight", "of a matrix")),
        ({UP: torch.ones(130, 136).to(torch.float8_e5m2)}, ("F8_E5M2",)),
        ({UP: torch.ones(130, 136)}, (f"'{UP}_scale_inv' is not part of the model",)),
    ],
)  # fmt: skip
def test_mismatched_scales_are_rejected(
    changes: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    put(tmp_path, RAGGED)
    change(tmp_path, **changes)
    with pytest.raises(WeightsError) as caught:
        HFSource(tmp_path, RAGGED)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, 'quant_method = "gptq"'),
        ({"weight_block_size": [64, 64]}, "weight_block_size = [64, 64]"),
        ({"weight_block_size": None}, "weight_block_size = null"),
        ({"fmt": "e5m2"}, 'fmt = "e5m2"'),
        ({"activation_scheme": "static"}, 'activation_scheme = "static"'),
        ({"expert_dtype": "fp4"}, 'expert_dtype = "fp4"'),
        ({"bits": 4}, "quantization_config.bits = 4"),
    ],
)
def test_other_quantisation_schemes_are_rejected(changes: dict[str, Any], words: str) -> None:
    raw = json.loads(config_text(RAGGED, "bfloat16"))
    from_huggingface({**raw, "quantization_config": {**SCHEME, "scale_fmt": "ue8m0"}}, "x")
    with pytest.raises(ConfigError) as caught:
        from_huggingface({**raw, "quantization_config": {**SCHEME, **changes}}, "DIR/config.json")
    for word in (words, "DIR/config.json", "only", "bf16"):
        assert word in str(caught.value)
