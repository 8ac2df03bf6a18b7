"""What tells the config.json of one family from that of another, as tables. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FamilyKeys:
    """The keys of one family's files."""

    architecture: str
    """The class of transformers."""
    fields: dict[str, str]
    """Keys, and the fields of ModelConfig that they are."""
    defaults: dict[str, Any]
    """What transformers takes where a file leaves a key out; a size without one must be given."""
    fixed: dict[str, tuple[Any, ...]]
    """Keys that change arithmetic, with the values that are built here; null always is."""
    written: dict[str, Any]
    """Keys that export always writes, so that no reader falls back on its own default."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Special tokens that transformers takes where a file leaves the key out."""
    latent: dict[str, str] = field(default_factory=dict)
    """Keys, and the fields of `latent` that they are."""

    def meaningful(self, key: str) -> bool:
        """Whether `key` says something of a model of this family alone."""
        return key in self.fields or key in self.fixed or key in self.latent or key in self.widths

    @property
    def widths(self) -> tuple[str, ...]:
        """Keys that `latent` makes the width of a head from."""
        return ("qk_head_dim", "qk_nope_head_dim") if self.latent else ()


FAMILIES: dict[str, FamilyKeys] = {
    "llama": FamilyKeys(
        architecture="LlamaForCausalLM",
        fields={"intermediate_size": "ffn"},
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
        fixed={"clip_qkv": (), "sliding_window": ()},
        written={
            "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
            "mlp_bias": False, "pretraining_tp": 1,
        },
        tokens={"bos_token_id": 1, "eos_token_id": 2},
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
        fixed={"clip_qkv": (), "norm_topk_prob": (True,)},
        written={
            "attention_dropout": 0.0, "hidden_act": "silu", "output_router_logits": False,
            "router_jitter_noise": 0.0,
        },
        tokens={"bos_token_id": 1, "eos_token_id": 2},
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
        fixed={"sliding_window": ()},
        written={
            "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
            "output_router_logits": False,
        },
        tokens={"eos_token_id": 50279, "pad_token_id": 1},
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
        fixed={"clip_qkv": ()},
        written={
            "attention_bias": False, "attention_dropout": 0.0, "decoder_sparse_step": 1,
            "hidden_act": "silu", "intermediate_size": 6144, "max_window_layers": 0,
            "mlp_only_layers": [], "output_router_logits": False,
        },
    ),
    "deepseek_v3": FamilyKeys(
        architecture="DeepseekV3ForCausalLM",
        fields={
            "first_k_dense_replace": "dense_layers", "intermediate_size": "dense_ffn",
            "moe_intermediate_size": "ffn", "n_group": "groups", "n_routed_experts": "experts",
            "n_shared_experts": "shared", "norm_topk_prob": "renormalise",
            "num_experts_per_tok": "top_k", "routed_scaling_factor": "scale",
            "topk_group": "top_groups",
        },
        defaults={
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
            "first_k_dense_replace": 3, "n_group": 8, "n_shared_experts": 1,
            "norm_topk_prob": True, "q_lora_rank": 1536, "routed_scaling_factor": 2.5,
            "topk_group": 4,
        },
        fixed={
            "clip_qkv": (), "moe_layer_freq": (1,), "rope_interleave": (True,),
            "scoring_func": ("sigmoid",), "sliding_window": (), "topk_method": ("noaux_tc",),
        },
        written={
            "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
            "moe_layer_freq": 1, "num_nextn_predict_layers": 0, "pretraining_tp": 1,
            "rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        },
        tokens={"bos_token_id": 0, "eos_token_id": 1},
        latent={
            "kv_lora_rank": "width", "q_lora_rank": "queries", "qk_rope_head_dim": "rotary",
            "v_head_dim": "value",
        },
    ),
}  # fmt: skip
