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
from moesaic.facts.job.model import FAMILY_KEYS, Family
from moesaic.models.hf import fp8
from moesaic.models.hf.families import FAMILIES

CONFIG_NAME = "config.json"
ADAPTER_NAME = "adapter_config.json"

FIXED_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,), "attention_dropout": (0.0,), "decoder_sparse_step": (1,),
    "hidden_act": ("silu", "swish"), "mlp_bias": (False,), "mlp_only_layers": ([],),
    "partial_rotary_factor": (1.0,), "router_jitter_noise": (0.0,),
}  # fmt: skip
"""Keys that change arithmetic in any family, with their supported values."""

TOKEN_DEFAULTS: dict[str, Any] = {
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "use_cache": True,
}  # fmt: skip
"""Keys that export writes for every family, with their defaults."""

NUM_EXPERTS_KEYS = ("num_local_experts", "num_experts")
"""Alternative keys for the number of experts."""

ROPE_KINDS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor", "original_max_position_embeddings": "original_max_positions",
        "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor", "original_max_position_embeddings": "original_max_positions",
        "beta_slow": "beta_slow", "beta_fast": "beta_fast", "attention_factor": "attention_factor",
        "mscale": "mscale", "mscale_all_dim": "mscale_all_dim", "truncate": "truncate",
    },
}  # fmt: skip
"""Keys of a rotary table by `rope_type`, and their fields in `model.rope_scaling`."""
UNSET_BY_ZERO = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Keys of rotary tables that transformers treats as absent if they are 0."""

BOOKKEEPING = frozenset(
    (
        *TOKEN_DEFAULTS, "add_cross_attention", "architectures", "aux_loss_alpha",
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
        "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "auto_map",
        "dtype", "torch_dtype", fp8.QUANTIZATION_KEY,
    )
)  # fmt: skip
"""Keys about how a file was loaded, or that export writes anew; not kept."""

MODEL_KEYS = frozenset(
    (
        "clip_qkv", "head_dim", "hidden_size", "initializer_range", "max_position_embeddings",
        "model_type", "norm_topk_prob", "num_attention_heads", "num_experts",
        "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads", "num_local_experts",
        "original_max_position_embeddings", "rms_norm_eps", "rope_parameters", "rope_scaling",
        "rope_theta", "sliding_window", "tie_word_embeddings", "use_sliding_window", "vocab_size",
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
    except FileNotFoundError:
        raise ConfigError(
            f"'{directory}' has no {CONFIG_NAME}: give a Hugging Face model directory"
        ) from None
    except NotADirectoryError:
        raise ConfigError(
            f"'{directory}' is a file: give the Hugging Face model directory that holds it"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"'{path}' cannot be read as JSON ({error}): restore it") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"'{path}' is not a JSON object: give a Hugging Face model directory")
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
    null_is_false = {key: False for key in NULL_IS_FALSE if key in raw and raw[key] is None}
    given = {key: value for key, value in raw.items() if value is not None}
    keys = ConfigKeys(given | null_is_false, family, origin)
    keys.check_supported()
    fields: dict[str, Any] = {
        "family": family,
        "vocab": keys.required("vocab_size"),
        "layers": keys.required("num_hidden_layers"),
        "norm_epsilon": keys.optional("rms_norm_eps"),
        "max_positions": keys.optional("max_position_embeddings"),
        "init_std": keys.raw.get("initializer_range", 0.02),
        "tied": keys.raw.get("tie_word_embeddings", False),
        "window": keys.window("sliding_window" in raw),
        "renormalise": family == "mixtral",
        **keys.rope(),
        **keys.family_fields(),
        **(keys.latent(raw) if FAMILIES[family].latent_fields else keys.attention(raw)),
    }
    keys.check_special_tokens()
    extras, warnings = _extras(raw, family, origin)
    return parse(ModelConfig, {**fields, "extras": extras}, origin), warnings


class ConfigKeys:
    """The keys of one config.json that are not null."""

    def __init__(self, raw: Mapping[str, Any], family: str, origin: str) -> None:
        self.raw, self.family, self.origin = raw, family, origin
        self._family_keys = FAMILIES[family]

    def required(self, key: str) -> int:
        """Return a required positive whole number."""
        if key not in self.raw:
            raise ConfigError(f"{self.origin}: '{key}' is required and not given: add it")
        value = self.raw[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"{self.origin}: {key} = {json.dumps(value)} is not a positive whole number"
            )
        return value

    def optional(self, key: str) -> Any:
        """Return a value, or the default of transformers if the file has none."""
        return self.raw.get(key, self._family_keys.defaults[key])

    def check_special_tokens(self) -> None:
        """Raise if a special token is not an id; the end token may be a list of ids."""
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = self.raw.get(key, [])
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
                raise ConfigError(
                    f"{self.origin}: {key} = {json.dumps(value)} is no token id: give a whole "
                    "number, or remove the key"
                )

    def check_supported(self) -> None:
        """Raise if the value of a key means unsupported arithmetic."""
        for key, allowed in {**FIXED_VALUES, **self._family_keys.fixed_values}.items():
            if key in self.raw and self.raw[key] not in allowed:
                self._raise_unsupported(key, self.raw[key], allowed or ("null",))
        if fp8.QUANTIZATION_KEY in self.raw:
            fp8.check_scheme(self.raw[fp8.QUANTIZATION_KEY], self.origin)

    def _raise_unsupported(self, key: str, value: Any, allowed: tuple[Any, ...]) -> None:
        names = [v if v == "null" else json.dumps(v) for v in allowed]
        raise ConfigError(
            f"{self.origin}: {key} = {json.dumps(value)} is not supported for "
            f"{self.family}: only {' or '.join(names)} is"
        )

    def family_fields(self) -> dict[str, Any]:
        """Return the fields that the family's own keys set."""
        result = {}
        for key, field in self._family_keys.fields.items():
            if field == "experts":
                result[field] = self._num_experts(key)
            else:
                has_default = key in self._family_keys.defaults
                result[field] = self.optional(key) if has_default else self.required(key)
        return result

    def _num_experts(self, family_key: str) -> int:
        values = {key: self.raw[key] for key in (family_key, *NUM_EXPERTS_KEYS) if key in self.raw}
        first = next(iter(values), family_key)
        experts = self.required(first)
        for key, value in values.items():
            if value != experts:
                raise ConfigError(
                    f"{self.origin}: {first} = {experts} and {key} = {json.dumps(value)} "
                    "contradict each other: remove one"
                )
        return experts

    def latent(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return heads and widths of latent attention; `raw` also has the keys that are null."""
        heads, rotary = self.required("num_attention_heads"), self.required("qk_rope_head_dim")
        head_dim = self.required("qk_nope_head_dim") + rotary
        # transformers uses head_dim for the rotary channels alone.
        derived = {"num_key_value_heads": heads, "head_dim": rotary, "qk_head_dim": head_dim}
        for key, allowed in derived.items():
            if self.raw.get(key, allowed) != allowed:
                self._raise_unsupported(key, self.raw[key], (allowed,))
        latent: dict[str, Any] = {
            field: self.required(key)
            for key, field in self._family_keys.latent_fields.items() if key != "q_lora_rank"
        }  # fmt: skip
        if "q_lora_rank" in self.raw or "q_lora_rank" not in raw:
            latent["q_lora_rank"] = self.optional("q_lora_rank")
        return {
            "hidden": self.required("hidden_size"), "heads": heads, "kv_heads": heads,
            "head_dim": head_dim, "latent": latent,
        }  # fmt: skip

    def attention(self, raw: Mapping[str, Any]) -> dict[str, int]:
        """Return widths and heads of attention; `raw` also has the keys that are null."""
        hidden, heads = self.required("hidden_size"), self.required("num_attention_heads")
        result = {"hidden": hidden, "heads": heads, "kv_heads": heads}
        if "num_key_value_heads" in self.raw:
            result["kv_heads"] = self.required("num_key_value_heads")
        elif "num_key_value_heads" not in raw:
            result["kv_heads"] = self._family_keys.defaults.get("num_key_value_heads", heads)
        if "head_dim" in self.raw:
            result["head_dim"] = self.required("head_dim")
        elif hidden % heads:
            raise ConfigError(
                f"{self.origin}: num_attention_heads = {heads} does not divide "
                f"hidden_size = {hidden}: give head_dim"
            )
        else:
            result["head_dim"] = hidden // heads
        if self.family == "olmoe" and result["head_dim"] * heads != hidden:
            raise ConfigError(
                f"{self.origin}: head_dim = {result['head_dim']} is not supported for olmoe: only "
                f"hidden_size / num_attention_heads = {hidden} / {heads} is"
            )
        return result

    def window(self, is_present: bool) -> Any:
        """Return the attention window in tokens; `is_present`: the file has the key, perhaps as
        null."""
        if self.family != "qwen3_moe":
            return self.raw.get("sliding_window")
        if not self.raw.get("use_sliding_window", False):
            return None
        window = self.raw.get("sliding_window") if is_present else self.optional("sliding_window")
        if window is not None and self.raw.get("max_window_layers", 0) != 0:
            raise ConfigError(
                f"{self.origin}: max_window_layers = {json.dumps(self.raw['max_window_layers'])} "
                f"beside sliding_window = {json.dumps(window)} is ambiguous: set it to 0 for "
                "a window in every layer, or set use_sliding_window to false"
            )
        return window

    def rope(self) -> dict[str, Any]:
        """Return base and scaling of the rotary embedding, from any of the keys that hold them."""
        theta: Any = self.raw.get("rope_theta")
        scalings: dict[str, dict[str, Any] | None] = {}
        for table_key in ("rope_scaling", "rope_parameters"):
            table = self.raw.get(table_key)
            if not table:
                continue
            if not isinstance(table, dict):
                raise ConfigError(f"{self.origin}: {table_key} = {json.dumps(table)} is no table")
            scalings[table_key] = self._rope_scaling(table_key, table)
            inner = table.get("rope_theta")
            if None not in (theta, inner) and inner != theta:
                raise ConfigError(
                    f"{self.origin}: rope_theta = {theta} and {table_key}.rope_theta = {inner} "
                    "contradict each other: remove one"
                )
            theta = inner if theta is None else theta
        theta = self.optional("rope_theta") if theta is None else theta
        if not isinstance(theta, (int, float)) or isinstance(theta, bool):
            raise ConfigError(f"{self.origin}: rope_theta = {json.dumps(theta)} is not a number")
        scaling, *others = scalings.values() or (None,)
        if others not in ([], [scaling]):
            raise ConfigError(
                f"{self.origin}: {' and '.join(scalings)} contradict each other: remove one"
            )
        try:
            return {"rope_theta": float(theta), "rope_scaling": scaling}
        except OverflowError:
            raise ConfigError(
                f"{self.origin}: rope_theta is too large for a float: lower it"
            ) from None

    def _rope_scaling(self, table_key: str, table: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return `model.rope_scaling` from one table of the file; None for the default."""
        given = {key: value for key, value in table.items() if value is not None}
        kind = self._rope_kind(table_key, given)
        if kind == "default":
            return None
        fields, length_key = ROPE_KINDS[kind], "original_max_position_embeddings"
        if length_key in fields:
            outer_value = self.raw.get(length_key, self.optional("max_position_embeddings"))
            if given.setdefault(length_key, outer_value) != self.raw.get(
                length_key, given[length_key]
            ):
                raise ConfigError(
                    f"{self.origin}: {length_key} = {json.dumps(outer_value)} and "
                    f"{table_key}.{length_key} = {json.dumps(given[length_key])} contradict each "
                    "other: remove one"
                )
        for key in ("factor", *(("low_freq_factor", "high_freq_factor") * (kind == "llama3"))):
            if key not in given:
                raise ConfigError(f"{self.origin}: {table_key} has no {key}: add it")
        return {"kind": kind} | {
            fields[key]: value for key, value in given.items()
            if key in fields and (value or key not in UNSET_BY_ZERO)
        }  # fmt: skip

    def _rope_kind(self, table_key: str, given: Mapping[str, Any]) -> str:
        """Return the kind of scaling; raise if the table has keys of another kind."""
        type_key = "rope_type" if "rope_type" in given else "type"
        kind: Any = given.get(type_key, "default")
        if kind not in tuple(ROPE_KINDS):
            self._raise_unsupported(f"{table_key}.{type_key}", kind, tuple(ROPE_KINDS))
        for key, value in given.items():
            if key == "partial_rotary_factor":
                if value != 1.0:
                    self._raise_unsupported(f"{table_key}.{key}", value, (1.0,))
            elif key not in ("rope_type", "type", "rope_theta", *ROPE_KINDS[kind]):
                self._raise_unsupported(f"{table_key}.{key}", value, ("null",))
        return str(kind)


def _extras(raw: Mapping[str, Any], family: str, origin: str) -> tuple[dict[str, Any], list[str]]:
    """Return the keys to keep that have no field in ModelConfig, and warnings about them."""
    keys = FAMILIES[family]
    defaults = {**keys.export_defaults, **TOKEN_DEFAULTS, "architectures": [keys.architecture]}
    extras: dict[str, Any] = {}
    warnings: list[str] = []
    for key, value in {**keys.token_defaults, **raw}.items():
        if key in MODEL_KEYS or key in FIXED_VALUES or key in OUTDATED or keys.is_model_key(key):
            continue
        if key == "architectures":
            names = value if isinstance(value, list) else [value]
            if value and keys.architecture not in names:
                warnings.append(
                    f"{origin}: architectures = {json.dumps(value)} is read as "
                    f"{keys.architecture}, which model_type = '{family}' means"
                )
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
    if model.latent is not None:
        result |= {
            **{key: getattr(model.latent, field) for key, field in keys.latent_fields.items()},
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
    kind, scaling = model.rope_scaling.kind, {}
    for key, field in ROPE_KINDS[kind].items():
        value = getattr(model.rope_scaling, field)
        if value is not None:
            scaling[key] = value
    scaling["rope_type"] = kind
    return {
        **base, "rope_parameters": {**base, **scaling}, "rope_scaling": {**scaling, "type": kind},
    }  # fmt: skip


def config_text(model: ModelConfig, dtype: str) -> str:
    """Return the text of config.json, keys in alphabetical order."""
    return json.dumps(to_huggingface(model, dtype), indent=2, sort_keys=True) + "\n"


def _check_writable(model: ModelConfig) -> None:
    model_keys = FIXED_VALUES.keys() | MODEL_KEYS | {fp8.QUANTIZATION_KEY}
    for key in model.extras:
        if key in model_keys or FAMILIES[model.family].is_model_key(key):
            raise ConfigError(
                f"model.extras.{key} = {json.dumps(model.extras[key])} changes the "
                "model: remove it, and set the corresponding key of [model]"
            )
    if model.family == "mixtral" and not model.renormalise:
        raise ConfigError(
            "model.renormalise = false cannot be exported, as readers of a mixtral config.json "
            "always renormalise: keep the checkpoint, or train with model.renormalise = true"
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
