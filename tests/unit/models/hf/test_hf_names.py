"""Every parameter has one written name, and fused tensors are split as in transformers."""

from __future__ import annotations

import pytest
import torch

from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.facts.workload import Parameter, expert_name, parameters
from moesaic.models.hf import names

MIXTRAL = ModelConfig(**PRESETS["tiny-mixtral"])
OLMOE = ModelConfig(**PRESETS["tiny-olmoe"])
QWEN3 = ModelConfig(**PRESETS["tiny-qwen3"])
DENSE = ModelConfig(**PRESETS["tiny-dense"])
DEEPSEEK = ModelConfig(**PRESETS["tiny-deepseek"], extras={"num_nextn_predict_layers": 2})


def at(model: ModelConfig, logical: str) -> list[names.StoredSlice]:
    return next(names.candidate_slices(model, p) for p in parameters(model) if p.name == logical)


@pytest.mark.parametrize("model", [MIXTRAL, OLMOE, QWEN3, DENSE, DEEPSEEK], ids=lambda m: m.family)
def test_names_are_one_to_one(model: ModelConfig) -> None:
    mapping = names.logical_names(model)
    assert list(mapping.values()) == [p.name for p in parameters(model)]
    for parameter in parameters(model):
        assert mapping[names.written_name(model, parameter)] == parameter.name


@pytest.mark.parametrize(
    ("model", "logical", "written"),
    [
        (MIXTRAL, "layers.3.moe.router.weight", "model.layers.3.block_sparse_moe.gate.weight"),
        (MIXTRAL, expert_name(1, 5, "gate"), "model.layers.1.block_sparse_moe.experts.5.w1.weight"),
        (MIXTRAL, expert_name(1, 5, "up"), "model.layers.1.block_sparse_moe.experts.5.w3.weight"),
        (MIXTRAL, expert_name(1, 5, "down"), "model.layers.1.block_sparse_moe.experts.5.w2.weight"),
        (OLMOE, "layers.3.moe.router.weight", "model.layers.3.mlp.gate.weight"),
        (OLMOE, expert_name(0, 9, "gate"), "model.layers.0.mlp.experts.9.gate_proj.weight"),
        (OLMOE, expert_name(0, 9, "down"), "model.layers.0.mlp.experts.9.down_proj.weight"),
        (OLMOE, "layers.0.attention.q_norm.weight", "model.layers.0.self_attn.q_norm.weight"),
        (QWEN3, "layers.0.attention.k_norm.weight", "model.layers.0.self_attn.k_norm.weight"),
        (QWEN3, "layers.3.moe.router.weight", "model.layers.3.mlp.gate.weight"),
        (QWEN3, expert_name(0, 9, "up"), "model.layers.0.mlp.experts.9.up_proj.weight"),
        (DENSE, "layers.2.ffn.up.weight", "model.layers.2.mlp.up_proj.weight"),
        (DENSE, "layers.2.ffn_norm.weight", "model.layers.2.post_attention_layernorm.weight"),
        (DENSE, "embed.weight", "model.embed_tokens.weight"),
        (DENSE, "head.weight", "lm_head.weight"),
        (DENSE, "head.norm.weight", "model.norm.weight"),
    ],
)
def test_written_names(model: ModelConfig, logical: str, written: str) -> None:
    assert at(model, logical)[0].tensor == written
    assert at(model, logical)[0].size == at(model, logical)[0].shape


@pytest.mark.parametrize(
    ("inner", "written"),
    [
        ("attention.q.weight", "self_attn.q_proj.weight"),
        ("attention.q_down.weight", "self_attn.q_a_proj.weight"),
        ("attention.q_norm.weight", "self_attn.q_a_layernorm.weight"),
        ("attention.q_up.weight", "self_attn.q_b_proj.weight"),
        ("attention.kv_down.weight", "self_attn.kv_a_proj_with_mqa.weight"),
        ("attention.kv_norm.weight", "self_attn.kv_a_layernorm.weight"),
        ("attention.kv_up.weight", "self_attn.kv_b_proj.weight"),
        ("attention.o.weight", "self_attn.o_proj.weight"),
        ("ffn.gate.weight", "mlp.gate_proj.weight"),
        ("moe.router.weight", "mlp.gate.weight"),
        ("moe.router.bias", "mlp.gate.e_score_correction_bias"),
        ("moe.shared.down.weight", "mlp.shared_experts.down_proj.weight"),
    ],
)
def test_written_names_of_deepseek(inner: str, written: str) -> None:
    parameter = Parameter(f"layers.2.{inner}", (3, 5), "dense", 2)
    (stored,) = names.candidate_slices(DEEPSEEK, parameter)
    assert stored == names.StoredSlice(f"model.layers.2.{written}", (3, 5), (0, 0), (3, 5))


def test_fused_slices_split_gate_and_up() -> None:
    hidden, ffn, experts = OLMOE.hidden, OLMOE.ffn, OLMOE.experts
    fused = torch.arange(experts * 2 * ffn * hidden).view(experts, 2 * ffn, hidden)
    gate, up = fused[7].chunk(2, dim=0)
    for part, expected in (("gate", gate), ("up", up)):
        stored = at(OLMOE, expert_name(2, 7, part))[-1]
        assert stored.size != stored.shape
        assert stored.tensor == "model.layers.2.mlp.experts.gate_up_proj"
        assert stored.shape == tuple(fused.shape)
        box = [slice(o, o + n) for o, n in zip(stored.offset, stored.size, strict=True)]
        assert torch.equal(fused[tuple(box)].squeeze(0), expected)


def test_mixtral_reads_transformers_5_names() -> None:
    router = [stored.tensor for stored in at(MIXTRAL, "layers.0.moe.router.weight")]
    assert router[1:] == ["model.layers.0.mlp.gate.weight"]
    down = [stored.tensor for stored in at(MIXTRAL, expert_name(0, 1, "down"))]
    assert down[-2:] == [
        "model.layers.0.block_sparse_moe.experts.down_proj",
        "model.layers.0.mlp.experts.down_proj",
    ]


def test_written_name_takes_precedence_over_fused() -> None:
    on_file = dict.fromkeys(names.logical_names(OLMOE), 0)
    fused = {"model.layers.0.mlp.experts.gate_up_proj": 0, **on_file}
    chosen = names.choose_slices(OLMOE, fused)
    assert all(stored and stored.size == stored.shape for stored in chosen.values())
    del on_file["model.norm.weight"]
    assert names.choose_slices(OLMOE, on_file)["head.norm.weight"] is None


def test_skipped_tensors() -> None:
    tied = DENSE.model_copy(update={"tied": True})
    assert "rope_theta" in str(
        names.reason_to_skip(DENSE, "model.layers.1.self_attn.rotary_emb.inv_freq")
    )
    assert names.reason_to_skip(DENSE, "model.rotary_emb.inv_freq")
    assert names.reason_to_skip(tied, "lm_head.weight")
    assert names.reason_to_skip(DENSE, "lm_head.weight") is None
    further = [
        names.reason_to_skip(DEEPSEEK, f"model.layers.{layer}.eh_proj.weight") for layer in (4, 5)
    ]
    assert all("num_nextn_predict_layers = 2" in str(reason) for reason in further)
    for layer in (3, 6):
        assert names.reason_to_skip(DEEPSEEK, f"model.layers.{layer}.eh_proj.weight") is None
    assert names.reason_to_skip(OLMOE, "model.layers.4.eh_proj.weight") is None
    assert names.reason_to_skip(DENSE, "model.layers.1.self_attn.rotary_emb.inv_freq.x") is None
