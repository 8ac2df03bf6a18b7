"""Supported directory contents (sharded, fused and spare tensors), and errors for the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from directories import on_file, put, put_sharded
from safetensors.torch import load_file, save_file
from torch import Tensor

from moesaic.base.errors import WeightsError
from moesaic.dist.state import FIRST_MOMENT, PARAMETER, TensorShard
from moesaic.facts.job import ModelConfig
from moesaic.facts.workload import parameters
from moesaic.models.hf import names
from moesaic.models.hf.config import read_config
from moesaic.models.hf.reader import INDEX_NAME, SINGLE_NAME, HFSource
from moesaic.testing.states import live_values, whole_shard

LLAMA = ModelConfig(
    family="llama", vocab=20, hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, ffn=6
)
MIXTRAL = LLAMA.model_copy(
    update={"family": "mixtral", "experts": 4, "top_k": 2, "renormalise": True}
)
OLMOE = MIXTRAL.model_copy(update={"family": "olmoe"})
NORM = "model.norm.weight"


def values(model: ModelConfig) -> dict[str, Tensor]:
    """Return random parameters by logical name."""
    return {p.name: torch.randn(p.shape) for p in parameters(model)}


def fill(
    directory: Path, model: ModelConfig, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    found = {p.name: torch.full(p.shape, float("nan"), dtype=dtype) for p in parameters(model)}
    HFSource(directory, model).fill([whole_shard(name, t) for name, t in found.items()])
    return found


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def fused(model: ModelConfig, logical: dict[str, Tensor], block: str) -> dict[str, Tensor]:
    """Return the tensors in the fused layout of transformers 5."""
    result = {}
    for parameter in parameters(model):
        at = f"model.layers.{parameter.layer}.{block}"
        if parameter.kind == "router":
            result[f"{at}.gate.weight"] = logical[parameter.name]
        elif parameter.kind != "expert":
            result[names.written_name(model, parameter)] = logical[parameter.name]
    for layer in range(model.layers):
        experts = [f"layers.{layer}.moe.experts.{e}" for e in range(model.experts)]
        gate_up = [torch.cat((logical[f"{e}.gate"], logical[f"{e}.up"])) for e in experts]
        at = f"model.layers.{layer}.{block}.experts"
        result[f"{at}.gate_up_proj"] = torch.stack(gate_up)
        result[f"{at}.down_proj"] = torch.stack([logical[f"{e}.down"] for e in experts])
    return result


@pytest.mark.parametrize("model", [LLAMA, MIXTRAL, OLMOE], ids=lambda m: m.family)
def test_single_and_sharded_files(model: ModelConfig, tmp_path: Path) -> None:
    expected = values(model)
    same(fill(put(tmp_path / "single", model, on_file(model, expected)), model), expected)
    (tmp_path / "single" / SINGLE_NAME).unlink()
    put_sharded(tmp_path / "single", on_file(model, expected))
    same(fill(tmp_path / "single", model), expected)


@pytest.mark.parametrize(
    ("model", "block"), [(MIXTRAL, "block_sparse_moe"), (MIXTRAL, "mlp"), (OLMOE, "mlp")]
)
def test_fused_files(model: ModelConfig, block: str, tmp_path: Path) -> None:
    expected = values(model)
    same(fill(put(tmp_path, model, fused(model, expected, block)), model), expected)
    source = HFSource(tmp_path, model)
    assert all(torch.equal(source.read(name), tensor) for name, tensor in expected.items())


def test_fused_layout_matches_transformers(peer: Callable[[str], Any], tmp_path: Path) -> None:
    directory = peer("mixtral").directory
    stored = transformers.AutoModelForCausalLM.from_pretrained(directory).state_dict()
    assert "model.layers.0.mlp.experts.gate_up_proj" in stored
    model, _ = read_config(directory)
    put(tmp_path, model, {name: tensor.clone() for name, tensor in stored.items()})
    same(fill(tmp_path, model), fill(directory, model))


@pytest.mark.parametrize("fuse", [False, True])
def test_shard_reads_its_box_only(fuse: bool, tmp_path: Path) -> None:
    expected = values(OLMOE)
    tensors = fused(OLMOE, expected, "mlp") if fuse else on_file(OLMOE, expected)
    put(tmp_path, OLMOE, tensors)
    shards, wanted = [], []
    for name in ("embed.weight", "layers.1.moe.experts.2.up", "layers.0.attention_norm.weight"):
        whole = expected[name]
        strided = torch.full((3, *whole.shape[1:], 2), float("nan"))[..., 0]
        offset = (2,) + (0,) * (whole.dim() - 1)
        shards.append(
            TensorShard.of_tensor(PARAMETER, name, tuple(whole.shape), offset, strided, (0,))
        )
        wanted.append(whole[2:5])
    output, name = expected["layers.0.attention.o.weight"], "layers.0.attention.o.weight"
    columns = torch.empty(len(output), 3)
    shards.append(
        TensorShard.of_tensor(PARAMETER, name, tuple(output.shape), (0, 2), columns, (0,))
    )
    wanted.append(output[:, 2:5])
    empty = torch.empty(0, 8)
    shards.append(TensorShard.of_tensor(PARAMETER, "embed.weight", (20, 8), (20, 0), empty, (0,)))
    HFSource(tmp_path, OLMOE).fill(shards)
    for shard, rows in zip(shards, wanted, strict=False):
        assert torch.equal(live_values(shard), rows), shard.name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_values_are_cast_to_the_shard_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    expected = values(LLAMA)
    put(tmp_path, LLAMA, {n: t.to(torch.bfloat16) for n, t in on_file(LLAMA, expected).items()})
    same(fill(tmp_path, LLAMA, dtype), {n: t.bfloat16().to(dtype) for n, t in expected.items()})
    assert HFSource(tmp_path, LLAMA).dtype("embed.weight") == torch.bfloat16


def test_optimizer_moments_are_rejected(tmp_path: Path) -> None:
    put(tmp_path, LLAMA, on_file(LLAMA, values(LLAMA)))
    moment = whole_shard("embed.weight", torch.empty(20, 8), FIRST_MOMENT)
    with pytest.raises(ValueError, match="parameters only"):
        HFSource(tmp_path, LLAMA).fill([moment])


def test_skipped_tensors_are_reported(tmp_path: Path) -> None:
    tied = LLAMA.model_copy(update={"tied": True})
    expected = values(tied)
    tensors = on_file(tied, expected)
    tensors["lm_head.weight"] = expected["embed.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    put(tmp_path, tied, tensors)
    notes = HFSource(tmp_path, tied).notes
    assert len(notes) == 2
    assert "lm_head.weight" in notes[0]
    assert "inv_freq" in notes[1]
    same(fill(tmp_path, tied), expected)

    tensors["model.layers.0.mlp.shared_experts.up_proj.weight"] = torch.empty(0, 8)
    put(tmp_path, tied, tensors)
    assert "'model.layers.0.mlp.shared_experts.up_proj.weight' is left out" in " ".join(
        HFSource(tmp_path, tied).notes
    )

    tensors["lm_head.weight"][19, 7] += 1
    put(tmp_path, tied, tensors)
    with pytest.raises(WeightsError, match=r"'lm_head\.weight' differs .*tie_word_embeddings"):
        HFSource(tmp_path, tied)


def test_layers_beyond_the_model_are_reported_in_one_line(tmp_path: Path) -> None:
    expected = values(LLAMA)
    tensors = on_file(LLAMA, expected)
    beyond = {f"model.layers.2.{name}": torch.ones(2) for name in ("enorm", "hnorm", "a", "b")}
    model = LLAMA.model_copy(update={"extras": {"num_nextn_predict_layers": 1}})
    put(tmp_path, LLAMA, {**tensors, **beyond})
    (note,) = HFSource(tmp_path, model).notes
    for words in (
        str(tmp_path),
        "4 tensors",
        "'model.layers.2.a'",
        "and 1 more",
        "left out",
        "no export will have them",
        "num_nextn_predict_layers = 1",
    ):
        assert words in note
    same(fill(tmp_path, model), expected)
    with pytest.raises(WeightsError, match=r"4 tensors .* are not part of the model"):
        HFSource(tmp_path, LLAMA)


UP = "model.layers.1.mlp.up_proj.weight"
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        (LLAMA, {NORM: None}, r"tensor 'model\.norm\.weight' is missing"),
        (
            MIXTRAL,
            {f"model.layers.1.block_sparse_moe.experts.{e}.w3.weight": None for e in range(4)},
            r"4 tensors \(.*experts\.0\.w3\.weight.* 1 more\) are missing",
        ),
        (LLAMA, {f"{UP[:-6]}bias": torch.ones(6)}, r"up_proj\.bias' is not part of the model"),
        (OLMOE, {GATE_UP: torch.ones(4, 12, 8)}, r"gate_up_proj' is not part of the model"),
        (LLAMA, {UP: torch.ones(8, 6)}, r"model\.safetensors'.* has shape \[8, 6\], .*\[6, 8\]"),
        (LLAMA, {NORM: torch.ones(8, dtype=torch.int8)}, r"norm\.weight' is of dtype I8"),
    ],
)
def test_other_tensors_are_rejected(
    model: ModelConfig, changes: dict[str, Tensor | None], words: str, tmp_path: Path
) -> None:
    tensors = {**on_file(model, values(model)), **changes}
    put(tmp_path, model, {name: one for name, one in tensors.items() if one is not None})
    with pytest.raises(WeightsError, match=words):
        HFSource(tmp_path, model)


def test_fused_tensors_of_another_shape_are_rejected(tmp_path: Path) -> None:
    tensors = fused(OLMOE, values(OLMOE), "mlp")
    tensors[GATE_UP] = torch.ones(4, 8, 12)
    with pytest.raises(WeightsError, match=r"gate_up_proj' has shape \[4, 8, 12\]"):
        HFSource(put(tmp_path, OLMOE, tensors), OLMOE)


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_truncated_file_is_rejected(keep: int, tmp_path: Path) -> None:
    file_of = put_sharded(tmp_path, on_file(LLAMA, values(LLAMA)))
    victim = tmp_path / sorted(set(file_of.values()))[1]
    victim.write_bytes(victim.read_bytes()[:keep])
    with pytest.raises(
        WeightsError, match=r"part-1\.safetensors' is not a complete safetensors file"
    ):
        HFSource(tmp_path, LLAMA)


def test_wrong_index_is_rejected(tmp_path: Path) -> None:
    tensors = on_file(LLAMA, values(LLAMA))
    file_of = put_sharded(tmp_path, tensors)
    index = tmp_path / INDEX_NAME

    index.write_text(json.dumps({"weight_map": {**file_of, NORM: "part-9.safetensors"}}))
    with pytest.raises(WeightsError, match=r"'part-9\.safetensors', but it is not there"):
        HFSource(tmp_path, LLAMA)
    index.write_text(json.dumps({"weight_map": {**file_of, "ghost": "part-0.safetensors"}}))
    with pytest.raises(WeightsError, match=r"'ghost' is in 'part-0\.safetensors', but it is not"):
        HFSource(tmp_path, LLAMA)
    index.write_text(json.dumps({"weight_map": {**file_of, NORM: "../part-0.safetensors"}}))
    with pytest.raises(WeightsError, match="files beside it"):
        HFSource(tmp_path, LLAMA)
    for broken in ("{", "[]", '{"weight_map": {"a": 3}}', '{"weight_map": {}}'):
        index.write_text(broken)
        with pytest.raises(WeightsError, match=INDEX_NAME):
            HFSource(tmp_path, LLAMA)


def test_duplicate_tensor_is_rejected(tmp_path: Path) -> None:
    tensors = on_file(LLAMA, values(LLAMA))
    file_of = put_sharded(tmp_path, tensors)
    other = next(file for file in file_of.values() if file != file_of[NORM])
    stored = load_file(tmp_path / other)
    save_file({**stored, NORM: tensors[NORM]}, tmp_path / other)
    with pytest.raises(WeightsError, match=r"'model\.norm\.weight' is both in"):
        HFSource(tmp_path, LLAMA)


def test_directory_without_safetensors_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no weights at all"):
        HFSource(tmp_path, LLAMA)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin.*safetensors"):
        HFSource(tmp_path, LLAMA)
    put_sharded(tmp_path, on_file(LLAMA, values(LLAMA)))
    put(tmp_path, LLAMA, on_file(LLAMA, values(LLAMA)))
    with pytest.raises(WeightsError, match="has both"):
        HFSource(tmp_path, LLAMA)
