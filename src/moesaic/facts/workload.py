"""What a model consists of: every parameter by its logical name, and what a rank must hold.

The names here are the names of state everywhere: in checkpoints, in moves, in the map to Hugging
Face files. They say nothing of layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moesaic.facts.job import Job, ModelConfig
from moesaic.facts.plan import Plan


@dataclass(frozen=True)
class Parameter:
    """One logical tensor of the model."""

    name: str
    shape: tuple[int, ...]
    kind: Literal["norm", "embedding", "dense", "router", "expert", "head"]
    layer: int | None = None
    expert: int | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def parameters(model: ModelConfig) -> Iterator[Parameter]:
    """Every parameter of `model`, in the order of the blocks."""
    hidden = model.hidden
    yield Parameter("embed.weight", (model.vocab, hidden), "embedding")
    for layer in range(model.layers):
        yield from _layer(model, layer)
    yield Parameter("head.norm.weight", (hidden,), "norm")
    if not model.tied:
        yield Parameter("head.weight", (model.vocab, hidden), "head")


def _layer(model: ModelConfig, layer: int) -> Iterator[Parameter]:
    at, hidden = f"layers.{layer}", model.hidden
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield Parameter(f"{at}.attention_norm.weight", (hidden,), "norm", layer)
    for name, rows, columns in (
        ("q", queries, hidden),
        ("k", keys, hidden),
        ("v", keys, hidden),
        ("o", hidden, queries),
    ):
        yield Parameter(f"{at}.attention.{name}.weight", (rows, columns), "dense", layer)
    if model.normalised_attention:
        yield Parameter(f"{at}.attention.q_norm.weight", (queries,), "norm", layer)
        yield Parameter(f"{at}.attention.k_norm.weight", (keys,), "norm", layer)
    yield Parameter(f"{at}.ffn_norm.weight", (hidden,), "norm", layer)
    wide, back = (model.ffn, hidden), (hidden, model.ffn)
    parts = (("gate", wide), ("up", wide), ("down", back))
    if not model.experts:
        for name, shape in parts:
            yield Parameter(f"{at}.ffn.{name}.weight", shape, "dense", layer)
        return
    yield Parameter(f"{at}.moe.router.weight", (model.experts, hidden), "router", layer)
    for expert in range(model.experts):
        for name, shape in parts:
            yield Parameter(expert_name(layer, expert, name), shape, "expert", layer, expert)


def expert_name(layer: int, expert: int, part: str) -> str:
    """The logical name of one matrix (gate, up, down) of one expert."""
    return f"layers.{layer}.moe.experts.{expert}.{part}"


@dataclass(frozen=True)
class Counts:
    """Parameters of a model, and those that one token meets."""

    total: int
    active: int


def count(model: ModelConfig) -> Counts:
    """Total and active parameters of `model`."""
    total = active = 0
    for parameter in parameters(model):
        total += parameter.size
        if parameter.kind != "expert" or (parameter.expert or 0) < model.top_k:
            active += parameter.size
    return Counts(total, active)


BYTES = {"fp32": 4, "bf16": 4, "fp64": 8}
"""Bytes of a stored parameter by `train.precision`; bf16 computes in bfloat16 over fp32 weights."""


HEAD_ROWS = 1024
"""Tokens whose logits exist at one time."""


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds while it trains, by what they are for."""

    parameters_bytes: int
    gradients_bytes: int
    moments_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return (
            self.parameters_bytes
            + self.gradients_bytes
            + self.moments_bytes
            + self.activations_bytes
        )


def memory(job: Job, plan: Plan) -> Memory:
    """What a rank of `plan` holds at its fullest; activations are an estimate for even routing."""
    model, width = job.model, BYTES[job.train.precision]
    dense = sum(p.size for p in parameters(model) if p.kind != "expert")
    expert = sum(p.size for p in parameters(model) if p.kind == "expert")
    held = -(-dense // plan.shard) + expert // plan.ep
    rows = -(-(job.train.batch // job.train.micro_batches) // plan.ranks)
    tokens = rows * job.data.sequence
    compute = 2 if job.train.precision == "bf16" else width
    per_layer = _activations_per_token(model) * tokens * compute
    kept = model.hidden * tokens * compute
    layers = model.layers * kept + per_layer if job.train.recompute else model.layers * per_layer
    # The head's logits live HEAD_ROWS tokens at a time, in fp32 at least, and once more narrow.
    head = min(tokens, HEAD_ROWS) * model.vocab * (max(width, 4) + compute) + 2 * kept
    return Memory(held * width, held * width, 2 * held * width, layers + head)


def _activations_per_token(model: ModelConfig) -> int:
    attention = 2 * model.hidden + 2 * (model.heads + model.kv_heads) * model.head_dim
    visits = max(model.top_k, 1)
    return attention + 2 * model.hidden + visits * (2 * model.hidden + 3 * model.ffn)
