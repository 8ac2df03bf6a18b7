"""Assembly of a run: the job's model on its ranks, with gradient buckets, optimizer and pipeline,
ready to step.

One process may assemble several times: train, `close`, then assemble another layout from the same
state with the same results. `Run.state` holds everything that training resumes from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moesaic.dist.buckets import GradientBuckets, ReducedParameter
from moesaic.dist.state import Source
from moesaic.dist.world import Group, World
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, stage_blocks
from moesaic.kernels import device as devices
from moesaic.kernels.grouped_mm import check_backend
from moesaic.models.finetune import prepare_for_finetuning
from moesaic.models.lm import Embedding, LanguageModel, LMHead
from moesaic.models.state import TP_DIM, LocalParam, local_params
from moesaic.nn.dispatch.all_to_all import DispatchGroups
from moesaic.nn.experts.bank import ExpertBank
from moesaic.nn.experts.lora import Adapters
from moesaic.nn.sharded_embedding import UNSHARDED, ShardedEmbedding
from moesaic.nn.tensor_parallel import NO_TP, TensorParallel
from moesaic.policy import balance as policies
from moesaic.train import balancing, loss_scale
from moesaic.train.expert_migration import ExpertMigration
from moesaic.train.low_bit_adamw import LowBitAdamW
from moesaic.train.optim import AdamW, FlatParams, flatten_params
from moesaic.train.run import Run

if TYPE_CHECKING:
    from moesaic.train.pipeline import Pipeline

DTYPES = {
    "fp32": torch.float32, "bf16": torch.float32, "fp16": torch.float32, "fp64": torch.float64,
}  # fmt: skip
"""Storage dtype of weights, by `train.precision`."""


def assemble(
    job: Job, plan: Plan, world: World, source: Source, counters: dict[str, int] | None = None,
    log: Callable[[str], None] | None = None,
) -> Run:  # fmt: skip
    """Build the job's model by `plan`, filled from `source`.

    Args:
        job: the job.
        plan: layout of the model over ranks.
        world: the ranks, as many as the plan has.
        source: values of parameters and moments.
        counters: position in the run; None for a new run.
        log: receives a message before slow work.
    """
    check_backend(plan.grouped_mm if job.model.experts else "auto", world.device)
    migrates = policies.can_migrate(job, plan)
    needs_prices = migrates or policies.should_balance(job, plan)
    groups = make_dispatch_ranks(plan, world, replicas=needs_prices)
    (mesh, tp), column_shard = _make_dense_mesh(plan, world), _make_column_shard(plan, world)
    local_stages = stage_blocks(plan, job.model)[plan.pp_rank(world.rank) :: plan.pp]
    block_names = [name for stage in local_stages for name in stage]
    with torch.device("meta"):
        model = LanguageModel(job.model, job.routing, plan, groups, tp, block_names, column_shard)
        if job.finetune is not None:
            prepare_for_finetuning(model, job.finetune)
    model.to(DTYPES[job.train.precision])
    for layer in model.decoder_layers():
        layer.recompute = job.train.recompute if plan.recompute is None else plan.recompute
    pipeline = _make_pipeline(job, plan, world, model)
    if mesh is not None and plan.dp_shard > 1:
        roots = [model] if pipeline is None else list(pipeline.stages.values())
        _apply_fsdp(model, roots, plan, mesh, world.device)
    else:
        model.materialise(world.device)
    devices.activate(world.device)
    run = _allocate_run(job, plan, world, model, pipeline)
    run.counters.update(counters or {})
    loss_scale.init_counters(run.counters, is_scaled=job.train.precision == "fp16")
    try:
        if migrates:
            items = [*run.trainable, *run.frozen]
            run.migration = ExpertMigration(job, plan, world, model, items, run.optimizer)
        if policies.should_balance(job, plan):
            for _, bank in model.expert_banks():
                bank.whole_arena()  # Refuses replicas of experts without a place.
        source.fill(run.state().shards)
        if needs_prices:
            run.plan = balancing.attach_balancers(model, job, run.plan, world, log)
    except BaseException:
        run.close()  # Parameter hooks keep the model alive.
        raise
    return run


def _allocate_run(
    job: Job, plan: Plan, world: World, model: LanguageModel, pipeline: Pipeline | None
) -> Run:
    """Return a run of `model` with all buffers and moments allocated; parameters have no values
    yet."""
    all_params = local_params(model, plan, world.rank)
    trainable = [item for item in all_params if item.parameter.requires_grad]
    buckets = _make_buckets(plan, world, trainable)
    try:
        flat_params = flatten_params(trainable, buckets.flatten_parameters())
        devices.reset_peak_memory(world.device)  # Freed parameters leave holes in the cache.
        return Run(
            job, plan, world, model, trainable, flat_params,
            _make_optimizer(job, world, flat_params),
            pipeline_rank_group=world.partition(plan.stage_groups()),
            tied_weight_group=_tied_weight_group(job, plan, world),
            expert_dp_group=world.partition(plan.expert_dp_groups(), _bucket_purpose(plan)),
            buckets=buckets, pipeline=pipeline,
            frozen=[item for item in all_params if not item.parameter.requires_grad],
        )  # fmt: skip
    except BaseException:
        buckets.close()  # Parameter hooks keep the model alive.
        raise


def make_dispatch_ranks(plan: Plan, world: World, *, replicas: bool = False) -> DispatchGroups:
    """Return the dispatch groups of this rank, which are numbered within its pipeline rank. With
    `replicas`, add a transport for expert replicas and migration."""
    ep_group = next(group for group in plan.ep_groups() if world.rank in group)
    transports = (world.transport(groups) for groups in plan.exchange_groups())
    return DispatchGroups(
        rank=world.rank % plan.ranks_per_stage // plan.etp,
        world_group=world.partition(plan.same_etp_rank_groups()),
        transports=tuple(transport for transport in transports if transport is not None),
        ep_ranks=tuple(rank % plan.ranks_per_stage // plan.etp for rank in ep_group),
        replica_transport=world.transport(plan.ep_groups()) if replicas else None,
        tp=TensorParallel(world.rank % plan.etp, plan.etp, world.partition(plan.etp_groups())),
    )


def _make_buckets(plan: Plan, world: World, trainable: Sequence[LocalParam]) -> GradientBuckets:
    """Return gradient buckets, grouped by the ranks that reduce them.

    Expert gradients are summed over expert-DP ranks, those of TP shards over DP ranks, all others
    over the whole pipeline rank. Column-sharded embeddings and FSDP parameters need no reduction
    here.

    Without a pipeline, buckets are reduced during backward, which each rank reaches at a different
    point of its collectives. They therefore use process groups of their own. With a pipeline,
    backwards of several micro-batches interleave and torch's schedules may set gradients
    themselves, so reduction waits for the end.
    """
    overlaps_backward = plan.pp == 1
    purpose = _bucket_purpose(plan)
    expert_dp_group = world.partition(plan.expert_dp_groups(), purpose)
    stage_group = dp_group = None
    if plan.dp_shard == 1:
        stage_group = world.partition(plan.stage_groups(), purpose)
        dp_group = world.partition(plan.dp_groups(), purpose)
    reduced = [
        ReducedParameter(item.parameter, expert_dp_group, "experts", item.has_weight_decay)
        if item.bank is not None
        else ReducedParameter(
            item.parameter,
            dp_group if item.is_tp_sharded else stage_group,
            decays=item.has_weight_decay,
        )
        for item in reversed(trainable)
        if not item.is_column_sharded and item.places is None
    ]
    return GradientBuckets(reduced, overlaps_backward=overlaps_backward)


def _bucket_purpose(plan: Plan) -> str:
    """Return the purpose of the groups that reduce gradients."""
    return "gradients" if plan.pp == 1 else ""


def _make_optimizer(job: Job, world: World, flat_params: Sequence[FlatParams]) -> AdamW:
    """Return an optimizer with zero moments, full or low-bit."""
    optimizer = (
        AdamW(job.optimizer)
        if job.optimizer.moments == "full"
        else LowBitAdamW(job.optimizer, job.seed, world.device)
    )
    for flat in flat_params:
        optimizer.init_moments(flat, world.rank)
    return optimizer


def _make_column_shard(plan: Plan, world: World) -> ShardedEmbedding:
    """Return the ranks that shard the embedding's columns."""
    if plan.embedding_shards == 1:
        return UNSHARDED
    return ShardedEmbedding(plan.embedding_shards, world.transport(plan.stage_groups()))


def _tied_weight_group(job: Job, plan: Plan, world: World) -> Group | None:
    """Return the group of the first and last pipeline rank if they share a tied weight."""
    if plan.pp == 1 or not job.model.tied:
        return None
    return world.partition([[chain[0], chain[-1]] for chain in plan.pp_groups()])


def _make_pipeline(job: Job, plan: Plan, world: World, model: LanguageModel) -> Pipeline | None:
    if plan.pp == 1:
        return None
    from moesaic.train.pipeline import Pipeline  # Slow to import, and rarely used.

    return Pipeline(job, plan, world, model)


def _make_dense_mesh(plan: Plan, world: World) -> tuple[DeviceMesh | None, TensorParallel]:
    """Return the device mesh of dense parameters, without dimensions of size 1, and the TP
    group."""
    if plan.dp_shard == plan.tp == 1:
        return None, NO_TP
    stage_ranks = torch.tensor(plan.stage_groups()[plan.pp_rank(world.rank)])
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
    for module in (*model.layers, *roots):
        sharded = fully_shard(
            module, mesh=mesh, ignored_params=ignored, reshard_after_forward=reshard
        )
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=device)
    model.tie()  # to_empty splits a shared parameter into two
