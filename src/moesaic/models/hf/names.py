"""Translation between logical names and tensor names of Hugging Face files.

A parameter has one written name and one or more candidate slices to read it from. A candidate is
the tensor of that name, or a slice of a fused tensor with all experts of a layer (transformers 5).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from moesaic.facts.job import ModelConfig
from moesaic.facts.workload import Parameter, parameters
from moesaic.facts.workload.parameters import SCORE as LOGICAL_SCORE

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
BY_WORD = ("embed.weight", "head.weight")
"""Logical names of parameters with one row for each token id."""
SCORE = "score.weight"

_OUTER = {
    "embed.weight": EMBEDDING, "head.norm.weight": "model.norm.weight", "head.weight": HEAD,
    LOGICAL_SCORE: SCORE,
}  # fmt: skip
_INNER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.q.weight": "self_attn.q_proj.weight",
    "attention.k.weight": "self_attn.k_proj.weight",
    "attention.v.weight": "self_attn.v_proj.weight",
    "attention.o.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.gate.weight": "mlp.gate_proj.weight",
    "ffn.up.weight": "mlp.up_proj.weight",
    "ffn.down.weight": "mlp.down_proj.weight",
}
_LATENT = {
    "attention.q_down.weight": "self_attn.q_a_proj.weight",
    "attention.q_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.q_up.weight": "self_attn.q_b_proj.weight",
    "attention.kv_down.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.kv_up.weight": "self_attn.kv_b_proj.weight",
    "moe.router.bias": "mlp.gate.e_score_correction_bias",
    "moe.shared.gate.weight": "mlp.shared_experts.gate_proj.weight",
    "moe.shared.up.weight": "mlp.shared_experts.up_proj.weight",
    "moe.shared.down.weight": "mlp.shared_experts.down_proj.weight",
}
"""Names that differ or exist only with latent attention (deepseek_v3)."""
_EXPERT_BLOCKS = {
    "mixtral": ("block_sparse_moe", "mlp"), "olmoe": ("mlp",), "qwen3_moe": ("mlp",),
    "deepseek_v3": ("mlp",),
}  # fmt: skip
"""Module of a layer's experts, the written name first."""
_PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_MATRICES = {
    "mixtral": {"gate": "w1", "up": "w3", "down": "w2"},
    "olmoe": _PROJECTIONS, "qwen3_moe": _PROJECTIONS, "deepseek_v3": _PROJECTIONS,
}  # fmt: skip
_ROTARY = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_LAYER = re.compile(r"model\.layers\.(\d+)\..+")


@dataclass(frozen=True)
class StoredSlice:
    """Box of a tensor on file that holds one parameter, apart from leading dimensions of 1."""

    tensor: str
    """Name of the tensor on file."""
    shape: tuple[int, ...]
    """Required shape of the whole tensor on file."""
    offset: tuple[int, ...]
    """Start of the box."""
    size: tuple[int, ...]
    """Extent of the box."""


def written_name(model: ModelConfig, parameter: Parameter) -> str:
    """Return the name under which `parameter` is written."""
    return candidate_slices(model, parameter)[0].tensor


def expert_matrices(model: ModelConfig) -> frozenset[str]:
    """Return the names of an expert's matrices; empty if `model` has no experts."""
    return frozenset(_MATRICES[model.family].values() if model.experts else ())


def logical_names(model: ModelConfig) -> dict[str, str]:
    """Return logical names by written name, for every parameter, in the order of the blocks."""
    return {written_name(model, p): p.name for p in parameters(model)}


def candidate_slices(model: ModelConfig, parameter: Parameter) -> list[StoredSlice]:
    """Return the slices that may hold `parameter` on file, the written one first."""
    if parameter.layer is None:
        return [_whole_tensor(_OUTER[parameter.name], parameter)]
    layer_prefix = f"model.layers.{parameter.layer}"
    inner = parameter.name.removeprefix(f"layers.{parameter.layer}.")
    if inner == "moe.router.weight":
        return [
            _whole_tensor(f"{layer_prefix}.{block}.gate.weight", parameter)
            for block in _EXPERT_BLOCKS[model.family]
        ]
    if parameter.kind == "expert":
        return _expert_slices(model, parameter, layer_prefix)
    inner_names = _INNER if model.latent is None else {**_INNER, **_LATENT}
    return [_whole_tensor(f"{layer_prefix}.{inner_names[inner]}", parameter)]


def _expert_slices(
    model: ModelConfig, parameter: Parameter, layer_prefix: str
) -> list[StoredSlice]:
    expert, projection = parameter.expert or 0, parameter.name.rpartition(".")[2]
    matrix = _MATRICES[model.family][projection]
    blocks = [f"{layer_prefix}.{block}.experts" for block in _EXPERT_BLOCKS[model.family]]
    rows, columns = parameter.shape
    if projection == "down":
        fused_name, fused_rows, first = "down_proj", rows, 0
    else:
        fused_name, fused_rows, first = "gate_up_proj", 2 * rows, rows if projection == "up" else 0
    fused = [
        StoredSlice(
            f"{block}.{fused_name}", (model.experts, fused_rows, columns), (expert, first, 0),
            (1, rows, columns),
        )
        for block in blocks
    ]  # fmt: skip
    return [
        _whole_tensor(f"{block}.{expert}.{matrix}.weight", parameter) for block in blocks
    ] + fused


def _whole_tensor(tensor: str, parameter: Parameter) -> StoredSlice:
    return StoredSlice(tensor, parameter.shape, (0,) * len(parameter.shape), parameter.shape)


def choose_slices(
    model: ModelConfig, on_file: Mapping[str, object]
) -> dict[str, StoredSlice | None]:
    """Return the first candidate slice in `on_file` by logical name; None where there is none."""
    return {
        p.name: next(
            (source for source in candidate_slices(model, p) if source.tensor in on_file), None
        )
        for p in parameters(model)
    }


def reason_to_skip(model: ModelConfig, tensor: str) -> str | None:
    """Return why a tensor that belongs to no parameter may be skipped; None if it may not."""
    if _ROTARY.fullmatch(tensor):
        return "a buffer of the rotary embedding, computed from rope_theta"
    if model.tied and tensor == HEAD:
        return f"the tied head, equal to {EMBEDDING}"
    if not model.labels and tensor == SCORE:
        return "the classifier of a text, which needs a job with [credibility]"
    num_predict_layers = model.extras.get("num_nextn_predict_layers") or 0
    layer = _LAYER.fullmatch(tensor)
    if layer and model.layers <= int(layer[1]) < model.layers + num_predict_layers:
        return (
            f"multi-token prediction (num_nextn_predict_layers = {num_predict_layers}), "
            "which is not supported"
        )
    return None
