"""Parameters of each rank under a plan: those of its pipeline stages, as TP shards."""

from __future__ import annotations

from dataclasses import replace

from moesaic.facts.job import ModelConfig
from moesaic.facts.plan import Plan, stage_blocks
from moesaic.facts.workload.parameters import Parameter, parameters


def blocks_of_rank(model: ModelConfig, plan: Plan, rank: int) -> list[str]:
    """Return the names of the model's blocks on `rank`, in model order."""
    return [
        name for stage in stage_blocks(plan, model)[plan.pp_rank(rank) :: plan.pp] for name in stage
    ]


def parameters_of_rank(model: ModelConfig, plan: Plan, rank: int) -> list[Parameter]:
    """Return every parameter on `rank`, in block order, with the experts that it owns.

    FSDP is not applied. In a pipeline, the last pipeline rank also has a tied weight, with kind
    `head` and the embedding's name.
    """
    local_blocks = set(blocks_of_rank(model, plan, rank))
    own: list[Parameter] = []
    tied: list[Parameter] = []
    for parameter in parameters(model, lambda layer: plan.experts_of(rank, layer)):
        if model_block(parameter) in local_blocks:
            own.append(_local_parameter(parameter, plan))
        elif parameter.kind == "embedding" and model.tied and "head" in local_blocks:
            tied.append(replace(_local_parameter(parameter, plan), kind="head"))
    return own + tied


def _local_parameter(parameter: Parameter, plan: Plan) -> Parameter:
    if parameter.kind == "embedding":
        parameter = parameter.column_shard(plan.embedding_shards)
    return parameter.tp_shard(plan.tp if parameter.expert is None else plan.etp)


def model_block(parameter: Parameter) -> str:
    """Return the model's block of `parameter`."""
    if parameter.layer is not None:
        return f"layers.{parameter.layer}"
    return "embed" if parameter.kind == "embedding" else "head"


def workload_block(parameter: Parameter, model: ModelConfig) -> str:
    """Return the workload's block of `parameter`; a layer has two blocks."""
    name = model_block(parameter)
    if parameter.layer is None:
        return name
    kind = parameter.name.split(".")[2]
    if kind == "ffn_norm":
        kind = "moe" if parameter.layer in model.expert_layers else "ffn"
    return f"{name}.{kind.removesuffix('_norm')}"


def counts_in_grad_norm(parameter: Parameter, plan: Plan, rank: int) -> bool:
    """Return whether `rank` is the first rank that holds these values of `parameter`.

    Only that rank counts them in the gradient norm.
    """
    if parameter.expert is not None:
        return rank % plan.ranks_per_stage < plan.ep * plan.etp
    if parameter.kind == "head" and parameter.name.startswith("embed."):
        return False  # The first pipeline rank counts the tied weight.
    if parameter.is_column_shard:
        return True
    return plan.dp_rank(rank) < plan.dp_shard and (
        parameter.tp_dim is not None or not rank % plan.tp
    )
