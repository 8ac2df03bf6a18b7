"""What a model consists of: every parameter by its logical name, and how many there are.

The names here are the names of state everywhere: in checkpoints, in moves, in the map to Hugging
Face files. They say nothing of layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
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
    cut: int | None = None
    """Dimension that slices (of an expert: its own ones) share out equally; None: each of them has
    all of it."""
    columns: bool = False
    """Whether it is a rank's own columns of a table: FSDP leaves it alone, and its gradient is
    whole on its rank."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_dense(self) -> bool:
        """Whether all ranks learn it, or shares of it: what is no expert's, but for biases."""
        return self.kind not in ("expert", "bias")

    def on_slice(self, slices: int) -> Parameter:
        """As each of so many slices has it."""
        if slices == 1 or self.cut is None:
            return self
        shape = list(self.shape)
        shape[self.cut] //= slices
        return replace(self, shape=tuple(shape))

    def in_columns(self, ranks: int) -> Parameter:
        """As each of so many ranks has it that share out its columns."""
        if ranks == 1:
            return self
        rows, width = self.shape
        return replace(self, shape=(rows, width // ranks), columns=True)


def parameters(
    model: ModelConfig, experts: Callable[[int], Collection[int]] | None = None
) -> Iterator[Parameter]:
    """Every parameter of `model`, in the order of the blocks; of experts all, or only those that
    `experts` says of a layer."""
    hidden = model.hidden
    yield Parameter("embed.weight", (model.vocab, hidden), "embedding", cut=0)
    for layer in range(model.layers):
        every = range(model.experts)
        yield from _layer(model, layer, every if experts is None else sorted(experts(layer)))
    yield Parameter("head.norm.weight", (hidden,), "norm")
    if not model.tied:
        yield Parameter("head.weight", (model.vocab, hidden), "head", cut=0)


def _layer(model: ModelConfig, layer: int, experts: Iterable[int]) -> Iterator[Parameter]:
    at, hidden = f"layers.{layer}", model.hidden
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield Parameter(f"{at}.attention_norm.weight", (hidden,), "norm", layer)
    if model.latent is not None:
        yield from _latent(model, model.latent, layer)
    else:
        for name, shape, cut in (
            ("q", (queries, hidden), 0),
            ("k", (keys, hidden), 0),
            ("v", (keys, hidden), 0),
            ("o", (hidden, queries), 1),
        ):
            yield Parameter(f"{at}.attention.{name}.weight", shape, "dense", layer, cut=cut)
    if model.normed is not None:
        across = model.normed == "whole"
        widths = (queries, keys) if across else (model.head_dim, model.head_dim)
        for name, width in zip("qk", widths, strict=True):
            yield Parameter(
                f"{at}.attention.{name}_norm.weight", (width,), "norm", layer,
                cut=0 if across else None,
            )  # fmt: skip
    yield Parameter(f"{at}.ffn_norm.weight", (hidden,), "norm", layer)
    if layer in model.expert_layers:
        yield from _moe(model, layer, experts)
        return
    for name, shape, cut in _gated(hidden, model.inner(layer)):
        yield Parameter(f"{at}.ffn.{name}.weight", shape, "dense", layer, cut=cut)


def _moe(model: ModelConfig, layer: int, experts: Iterable[int]) -> Iterator[Parameter]:
    at, hidden = f"layers.{layer}", model.hidden
    yield Parameter(f"{at}.moe.router.weight", (model.experts, hidden), "router", layer)
    if model.score == "sigmoid":
        yield Parameter(f"{at}.moe.router.bias", (model.experts,), "bias", layer)
    for expert in experts:
        for name, shape, cut in _gated(hidden, model.ffn):
            yield Parameter(
                expert_name(layer, expert, name), shape, "expert", layer, expert, cut=cut
            )
    for name, shape, cut in _gated(hidden, model.shared * model.ffn) if model.shared else ():
        yield Parameter(f"{at}.moe.shared.{name}.weight", shape, "dense", layer, cut=cut)


def _gated(hidden: int, inner: int) -> tuple[tuple[str, tuple[int, int], int], ...]:
    """The matrices of a gated feed-forward network, and which dimension is its inner one."""
    return (("gate", (inner, hidden), 0), ("up", (inner, hidden), 0), ("down", (hidden, inner), 1))


def _latent(model: ModelConfig, latent: Latent, layer: int) -> Iterator[Parameter]:
    hidden, heads = model.hidden, model.heads
    queries, values = heads * model.head_dim, heads * latent.value
    unturned = heads * (model.head_dim - latent.rotary)
    shapes: list[tuple[str, tuple[int, ...], int | None]] = [("q", (queries, hidden), 0)]
    if latent.queries is not None:
        shapes = [
            ("q_down", (latent.queries, hidden), None),
            ("q_norm", (latent.queries,), None),
            ("q_up", (queries, latent.queries), 0),
        ]
    shapes += [
        ("kv_down", (latent.width + latent.rotary, hidden), None),
        ("kv_norm", (latent.width,), None),
        ("kv_up", (unturned + values, latent.width), 0),
        ("o", (hidden, values), 1),
    ]
    for name, shape, cut in shapes:
        yield Parameter(
            f"layers.{layer}.attention.{name}.weight", shape,
            "norm" if len(shape) == 1 else "dense", layer, cut=cut,
        )  # fmt: skip


def expert_name(layer: int, expert: int, part: str) -> str:
    """The logical name of one matrix (gate, up, down) of one expert."""
    return f"layers.{layer}.moe.experts.{expert}.{part}"


def local_size(parameter: Parameter, shard: int) -> int:
    """Elements of a rank's part of a dense parameter over `shard` ranks: whole rows, padded; of
    columns all."""
    if parameter.columns:
        return parameter.size
    rows = parameter.shape[0]
    return -(-rows // shard) * (parameter.size // rows)


def rank_size(parameter: Parameter, shard: int, rank: int) -> int:
    """The same without what is padded: the last of the ranks may have fewer rows, or none."""
    if parameter.columns:
        return parameter.size
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
    for parameter in parameters(
        model, lambda _: range(min(model.experts, 1))
    ):  # One stands for all.
        expert = parameter.kind == "expert"
        total += parameter.size * (model.experts if expert else 1)
        active += parameter.size * (model.top_k if expert else 1)
    return Counts(total, active)
