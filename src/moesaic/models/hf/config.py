"""config.json of a Hugging Face directory <-> ModelConfig.

Every key is one of four kinds: a size or switch that ModelConfig has; one that must have a fixed
value, because another would mean arithmetic that is not built here (an error); bookkeeping, kept in
`ModelConfig.extras` and written again; unknown, kept likewise and reported in a warning. What
differs from family to family stands in `families`, as far as a table can say it. Both spellings of
what the rotary embedding does are read (transformers 4 and 5), and both are written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import ONLY, Family
from moesaic.models.hf import fp8
from moesaic.models.hf.families import FAMILIES

CONFIG_NAME = "config.json"
ADAPTER_NAME = "adapter_config.json"

FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,), "attention_dropout": (0.0,), "decoder_sparse_step": (1,),
    "hidden_act": ("silu", "swish"), "mlp_bias": (False,), "mlp_only_layers": ([],),
    "partial_rotary_factor": (1.0,), "router_jitter_noise": (0.0,),
}  # fmt: skip
"""Keys of any family that change arithmetic, with the values that are built here."""

TOKENS: dict[str, Any] = {
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "use_cache": True,
}  # fmt: skip
"""Keys that export of any family writes."""

EXPERTS = ("num_local_experts", "num_experts")
"""Keys of which a file may have one for the other."""

ROPE_KINDS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor", "original_max_position_embeddings": "original_positions",
        "low_freq_factor": "low", "high_freq_factor": "high",
    },
    "yarn": {
        "factor": "factor", "original_max_position_embeddings": "original_positions",
        "beta_slow": "slow", "beta_fast": "fast", "attention_factor": "sharpness",
        "mscale": "mscale", "mscale_all_dim": "mscale_all", "truncate": "truncate",
    },
}  # fmt: skip
"""By `rope_type`, the keys of its table and those of `model.rope_scaling`."""
UNSET_BY_ZERO = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Keys of such tables that transformers takes for absent where they are 0."""

BOOKKEEPING = frozenset(
    (
        *TOKENS, "add_cross_attention", "architectures", "aux_loss_alpha",
        "chunk_size_feed_forward", "ep_size", "finetuning_task", "id2label", "intermediate_size",
        "is_decoder", "is_encoder_decoder", "label2id", "max_window_layers", "num_labels",
        "num_nextn_predict_layers", "output_attentions", "output_hidden_states",
        "output_router_logits", "prefix", "pretraining_tp", "problem_type", "pruned_heads",
        "return_dict", "router_aux_loss_coef", "router_z_loss_coef", "sep_token_id", "seq_aux",
        "task_specific_params", "tokenizer_class", "torchscript", "transformers_version",
        "unsloth_fixed", "unsloth_version", "use_bfloat16",
    )
)  # fmt: skip
"""Keys that change no arithmetic of the model."""

OUTDATED = frozenset(
    (
        "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "auto_map",
        "dtype", "torch_dtype", fp8.SCHEME,
    )
)  # fmt: skip
"""Keys that say how or whence a file was once loaded, or what export says anew; not kept."""

MODEL_KEYS = frozenset(
    (
        "clip_qkv", "head_dim", "hidden_size", "initializer_range", "max_position_embeddings",
        "model_type", "norm_topk_prob", "num_attention_heads", "num_experts",
        "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads", "num_local_experts",
        "original_max_position_embeddings", "rms_norm_eps", "rope_parameters", "rope_scaling",
        "rope_theta", "sliding_window", "tie_word_embeddings", "use_sliding_window", "vocab_size",
    )
)  # fmt: skip
"""Keys of more than one family that ModelConfig has a field for."""


NULL_IS_FALSE = ("norm_topk_prob", "rope_interleave")
"""Keys whose null transformers reads as false, where without the key it may take true."""


def what_else(path: Path) -> str:
    """What is at `path`, in words, where no model of ours is."""
    if (path / ADAPTER_NAME).is_file():
        return "is an adapter, which holds no model of its own"
    return "is none of these" if path.exists() else "is not there"


def read_config(directory: Path) -> tuple[ModelConfig, list[str]]:
    """The model that `directory` holds, and what a person should know of its config.json."""
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
            f"'{directory}' holds an adapter beside the model, which transformers would apply and "
            f"nothing here does: merge the two, or take {ADAPTER_NAME} away for the model alone"
        )
    return from_huggingface(raw, str(path))


def from_huggingface(raw: Mapping[str, Any], origin: str) -> tuple[ModelConfig, list[str]]:
    """The content of a config.json as ModelConfig, with warnings; `origin` opens every error."""
    family: Any = raw.get("model_type")
    if family not in get_args(Family):
        raise ConfigError(
            f"{origin}: model_type = {json.dumps(family)} is not supported: "
            f"use one of {', '.join(get_args(Family))}"
        )
    falsy = {key: False for key in NULL_IS_FALSE if key in raw and raw[key] is None}
    given = {key: value for key, value in raw.items() if value is not None}
    known = Keys(given | falsy, family, origin)
    known.refuse_unbuilt()
    fields: dict[str, Any] = {
        "family": family,
        "vocab": known.required("vocab_size"),
        "layers": known.required("num_hidden_layers"),
        "norm_epsilon": known.optional("rms_norm_eps"),
        "max_positions": known.optional("max_position_embeddings"),
        "init_std": known.raw.get("initializer_range", 0.02),
        "tied": known.raw.get("tie_word_embeddings", False),
        "window": known.window("sliding_window" in raw),
        "renormalise": family == "mixtral",
        **known.rope(),
        **known.own(),
        **(known.latent(raw) if FAMILIES[family].latent else known.attention(raw)),
    }
    known.check_special_tokens()
    extras, warnings = _extras(raw, family, origin)
    return parse(ModelConfig, {**fields, "extras": extras}, origin), warnings


class Keys:
    """The keys of one config.json that are not null, and what follows from them."""

    def __init__(self, raw: Mapping[str, Any], family: str, origin: str) -> None:
        self.raw, self.family, self.origin = raw, family, origin
        self._keys = FAMILIES[family]

    def required(self, key: str) -> int:
        """A whole number that must be given."""
        if key not in self.raw:
            raise ConfigError(f"{self.origin}: '{key}' is required and not given: add it")
        value = self.raw[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"{self.origin}: {key} = {json.dumps(value)} is not a positive whole number"
            )
        return value

    def optional(self, key: str) -> Any:
        """A value, or what transformers takes where the file leaves it out."""
        return self.raw.get(key, self._keys.defaults[key])

    def check_special_tokens(self) -> None:
        """Raise for a special token that is no id; the end token may be a list of ids."""
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = self.raw.get(key, [])
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
                raise ConfigError(
                    f"{self.origin}: {key} = {json.dumps(value)} is no token id: give a whole "
                    "number, or remove the key"
                )

    def refuse_unbuilt(self) -> None:
        """Raise for a key whose value means arithmetic that is not built here."""
        for key, allowed in {**FIXED, **self._keys.fixed}.items():
            if key in self.raw and self.raw[key] not in allowed:
                self._refuse(key, self.raw[key], allowed or ("null",))
        if fp8.SCHEME in self.raw:
            fp8.check_scheme(self.raw[fp8.SCHEME], self.origin)

    def _refuse(self, key: str, value: Any, allowed: tuple[Any, ...]) -> None:
        names = [v if v == "null" else json.dumps(v) for v in allowed]
        raise ConfigError(
            f"{self.origin}: {key} = {json.dumps(value)} is not supported for "
            f"{self.family}: only {' or '.join(names)} is"
        )

    def own(self) -> dict[str, Any]:
        """What the family's own keys say."""
        result = {}
        for key, field in self._keys.fields.items():
            if field == "experts":
                result[field] = self._experts(key)
            else:
                given = key in self._keys.defaults
                result[field] = self.optional(key) if given else self.required(key)
        return result

    def _experts(self, own: str) -> int:
        found = {key: self.raw[key] for key in (own, *EXPERTS) if key in self.raw}
        first = next(iter(found), own)
        experts = self.required(first)
        for key, value in found.items():
            if value != experts:
                raise ConfigError(
                    f"{self.origin}: {first} = {experts} and {key} = {json.dumps(value)} "
                    "contradict each other: remove one"
                )
        return experts

    def latent(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Heads and widths of latent attention; `raw`: with keys that are null."""
        heads, rotary = self.required("num_attention_heads"), self.required("qk_rope_head_dim")
        head_dim = self.required("qk_nope_head_dim") + rotary
        # transformers calls the turned channels alone a head's width.
        meant = {"num_key_value_heads": heads, "head_dim": rotary, "qk_head_dim": head_dim}
        for key, only in meant.items():
            if self.raw.get(key, only) != only:
                self._refuse(key, self.raw[key], (only,))
        latent: dict[str, Any] = {
            field: self.required(key)
            for key, field in self._keys.latent.items() if key != "q_lora_rank"
        }  # fmt: skip
        if "q_lora_rank" in self.raw or "q_lora_rank" not in raw:
            latent["queries"] = self.optional("q_lora_rank")
        return {
            "hidden": self.required("hidden_size"), "heads": heads, "kv_heads": heads,
            "head_dim": head_dim, "latent": latent,
        }  # fmt: skip

    def attention(self, raw: Mapping[str, Any]) -> dict[str, int]:
        """Widths and heads; `raw`: with keys that are null."""
        hidden, heads = self.required("hidden_size"), self.required("num_attention_heads")
        result = {"hidden": hidden, "heads": heads, "kv_heads": heads}
        if "num_key_value_heads" in self.raw:
            result["kv_heads"] = self.required("num_key_value_heads")
        elif "num_key_value_heads" not in raw:
            result["kv_heads"] = self._keys.defaults.get("num_key_value_heads", heads)
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

    def window(self, named: bool) -> Any:
        """Tokens that attention looks back on; `named`: the file has that key, if only as null."""
        if self.family != "qwen3_moe":
            return self.raw.get("sliding_window")
        if not self.raw.get("use_sliding_window", False):
            return None
        window = self.raw.get("sliding_window") if named else self.optional("sliding_window")
        if window is not None and self.raw.get("max_window_layers", 0) != 0:
            raise ConfigError(
                f"{self.origin}: max_window_layers = {json.dumps(self.raw['max_window_layers'])} "
                f"beside sliding_window = {json.dumps(window)} is read in two ways: give 0, which "
                "means a window in every layer, or set use_sliding_window to false"
            )
        return window

    def rope(self) -> dict[str, Any]:
        """Base and scaling of the rotary embedding, from whichever keys hold them."""
        theta: Any = self.raw.get("rope_theta")
        scalings: dict[str, dict[str, Any] | None] = {}
        for table_key in ("rope_scaling", "rope_parameters"):
            table = self.raw.get(table_key)
            if not table:
                continue
            if not isinstance(table, dict):
                raise ConfigError(f"{self.origin}: {table_key} = {json.dumps(table)} is no table")
            scalings[table_key] = self._scaling(table_key, table)
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
            raise ConfigError(f"{self.origin}: rope_theta has more digits than any base") from None

    def _scaling(self, table_key: str, table: Mapping[str, Any]) -> dict[str, Any] | None:
        """`model.rope_scaling` as one table of the file has it; None for the default."""
        given = {key: value for key, value in table.items() if value is not None}
        kind = self._rope_kind(table_key, given)
        if kind == "default":
            return None
        fields, first = ROPE_KINDS[kind], "original_max_position_embeddings"
        if first in fields:
            beside = self.raw.get(first, self.optional("max_position_embeddings"))
            if given.setdefault(first, beside) != self.raw.get(first, given[first]):
                raise ConfigError(
                    f"{self.origin}: {first} = {json.dumps(beside)} and {table_key}.{first} = "
                    f"{json.dumps(given[first])} contradict each other: remove one"
                )
        for key in ("factor", *(("low_freq_factor", "high_freq_factor") * (kind == "llama3"))):
            if key not in given:
                raise ConfigError(f"{self.origin}: {table_key} has no {key}: add it")
        return {"kind": kind} | {
            fields[key]: value for key, value in given.items()
            if key in fields and (value or key not in UNSET_BY_ZERO)
        }  # fmt: skip

    def _rope_kind(self, table_key: str, given: Mapping[str, Any]) -> str:
        """The kind of scaling, where the table has no key that this kind has not."""
        type_key = "rope_type" if "rope_type" in given else "type"
        kind: Any = given.get(type_key, "default")
        if kind not in tuple(ROPE_KINDS):
            self._refuse(f"{table_key}.{type_key}", kind, tuple(ROPE_KINDS))
        for key, value in given.items():
            if key == "partial_rotary_factor":
                if value != 1.0:
                    self._refuse(f"{table_key}.{key}", value, (1.0,))
            elif key not in ("rope_type", "type", "rope_theta", *ROPE_KINDS[kind]):
                self._refuse(f"{table_key}.{key}", value, ("null",))
        return str(kind)


def _extras(raw: Mapping[str, Any], family: str, origin: str) -> tuple[dict[str, Any], list[str]]:
    """What to keep of keys that ModelConfig has no field for, and warnings about them."""
    keys = FAMILIES[family]
    always = {**keys.written, **TOKENS, "architectures": [keys.architecture]}
    extras: dict[str, Any] = {}
    warnings: list[str] = []
    for key, value in {**keys.tokens, **raw}.items():
        if key in MODEL_KEYS or key in FIXED or key in OUTDATED or keys.meaningful(key):
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
        if key not in always or value != always[key]:
            extras[key] = value
    return extras, warnings


def to_huggingface(model: ModelConfig, dtype: str) -> dict[str, Any]:
    """The content of a config.json for `model` with weights of `dtype` (float32, bfloat16, ...)."""
    _refuse_unwritable(model)
    keys = FAMILIES[model.family]
    result: dict[str, Any] = {
        **keys.written,
        **TOKENS,
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
        **_rope(model),
        **{key: getattr(model, field) for key, field in keys.fields.items()},
    }
    if model.latent is not None:
        result |= {
            **{key: getattr(model.latent, field) for key, field in keys.latent.items()},
            "intermediate_size": model.ffn if model.dense_ffn is None else model.dense_ffn,
            "num_nextn_predict_layers": 0,  # none is written, whatever a file once held
            "qk_nope_head_dim": model.head_dim - model.latent.rotary,
        }
    elif model.family != "olmoe":
        result["head_dim"] = model.head_dim
    if model.family in ONLY["window"]:
        result["sliding_window"] = model.window
    if model.family == "qwen3_moe":
        result["use_sliding_window"] = model.window is not None
        if model.window is not None:
            result["max_window_layers"] = 0
    return result


def _rope(model: ModelConfig) -> dict[str, Any]:
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
    """The bytes of config.json as text, keys in alphabetical order."""
    return json.dumps(to_huggingface(model, dtype), indent=2, sort_keys=True) + "\n"


def _refuse_unwritable(model: ModelConfig) -> None:
    changing = FIXED.keys() | MODEL_KEYS | {fp8.SCHEME}
    for key in model.extras:
        if key in changing or FAMILIES[model.family].meaningful(key):
            raise ConfigError(
                f"model.extras.{key} = {json.dumps(model.extras[key])} is no bookkeeping but "
                "changes the model: remove it, and use the key of [model] that means it"
            )
    if model.family == "mixtral" and not model.renormalise:
        raise ConfigError(
            "model.renormalise = false has no place in a mixtral config.json, whose readers always "
            "renormalise: keep the checkpoint, or train with model.renormalise = true"
        )
    if model.family == "olmoe" and model.head_dim * model.heads != model.hidden:
        even = not model.hidden % model.heads
        remedy = f"set model.head_dim = {model.hidden // model.heads}, or " if even else ""
        raise ConfigError(
            f"model.head_dim = {model.head_dim} has no place in an olmoe config.json, whose "
            f"readers take hidden / heads = {model.hidden} / {model.heads}: {remedy}keep to "
            "checkpoints"
        )
    if model.family == "llama" and model.hidden % model.heads:
        raise ConfigError(
            f"model.heads = {model.heads} has no place in a llama config.json, whose readers want "
            f"a divisor of hidden = {model.hidden}, whatever head_dim says: choose one, or keep to "
            "checkpoints"
        )
