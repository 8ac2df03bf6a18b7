"""The model a job trains: sizes and the few switches that tell one decoder family from another."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from moesaic.base.config import Section

MOST_EXPERTS = 1 << 15
"""Fewer experts than these a layer has; their numbers are kept in two bytes."""

Family = Literal["llama", "mixtral", "olmoe"]
Preset = Literal["tiny-dense", "tiny-mixtral", "tiny-olmoe", "olmoe-1b-7b", "mixtral-8x7b"]


class ModelSource(Section):
    """Where the sizes come from if a file does not write them out; resolved before parsing."""

    preset: Preset | None = None
    """A model by name; other keys of [model] change it."""
    from_: str | None = Field(default=None, alias="from")
    """Hugging Face model directory: its config.json gives the sizes, its weights are where training
    starts."""


class ModelConfig(Section):
    """A decoder: token embedding, layers of attention and (expert) feed-forward, head."""

    file_keys: ClassVar[type[ModelSource]] = ModelSource

    family: Family
    """Whose architecture and file names: llama (dense), mixtral, olmoe (normed queries, keys)."""
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
    """Width of one head; even, for the rotary embedding."""
    ffn: int = Field(ge=1)
    """Inner width of the feed-forward network, or of one expert."""
    experts: int = Field(default=0, ge=0, lt=MOST_EXPERTS)
    """Experts a layer; 0 for a dense model."""
    top_k: int = Field(default=0, ge=0)
    """Experts that each token visits; 0 for a dense model."""
    renormalise: bool = False
    """Whether the weights of a token's chosen experts are scaled to sum to one."""
    tied: bool = False
    """Whether the head uses the embedding's weight."""
    norm_epsilon: float = Field(default=1e-5, gt=0)
    """Added to the mean square in every RMS norm."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the rotary embedding's frequencies."""
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
            remedy = (
                'set model.experts and model.top_k to 0, or family to "mixtral" or "olmoe"'
                if self.experts
                else 'give model.experts and model.top_k, or set family to "llama"'
            )
            raise ValueError(
                f'model.family = "{self.family}" {what}, but model.experts = {self.experts}: '
                f"{remedy}"
            )
        if self.clip_qkv is not None and self.family != "olmoe":
            raise ValueError(
                f'model.clip_qkv = {self.clip_qkv} belongs to family "olmoe", not "{self.family}": '
                "remove it"
            )
        return self

    @property
    def normalised_attention(self) -> bool:
        """Whether queries and keys pass an RMS norm."""
        return self.family == "olmoe"


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
    "olmoe-1b-7b": {
        "family": "olmoe", "vocab": 50304, "hidden": 2048, "layers": 16, "heads": 16,
        "kv_heads": 16, "head_dim": 128, "ffn": 1024, "experts": 64, "top_k": 8,
    },
    "mixtral-8x7b": {
        "family": "mixtral", "vocab": 32000, "hidden": 4096, "layers": 32, "heads": 32,
        "kv_heads": 8, "head_dim": 128, "ffn": 14336, "experts": 8, "top_k": 2,
        "renormalise": True, "rope_theta": 1e6, "max_positions": 32768,
    },
}  # fmt: skip
