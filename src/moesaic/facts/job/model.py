"""The model a job trains: sizes and the few switches that tell one decoder family from another."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from moesaic.base.config import Section

MOST_EXPERTS = 1 << 15
"""Fewer experts than these a layer has; their numbers are kept in two bytes."""

Family = Literal["llama", "mixtral", "olmoe", "qwen3_moe", "deepseek_v3"]
Preset = Literal[
    "tiny-dense", "tiny-mixtral", "tiny-olmoe", "tiny-qwen3", "tiny-deepseek", "olmoe-1b-7b",
    "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3",
]  # fmt: skip


ONLY: dict[str, tuple[Family, ...]] = {
    "clip_qkv": ("olmoe",), "dense_ffn": ("deepseek_v3",), "dense_layers": ("deepseek_v3",),
    "groups": ("deepseek_v3",), "latent": ("deepseek_v3",), "scale": ("deepseek_v3",),
    "shared": ("deepseek_v3",), "top_groups": ("deepseek_v3",), "window": ("mixtral", "qwen3_moe"),
}  # fmt: skip
"""Keys that only some families have."""
BEST_OF_GROUP = 2
"""Scores that a group of experts is judged by."""


class ModelSource(Section):
    """Where the sizes come from if a file does not write them out; resolved before parsing."""

    preset: Preset | None = None
    """A model by name; other keys of [model] change it."""
    from_: str | None = Field(default=None, alias="from")
    """Hugging Face model directory: its config.json gives the sizes, its weights are where training
    starts."""


class Latent(Section):
    """Latent attention: keys and values of all heads come from one narrow vector a token."""

    width: int = Field(ge=1)
    """Width of that vector (kv_lora_rank)."""
    queries: int | None = Field(default=None, ge=1)
    """Width of the vector that queries come from (q_lora_rank); unset: from the stream itself."""
    rotary: int = Field(ge=2)
    """Channels of a head that are turned by positions, the same for the keys of all heads; even."""
    value: int = Field(ge=1)
    """Width of a head's values."""


class RopeScaling(Section):
    """How rotary angles are stretched for longer sequences than a model was first trained on."""

    kind: Literal["linear", "llama3", "yarn"]
    """linear: all alike. llama3: low frequencies, and those between in part. yarn: likewise, by
    turns within the first length, and attention is sharpened."""
    factor: float = Field(ge=1)
    """How much longer."""
    original_positions: int = Field(default=8192, ge=1)
    """The longest sequence of the first training (llama3, yarn)."""
    low: float = Field(default=1.0, gt=0)
    """llama3: waves that turn less often than this in it are stretched whole."""
    high: float = Field(default=4.0, gt=0)
    """llama3: waves that turn more often are not stretched."""
    slow: float = Field(default=1.0, gt=0)
    """yarn: channels that turn less often than this in it are stretched whole."""
    fast: float = Field(default=32.0, gt=0)
    """yarn: channels that turn more often are not stretched."""
    sharpness: float | None = Field(default=None, gt=0)
    """yarn: cosines and sines are multiplied by this; unset: by what the factor implies."""
    mscale: float | None = Field(default=None, gt=0)
    """yarn: weight of the factor's logarithm in that, over that of `mscale_all`; the two count
    there only together."""
    mscale_all: float | None = Field(default=None, gt=0)
    """yarn: see `mscale`; latent attention multiplies its scores by the square of what it gives."""
    truncate: bool = True
    """yarn: whether the channels between which angles are blended are whole numbers."""

    @model_validator(mode="after")
    def _ordered(self) -> RopeScaling:
        if self.kind == "llama3" and self.low >= self.high:
            raise ValueError(
                f"model.rope_scaling.low = {self.low} is not below model.rope_scaling.high = "
                f"{self.high}: lower it"
            )
        return self


class ModelConfig(Section):
    """A decoder: token embedding, layers of attention and (expert) feed-forward, head."""

    file_keys: ClassVar[type[ModelSource]] = ModelSource

    family: Family
    """Whose architecture and file names: llama (dense), mixtral, olmoe (normed queries and keys),
    qwen3_moe (normed by head), deepseek_v3 (latent attention, sigmoid router, shared experts)."""
    vocab: int = Field(ge=1)
    """Rows of the embedding: at least the tokenizer's size."""
    hidden: int = Field(ge=1)
    """Width of the residual stream."""
    layers: int = Field(ge=1, lt=1 << 15)
    """Number of decoder layers."""
    heads: int = Field(ge=1)
    """Query heads."""
    kv_heads: int = Field(ge=1)
    """Key and value heads; divides heads."""
    head_dim: int = Field(ge=2)
    """Width of one head's queries and keys; even, for the rotary embedding."""
    ffn: int = Field(ge=1)
    """Inner width of the feed-forward network, or of one expert."""
    experts: int = Field(default=0, ge=0, lt=MOST_EXPERTS)
    """Experts a layer; 0 for a dense model."""
    top_k: int = Field(default=0, ge=0)
    """Experts that each token visits; 0 for a dense model."""
    renormalise: bool = False
    """Whether the weights of a token's chosen experts are scaled to sum to one."""
    dense_layers: int = Field(default=0, ge=0)
    """The first so many layers have a dense network in place of experts (deepseek_v3 only)."""
    dense_ffn: int | None = Field(default=None, ge=1)
    """Inner width of the networks of those layers; unset: that of an expert."""
    shared: int = Field(default=0, ge=0)
    """Experts that every token visits, as one network of so many widths (deepseek_v3 only)."""
    groups: int = Field(default=1, ge=1)
    """Groups that experts are chosen within; divides experts (deepseek_v3 only)."""
    top_groups: int = Field(default=1, ge=1)
    """Groups that a token's experts may come from: those with the best two scores together."""
    scale: float = Field(default=1.0, gt=0)
    """Factor on the weights of a token's experts (deepseek_v3 only)."""
    tied: bool = False
    """Whether the head uses the embedding's weight."""
    norm_epsilon: float = Field(default=1e-5, gt=0)
    """Added to the mean square in every RMS norm."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the rotary embedding's frequencies."""
    rope_scaling: RopeScaling | None = None
    """How angles are stretched for longer sequences; unset: not."""
    latent: Latent | None = None
    """Latent attention (deepseek_v3, which always has it)."""
    window: int | None = Field(default=None, ge=1)
    """Tokens that attention looks back on, the query's own among them; unset: all."""
    max_positions: int = Field(default=4096, ge=1)
    """Longest sequence that the model is meant for."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of initial weights."""
    clip_qkv: float | None = Field(default=None, gt=0)
    """Queries, keys and values are clamped to this magnitude (olmoe only)."""
    extras: dict[str, Any] = Field(default_factory=dict)
    """Keys of a Hugging Face config.json that change no arithmetic here; kept for export."""

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        self._check_attention()
        self._check_experts()
        for key, families in ONLY.items():
            value = getattr(self, key)
            if value != type(self).model_fields[key].default and self.family not in families:
                names = " or ".join(f'"{name}"' for name in families)
                shown = "" if isinstance(value, Section) else f" = {value}"
                raise ValueError(
                    f'model.{key}{shown} belongs to family {names}, not "{self.family}": remove it'
                )
        return self

    def _check_attention(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.kv_heads = {self.kv_heads} does not divide model.heads = {self.heads}: "
                "choose a divisor of the number of heads"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"model.head_dim = {self.head_dim} is odd: the rotary embedding pairs channels, "
                "give an even number"
            )
        if self.rope_scaling and self.rope_scaling.kind == "yarn" and self.rope_theta <= 1:
            raise ValueError(
                f"model.rope_theta = {self.rope_theta} is not above 1, so that no channel turns "
                'more slowly than another, as model.rope_scaling.kind = "yarn" needs: raise it'
            )
        if self.family == "deepseek_v3" and self.latent is None:
            raise ValueError(
                'model.family = "deepseek_v3" has latent attention, but there is no model.latent: '
                "give model.latent.width, .rotary and .value"
            )
        if self.latent is None:
            return
        if self.latent.rotary % 2:
            raise ValueError(
                f"model.latent.rotary = {self.latent.rotary} is odd: the rotary embedding pairs "
                "channels, give an even number"
            )
        if self.latent.rotary >= self.head_dim:
            raise ValueError(
                f"model.latent.rotary = {self.latent.rotary} leaves nothing of model.head_dim = "
                f"{self.head_dim}, the width of a head's turned and other channels: lower it"
            )
        if self.kv_heads != self.heads:
            raise ValueError(
                f"model.kv_heads = {self.kv_heads} with latent attention, in which every head has "
                f"keys of its own: set it to model.heads = {self.heads}"
            )

    def _check_experts(self) -> None:
        if bool(self.experts) != bool(self.top_k):
            raise ValueError(
                f"model.experts = {self.experts} with model.top_k = {self.top_k}: "
                "give both, or neither for a dense model"
            )
        if self.top_k > self.experts:
            raise ValueError(
                f"model.top_k = {self.top_k} is more than model.experts = {self.experts}: "
                "a token visits each expert once, lower it"
            )
        if (self.family == "llama") == bool(self.experts):
            what = "is dense" if self.experts else "has experts"
            others = ", ".join(f'"{name}"' for name in get_args(Family) if name != "llama")
            remedy = (
                f"set model.experts and model.top_k to 0, or family to one of {others}"
                if self.experts
                else 'give model.experts and model.top_k, or set family to "llama"'
            )
            raise ValueError(
                f'model.family = "{self.family}" {what}, but model.experts = {self.experts}: '
                f"{remedy}"
            )
        if self.experts and self.dense_layers >= self.layers:
            raise ValueError(
                f"model.dense_layers = {self.dense_layers} leaves none of model.layers = "
                f"{self.layers} with experts: lower it"
            )
        self._check_groups()

    def _check_groups(self) -> None:
        if self.experts % self.groups:
            raise ValueError(
                f"model.groups = {self.groups} does not divide model.experts = {self.experts}: "
                "choose a divisor of the number of experts"
            )
        if self.top_groups > self.groups:
            raise ValueError(
                f"model.top_groups = {self.top_groups} is more than model.groups = {self.groups}: "
                "lower it"
            )
        offered = self.top_groups * self.experts // self.groups
        if self.top_k > offered:
            raise ValueError(
                f"model.top_k = {self.top_k} is more than the {offered} experts of "
                f"model.top_groups = {self.top_groups} groups: raise top_groups, or lower top_k"
            )
        if self.groups > 1 and self.experts // self.groups < BEST_OF_GROUP:
            raise ValueError(
                f"model.groups = {self.groups} leaves one of model.experts = {self.experts} in a "
                f"group, which is chosen by its best {BEST_OF_GROUP}: lower model.groups"
            )

    @property
    def normed(self) -> Literal["whole", "heads"] | None:
        """Whether queries and keys pass an RMS norm: all heads' channels at once, or by head."""
        kinds: dict[Family, Literal["whole", "heads"]] = {"olmoe": "whole", "qwen3_moe": "heads"}
        return kinds.get(self.family)

    @property
    def turned(self) -> int:
        """Channels of a head that are turned by positions."""
        return self.head_dim if self.latent is None else self.latent.rotary

    @property
    def score(self) -> Literal["softmax", "sigmoid"]:
        """What turns a router's logits into weights.

        Sigmoids come with a bias by expert, which is added where experts are chosen, and balances
        their loads in place of a loss.
        """
        return "sigmoid" if self.family == "deepseek_v3" else "softmax"

    @property
    def expert_layers(self) -> range:
        """The layers that have experts."""
        return range(self.dense_layers, self.layers) if self.experts else range(0)

    def inner(self, layer: int) -> int:
        """Inner width of the feed-forward network of a dense `layer`."""
        wide = self.dense_ffn if layer < self.dense_layers else None
        return self.ffn if wide is None else wide


PRESETS: dict[str, dict[str, Any]] = {
    "tiny-dense": {
        "family": "llama", "vocab": 320, "hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2,
        "head_dim": 32, "ffn": 384,
    },
    "tiny-mixtral": {
        "family": "mixtral", "vocab": 320, "hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2,
        "head_dim": 32, "ffn": 256, "experts": 8, "top_k": 2, "renormalise": True,
    },
    "tiny-olmoe": {
        "family": "olmoe", "vocab": 320, "hidden": 128, "layers": 4, "heads": 4, "kv_heads": 4,
        "head_dim": 32, "ffn": 64, "experts": 16, "top_k": 4,
    },
    "tiny-qwen3": {
        "family": "qwen3_moe", "vocab": 320, "hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2,
        "head_dim": 32, "ffn": 64, "experts": 16, "top_k": 4, "renormalise": True,
    },
    "tiny-deepseek": {
        "family": "deepseek_v3", "vocab": 320, "hidden": 128, "layers": 4, "heads": 4,
        "kv_heads": 4, "head_dim": 32, "ffn": 64, "experts": 16, "top_k": 4, "renormalise": True,
        "dense_layers": 1, "dense_ffn": 384, "shared": 1, "groups": 4, "top_groups": 2,
        "scale": 2.5, "latent": {"width": 32, "queries": 64, "rotary": 16, "value": 32},
    },
    "olmoe-1b-7b": {
        "family": "olmoe", "vocab": 50304, "hidden": 2048, "layers": 16, "heads": 16,
        "kv_heads": 16, "head_dim": 128, "ffn": 1024, "experts": 64, "top_k": 8,
    },
    "mixtral-8x7b": {
        "family": "mixtral", "vocab": 32000, "hidden": 4096, "layers": 32, "heads": 32,
        "kv_heads": 8, "head_dim": 128, "ffn": 14336, "experts": 8, "top_k": 2,
        "renormalise": True, "rope_theta": 1e6, "max_positions": 32768,
    },
    "qwen3-30b-a3b": {
        "family": "qwen3_moe", "vocab": 151936, "hidden": 2048, "layers": 48, "heads": 32,
        "kv_heads": 4, "head_dim": 128, "ffn": 768, "experts": 128, "top_k": 8,
        "renormalise": True, "norm_epsilon": 1e-6, "rope_theta": 1e6, "max_positions": 40960,
    },
    "deepseek-v3": {
        "family": "deepseek_v3", "vocab": 129280, "hidden": 7168, "layers": 61, "heads": 128,
        "kv_heads": 128, "head_dim": 192, "ffn": 2048, "experts": 256, "top_k": 8,
        "renormalise": True, "dense_layers": 3, "dense_ffn": 18432, "shared": 1, "groups": 8,
        "top_groups": 4, "scale": 2.5, "norm_epsilon": 1e-6, "max_positions": 163840,
        "latent": {"width": 512, "queries": 1536, "rotary": 64, "value": 128},
        "rope_scaling": {
            "kind": "yarn", "factor": 40, "original_positions": 4096, "mscale": 1.0,
            "mscale_all": 1.0,
        },
    },
}  # fmt: skip
