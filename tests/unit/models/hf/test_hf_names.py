"""Every parameter has one written name, and tensors that belong to none may be skipped."""

from __future__ import annotations

import pytest

from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.facts.workload import parameters
from moesaic.models.hf import names

MIXTRAL = ModelConfig(**PRESETS["tiny-mixtral"])
OLMOE = ModelConfig(**PRESETS["tiny-olmoe"])
QWEN3 = ModelConfig(**PRESETS["tiny-qwen3"])
DENSE = ModelConfig(**PRESETS["tiny-dense"])
DEEPSEEK = ModelConfig(**PRESETS["tiny-deepseek"], extras={"num_nextn_predict_layers": 2})


@pytest.mark.parametrize("model", [MIXTRAL, OLMOE, QWEN3, DENSE, DEEPSEEK], ids=lambda m: m.family)
def test_names_are_one_to_one(model: ModelConfig) -> None:
    mapping = names.logical_names(model)
    assert list(mapping.values()) == [p.name for p in parameters(model)]
    for parameter in parameters(model):
        assert mapping[names.written_name(model, parameter)] == parameter.name


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
