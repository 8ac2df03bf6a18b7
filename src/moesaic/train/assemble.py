"""assemble(job, plan, world, source) -> Run: a model on ranks, ready to step.

It can be called again and again in one process: train, `close`, assemble another layout from the
same state, go on with the same numbers. Everything that training goes on from is in `Run.state`.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from moesaic.dist import device as devices
from moesaic.dist.state import Source
from moesaic.dist.world import Group, World
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.models.finetune import prepare
from moesaic.models.lm import LanguageModel
from moesaic.models.pieces import held
from moesaic.nn.bank import Bank
from moesaic.nn.dispatch import Ranks
from moesaic.nn.lora import Adapters
from moesaic.train.optim import AdamW
from moesaic.train.run import Run

DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}
"""What weights are stored in, by `train.precision`."""


def assemble(
    job: Job, plan: Plan, world: World, source: Source, counters: dict[str, int] | None = None
) -> Run:
    """Build the job's model as `plan` says, filled from `source`.

    Args:
        job: the job.
        plan: which rank holds what.
        world: the ranks; as many as the plan's.
        source: where the values of parameters and moments come from.
        counters: position in the run; absent: its start.
    """
    groups = _groups(plan, world)
    with torch.device("meta"):
        model = LanguageModel(job.model, job.routing, plan, groups[0])
        if job.finetune is not None:
            prepare(model, job.finetune)
    model.to(DTYPES[job.train.precision])
    for layer in model.decoder_layers():
        layer.recompute = job.train.recompute if plan.recompute is None else plan.recompute
    if plan.shard > 1:
        _shard(model, plan, world)
    else:
        model.materialise(world.device)
    optimizer = AdamW(job.optimizer)
    everything = held(model, plan, world.rank)
    holdings = [item for item in everything if item.parameter.requires_grad]
    frozen = [item for item in everything if not item.parameter.requires_grad]
    for item in holdings:
        optimizer.attach(item.name, item.local)
    devices.activate(world.device)
    run = Run(job, plan, world, model, holdings, optimizer, replicas=groups[1], frozen=frozen)
    run.counters.update(counters or {})
    source.fill(run.state().pieces)
    return run


def _groups(plan: Plan, world: World) -> tuple[Ranks, Group | None]:
    """The ranks that dispatch, and the group that holds copies of this rank's experts."""
    everyone = world.partition(plan.part_groups())
    expert_groups = plan.expert_groups()
    mine = next(tuple(group) for group in expert_groups if world.rank in group)
    exchange = world.partition(expert_groups)
    replicas = world.partition(plan.replica_groups())
    return Ranks(world.rank, everyone, exchange, mine), replicas


def _shard(model: LanguageModel, plan: Plan, world: World) -> None:
    """Shard dense parameters over `plan.shard` ranks, replicate over the rest (FSDP2), materialise.

    Gradients are summed, not averaged: losses are divided by global counts already. The root holds
    embedding and head, so that a tied weight is one parameter.
    """
    from torch.distributed.fsdp import fully_shard  # Slow to import, and rarely used.

    grid = torch.arange(plan.ranks).view(-1, plan.shard)
    shard, replicate = world.partition(grid.tolist()), world.partition(grid.T.tolist())
    assert shard is not None
    if replicate is None:
        mesh = DeviceMesh.from_group(shard, world.device.type, mesh_dim_names=("shard",))
    else:
        mesh = DeviceMesh.from_group(
            [replicate, shard], world.device.type, mesh=grid, mesh_dim_names=("replicate", "shard")
        )
    arenas = {m.arena for m in model.modules() if isinstance(m, Bank | Adapters)}
    for module in (*model.layers, model):
        sharded = fully_shard(module, mesh=mesh, ignored_params=arenas)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=world.device)
    model.tie()  # to_empty makes two of one shared parameter
