"""Blocks of a model on one rank: the spec that module, cost and memory are built from.

A decoder layer is two blocks: attention, and a dense FFN or a mixture of experts. Each begins with
its norm and ends with its residual.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from moesaic.facts.job import ModelConfig
from moesaic.facts.job.finetune import FinetuneConfig
from moesaic.facts.plan import Plan, stage_blocks
from moesaic.facts.workload.parameters import Parameter, adapters, parameters

BlockKind = Literal["embed", "attention", "ffn", "moe", "head", "other"]


@dataclass(frozen=True)
class BlockSpec:
    """One block of a model on one rank."""

    name: str
    """Name: embed, layers.0.attention, layers.0.ffn or layers.0.moe, ..., head."""
    kind: BlockKind
    layer: int | None = None
    """Index of its decoder layer."""
    inner_width: int = 0
    """Inner width over all ranks of the dense FFN, or of the shared experts together."""
    experts: tuple[int, ...] = ()
    """Experts on the rank, in slot order."""
    parameters: tuple[Parameter, ...] = ()
    """Parameters on the rank: shards of TP and expert TP, and column shards. FSDP is not applied.
    """

    @property
    def model_block(self) -> str:
        """Name of the module's block, which determines the pipeline stage."""
        return self.name if self.layer is None else f"layers.{self.layer}"

    @property
    def dense(self) -> list[Parameter]:
        """Dense parameters, as TP shards."""
        return [p for p in self.parameters if p.is_dense]


def block_specs(
    model: ModelConfig,
    plan: Plan,
    rank: int = 0,
    finetune: FinetuneConfig | None = None,
    *,
    with_experts: bool = True,
) -> list[BlockSpec]:
    """Return the blocks on `rank`, in model order, with the adapters that `finetune` adds, on
    request without matrices of experts.

    In a pipeline, the head's block has a tied weight too, with kind `head` and the embedding's
    name.
    """
    stages = stage_blocks(plan, model)[plan.pp_rank(rank) :: plan.pp]
    names = [name for stage in stages for name in stage]
    layers = [layer for layer in range(model.layers) if f"layers.{layer}" in names]

    def experts(layer: int) -> Sequence[int]:
        return plan.experts_of(rank, layer) if with_experts else ()

    by_block: dict[str, list[Parameter]] = {}
    own = *parameters(model, experts, layers), *adapters(model, finetune, experts, layers)
    for parameter in own:
        parameter = parameter.tp_shard(plan.tp if parameter.expert is None else plan.etp)
        if parameter.kind == "embedding":
            if plan.embedding_shards > 1:
                rows, width = parameter.shape
                shape = rows, width // plan.embedding_shards
                parameter = replace(parameter, shape=shape, is_column_shard=True)
            if model.tied and "embed" not in names:  # The last pipeline rank has it too.
                by_block["head"] = [replace(parameter, kind="head")]
        by_block.setdefault(block_of(parameter, model), []).append(parameter)
    return [
        replace(spec, parameters=tuple(by_block.get(spec.name, ())))
        for name in names
        for spec in _specs(model, plan, rank, name)
    ]


def _specs(model: ModelConfig, plan: Plan, rank: int, name: str) -> Iterator[BlockSpec]:
    """Yield the blocks of the model's block `name`, without parameters."""
    if name in ("embed", "head"):
        yield BlockSpec(name, "embed" if name == "embed" else "head")
        return
    layer = int(name.removeprefix("layers."))
    yield BlockSpec(f"{name}.attention", "attention", layer)
    if layer in model.expert_layers:
        shared = model.shared_experts * model.ffn
        yield BlockSpec(f"{name}.moe", "moe", layer, shared, plan.experts_of(rank, layer))
    else:
        yield BlockSpec(f"{name}.ffn", "ffn", layer, model.ffn_width(layer))


def block_of(parameter: Parameter, model: ModelConfig) -> str:
    """Return the name of the block that has `parameter`."""
    if parameter.layer is None:
        return "embed" if parameter.kind == "embedding" else "head"
    kind = parameter.name.split(".")[2].removesuffix("_norm")
    if kind == "ffn" and parameter.layer in model.expert_layers:
        kind = "moe"
    return f"layers.{parameter.layer}.{kind}"
