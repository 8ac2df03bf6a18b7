"""Which parameters a rank holds under a plan: those of its stages, each as its slice has it."""

from __future__ import annotations

from dataclasses import replace

from moesaic.facts.job import ModelConfig
from moesaic.facts.plan import Plan, stages
from moesaic.facts.workload.parameters import Parameter, parameters


def blocks_on(model: ModelConfig, plan: Plan, rank: int) -> list[str]:
    """Names of the model's blocks on `rank`, in the order of the model."""
    return [name for stage in stages(plan, model)[plan.part(rank) :: plan.pp] for name in stage]


def held(model: ModelConfig, plan: Plan, rank: int) -> list[Parameter]:
    """Every parameter on `rank`, in the order of the blocks; of experts, those that live there.

    Shards of FSDP are not looked at. In a pipeline the last part has a tied weight too: as one of
    the head, by the embedding's name.
    """
    here = set(blocks_on(model, plan, rank))
    found: list[Parameter] = []
    copy: list[Parameter] = []
    for parameter in parameters(model, lambda layer: plan.homes(rank, layer)):
        if model_block(parameter) in here:
            found.append(_on_rank(parameter, plan))
        elif parameter.kind == "embedding" and model.tied and "head" in here:
            copy.append(replace(_on_rank(parameter, plan), kind="head"))
    return found + copy


def _on_rank(parameter: Parameter, plan: Plan) -> Parameter:
    if parameter.kind == "embedding":
        parameter = parameter.in_columns(plan.columns)
    return parameter.on_slice(plan.tp if parameter.expert is None else plan.etp)


def model_block(parameter: Parameter) -> str:
    """The model's block that `parameter` is in."""
    if parameter.layer is not None:
        return f"layers.{parameter.layer}"
    return "embed" if parameter.kind == "embedding" else "head"


def block_of(parameter: Parameter, model: ModelConfig) -> str:
    """The block of a workload that `parameter` is in: a layer has two of them."""
    name = model_block(parameter)
    if parameter.layer is None:
        return name
    inner = parameter.name.split(".")[2]
    if inner == "ffn_norm":
        inner = "moe" if parameter.layer in model.expert_layers else "ffn"
    return f"{name}.{inner.removesuffix('_norm')}"


def is_first(parameter: Parameter, plan: Plan, rank: int) -> bool:
    """Whether `rank` comes before all others that hold the same values of `parameter`.

    It is the one that counts them in the gradient's norm.
    """
    if parameter.expert is not None:
        return rank % plan.span < plan.ep * plan.etp
    if parameter.kind == "head" and parameter.name.startswith("embed."):
        return False  # The embedding itself is on another part.
    if parameter.columns:
        return True
    return plan.replica(rank) < plan.shard and (parameter.cut is not None or not rank % plan.tp)
