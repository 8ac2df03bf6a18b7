"""The model: its sizes, and the switches that distinguish the decoder families."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from moesaic.base import keys
from moesaic.base.config import Section

MAX_EXPERTS = 1 << 15
"""Bound on the experts of a layer: expert numbers are stored in two bytes."""

Family = Literal["llama", "mixtral", "olmoe", "qwen3_moe", "deepseek_v3"]
Preset = Literal[
    "tiny-dense", "tiny-mixtral", "tiny-olmoe", "tiny-qwen3", "tiny-deepseek", "olmoe-1b-7b",
    "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3",
]  # fmt: skip


FAMILY_KEYS: dict[str, tuple[Family, ...]] = {
    "clip_qkv": ("olmoe",), "dense_ffn": ("deepseek_v3",), "dense_layers": ("deepseek_v3",),
    "expert_groups": ("deepseek_v3",), "latent": ("deepseek_v3",),
    "routed_scaling_factor": ("deepseek_v3",), "shared_experts": ("deepseek_v3",),
    "top_expert_groups": ("deepseek_v3",), "window": ("mixtral", "qwen3_moe"),
}  # fmt: skip
"""Keys that only some families have."""
GROUP_TOP_K = 2
"""Scores of a group that are summed to rank expert groups."""


class ModelSource(Section):
    """Source of the sizes that a file does not give; resolved before parsing."""

    preset: Preset | None = None
    """Preset to start from; other keys of [model] change it."""
    from_: str | None = Field(default=None, alias="from")
    """Hugging Face model directory: its config.json gives the sizes, and training starts from its
    weights."""


class LatentConfig(Section):
    """Multi-head latent attention: keys and values of all heads come from one low-rank vector per
    token."""

    kv_lora_rank: int = Field(ge=1)
    """Width of the low-rank vector that keys and values come from."""
    q_lora_rank: int | None = Field(default=None, ge=1)
    """Width of the low-rank vector that queries come from; unset: queries come from the hidden
    state."""
    qk_rope_head_dim: int = Field(ge=2)
    """Rotary channels of a head, whose keys all heads share; even."""
    v_head_dim: int = Field(ge=1)
    """Width of one head's values."""


class RopeScaling(Section):
    """Scaling of rotary frequencies for longer sequences than the model was first trained on."""

    kind: Literal["linear", "llama3", "yarn"]
    """Scaling method. linear: all frequencies alike. llama3: low frequencies fully, medium ones in
    part. yarn: like llama3, by rotations within the original length, and with sharper attention."""
    factor: float = Field(ge=1)
    """Ratio of the new length to the original one."""
    original_max_positions: int = Field(default=8192, ge=1)
    """Longest sequence of the original training, in tokens (llama3, yarn)."""
    low_freq_factor: float = Field(default=1.0, gt=0)
    """Channels with fewer rotations within the original length are scaled fully (llama3)."""
    high_freq_factor: float = Field(default=4.0, gt=0)
    """Channels with more rotations within the original length are not scaled (llama3)."""
    beta_slow: float = Field(default=1.0, gt=0)
    """Channels with fewer rotations within the original length are scaled fully (yarn)."""
    beta_fast: float = Field(default=32.0, gt=0)
    """Channels with more rotations within the original length are not scaled (yarn)."""
    attention_factor: float | None = Field(default=None, gt=0)
    """Factor on cosines and sines (yarn); unset: derived from `factor`."""
    mscale: float | None = Field(default=None, gt=0)
    """Weight of log(factor) in the attention factor, relative to `mscale_all_dim` (yarn). It counts
    only if both are set."""
    mscale_all_dim: float | None = Field(default=None, gt=0)
    """See `mscale` (yarn). Latent attention also multiplies its scores by the square of the
    resulting factor."""
    truncate: bool = True
    """Round the first and last scaled channel to whole numbers (yarn)."""

    def conflicts(self) -> Iterator[str]:
        """Yield a sentence if the frequencies are in the wrong order."""
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            yield (
                f"model.rope_scaling.low_freq_factor = {self.low_freq_factor} is not below "
                f"model.rope_scaling.high_freq_factor = {self.high_freq_factor}: lower it"
            )


class ModelConfig(Section):
    """A decoder: token embedding, layers of attention and (expert) feed-forward, head."""

    file_keys: ClassVar[type[ModelSource]] = ModelSource
    resolved_keys: ClassVar[frozenset[str]] = frozenset({"labels"})

    family: Family
    """Architecture and file format: llama (dense), mixtral, olmoe (normalised queries and keys),
    qwen3_moe (normalised per head), deepseek_v3 (latent attention, sigmoid router, shared experts).
    """
    vocab: int = Field(ge=1)
    """Vocabulary size, at least that of the tokenizer."""
    hidden: int = Field(ge=1)
    """Width of the residual stream."""
    layers: int = Field(ge=1, lt=1 << 15)
    """Number of decoder layers."""
    heads: int = Field(ge=1)
    """Query heads."""
    kv_heads: int = Field(ge=1)
    """Key and value heads; divides `heads`."""
    head_dim: int = Field(ge=2)
    """Width of one head's queries and keys; even, for the rotary embedding."""
    ffn: int = Field(ge=1)
    """Inner width of the feed-forward network, or of one expert."""
    experts: int = Field(default=0, ge=0, lt=MAX_EXPERTS)
    """Experts per layer; 0 for a dense model."""
    top_k: int = Field(default=0, ge=0)
    """Experts per token; 0 for a dense model."""
    renormalise: bool = False
    """Scale the weights of a token's chosen experts to sum to one."""
    dense_layers: int = Field(default=0, ge=0)
    """Number of first layers with a dense network instead of experts (deepseek_v3 only)."""
    dense_ffn: int | None = Field(default=None, ge=1)
    """Inner width of the networks of the dense layers; unset: that of an expert."""
    shared_experts: int = Field(default=0, ge=0)
    """Experts that process every token, fused into one network of that many widths (deepseek_v3
    only)."""
    expert_groups: int = Field(default=1, ge=1)
    """Groups of experts for group-limited routing; divides `experts` (deepseek_v3 only)."""
    top_expert_groups: int = Field(default=1, ge=1)
    """Groups that a token's experts may come from: those with the largest sum of their two best
    scores."""
    routed_scaling_factor: float = Field(default=1.0, gt=0)
    """Factor on the weights of a token's experts (deepseek_v3 only)."""
    tied: bool = False
    """Share one weight between embedding and head."""
    norm_epsilon: float = Field(default=1e-5, gt=0)
    """Added to the mean square in every RMS norm."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the rotary embedding's frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of rotary frequencies for longer sequences; unset: none."""
    latent: LatentConfig | None = None
    """Latent attention (deepseek_v3, which always has it)."""
    window: int | None = Field(default=None, ge=1)
    """Sliding window of attention in tokens, including the query's own; unset: all tokens."""
    labels: int = Field(default=0, ge=0)
    """Classes of a head that reads a text's last token ([credibility] adds one); 0: no such head.
    """
    max_positions: int = Field(default=4096, ge=1)
    """Longest supported sequence, in tokens."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""
    clip_qkv: float | None = Field(default=None, gt=0)
    """Largest magnitude of queries, keys and values, which are clamped to it (olmoe only)."""
    extras: dict[str, Any] = Field(default_factory=dict)
    """Other keys of a Hugging Face config.json; they change no arithmetic and are kept for export.
    """

    @model_serializer(mode="wrap")
    def _leave_out_labels(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the fields as plain data; `labels` only for a model with such a head."""
        found: dict[str, Any] = dump(self)
        return {key: value for key, value in found.items() if value or key != "labels"}

    def conflicts(self) -> Iterator[str]:
        """Yield sizes that do not go together, and keys of another family."""
        yield from self._foreign_keys()
        yield from self._attention_conflicts()
        if self.latent is not None and self.family in FAMILY_KEYS["latent"]:
            yield from self._latent_conflicts(self.latent)
        elif self.heads % self.kv_heads:
            yield (
                f"model.kv_heads = {self.kv_heads} does not divide model.heads = {self.heads}: "
                f"use {keys.list_divisors(self.heads)}"
            )
        yield from self._expert_conflicts()

    def _foreign_keys(self) -> Iterator[str]:
        """Yield keys of another family."""
        for key, families in FAMILY_KEYS.items():
            value = getattr(self, key)
            if value != type(self).model_fields[key].default and self.family not in families:
                names = " or ".join(f'"{name}"' for name in families)
                shown = "" if isinstance(value, Section) else f" = {value}"
                yield (
                    f'model.{key}{shown} belongs to family {names}, not "{self.family}": remove it'
                )

    def _attention_conflicts(self) -> Iterator[str]:
        """Yield channels that cannot rotate, and latent attention that is missing."""
        if self.head_dim % 2:
            yield (
                f"model.head_dim = {self.head_dim} is odd: the rotary embedding pairs channels, "
                "give an even number"
            )
        if self.rope_scaling and self.rope_scaling.kind == "yarn" and self.rope_theta <= 1:
            yield (
                f"model.rope_theta = {self.rope_theta} is not above 1, so all channels rotate at "
                'one speed, which model.rope_scaling.kind = "yarn" cannot scale: raise it'
            )
        if self.family == "deepseek_v3" and self.latent is None:
            yield (
                'model.family = "deepseek_v3" has latent attention, but model.latent is missing: '
                "give model.latent.kv_lora_rank, .qk_rope_head_dim and .v_head_dim"
            )

    def _latent_conflicts(self, latent: LatentConfig) -> Iterator[str]:
        """Yield sizes that latent attention cannot have."""
        if latent.qk_rope_head_dim % 2:
            yield (
                f"model.latent.qk_rope_head_dim = {latent.qk_rope_head_dim} is odd: the "
                "rotary embedding pairs channels, give an even number"
            )
        if latent.qk_rope_head_dim >= self.head_dim:
            yield (
                f"model.latent.qk_rope_head_dim = {latent.qk_rope_head_dim} is all of "
                f"model.head_dim = {self.head_dim}, which has other channels too: lower it"
            )
        if self.kv_heads != self.heads:
            yield (
                f"model.kv_heads = {self.kv_heads} with latent attention, where every head has its "
                f"own keys: set it to model.heads = {self.heads}"
            )

    def _expert_conflicts(self) -> Iterator[str]:
        """Yield numbers of experts that do not go together."""
        if bool(self.experts) != bool(self.top_k):
            yield (
                f"model.experts = {self.experts} with model.top_k = {self.top_k}: "
                "give both, or neither for a dense model"
            )
            return
        if self.top_k > self.experts:
            yield (
                f"model.top_k = {self.top_k} is more than model.experts = {self.experts}: "
                "a token uses each expert once, lower it"
            )
        if (self.family == "llama") == bool(self.experts):
            what = "is dense" if self.experts else "has experts"
            others = ", ".join(f'"{name}"' for name in get_args(Family) if name != "llama")
            remedy = (
                f"set model.experts and model.top_k to 0, or family to one of {others}"
                if self.experts
                else 'give model.experts and model.top_k, or set family to "llama"'
            )
            yield (
                f'model.family = "{self.family}" {what}, but model.experts = {self.experts}: '
                f"{remedy}"
            )
        if not self.experts:
            return
        if self.family in FAMILY_KEYS["dense_layers"] and self.dense_layers >= self.layers:
            yield (
                f"model.dense_layers = {self.dense_layers} leaves none of model.layers = "
                f"{self.layers} with experts: lower it"
            )
        if self.family in FAMILY_KEYS["expert_groups"]:
            yield from self._group_conflicts()

    def _group_conflicts(self) -> Iterator[str]:
        """Yield groups that do not split the experts."""
        if self.experts % self.expert_groups:
            yield (
                f"model.expert_groups = {self.expert_groups} does not divide "
                f"model.experts = {self.experts}: use {keys.list_divisors(self.experts)}"
            )
            return
        if self.top_expert_groups > self.expert_groups:
            yield (
                f"model.top_expert_groups = {self.top_expert_groups} is more than "
                f"model.expert_groups = {self.expert_groups}: lower it"
            )
            return
        offered = self.top_expert_groups * self.experts // self.expert_groups
        if offered < self.top_k <= self.experts:
            yield (
                f"model.top_k = {self.top_k} is more than the {offered} experts of "
                f"model.top_expert_groups = {self.top_expert_groups} groups: raise "
                "model.top_expert_groups, or lower model.top_k"
            )
        if self.expert_groups > 1 and self.experts // self.expert_groups < GROUP_TOP_K:
            yield (
                f"model.expert_groups = {self.expert_groups} leaves one of model.experts = "
                f"{self.experts} in a group, and groups are ranked by {GROUP_TOP_K} scores: "
                "lower model.expert_groups"
            )

    @property
    def qk_norm(self) -> Literal["whole", "heads"] | None:
        """RMS norm of queries and keys: over all heads' channels at once, per head, or none."""
        kinds: dict[Family, Literal["whole", "heads"]] = {"olmoe": "whole", "qwen3_moe": "heads"}
        return kinds.get(self.family)

    @property
    def rotary_dim(self) -> int:
        """Rotary channels of a head."""
        return self.head_dim if self.latent is None else self.latent.qk_rope_head_dim

    @property
    def cache_shapes(self) -> list[tuple[int, int]]:
        """Heads and channels of the tensors that attention caches for a position of one layer."""
        if self.latent is None:
            return [(self.kv_heads, self.head_dim)] * 2
        return [(1, self.latent.kv_lora_rank + self.latent.qk_rope_head_dim)]

    @property
    def cache_width(self) -> int:
        """Numbers that attention caches for a position of one layer."""
        return sum(heads * channels for heads, channels in self.cache_shapes)

    @property
    def score_function(self) -> Literal["softmax", "sigmoid"]:
        """Function from router logits to scores.

        With sigmoid, the router has a bias per expert. It is added to scores where experts are
        chosen, and balances their loads in place of a loss.
        """
        return "sigmoid" if self.family == "deepseek_v3" else "softmax"

    @property
    def expert_layers(self) -> range:
        """Layers that have experts."""
        return range(self.dense_layers, self.layers) if self.experts else range(0)

    def ffn_width(self, layer: int) -> int:
        """Return the inner width of the feed-forward network of a dense `layer`."""
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
        "dense_layers": 1, "dense_ffn": 384, "shared_experts": 1, "expert_groups": 4,
        "top_expert_groups": 2, "routed_scaling_factor": 2.5,
        "latent": {"kv_lora_rank": 32, "q_lora_rank": 64, "qk_rope_head_dim": 16, "v_head_dim": 32},
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
        "renormalise": True, "dense_layers": 3, "dense_ffn": 18432, "shared_experts": 1,
        "expert_groups": 8, "top_expert_groups": 4, "routed_scaling_factor": 2.5,
        "norm_epsilon": 1e-6, "max_positions": 163840,
        "latent": {
            "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
        },
        "rope_scaling": {
            "kind": "yarn", "factor": 40, "original_max_positions": 4096, "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
}  # fmt: skip
