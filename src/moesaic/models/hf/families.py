"""Tables of the config.json keys of each model family. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FamilyKeys:
    """Keys of one family's config.json."""

    architecture: str
    """Model class in transformers."""
    fields: dict[str, str]
    """Fields of ModelConfig by key."""
    defaults: dict[str, Any]
    """Defaults of transformers for missing keys; a size without a default is required."""
    fixed_values: dict[str, tuple[Any, ...]]
    """Keys that change arithmetic, with their supported values; null is always supported."""
    export_defaults: dict[str, Any]
    """Keys that export always writes, so that no reader uses its own default."""
    token_defaults: dict[str, int] = field(default_factory=dict)
    """Special token ids that transformers uses if the file has no key."""

    @property
    def model_keys(self) -> set[str]:
        """Keys that describe a model of this family only."""
        return {*self.fields, *self.fixed_values}


FAMILIES: dict[str, FamilyKeys] = {
    "llama": FamilyKeys(
        architecture="LlamaForCausalLM",
        fields={"intermediate_size": "ffn"},
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
        fixed_values={"clip_qkv": (), "sliding_window": ()},
        export_defaults={
            "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
            "mlp_bias": False, "pretraining_tp": 1,
        },
        token_defaults={"bos_token_id": 1, "eos_token_id": 2},
    ),
    "mixtral": FamilyKeys(
        architecture="MixtralForCausalLM",
        fields={
            "intermediate_size": "ffn", "num_local_experts": "experts",
            "num_experts_per_tok": "top_k",
        },
        defaults={
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
            "num_key_value_heads": 8,
        },
        fixed_values={"clip_qkv": (), "norm_topk_prob": (True,)},
        export_defaults={
            "attention_dropout": 0.0, "hidden_act": "silu", "output_router_logits": False,
            "router_jitter_noise": 0.0,
        },
        token_defaults={"bos_token_id": 1, "eos_token_id": 2},
    ),
    "olmoe": FamilyKeys(
        architecture="OlmoeForCausalLM",
        fields={
            "intermediate_size": "ffn", "num_experts": "experts", "num_experts_per_tok": "top_k",
            "norm_topk_prob": "renormalise", "clip_qkv": "clip_qkv",
        },
        defaults={
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
            "norm_topk_prob": False, "clip_qkv": None,
        },
        fixed_values={"sliding_window": ()},
        export_defaults={
            "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
            "output_router_logits": False,
        },
        token_defaults={"eos_token_id": 50279, "pad_token_id": 1},
    ),
    "qwen3_moe": FamilyKeys(
        architecture="Qwen3MoeForCausalLM",
        fields={
            "moe_intermediate_size": "ffn", "num_experts": "experts",
            "num_experts_per_tok": "top_k", "norm_topk_prob": "renormalise",
        },
        defaults={
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
            "num_key_value_heads": 4, "sliding_window": 4096, "norm_topk_prob": False,
        },
        fixed_values={"clip_qkv": ()},
        export_defaults={
            "attention_bias": False, "attention_dropout": 0.0, "decoder_sparse_step": 1,
            "hidden_act": "silu", "intermediate_size": 6144, "max_window_layers": 0,
            "mlp_only_layers": [], "output_router_logits": False,
        },
    ),
    "deepseek_v3": FamilyKeys(
        architecture="DeepseekV3ForCausalLM",
        fields={
            "first_k_dense_replace": "dense_layers", "intermediate_size": "dense_ffn",
            "moe_intermediate_size": "ffn", "n_group": "expert_groups",
            "n_routed_experts": "experts", "n_shared_experts": "shared_experts",
            "norm_topk_prob": "renormalise", "num_experts_per_tok": "top_k",
            "routed_scaling_factor": "routed_scaling_factor",
            "topk_group": "top_expert_groups",
        },
        defaults={
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
            "first_k_dense_replace": 3, "n_group": 8, "n_shared_experts": 1,
            "norm_topk_prob": True, "q_lora_rank": 1536, "routed_scaling_factor": 2.5,
            "topk_group": 4,
        },
        fixed_values={
            "clip_qkv": (), "moe_layer_freq": (1,), "rope_interleave": (True,),
            "scoring_func": ("sigmoid",), "sliding_window": (), "topk_method": ("noaux_tc",),
        },
        export_defaults={
            "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
            "moe_layer_freq": 1, "num_nextn_predict_layers": 0, "pretraining_tp": 1,
            "rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        },
        token_defaults={"bos_token_id": 0, "eos_token_id": 1},
    ),
}  # fmt: skip
