"""config.json in both spellings, unsupported values, and the export."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from moesaic.base.errors import ConfigError
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.models.hf.config import config_text, from_huggingface, read_config, to_huggingface

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
MIXTRAL = {
    **LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
    "num_key_value_heads": 2, "architectures": ["MixtralForCausalLM"],
}  # fmt: skip
OLMOE = {
    **LLAMA, "model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 3,
    "architectures": ["OlmoeForCausalLM"],
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "aux_loss_alpha": 0.001, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1,
    "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6, "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False, "topk_group": 4,
    "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.33.1",
    "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
QWEN3 = {
    **LLAMA, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "architectures": ["Qwen3MoeForCausalLM"],
}  # fmt: skip
QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
"""The published config of Qwen3-30B-A3B, without its null `rope_scaling`."""
FAMILIES = {"llama": LLAMA, "mixtral": MIXTRAL, "olmoe": OLMOE, "qwen3_moe": QWEN3}

LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
ROPE_YARN = {"type": "yarn", **YARN}


def parse(raw: dict[str, Any]) -> ModelConfig:
    model, warnings = from_huggingface(raw, "config.json")
    assert warnings == []
    return model


def refuse(raw: dict[str, Any], *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_huggingface(raw, "DIR/config.json")
    for word in ("DIR/config.json", *words):
        assert word in str(caught.value)


def test_null_is_false_as_in_transformers() -> None:
    assert not parse({**DEEPSEEK, "norm_topk_prob": None}).renormalise
    assert parse({k: v for k, v in DEEPSEEK.items() if k != "norm_topk_prob"}).renormalise


def test_adapter_beside_a_model_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    read_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"an adapter beside the model.*adapter_config\.json"):
        read_config(tmp_path)


def test_config_does_not_import_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import moesaic.models.hf.config, moesaic.models.hf.names"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_match_transformers(family: str) -> None:
    theirs = transformers.AutoConfig.for_model(
        **{key: value for key, value in FAMILIES[family].items() if key != "architectures"}
    )
    ours = parse(FAMILIES[family])
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 8)
    assert ours.norm_epsilon == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.max_positions == theirs.max_position_embeddings
    assert ours.init_std == theirs.initializer_range
    assert ours.tied == theirs.tie_word_embeddings
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert ours.extras.get(key) == getattr(theirs, key)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 500000, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}, "partial_rotary_factor": 1.0},
    ],
)
def test_both_spellings_of_the_rotary_base(family: str, keys: dict[str, Any]) -> None:
    assert parse({**FAMILIES[family], **keys}).rope_theta == 5e5


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({**LLAMA, "model_type": "gpt2"}, ('model_type = "gpt2"', "llama, mixtral, olmoe")),
        ({"vocab_size": 3}, ("model_type = null", "llama, mixtral, olmoe")),
        ({**LLAMA, "rope_scaling": {"type": "dynamic"}}, ('rope_scaling.type = "dynamic"', "yarn")),
        ({**LLAMA, "rope_scaling": {"type": "linear"}}, ("rope_scaling has no factor",)),
        (
            {**LLAMA, "rope_scaling": {"rope_type": "linear", **YARN}},
            ("rope_scaling.original_max_position_embeddings = 32768", 'rope_type = "linear"'),
        ),
        ({**LLAMA, "rope_scaling": {**ROPE_YARN, "low_freq_factor": 1}}, ("low_freq_factor = 1",)),
        (
            {**LLAMA, "rope_scaling": {"type": "llama3", **LLAMA3, "mscale": 0.5}},
            ("rope_scaling.mscale = 0.5", '"llama3"'),
        ),
        (
            {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 16}},
            ("rope_scaling.beta_fast = 16",),
        ),
        ({**LLAMA, "rope_parameters": {"factor": 2.0}}, ("rope_parameters.factor", '"default"')),
        ({**LLAMA, "rope_scaling": {"type": "llama3", **YARN}}, ("has no low_freq_factor",)),
        (
            {**LLAMA, "rope_scaling": {**ROPE_YARN, "original_max_position_embeddings": "8k"}},
            ('rope_scaling.original_max_position_embeddings = "8k"', "whole number"),
        ),
        ({**LLAMA, "rope_scaling": {**ROPE_YARN, "beta_mid": 2}}, ("rope_scaling.beta_mid",)),
        (
            {**LLAMA, "rope_scaling": ROPE_YARN, "rope_parameters": {"rope_theta": 1e4}},
            ("rope_scaling and rope_parameters contradict",),
        ),
        ({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}}, ("0.5", "1.0")),
        ({**LLAMA, "rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, ("contradict",)),
        ({**LLAMA, "rope_theta": "big"}, ("rope_theta", '"big"')),
        ({**LLAMA, "rope_scaling": "linear"}, ("rope_scaling", "no table")),
        ({**LLAMA, "mlp_bias": True}, ("mlp_bias = true", "only false")),
        ({**LLAMA, "hidden_act": "gelu"}, ('hidden_act = "gelu"', '"silu"')),
        ({**LLAMA, "clip_qkv": 8.0}, ("clip_qkv = 8.0", "llama", "only null")),
        ({**LLAMA, "quantization_config": {"bits": 4}}, ("quant_method", 'only "fp8"')),
        ({**LLAMA, "hidden_size": None}, ("'hidden_size' is required",)),
        ({**LLAMA, "hidden_size": "big"}, ("hidden_size", '"big"')),
        ({**LLAMA, "hidden_size": 30}, ("num_attention_heads = 4", "hidden_size = 30")),
        ({**LLAMA, "num_key_value_heads": 3}, ("kv_heads = 3", "heads = 4")),
        ({**LLAMA, "rms_norm_eps": "tiny"}, ("norm_epsilon", "tiny")),
        ({**LLAMA, "eos_token_id": "</s>"}, ('eos_token_id = "</s>" is no token id',)),
        ({**MIXTRAL, "norm_topk_prob": False}, ("norm_topk_prob = false", "only true")),
        ({**MIXTRAL, "num_experts": 8}, ("num_local_experts = 4", "num_experts = 8")),
        ({**MIXTRAL, "sliding_window": 0}, ("window", "0")),
        ({**OLMOE, "head_dim": 16}, ("head_dim = 16", "32 / 4")),
        ({**OLMOE, "num_experts_per_tok": None}, ("num_experts_per_tok", "required")),
        (
            {**QWEN3, "use_sliding_window": True, "max_window_layers": 28},
            ("max_window_layers = 28", "sliding_window = 4096", "use_sliding_window"),
        ),
        ({**DEEPSEEK, "scoring_func": "softmax"}, ("scoring_func", 'only "sigmoid"')),
        ({**DEEPSEEK, "rope_interleave": None}, ("rope_interleave = false",)),
        ({**DEEPSEEK, "num_key_value_heads": 8}, ("num_key_value_heads = 8", "only 128")),
        ({**DEEPSEEK, "head_dim": 128}, ("head_dim = 128", "only 64")),
        ({**DEEPSEEK, "n_group": 7}, ("groups = 7",)),
        ({**DEEPSEEK, "kv_lora_rank": "wide"}, ("kv_lora_rank", "wide")),
    ],
)
def test_unsupported_configs_are_rejected(raw: dict[str, Any], words: tuple[str, ...]) -> None:
    refuse(raw, *words)


def test_sparse_keys() -> None:
    mixtral, olmoe = parse({**MIXTRAL, "head_dim": None}), parse(OLMOE)
    assert (mixtral.experts, mixtral.top_k, mixtral.renormalise) == (4, 2, True)
    assert mixtral.head_dim == 8
    assert (olmoe.experts, olmoe.top_k, olmoe.renormalise, olmoe.ffn) == (8, 3, False, 48)
    assert parse({**OLMOE, "norm_topk_prob": True}).renormalise
    assert parse({**OLMOE, "clip_qkv": 8.0}).clip_qkv == 8.0
    alias = {key: value for key, value in OLMOE.items() if key != "num_experts"}
    assert parse({**alias, "num_local_experts": 6}).experts == 6
    assert parse({**MIXTRAL, "num_key_value_heads": None}).kv_heads == 4


def test_deepseek_as_published() -> None:
    model = parse(DEEPSEEK)
    kept = {
        "aux_loss_alpha": 0.001, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1,
        "num_nextn_predict_layers": 1, "seq_aux": True, "transformers_version": "4.33.1",
    }  # fmt: skip
    assert model == ModelConfig(**PRESETS["deepseek-v3"], extras=kept)
    written = to_huggingface(model, "bfloat16")
    assert DEEPSEEK["rope_scaling"].items() <= written["rope_scaling"].items()
    others = {"auto_map", "num_nextn_predict_layers", "quantization_config", "rope_scaling"}
    assert {key: DEEPSEEK[key] for key in DEEPSEEK.keys() - others}.items() <= written.items()
    assert written["num_nextn_predict_layers"] == 0
    assert not {"auto_map", "quantization_config", "head_dim"} & written.keys()
    assert parse(to_huggingface(parse(written), "bfloat16")) == parse(written)


def test_deepseek_defaults_and_transformers_export(tmp_path: Path) -> None:
    required = (
        "model_type", "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size",
        "num_hidden_layers", "num_attention_heads", "n_routed_experts", "num_experts_per_tok",
        "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    )  # fmt: skip
    short = {key: DEEPSEEK[key] for key in required}
    theirs = transformers.AutoConfig.for_model(**short)
    theirs.save_pretrained(tmp_path)
    ours = parse(short)
    full, warnings = read_config(tmp_path)
    assert warnings == []
    assert full.model_copy(update={"extras": {}}) == ours.model_copy(update={"extras": {}})
    direct = parse({**short, "q_lora_rank": None})
    assert direct.latent is not None
    assert direct.latent.q_lora_rank is None
    assert to_huggingface(direct, "float32")["q_lora_rank"] is None
    for key in required[1:]:
        refuse({k: v for k, v in short.items() if k != key}, f"'{key}' is required")


def test_published_qwen3_matches_the_preset() -> None:
    model = parse({**QWEN3_30B, "rope_scaling": None})
    assert model.model_copy(update={"extras": {}}) == ModelConfig(**PRESETS["qwen3-30b-a3b"])
    assert QWEN3_30B.items() <= to_huggingface(model, "bfloat16").items()


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"sliding_window": 7},
        {"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 3},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 7},
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
    ],
)
def test_window_matches_transformers(keys: dict[str, Any], tmp_path: Path) -> None:
    raw = {**QWEN3, "num_key_value_heads": 4, **keys}
    config = {key: value for key, value in raw.items() if key != "architectures"}
    theirs, ours = transformers.AutoConfig.for_model(**config), parse(raw)
    assert ours.window == theirs.sliding_window
    (tmp_path / "config.json").write_text(config_text(ours, "float32"))
    assert read_config(tmp_path) == (ours, [])
    assert transformers.AutoConfig.from_pretrained(tmp_path).sliding_window == ours.window
    windowless = to_huggingface(ours.model_copy(update={"window": None}), "float32")
    assert windowless["use_sliding_window"] is False
    windowed = to_huggingface(ours.model_copy(update={"window": 9}), "float32")
    assert parse(windowed).window == 9


def test_mixtral_window_round_trip() -> None:
    for window in (None, 4096):
        model = parse({**MIXTRAL, "sliding_window": window})
        written = to_huggingface(model, "float32")
        assert written["sliding_window"] == parse(written).window == model.window == window


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("table", "fields"),
    [
        ({"rope_type": "linear", "factor": 2.0}, {"factor": 2.0}),
        (
            {"rope_type": "llama3", **LLAMA3},
            {
                "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_positions": 8192,
            },
        ),
        ({"rope_type": "yarn", **YARN}, {"factor": 4.0, "original_max_positions": 32768}),
        ({"rope_type": "yarn", "factor": 4.0}, {"original_max_positions": 512}),
        (
            {
                "rope_type": "yarn", **YARN, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7,
                "mscale_all_dim": 0.5, "attention_factor": 1.2, "truncate": False,
            },
            {
                "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.5,
                "attention_factor": 1.2, "truncate": False,
            },
        ),
        (
            {
                "rope_type": "yarn", **YARN, "beta_fast": 0, "mscale": 0, "mscale_all_dim": 0,
                "attention_factor": None, "partial_rotary_factor": 1.0,
            },
            {
                "beta_fast": 32.0, "mscale": None, "mscale_all_dim": None,
                "attention_factor": None,
            },
        ),
    ],
)  # fmt: skip
def test_rotary_scaling_in_both_spellings(
    family: str, table: dict[str, Any], fields: dict[str, Any], tmp_path: Path
) -> None:
    raw = {**FAMILIES[family], "max_position_embeddings": 512}
    older = {key: value for key, value in table.items() if key != "rope_type"}
    model = parse({**raw, "rope_theta": 5e5, "rope_scaling": {**older, "type": table["rope_type"]}})
    assert parse({**raw, "rope_theta": 5e5, "rope_scaling": table}) == model
    assert parse({**raw, "rope_parameters": {**table, "rope_theta": 5e5}}) == model
    assert model.rope_scaling is not None
    assert model.rope_scaling.kind == table["rope_type"]
    assert fields.items() <= model.rope_scaling.model_dump().items()

    (tmp_path / "config.json").write_text(config_text(model, "float32"))
    assert read_config(tmp_path) == (model, [])
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert theirs["rope_theta"] == 5e5
    for key, value in table.items():
        if value:
            assert theirs.get(key, 1.0) == value, key


def test_original_length_beside_the_rope_table() -> None:
    first = "original_max_position_embeddings"
    raw = {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 4.0}, first: 64}
    scaling = parse(raw).rope_scaling
    assert scaling is not None
    assert scaling.original_max_positions == 64
    raw["rope_scaling"][first] = 32
    refuse(raw, f"{first} = 64", f"rope_scaling.{first} = 32", "contradict")


def test_bookkeeping_is_exported_and_outdated_keys_are_not() -> None:
    kept = {
        "eos_token_id": [2, 7], "pad_token_id": 0, "transformers_version": "4.40.0",
        "use_cache": False, "router_aux_loss_coef": 0.5, "output_router_logits": True,
    }  # fmt: skip
    model = parse({**MIXTRAL, **kept, "_name_or_path": "/home/x", "torch_dtype": "float16"})
    written = to_huggingface(model, "bfloat16")
    assert kept.items() <= written.items()
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"
    assert "_name_or_path" not in written


def test_unknown_keys_are_kept_and_reported() -> None:
    model, warnings = from_huggingface({**LLAMA, "flux": {"a": 1}}, "DIR/config.json")
    assert len(warnings) == 1
    assert all(word in warnings[0] for word in ("DIR/config.json", "flux", '{"a": 1}'))
    assert to_huggingface(model, "float32")["flux"] == {"a": 1}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_round_trip(preset: str, tmp_path: Path) -> None:
    model = ModelConfig(**PRESETS[preset])
    (tmp_path / "config.json").write_text(config_text(model, "float32"))
    again, warnings = read_config(tmp_path)
    assert warnings == []
    # transformers replaces an absent special token by its default; null means none
    assert again == model
    assert config_text(again, "float32") == config_text(model, "float32")
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.model_type == model.family
    assert theirs.eos_token_id is None
    assert theirs.rope_parameters["rope_theta"] == model.rope_theta


def test_inexpressible_models_are_not_exported() -> None:
    with pytest.raises(ConfigError, match=r"model\.renormalise"):
        to_huggingface(ModelConfig(**PRESETS["tiny-mixtral"] | {"renormalise": False}), "float32")
    with pytest.raises(ConfigError, match=r"model\.head_dim = 16"):
        to_huggingface(ModelConfig(**PRESETS["tiny-olmoe"] | {"head_dim": 16}), "float32")
    with pytest.raises(ConfigError, match=r"model\.heads = 6 cannot be exported"):
        to_huggingface(ModelConfig(**PRESETS["tiny-dense"] | {"heads": 6}), "float32")
    for key in ("attention_bias", "quantization_config", "intermediate_size", "sliding_window"):
        model = ModelConfig(**PRESETS["tiny-dense"], extras={key: 1})
        with pytest.raises(ConfigError, match=rf"model\.extras\.{key}"):
            to_huggingface(model, "float32")


def test_unreadable_config_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_config(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json' cannot be read as JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_config(tmp_path / "config.json")
