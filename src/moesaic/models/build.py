"""Model building by a plan: the ranks that share the layers, the blocks of this rank, their memory.

`ModelRanks.by_plan` makes process groups and meshes. `build_model` makes this rank's blocks on the
meta device. `allocate_model` gives them memory, sharded by FSDP2 if the plan says so. A `Source`
fills in the values later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moesaic.dist.world import World
from moesaic.facts.job import ModelConfig, RoutingConfig
from moesaic.facts.job.finetune import FinetuneConfig
from moesaic.facts.plan import Plan
from moesaic.facts.workload import block_specs, expert_name, parameters
from moesaic.facts.workload.parameters import A, adapters, is_trainable
from moesaic.models.lm import Embedding, LanguageModel, LMHead
from moesaic.models.state import TP_DIM, logical_name
from moesaic.nn.attention import Linear
from moesaic.nn.dispatch.all_to_all import DispatchGroups
from moesaic.nn.experts.bank import ExpertBank
from moesaic.nn.experts.lora import Adapters
from moesaic.nn.experts.places import Places
from moesaic.nn.sharded_embedding import UNSHARDED, ShardedEmbedding
from moesaic.nn.tensor_parallel import NO_TP, TensorParallel


@dataclass(frozen=True)
class ModelRanks:
    """Ranks that share a model's layers with this rank; by default, one rank holds all."""

    dispatch: DispatchGroups = field(default_factory=DispatchGroups)
    mesh: DeviceMesh | None = None
    """Mesh of dense parameters; None if each rank holds them whole."""
    tp: TensorParallel = NO_TP
    column_shard: ShardedEmbedding = UNSHARDED

    @classmethod
    def by_plan(cls, plan: Plan, world: World, *, replicas: bool = False) -> ModelRanks:
        """Return the groups of this rank under `plan`; `replicas` adds a transport for expert
        replicas and migration."""
        dispatch = make_dispatch_ranks(plan, world, replicas=replicas)
        mesh, tp = _make_dense_mesh(plan, world)
        return cls(dispatch, mesh, tp, _make_column_shard(plan, world))


def build_model(
    config: ModelConfig,
    dtype: torch.dtype,
    plan: Plan | None = None,
    rank: int = 0,
    ranks: ModelRanks | None = None,
    routing: RoutingConfig | None = None,
    finetune: FinetuneConfig | None = None,
    places: Mapping[int, Places] | None = None,
) -> LanguageModel:
    """Return the blocks of `rank` under `plan` on the meta device; without a plan, the whole
    model. `finetune` freezes parameters and adds adapters. `places` have the expert state of each
    layer, if not all of it is in memory."""
    ranks = ranks or ModelRanks()
    specs = None if plan is None else block_specs(config, plan, rank)
    with torch.device("meta"):
        model = LanguageModel(
            config, specs, routing, plan, ranks.dispatch, ranks.tp, ranks.column_shard, places
        )
        if finetune is not None:
            _prepare_for_finetuning(model, finetune)
    return model.to(dtype)


def _prepare_for_finetuning(model: LanguageModel, finetune: FinetuneConfig) -> None:
    """Freeze parameters and add adapters as `facts.workload.parameters` decides."""
    config = model.config
    trainable = {param.name for param in parameters(config) if is_trainable(finetune, param)}
    adapted = {param.name.removesuffix(A) for param in adapters(config, finetune)}
    for block, module in model.blocks():
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(logical_name(config, f"{block}.{name}") in trainable)
        for name, submodule in module.named_modules():
            if isinstance(submodule, Linear) and f"{block}.{name}" in adapted:
                submodule.add_adapters(finetune.rank, finetune.scale)
    for layer, bank in model.expert_banks():
        # One arena holds all experts of a layer, so one matrix decides for all of them.
        name = expert_name(layer, bank.experts[0], "gate")
        bank.arena.requires_grad_(name in trainable)
        if name in adapted:
            bank.add_adapters(finetune.rank, finetune.scale)


def allocate_model(
    model: LanguageModel,
    device: torch.device,
    plan: Plan | None = None,
    ranks: ModelRanks | None = None,
    stages: Sequence[nn.Module] = (),
) -> None:
    """Allocate the parameters of `model` on `device`, uninitialised, sharded by FSDP2 if the plan
    shards them. `stages` are the pipeline stages of this rank, if there are any."""
    if plan is None or ranks is None or ranks.mesh is None or plan.dp_shard == 1:
        model.materialise(device)
    else:
        _apply_fsdp(model, stages or [model], plan, ranks.mesh, device)


def make_dispatch_ranks(plan: Plan, world: World, *, replicas: bool = False) -> DispatchGroups:
    """Return the dispatch groups of this rank. With `replicas`, add a transport for expert replicas
    and migration."""
    transports = (world.transport(groups) for groups in plan.exchange_groups())
    return DispatchGroups(
        ep_rank=world.rank // plan.etp % plan.ep,
        ep_size=plan.ep,
        ep_group=world.partition(plan.ep_groups()),
        all_group=world.partition(plan.same_etp_rank_groups()),
        transports=tuple(transport for transport in transports if transport is not None),
        replica_transport=world.transport(plan.ep_groups()) if replicas else None,
        tp=TensorParallel(world.rank % plan.etp, plan.etp, world.partition(plan.etp_groups())),
    )


def _make_column_shard(plan: Plan, world: World) -> ShardedEmbedding:
    if plan.embedding_shards == 1:
        return UNSHARDED
    return ShardedEmbedding(plan.embedding_shards, world.transport(plan.stage_groups()))


def _make_dense_mesh(plan: Plan, world: World) -> tuple[DeviceMesh | None, TensorParallel]:
    """Return the device mesh of dense parameters, without dimensions of size 1, and the TP
    group."""
    if plan.dp_shard == plan.tp == 1:
        return None, NO_TP
    stage = plan.stage_groups()[plan.pp_rank(world.rank)]
    stage_ranks = torch.tensor([world.ranks[rank] for rank in stage])
    grid = stage_ranks.view(-1, plan.dp_shard, plan.tp)
    all_groups = {
        "replicate": world.partition(plan.dp_replicate_groups()),
        "dp_shard": world.partition(plan.dp_shard_groups()),
        TP_DIM: world.partition(plan.tp_groups()),
    }
    groups = {name: group for name, group in all_groups.items() if group is not None}
    mesh = DeviceMesh.from_group(
        list(groups.values()), world.device.type, mesh=grid.squeeze(), mesh_dim_names=tuple(groups)
    )
    tp_mesh = mesh[TP_DIM] if plan.tp > 1 else None
    return mesh, TensorParallel(world.rank % plan.tp, plan.tp, all_groups[TP_DIM], tp_mesh)


def _apply_fsdp(
    model: LanguageModel, roots: Sequence[nn.Module], plan: Plan, mesh: DeviceMesh,
    device: torch.device,
) -> None:  # fmt: skip
    """Shard dense parameters over `plan.dp_shard` ranks by FSDP2, replicate over the rest, and
    materialise.

    Gradients are summed, not averaged, because losses are already divided by global counts. The
    root holds embedding and head, so a tied weight is one parameter; each pipeline stage is a root.
    Experts and column-sharded embeddings are excluded because they are sharded already. A pipeline
    stage stays unsharded between passes because other micro-batches still need it.
    """
    from torch.distributed.fsdp import fully_shard  # Slow to import, and rarely used.

    is_replicated = "replicate" in (mesh.mesh_dim_names or ())
    mesh = mesh["replicate", "dp_shard"] if is_replicated else mesh["dp_shard"]
    ignored = {m.arena for m in model.modules() if isinstance(m, ExpertBank | Adapters)}
    ignored |= {
        m.weight
        for m in model.modules()
        if isinstance(m, Embedding | LMHead) and m.column_shard.num_ranks > 1
    }
    reshard = None if plan.pp == 1 else False
    for module in dict.fromkeys((*model.layers, *roots)):
        sharded = fully_shard(
            module, mesh=mesh, ignored_params=ignored, reshard_after_forward=reshard
        )
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=device)
    model.tie()  # to_empty splits a shared parameter into two
