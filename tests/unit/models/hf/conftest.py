"""Model directories written by transformers, and the logits that it computes from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip

QWEN3 = {
    "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "num_hidden_layers": 3, "num_key_value_heads": 4,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 1.5, "kv_lora_rank": 10, "q_lora_rank": 12, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied-wide": {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 16},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3},
    "olmoe-renormalised": {
        "model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "clip_qkv": 0.7, "num_key_value_heads": 4, "rope_parameters": {
            "rope_type": "default", "rope_theta": 5e5,
        },
    },
    "qwen3": {**QWEN3, "head_dim": 16},
    "qwen3-window": {
        **QWEN3, "norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 5,
    },
    "mixtral-window": {
        "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 6,
    },
    "llama-linear": {
        "model_type": "llama", "rope_parameters": {
            "rope_type": "linear", "rope_theta": 1e3, "factor": 4.0,
        },
    },
    "llama-llama3": {
        "model_type": "llama", "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1e3, "factor": 4.0, "low_freq_factor": 0.5,
            "high_freq_factor": 3.0, "original_max_position_embeddings": 16,
        },
    },
    "deepseek": DEEPSEEK,
    "deepseek-yarn": {
        **DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
        "n_shared_experts": 1, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "beta_fast": 4.0,
            "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16,
        },
    },
    "qwen3-yarn": {
        **QWEN3, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "beta_fast": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
}  # fmt: skip


@dataclass(frozen=True)
class Peer:
    """A model directory written by transformers, with its outputs."""

    directory: Path
    tokens: Tensor
    logits: Tensor


def randomise(model: torch.nn.Module) -> None:
    """Set weights large enough for logits of order one and clear routing decisions."""
    draws = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draws)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=draws))


def build(case: str, **changes: Any) -> transformers.PreTrainedModel:
    keys = {**SIZES, **CASES[case], **changes}
    config = transformers.AutoConfig.for_model(**keys)
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomise(model)
    model.tie_weights()
    return model.eval()


def ask(model: transformers.PreTrainedModel) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(
        0, SIZES["vocab_size"], (3, 17), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        return tokens, model(tokens).logits


@pytest.fixture(scope="session")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Peer]:
    made: dict[str, Peer] = {}

    def make(case: str) -> Peer:
        if case not in made:
            model = build(case)
            directory = tmp_path_factory.mktemp("peers") / case
            model.save_pretrained(directory)
            made[case] = Peer(directory, *ask(model))
        return made[case]

    return make


@pytest.fixture(scope="session")
def their_model() -> Callable[..., transformers.PreTrainedModel]:
    """Return a builder of the model of a case, with changed keys."""
    return build


@pytest.fixture(scope="session")
def their_logits() -> Callable[[Path, Tensor], Tensor]:
    def compute(directory: Path, tokens: Tensor) -> Tensor:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            return model(tokens).logits

    return compute
