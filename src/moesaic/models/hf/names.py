"""Logical names <-> tensor names of Hugging Face files.

A parameter has one name that is written, and one or more *places* it is read from: the tensor of
that name, or a slice of a fused tensor that holds every expert of a layer, as transformers 5 has
them in memory and some files on disk.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from moesaic.facts.job import ModelConfig
from moesaic.facts.workload import Parameter, parameters

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_OUTER = {"embed.weight": EMBEDDING, "head.norm.weight": "model.norm.weight", "head.weight": HEAD}
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
"""What is called otherwise, or is there only, with latent attention: in deepseek_v3."""
_BLOCKS = {
    "mixtral": ("block_sparse_moe", "mlp"), "olmoe": ("mlp",), "qwen3_moe": ("mlp",),
    "deepseek_v3": ("mlp",),
}  # fmt: skip
"""Where a layer keeps its experts, the written name first."""
_PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_MATRICES = {
    "mixtral": {"gate": "w1", "up": "w3", "down": "w2"},
    "olmoe": _PROJECTIONS, "qwen3_moe": _PROJECTIONS, "deepseek_v3": _PROJECTIONS,
}  # fmt: skip
_ROTARY = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_LAYER = re.compile(r"model\.layers\.(\d+)\..+")


@dataclass(frozen=True)
class Place:
    """A box of a tensor on file that holds one parameter, up to leading dimensions of one."""

    tensor: str
    """Name of the tensor on file."""
    shape: tuple[int, ...]
    """Shape that the whole tensor on file must have."""
    offset: tuple[int, ...]
    """Where the box starts."""
    size: tuple[int, ...]
    """Extent of the box."""

    @property
    def fused(self) -> bool:
        """Whether the tensor on file holds more than this parameter."""
        return self.size != self.shape


def written_name(model: ModelConfig, parameter: Parameter) -> str:
    """The name under which `parameter` is written."""
    return places(model, parameter)[0].tensor


def expert_matrices(model: ModelConfig) -> frozenset[str]:
    """What the matrices of an expert are called, if `model` has experts."""
    return frozenset(_MATRICES[model.family].values() if model.experts else ())


def logical_names(model: ModelConfig) -> dict[str, str]:
    """Written name -> logical name, for every parameter of `model`, in the order of the blocks."""
    return {written_name(model, p): p.name for p in parameters(model)}


def places(model: ModelConfig, parameter: Parameter) -> list[Place]:
    """Where `parameter` may lie on file, the written place first."""
    if parameter.layer is None:
        return [_whole(_OUTER[parameter.name], parameter)]
    at = f"model.layers.{parameter.layer}"
    inner = parameter.name.removeprefix(f"layers.{parameter.layer}.")
    if inner == "moe.router.weight":
        return [_whole(f"{at}.{block}.gate.weight", parameter) for block in _BLOCKS[model.family]]
    if parameter.kind == "expert":
        return _expert_places(model, parameter, at)
    own = _INNER if model.latent is None else {**_INNER, **_LATENT}
    return [_whole(f"{at}.{own[inner]}", parameter)]


def _expert_places(model: ModelConfig, parameter: Parameter, at: str) -> list[Place]:
    expert, part = parameter.expert or 0, parameter.name.rpartition(".")[2]
    matrix = _MATRICES[model.family][part]
    blocks = [f"{at}.{block}.experts" for block in _BLOCKS[model.family]]
    rows, columns = parameter.shape
    if part == "down":
        fused_name, fused_rows, first = "down_proj", rows, 0
    else:
        fused_name, fused_rows, first = "gate_up_proj", 2 * rows, rows if part == "up" else 0
    fused = [
        Place(
            f"{block}.{fused_name}", (model.experts, fused_rows, columns), (expert, first, 0),
            (1, rows, columns),
        )
        for block in blocks
    ]  # fmt: skip
    return [_whole(f"{block}.{expert}.{matrix}.weight", parameter) for block in blocks] + fused


def _whole(tensor: str, parameter: Parameter) -> Place:
    return Place(tensor, parameter.shape, (0,) * len(parameter.shape), parameter.shape)


def choose(model: ModelConfig, on_file: Mapping[str, object]) -> dict[str, Place | None]:
    """For every parameter by logical name, the first of its places that `on_file` has, if any."""
    return {
        p.name: next((place for place in places(model, p) if place.tensor in on_file), None)
        for p in parameters(model)
    }


def spare(model: ModelConfig, tensor: str) -> str | None:
    """Why a tensor that no parameter is read from may stand in a file, if it may."""
    if _ROTARY.fullmatch(tensor):
        return "a buffer of the rotary embedding, computed from rope_theta"
    if model.tied and tensor == HEAD:
        return f"the tied head, equal to {EMBEDDING}"
    further = model.extras.get("num_nextn_predict_layers") or 0
    layer = _LAYER.fullmatch(tensor)
    if layer and model.layers <= int(layer[1]) < model.layers + further:
        return (
            f"prediction of several tokens (num_nextn_predict_layers = {further}), "
            "which is not built here"
        )
    return None
