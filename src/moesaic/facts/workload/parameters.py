"""Parameters of a model by logical name, LoRA adapters among them, and their number.

Checkpoints, moves of state and the map to Hugging Face files use these names. They do not depend on
the layout.

An adapter of W [outputs, inputs] is a pair A [rank, inputs] and B [outputs, rank]. Their names
replace `weight` in W's name by `lora_a` and `lora_b`, or append them for an expert's matrix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from moesaic.facts.job import Job, ModelConfig
from moesaic.facts.job.distill import TEACHER
from moesaic.facts.job.finetune import FinetuneConfig
from moesaic.facts.job.model import LatentConfig
from moesaic.facts.job.train import MOMENT_BLOCK
from moesaic.facts.workload.sizes import SCALE_BYTES, STORED_BYTES

ParameterKind = Literal["norm", "embedding", "dense", "router", "bias", "expert", "head"]

A, B = ".lora_a", ".lora_b"
SCORE = "head.score.weight"
"""Logical name of the classifier's matrix."""
_EXPERTS = "moe.experts"
_KINDS: dict[str, ParameterKind] = {"moe.router": "router", "moe.router.bias": "bias"}


@dataclass(frozen=True)
class Parameter:
    """One logical tensor of the model."""

    name: str
    shape: tuple[int, ...]
    kind: ParameterKind
    """Kind of parameter; a router's bias has neither gradient nor moments."""
    layer: int | None = None
    expert: int | None = None
    tp_dim: int | None = None
    """Dimension that TP splits (for an expert, expert TP); None if every rank has all of it."""
    is_column_shard: bool = False
    """True if it is one rank's column shard of an embedding: FSDP skips it, and its gradient needs
    no reduction."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_dense(self) -> bool:
        """True if neither an expert's nor a bias, so that every rank trains it or a shard of it."""
        return self.kind not in ("expert", "bias")

    def tp_shard(self, tp: int) -> Parameter:
        """Return the shard of one of `tp` TP ranks."""
        if tp == 1 or self.tp_dim is None:
            return self
        shape = list(self.shape)
        shape[self.tp_dim] //= tp
        return replace(self, shape=tuple(shape))


def parameters(
    model: ModelConfig,
    experts: Callable[[int], Collection[int]] | None = None,
    layers: Sequence[int] | None = None,
) -> Iterator[Parameter]:
    """Yield every parameter of `model`, in block order.

    Args:
        model: the model.
        experts: experts to include, by layer; None for all.
        layers: layers to include, in order; None for all.
    """
    hidden = model.hidden
    yield Parameter("embed.weight", (model.vocab, hidden), "embedding", tp_dim=0)
    for layer in range(model.layers) if layers is None else layers:
        own = range(model.experts) if experts is None else sorted(experts(layer))
        for path, shape, tp_dim in _layer(model, layer):
            if path == _EXPERTS:
                for expert in own:
                    for matrix, matrix_shape, dim in _gated_ffn("", hidden, model.ffn):
                        name = expert_name(layer, expert, matrix)
                        yield Parameter(name, matrix_shape, "expert", layer, expert, dim)
                continue
            kind = _KINDS.get(path, "norm" if len(shape) == 1 else "dense")
            name = f"layers.{layer}.{path}" + ".weight" * (kind != "bias")
            yield Parameter(name, shape, kind, layer, tp_dim=tp_dim)
    yield Parameter("head.norm.weight", (hidden,), "norm")
    if not model.tied:
        yield Parameter("head.weight", (model.vocab, hidden), "head", tp_dim=0)
    if model.labels:
        yield Parameter(SCORE, (model.labels, hidden), "head")


_Shapes = Iterator[tuple[str, tuple[int, ...], int | None]]
"""Path in a layer, shape, and the dimension that TP splits."""


def _layer(model: ModelConfig, layer: int) -> _Shapes:
    """Yield the parameters of a layer, with one entry for all experts."""
    hidden = model.hidden
    yield "attention_norm", (hidden,), None
    yield from _attention(model) if model.latent is None else _latent(model, model.latent)
    if model.qk_norm is not None:
        is_whole = model.qk_norm == "whole"
        for name, heads in (("q", model.heads), ("k", model.kv_heads)):
            width = (heads if is_whole else 1) * model.head_dim
            yield f"attention.{name}_norm", (width,), 0 if is_whole else None
    yield "ffn_norm", (hidden,), None
    if layer not in model.expert_layers:
        yield from _gated_ffn("ffn.", hidden, model.ffn_width(layer))
        return
    yield "moe.router", (model.experts, hidden), None
    if model.score_function == "sigmoid":
        yield "moe.router.bias", (model.experts,), None
    yield _EXPERTS, (), None
    if model.shared_experts:
        yield from _gated_ffn("moe.shared.", hidden, model.shared_experts * model.ffn)


def _attention(model: ModelConfig) -> _Shapes:
    hidden = model.hidden
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield "attention.q", (queries, hidden), 0
    yield "attention.k", (keys, hidden), 0
    yield "attention.v", (keys, hidden), 0
    yield "attention.o", (hidden, queries), 1


def _latent(model: ModelConfig, latent: LatentConfig) -> _Shapes:
    hidden, rank, rope = model.hidden, latent.q_lora_rank, latent.qk_rope_head_dim
    queries, values = model.heads * model.head_dim, model.heads * latent.v_head_dim
    if rank is None:
        yield "attention.q", (queries, hidden), 0
    else:
        yield "attention.q_down", (rank, hidden), None
        yield "attention.q_norm", (rank,), None
        yield "attention.q_up", (queries, rank), 0
    yield "attention.kv_down", (latent.kv_lora_rank + rope, hidden), None
    yield "attention.kv_norm", (latent.kv_lora_rank,), None
    yield "attention.kv_up", (queries - model.heads * rope + values, latent.kv_lora_rank), 0
    yield "attention.o", (hidden, values), 1


def _gated_ffn(prefix: str, hidden: int, inner: int) -> _Shapes:
    yield f"{prefix}gate", (inner, hidden), 0
    yield f"{prefix}up", (inner, hidden), 0
    yield f"{prefix}down", (hidden, inner), 1


def expert_name(layer: int, expert: int, matrix: str) -> str:
    """Return the logical name of one matrix (gate, up, down) of one expert."""
    return f"layers.{layer}.moe.experts.{expert}.{matrix}"


def local_size(parameter: Parameter, num_shards: int) -> int:
    """Return elements of one of `num_shards` FSDP shards, in whole rows with padding."""
    return unpadded_local_size(parameter, num_shards, 0)


def unpadded_local_size(parameter: Parameter, num_shards: int, rank: int) -> int:
    """Return elements of `rank`'s FSDP shard without padding; the last ranks may have fewer rows or
    none. FSDP does not split a column shard."""
    if parameter.is_column_shard:
        return parameter.size
    rows = parameter.shape[0]
    rows_per_shard = -(-rows // num_shards)
    return min(max(rows - rank % num_shards * rows_per_shard, 0), rows_per_shard) * (
        parameter.size // rows
    )


def moment_bytes(parameter: Parameter, elements: int, job: Job) -> tuple[int, ...]:
    """Return bytes of each optimizer tensor for `elements` elements (whole rows) of `parameter`."""
    moments, element_bytes = job.optimizer.moments, STORED_BYTES[job.train.precision]
    if moments == "full" or len(parameter.shape) == 1:
        return (elements * element_bytes,) * 2
    if moments == "bf16":
        return (elements * 2,) * 2
    columns = parameter.shape[1]
    scales = elements // columns * -(-columns // MOMENT_BLOCK) * SCALE_BYTES
    return (elements, scales) * 2


@dataclass(frozen=True)
class ParameterCounts:
    """Number of parameters of a model, and of those active per token."""

    total: int
    active: int


def count_parameters(model: ModelConfig) -> ParameterCounts:
    """Return total and active parameters of `model`."""
    total = active = 0
    # One expert stands for all.
    for parameter in parameters(model, lambda _: range(min(model.experts, 1))):
        is_expert = parameter.kind == "expert"
        total += parameter.size * (model.experts if is_expert else 1)
        active += parameter.size * (model.top_k if is_expert else 1)
    return ParameterCounts(total, active)


def size_warnings(job: Job) -> list[str]:
    """Return a warning for each student with more parameters than its teacher."""
    counts = {TEACHER: count_parameters(job.model).total}
    counts |= {one.name: count_parameters(one.model).total for one in job.student}
    return [
        f'student "{one.name}" has {counts[one.name]:,} parameters, more than its teacher '
        f'"{one.teacher}" with {counts[one.teacher]:,}: it costs more than it can learn'
        for one in job.student
        if counts[one.name] > counts[one.teacher]
    ]


def adapter_prefix(name: str) -> str:
    """Return the common prefix of the adapter names of parameter `name`."""
    return name.removesuffix(".weight")


def adapters(
    model: ModelConfig,
    finetune: FinetuneConfig | None,
    experts: Callable[[int], Collection[int]] | None = None,
    layers: Sequence[int] | None = None,
) -> Iterator[Parameter]:
    """Yield every A and B that `finetune` adds to `model`, in block order.

    `experts` and `layers` are as in `parameters`.
    """
    if finetune is None or finetune.method != "lora":
        return
    for parameter in parameters(model, experts, layers):
        if _target(parameter) in finetune.targets:
            outputs, inputs = parameter.shape
            prefix, tp_dim = adapter_prefix(parameter.name), parameter.tp_dim
            pairs = (A, (finetune.rank, inputs), 1), (B, (outputs, finetune.rank), 0)
            # TP splits an adapter like its matrix, along the dimension that both have.
            for name, shape, dim in pairs:
                adapter_tp_dim = tp_dim if tp_dim == dim else None
                yield replace(parameter, name=f"{prefix}{name}", shape=shape, tp_dim=adapter_tp_dim)


def is_trainable(finetune: FinetuneConfig | None, parameter: Parameter) -> bool:
    """Return whether a parameter or adapter has a gradient and moments."""
    if parameter.kind == "bias":
        return False
    if finetune is None or parameter.name == SCORE or parameter.name.endswith((A, B)):
        return True
    return finetune.router == "train" if parameter.kind == "router" else finetune.method == "full"


def trainable_parameters(
    job: Job, experts: Callable[[int], Collection[int]] | None = None
) -> list[Parameter]:
    """Return every parameter that `job` trains; `experts` is as in `parameters`."""
    trained = [p for p in parameters(job.model, experts) if is_trainable(job.finetune, p)]
    return trained + list(adapters(job.model, job.finetune, experts))


def describe_trainable(job: Job) -> list[str]:
    """Return lines for the user: what is trained, and how much of all parameters that is.

    Then come the sizes of trained parameters. Layers and experts share a line, with * as number.
    """
    sizes: dict[str, int] = {}
    for parameter in trainable_parameters(job):
        pattern = re.sub(r"\b\d+\b|(?<=\.lora_).", "*", parameter.name)
        sizes[pattern] = sizes.get(pattern, 0) + parameter.size
    num_trained = sum(sizes.values())
    num_adapters = sum(p.size for p in adapters(job.model, job.finetune))
    num_parameters = sum(p.size for p in parameters(job.model)) + num_adapters
    fraction = num_trained / num_parameters
    whole = f"trains {num_trained:,} of {num_parameters:,} parameters ({fraction:.2%})"
    lines = [f"  {pattern}: {size:,}" for pattern, size in sizes.items()]
    return [f"{whole}: {_trained_matrices(job, sizes)}", *lines]


def _trained_matrices(job: Job, names: Collection[str]) -> str:
    """Return in words what the parameters of these names are."""
    adapted = [name.split(".")[-2] for name in names if name.endswith(".lora_*")]
    finetune = job.finetune
    has_routers = job.model.experts > 0
    trains_routers = has_routers and (finetune is None or finetune.router == "train")
    if not adapted:
        return "every weight" + " but those of routers" * (has_routers and not trains_routers)
    words = [f"LoRA of {', '.join(dict.fromkeys(adapted))}"]
    words += ["routers"] * trains_routers + ["the score"] * (SCORE in names)
    return "; ".join(words)


def _target(parameter: Parameter) -> str | None:
    """Return the adapter target of `parameter`; None if it takes no adapter."""
    if parameter.kind == "expert":
        return "experts"
    return parameter.name.split(".")[-3] if parameter.kind == "dense" else None
