"""Translation between config.json of a Hugging Face directory and ModelConfig.

Every key is one of four kinds:

- a size or switch with a field in ModelConfig;
- a key with a fixed value, because other values mean unsupported arithmetic (an error);
- bookkeeping, kept in `ModelConfig.extras` and exported again;
- unknown, kept too and reported in a warning.

Differences between families are tables in `families` where possible. The rotary keys of
transformers 4 and 5 are both read, and both are written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import FAMILY_KEYS, Family, LatentConfig
from moesaic.models.hf import fp8
from moesaic.models.hf.families import FAMILIES
from moesaic.models.hf.labels import LABEL_KEYS, label_keys, num_labels
from moesaic.models.hf.special_tokens import TOKEN_ID_KEYS, token_ids

CONFIG_NAME = "config.json"
RECOMMENDER = "moesaic-recommender"
"""Format of an exported recommender's config.json."""
ADAPTER_NAME = "adapter_config.json"

FIXED_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,), "attention_dropout": (0.0,), "decoder_sparse_step": (1,),
    "hidden_act": ("silu", "swish"), "mlp_bias": (False,), "mlp_only_layers": ([],),
    "partial_rotary_factor": (1.0,), "router_jitter_noise": (0.0,),
}  # fmt: skip
"""Keys that change arithmetic in any family, with their supported values."""

TOKEN_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(TOKEN_ID_KEYS), "use_cache": True,
}  # fmt: skip
"""Keys that export writes for every family, with their defaults."""

NUM_EXPERTS_KEYS = ("num_local_experts", "num_experts")
"""Alternative keys for the number of experts."""

LATENT_KEYS = tuple(LatentConfig.model_fields)
ORIGINAL_LENGTH = "original_max_position_embeddings"
ROPE_KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", ORIGINAL_LENGTH, "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor", ORIGINAL_LENGTH, "beta_slow", "beta_fast", "attention_factor", "mscale",
        "mscale_all_dim", "truncate",
    ),
}  # fmt: skip
"""Keys of a rotary table by `rope_type`; `model.rope_scaling` has fields of the same names, but
`original_max_positions` for `ORIGINAL_LENGTH`."""
ROPE_REQUIRED = ("factor", "low_freq_factor", "high_freq_factor")
"""Keys that a rotary table must have if its `rope_type` knows them."""
UNSET_BY_ZERO = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Keys of rotary tables that transformers treats as absent if they are 0."""

BOOKKEEPING = frozenset(
    (
        *TOKEN_DEFAULTS, "add_cross_attention", "aux_loss_alpha",
        "chunk_size_feed_forward", "ep_size", "finetuning_task", "id2label", "intermediate_size",
        "is_decoder", "is_encoder_decoder", "label2id", "max_window_layers", "num_labels",
        "num_nextn_predict_layers", "output_attentions", "output_hidden_states",
        "output_router_logits", "prefix", "pretraining_tp", "problem_type", "pruned_heads",
        "return_dict", "router_aux_loss_coef", "router_z_loss_coef", "sep_token_id", "seq_aux",
        "task_specific_params", "tokenizer_class", "torchscript", "transformers_version",
        "unsloth_fixed", "unsloth_version", "use_bfloat16",
    )
)  # fmt: skip
"""Keys that do not change the model's arithmetic."""

OUTDATED = frozenset(
    (
        "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures",
        "auto_map", "dtype", "torch_dtype", fp8.QUANTIZATION_KEY,
    )
)  # fmt: skip
"""Keys about how a file was loaded, or that export writes anew; not kept."""

MODEL_KEYS = frozenset(
    (
        "clip_qkv", "head_dim", "hidden_size", "initializer_range", "max_position_embeddings",
        "model_type", "norm_topk_prob", "num_attention_heads", "num_experts",
        "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads", "num_local_experts",
        "original_max_position_embeddings", "qk_head_dim", "qk_nope_head_dim", "rms_norm_eps",
        "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "tie_word_embeddings",
        "use_sliding_window", "vocab_size", *LATENT_KEYS,
    )
)  # fmt: skip
"""Keys of several families with a field in ModelConfig."""


NULL_IS_FALSE = ("norm_topk_prob", "rope_interleave")
"""Keys whose null transformers reads as false, although its default for a missing key may be true.
"""


def describe_path(path: Path) -> str:
    """Return a phrase for an error message about a `path` that holds no model."""
    if (path / ADAPTER_NAME).is_file():
        return "is an adapter, which holds no model of its own"
    return "is none of these" if path.exists() else "is not there"


def read_config(directory: Path) -> tuple[ModelConfig, list[str]]:
    """Return the model config of `directory`, and warnings about its config.json."""
    path = directory / CONFIG_NAME
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"'{directory}' has no {CONFIG_NAME}: give a Hugging Face model directory"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"'{path}' cannot be read as JSON ({error}): restore it") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"'{path}' is not a JSON object: give a Hugging Face model directory")
    if raw.get("format") == RECOMMENDER:
        raise ConfigError(
            f"'{directory}' is an exported recommender, not a language model: use moesaic predict"
        )
    if (directory / ADAPTER_NAME).is_file():
        raise ConfigError(
            f"'{directory}' holds an adapter beside the model, which is not supported: merge "
            f"the two, or remove {ADAPTER_NAME} to use the model alone"
        )
    return from_huggingface(raw, str(path))


def from_huggingface(raw: Mapping[str, Any], origin: str) -> tuple[ModelConfig, list[str]]:
    """Return the content of a config.json as ModelConfig, with warnings.

    Args:
        raw: the content of the file.
        origin: file name that starts every error message."""
    family: Any = raw.get("model_type")
    if family not in get_args(Family):
        raise ConfigError(
            f"{origin}: model_type = {json.dumps(family)} is not supported: "
            f"use one of {', '.join(get_args(Family))}"
        )
    keys = _ConfigKeys(raw, family, origin)
    keys.check_supported()
    fields: dict[str, Any] = {
        "family": family,
        "vocab": keys.required("vocab_size"),
        "layers": keys.required("num_hidden_layers"),
        "norm_epsilon": keys.optional("rms_norm_eps"),
        "max_positions": keys.optional("max_position_embeddings"),
        "init_std": keys.optional("initializer_range", 0.02),
        "tied": keys.optional("tie_word_embeddings", False),
        "window": keys.window(),
        "renormalise": family == "mixtral",
        "labels": num_labels(raw),
        **keys.rope(),
        **keys.family_fields(),
        **(keys.latent() if family in FAMILY_KEYS["latent"] else keys.attention()),
    }
    for key in TOKEN_ID_KEYS:
        token_ids(raw.get(key), key, origin)
    extras, warnings = _extras(raw, family, origin)
    return parse(ModelConfig, {**fields, "extras": extras}, origin), warnings


class _ConfigKeys:
    """The keys of one config.json; `given` has those that are not null."""

    def __init__(self, raw: Mapping[str, Any], family: str, origin: str) -> None:
        self._family, self._origin = FAMILIES[family], origin
        self._family_name = family
        self._nulls = {key for key, value in raw.items() if value is None}
        self.given = {key: value for key, value in raw.items() if value is not None}
        self.given |= {key: False for key in NULL_IS_FALSE if key in self._nulls}

    def required(self, key: str) -> int:
        """Return a required positive whole number."""
        value = self.given.get(key)
        if value is None:
            raise ConfigError(f"{self._origin}: '{key}' is required and not given: add it")
        return self._positive(key, value)

    def _positive(self, key: str, value: Any) -> int:
        """Return `value`; raise unless it is a positive whole number."""
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"{self._origin}: {key} = {json.dumps(value)} is not a positive whole number"
            )
        return value

    def optional(self, key: str, default: Any = None) -> Any:
        """Return a value; the default of the family or else `default` if the file has none."""
        return self.given.get(key, self._family.defaults.get(key, default))

    def nullable(self, key: str, if_null: Any) -> Any:
        """Return the same as `optional`, but `if_null` if the file says null."""
        return if_null if key in self._nulls else self.optional(key, if_null)

    def check_supported(self) -> None:
        """Raise if the value of a key means unsupported arithmetic."""
        for key, allowed in {**FIXED_VALUES, **self._family.fixed_values}.items():
            self._check_value(key, self.given.get(key), allowed)
        if fp8.QUANTIZATION_KEY in self.given:
            fp8.check_scheme(self.given[fp8.QUANTIZATION_KEY], self._origin)

    def _check_value(self, key: str, value: Any, allowed: tuple[Any, ...]) -> None:
        """Raise unless `value` is null or in `allowed`."""
        if value is not None and value not in allowed:
            names = [json.dumps(one) for one in allowed] or ["null"]
            raise ConfigError(
                f"{self._origin}: {key} = {json.dumps(value)} is not supported for "
                f"{self._family_name}: only {' or '.join(names)} is"
            )

    def _agreed(self, values: Mapping[str, Any], default: Any) -> Any:
        """Return the value of keys that mean the same, or `default` if all of them are None; raise
        if they contradict each other."""
        found = {key: value for key, value in values.items() if value is not None}
        if not found:
            return default
        (first, agreed), *others = found.items()
        for key, value in others:
            if value != agreed:
                raise ConfigError(
                    f"{self._origin}: {first} = {json.dumps(agreed)} and {key} = "
                    f"{json.dumps(value)} contradict each other: remove one"
                )
        return agreed

    def family_fields(self) -> dict[str, Any]:
        """Return the fields that the family's own keys set."""
        result = {}
        for key, field in self._family.fields.items():
            if field == "experts":
                alternatives = {one: self.given.get(one) for one in (key, *NUM_EXPERTS_KEYS)}
                result[field] = self._agreed(alternatives, None)
                if result[field] is None:
                    self.required(key)
            else:
                has_default = key in self._family.defaults
                result[field] = self.optional(key) if has_default else self.required(key)
        return result

    def latent(self) -> dict[str, Any]:
        """Return heads and widths of latent attention."""
        heads, rotary = self.required("num_attention_heads"), self.required("qk_rope_head_dim")
        head_dim = self.required("qk_nope_head_dim") + rotary
        # transformers uses head_dim for the rotary channels alone.
        derived = {"num_key_value_heads": heads, "head_dim": rotary, "qk_head_dim": head_dim}
        for key, allowed in derived.items():
            self._check_value(key, self.given.get(key), (allowed,))
        latent = {
            key: self.nullable(key, None) if key == "q_lora_rank" else self.required(key)
            for key in LATENT_KEYS
        }
        return {
            "hidden": self.required("hidden_size"), "heads": heads, "kv_heads": heads,
            "head_dim": head_dim, "latent": latent,
        }  # fmt: skip

    def attention(self) -> dict[str, int]:
        """Return widths and heads of attention."""
        hidden, heads = self.required("hidden_size"), self.required("num_attention_heads")
        head_dim = self.optional("head_dim", hidden // heads)
        if "head_dim" not in self.given and hidden % heads:
            raise ConfigError(
                f"{self._origin}: num_attention_heads = {heads} does not divide "
                f"hidden_size = {hidden}: give head_dim"
            )
        if self._family_name == "olmoe" and head_dim * heads != hidden:
            raise ConfigError(
                f"{self._origin}: head_dim = {head_dim} is not supported for olmoe: only "
                f"hidden_size / num_attention_heads = {hidden} / {heads} is"
            )
        kv_heads = self.nullable("num_key_value_heads", heads)
        return {"hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}

    def window(self) -> Any:
        """Return the attention window in tokens."""
        if self._family_name != "qwen3_moe":
            return self.given.get("sliding_window")
        if not self.given.get("use_sliding_window", False):
            return None
        window, first = self.nullable("sliding_window", None), self.given.get("max_window_layers")
        if window is not None and first:
            raise ConfigError(
                f"{self._origin}: max_window_layers = {json.dumps(first)} "
                f"beside sliding_window = {json.dumps(window)} is ambiguous: set it to 0 for "
                "a window in every layer, or set use_sliding_window to false"
            )
        return window

    def rope(self) -> dict[str, Any]:
        """Return base and scaling of the rotary embedding, from any of the keys that hold them."""
        thetas = {"rope_theta": self.given.get("rope_theta")}
        scalings: dict[str, dict[str, Any]] = {}
        for key in ("rope_scaling", "rope_parameters"):
            table = self.given.get(key) or {}
            if not isinstance(table, dict):
                raise ConfigError(f"{self._origin}: {key} = {json.dumps(table)} is no table")
            thetas[f"{key}.rope_theta"] = table.get("rope_theta")
            if table:
                scalings[key] = self._rope_scaling(key, table)
        scaling, *others = scalings.values() or ({},)
        if any(other != scaling for other in others):
            raise ConfigError(
                f"{self._origin}: {' and '.join(scalings)} contradict each other: remove one"
            )
        return {
            "rope_theta": self._agreed(thetas, self.optional("rope_theta")),
            "rope_scaling": scaling or None,
        }

    def _rope_scaling(self, table_key: str, table: Mapping[str, Any]) -> dict[str, Any]:
        """Return `model.rope_scaling` from one table of the file; empty for the default."""
        given = {
            key: value for key, value in table.items()
            if value is not None and (value or key not in UNSET_BY_ZERO)
        }  # fmt: skip
        kind_key = "rope_type" if "rope_type" in given else "type"
        kind = given.get(kind_key, "default")
        self._check_value(f"{table_key}.{kind_key}", kind, tuple(ROPE_KINDS))
        partial = given.get("partial_rotary_factor")
        self._check_value(f"{table_key}.partial_rotary_factor", partial, (1.0,))
        for key in ("rope_type", "type", "rope_theta", "partial_rotary_factor"):
            given.pop(key, None)
        known = ROPE_KINDS[kind]
        for key, value in given.items():
            if key not in known:
                raise ConfigError(
                    f"{self._origin}: {table_key}.{key} = {json.dumps(value)} is not known for "
                    f'{kind_key} = "{kind}": remove it'
                )
        for key in ROPE_REQUIRED:
            if key in known and key not in given:
                raise ConfigError(f"{self._origin}: {table_key} has no {key}: add it")
        if kind == "default":
            return {}
        if ORIGINAL_LENGTH in known:
            inner_key = f"{table_key}.{ORIGINAL_LENGTH}"
            lengths = {
                ORIGINAL_LENGTH: self.given.get(ORIGINAL_LENGTH),
                inner_key: given.pop(ORIGINAL_LENGTH, None),
            }
            length = self._agreed(lengths, self.optional("max_position_embeddings"))
            given["original_max_positions"] = self._positive(inner_key, length)
        return {"kind": kind, **given}


def _extras(raw: Mapping[str, Any], family: str, origin: str) -> tuple[dict[str, Any], list[str]]:
    """Return the keys to keep that have no field in ModelConfig, and warnings about them."""
    keys = FAMILIES[family]
    defaults = {**keys.export_defaults, **TOKEN_DEFAULTS}
    extras: dict[str, Any] = {}
    warnings: list[str] = []
    known = FIXED_VALUES.keys() | MODEL_KEYS | OUTDATED | keys.model_keys
    for key, value in {**keys.token_defaults, **raw}.items():
        if key in known or (num_labels(raw) and key in LABEL_KEYS):
            continue
        if key not in BOOKKEEPING:
            warnings.append(
                f"{origin}: {key} = {json.dumps(value)} is not known and has no effect; "
                "kept for export"
            )
        if key not in defaults or value != defaults[key]:
            extras[key] = value
    return extras, warnings


def to_huggingface(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the content of a config.json for `model` with weights of `dtype` (float32, bfloat16,
    ...)."""
    _check_writable(model)
    keys = FAMILIES[model.family]
    result: dict[str, Any] = {
        **keys.export_defaults,
        **TOKEN_DEFAULTS,
        **model.extras,
        "architectures": [keys.architecture],
        "dtype": dtype,
        "torch_dtype": dtype,
        "model_type": model.family,
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "max_position_embeddings": model.max_positions,
        "initializer_range": model.init_std,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tied,
        **_rope_keys(model),
        **{key: getattr(model, field) for key, field in keys.fields.items()},
    }
    if model.labels:
        result |= label_keys(model, keys.architecture)
    if model.latent is not None:
        result |= {
            **model.latent.model_dump(),
            "intermediate_size": model.ffn if model.dense_ffn is None else model.dense_ffn,
            # Export writes no prediction layers, even if the source file had some.
            "num_nextn_predict_layers": 0,
            "qk_nope_head_dim": model.head_dim - model.latent.qk_rope_head_dim,
        }
    elif model.family != "olmoe":
        result["head_dim"] = model.head_dim
    if model.family in FAMILY_KEYS["window"]:
        result["sliding_window"] = model.window
    if model.family == "qwen3_moe":
        result["use_sliding_window"] = model.window is not None
        if model.window is not None:
            result["max_window_layers"] = 0
    return result


def _rope_keys(model: ModelConfig) -> dict[str, Any]:
    base = {"rope_theta": model.rope_theta}
    if model.rope_scaling is None:
        return {**base, "rope_parameters": {**base, "rope_type": "default"}}
    kind = model.rope_scaling.kind
    fields = model.rope_scaling.model_dump(exclude_none=True)
    fields[ORIGINAL_LENGTH] = fields.pop("original_max_positions")
    scaling = {key: fields[key] for key in ROPE_KINDS[kind] if key in fields}
    scaling["rope_type"] = kind
    return {
        **base, "rope_parameters": {**base, **scaling}, "rope_scaling": {**scaling, "type": kind},
    }  # fmt: skip


def config_text(model: ModelConfig, dtype: str) -> str:
    """Return the text of config.json, keys in alphabetical order."""
    return json.dumps(to_huggingface(model, dtype), indent=2, sort_keys=True) + "\n"


def _check_writable(model: ModelConfig) -> None:
    model_keys = FIXED_VALUES.keys() | MODEL_KEYS | FAMILIES[model.family].model_keys
    for key in model.extras:
        if key in model_keys or key == fp8.QUANTIZATION_KEY:
            raise ConfigError(
                f"model.extras.{key} = {json.dumps(model.extras[key])} changes the "
                "model: remove it, and set the corresponding key of [model]"
            )
    if model.family == "mixtral" and not model.renormalise:
        raise ConfigError(
            "model.renormalise = false cannot be exported, as readers of a mixtral config.json "
            "always renormalise: keep the checkpoint, or train with model.renormalise = true"
        )
    if model.family == "olmoe" and model.labels:
        raise ConfigError(
            "a model of family olmoe with a classifier cannot be exported, as transformers has no "
            "OlmoeForSequenceClassification: generate and rank with the run itself"
        )
    if model.family == "olmoe" and model.head_dim * model.heads != model.hidden:
        divides = not model.hidden % model.heads
        remedy = f"set model.head_dim = {model.hidden // model.heads}, or " if divides else ""
        raise ConfigError(
            f"model.head_dim = {model.head_dim} cannot be exported, as readers of an olmoe "
            f"config.json use hidden / heads = {model.hidden} / {model.heads}: {remedy}keep to "
            "checkpoints"
        )
    if model.family == "llama" and model.hidden % model.heads:
        raise ConfigError(
            f"model.heads = {model.heads} cannot be exported, as readers of a llama config.json "
            f"require a divisor of hidden = {model.hidden} whatever head_dim is: choose one, or "
            "keep to checkpoints"
        )
