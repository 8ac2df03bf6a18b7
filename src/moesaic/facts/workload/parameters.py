"""What a model consists of: every parameter by its logical name, and how many there are.

The names here are the names of state everywhere: in checkpoints, in moves, in the map to Hugging
Face files. They say nothing of layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moesaic.facts.job import Job, ModelConfig
from moesaic.facts.job.model import Latent
from moesaic.facts.job.train import MOMENT_BLOCK
from moesaic.facts.workload.sizes import SCALE_BYTES, STORED_BYTES


@dataclass(frozen=True)
class Parameter:
    """One logical tensor of the model."""

    name: str
    shape: tuple[int, ...]
    kind: Literal["norm", "embedding", "dense", "router", "bias", "expert", "head"]
    """A bias of a router is no one's to learn: it has neither gradient nor moments."""
    layer: int | None = None
    expert: int | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_dense(self) -> bool:
        """Whether all ranks learn it, or shares of it: what is no expert's, but for biases."""
        return self.kind not in ("expert", "bias")


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
    if model.latent is not None:
        yield from _latent(model, model.latent, layer)
    else:
        for name, rows, columns in (
            ("q", queries, hidden),
            ("k", keys, hidden),
            ("v", keys, hidden),
            ("o", hidden, queries),
        ):
            yield Parameter(f"{at}.attention.{name}.weight", (rows, columns), "dense", layer)
    if model.normed is not None:
        widths = (queries, keys) if model.normed == "whole" else (model.head_dim, model.head_dim)
        for name, width in zip("qk", widths, strict=True):
            yield Parameter(f"{at}.attention.{name}_norm.weight", (width,), "norm", layer)
    yield Parameter(f"{at}.ffn_norm.weight", (hidden,), "norm", layer)
    if layer in model.expert_layers:
        yield from _moe(model, layer)
        return
    for name, shape in _gated(hidden, model.inner(layer)):
        yield Parameter(f"{at}.ffn.{name}.weight", shape, "dense", layer)


def _moe(model: ModelConfig, layer: int) -> Iterator[Parameter]:
    at, hidden = f"layers.{layer}", model.hidden
    yield Parameter(f"{at}.moe.router.weight", (model.experts, hidden), "router", layer)
    if model.score == "sigmoid":
        yield Parameter(f"{at}.moe.router.bias", (model.experts,), "bias", layer)
    for expert in range(model.experts):
        for name, shape in _gated(hidden, model.ffn):
            yield Parameter(expert_name(layer, expert, name), shape, "expert", layer, expert)
    for name, shape in _gated(hidden, model.shared * model.ffn) if model.shared else ():
        yield Parameter(f"{at}.moe.shared.{name}.weight", shape, "dense", layer)


def _gated(hidden: int, inner: int) -> tuple[tuple[str, tuple[int, int]], ...]:
    """The matrices of a gated feed-forward network."""
    return (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner)))


def _latent(model: ModelConfig, latent: Latent, layer: int) -> Iterator[Parameter]:
    hidden, heads = model.hidden, model.heads
    queries, values = heads * model.head_dim, heads * latent.value
    unturned = heads * (model.head_dim - latent.rotary)
    shapes: list[tuple[str, tuple[int, ...]]] = [("q", (queries, hidden))]
    if latent.queries is not None:
        shapes = [
            ("q_down", (latent.queries, hidden)),
            ("q_norm", (latent.queries,)),
            ("q_up", (queries, latent.queries)),
        ]
    shapes += [
        ("kv_down", (latent.width + latent.rotary, hidden)),
        ("kv_norm", (latent.width,)),
        ("kv_up", (unturned + values, latent.width)),
        ("o", (hidden, values)),
    ]
    for name, shape in shapes:
        yield Parameter(
            f"layers.{layer}.attention.{name}.weight", shape,
            "norm" if len(shape) == 1 else "dense", layer,
        )  # fmt: skip


def expert_name(layer: int, expert: int, part: str) -> str:
    """The logical name of one matrix (gate, up, down) of one expert."""
    return f"layers.{layer}.moe.experts.{expert}.{part}"


def local_size(parameter: Parameter, shard: int) -> int:
    """Elements of a rank's part of a dense parameter over `shard` ranks: whole rows, padded."""
    rows = parameter.shape[0]
    return -(-rows // shard) * (parameter.size // rows)


def rank_size(parameter: Parameter, shard: int, rank: int) -> int:
    """The same without what is padded: the last of the ranks may have fewer rows, or none."""
    rows = parameter.shape[0]
    part = -(-rows // shard)
    return min(max(rows - rank % shard * part, 0), part) * (parameter.size // rows)


def moment_bytes(parameter: Parameter, elements: int, job: Job) -> tuple[int, ...]:
    """Bytes of each tensor that the optimizer keeps for `elements` (whole rows) of `parameter`."""
    kept, wide = job.optimizer.moments, STORED_BYTES[job.train.precision]
    if kept == "full" or len(parameter.shape) == 1:
        return (elements * wide,) * 2
    if kept == "bf16":
        return (elements * 2,) * 2
    columns = parameter.shape[1]
    scales = elements // columns * -(-columns // MOMENT_BLOCK) * SCALE_BYTES
    return (elements, scales) * 2


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
