"""assemble(job, plan, world, source) -> Run: a model on ranks, ready to step.

It can be called again and again in one process: train, `close`, assemble another layout from the
same state, go on with the same numbers. Everything that training goes on from is in `Run.state`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moesaic.dist import device as devices
from moesaic.dist.buckets import Buckets, Summed
from moesaic.dist.products import check
from moesaic.dist.state import Source
from moesaic.dist.world import Group, World
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, stages
from moesaic.models.finetune import prepare
from moesaic.models.lm import Embedding, Head, LanguageModel
from moesaic.models.pieces import SLICES, Held, held
from moesaic.nn.bank import Bank
from moesaic.nn.columns import ALONE, Columns
from moesaic.nn.lora import Adapters
from moesaic.nn.slices import WHOLE, Slices
from moesaic.nn.travel import Ranks
from moesaic.policy import balance as policies
from moesaic.train import balancing, scale
from moesaic.train.narrow import NarrowAdamW
from moesaic.train.optim import AdamW, Stretch, stretches
from moesaic.train.rehoming import Rehoming
from moesaic.train.run import Run

if TYPE_CHECKING:
    from moesaic.train.pipeline import Pipeline

DTYPES = {
    "fp32": torch.float32, "bf16": torch.float32, "fp16": torch.float32, "fp64": torch.float64,
}  # fmt: skip
"""What weights are stored in, by `train.precision`."""


def assemble(
    job: Job, plan: Plan, world: World, source: Source, counters: dict[str, int] | None = None,
    say: Callable[[str], None] | None = None,
) -> Run:  # fmt: skip
    """Build the job's model as `plan` says, filled from `source`.

    Args:
        job: the job.
        plan: which rank holds what.
        world: the ranks; as many as the plan's.
        source: where the values of parameters and moments come from.
        counters: position in the run; absent: its start.
        say: told what takes long.
    """
    check(plan.grouped_mm if job.model.experts else "auto", world.device)
    moves = policies.rehomes(job, plan)
    priced = moves or policies.balances(job, plan)
    ranks = ranks_of(plan, world, copies=priced)
    (mesh, slices), columns = _shared_out(plan, world), _columns(plan, world)
    part = stages(plan, job.model)[plan.part(world.rank) :: plan.pp]
    names = [name for stage in part for name in stage]
    with torch.device("meta"):
        model = LanguageModel(job.model, job.routing, plan, ranks, slices, names, columns)
        if job.finetune is not None:
            prepare(model, job.finetune)
    model.to(DTYPES[job.train.precision])
    for layer in model.decoder_layers():
        layer.recompute = job.train.recompute if plan.recompute is None else plan.recompute
    pipeline = _pipeline(job, plan, world, model)
    if mesh is not None and plan.shard > 1:
        roots = [model] if pipeline is None else list(pipeline.stages.values())
        _shard(model, roots, plan, mesh, world.device)
    else:
        model.materialise(world.device)
    devices.activate(world.device)
    run = _with_memory(job, plan, world, model, pipeline)
    run.counters.update(counters or {})
    scale.begin(run.counters, scaled=job.train.precision == "fp16")
    try:
        if moves:
            items = [*run.holdings, *run.frozen]
            run.rehoming = Rehoming(job, plan, world, model, items, run.optimizer)
        source.fill(run.state().pieces)
        if priced:
            run.plan = balancing.begin(model, job, run.plan, world, say)
    except BaseException:
        run.close()  # Hooks of its parameters hold the model.
        raise
    return run


def _with_memory(
    job: Job, plan: Plan, world: World, model: LanguageModel, pipeline: Pipeline | None
) -> Run:
    """A run of `model`, with room for all that it learns by: nothing has a value yet."""
    everything = held(model, plan, world.rank)
    holdings = [item for item in everything if item.parameter.requires_grad]
    buckets = _buckets(plan, world, holdings)
    try:
        updated = stretches(holdings, buckets.settle())
        devices.begin_anew(world.device)  # Where parameters have been leaves holes.
        return Run(
            job, plan, world, model, holdings, updated, _optimizer(job, world, updated),
            part=world.partition(plan.part_groups()), ends=_ends(job, plan, world),
            buckets=buckets, pipeline=pipeline,
            frozen=[item for item in everything if not item.parameter.requires_grad],
        )  # fmt: skip
    except BaseException:
        buckets.close()  # Hooks of its parameters hold the model.
        raise


def ranks_of(plan: Plan, world: World, *, copies: bool = False) -> Ranks:
    """The ranks that dispatch, by place in their part of the pipeline; with what carries `copies`
    of experts, or experts themselves, if there are to be some."""
    mine = next(group for group in plan.expert_groups() if world.rank in group)
    carriers = (world.carrier(groups) for groups in plan.trip_groups())
    return Ranks(
        rank=world.rank % plan.span // plan.etp,
        everyone=world.partition(plan.same_expert_slice_groups()),
        carriers=tuple(carrier for carrier in carriers if carrier is not None),
        group_ranks=tuple(rank % plan.span // plan.etp for rank in mine),
        straight=world.carrier(plan.expert_groups()) if copies else None,
        slices=Slices(world.rank % plan.etp, plan.etp, world.partition(plan.expert_slice_groups())),
    )


def _buckets(plan: Plan, world: World, holdings: Sequence[Held]) -> Buckets:
    """Gradients that ranks which learn the same add up: experts' over copies, slices' over ranks
    that have the same, and all others over a part; but for columns of a table, of which nobody
    else there has any, and those that FSDP has to do with.

    Under backward that goes on beside what layers say, and not at the same point on every rank: in
    groups of its own. A pipeline's stages mingle backwards of several micro-batches, of which
    torch's schedules may set the gradients themselves, so that they wait for the end.
    """
    early = plan.pp == 1
    purpose = "gradients" if early else ""
    copies = world.partition(plan.replica_groups(), purpose)
    whole = sliced = None
    if plan.shard == 1:
        whole = world.partition(plan.part_groups(), purpose)
        sliced = world.partition(plan.same_slice_groups(), purpose)
    sums = [
        Summed(item.parameter, copies, "experts", item.decays)
        if item.bank is not None
        else Summed(item.parameter, sliced if item.sliced else whole, decays=item.decays)
        for item in reversed(holdings)
        if not item.columns
    ]
    return Buckets(sums, early=early)


def _optimizer(job: Job, world: World, updated: Sequence[Stretch]) -> AdamW:
    """Of full moments, or narrow ones, all of them zero."""
    optimizer = (
        AdamW(job.optimizer)
        if job.optimizer.moments == "full"
        else NarrowAdamW(job.optimizer, job.seed, world.device)
    )
    for stretch in updated:
        optimizer.hold(stretch, world.rank)
    return optimizer


def _columns(plan: Plan, world: World) -> Columns:
    """The ranks that share out the embedding's columns."""
    if plan.columns == 1:
        return ALONE
    return Columns(plan.columns, world.carrier(plan.part_groups()))


def _ends(job: Job, plan: Plan, world: World) -> Group | None:
    """The group that holds a tied weight on both ends of a pipeline."""
    if plan.pp == 1 or not job.model.tied:
        return None
    return world.partition([[chain[0], chain[-1]] for chain in plan.chain_groups()])


def _pipeline(job: Job, plan: Plan, world: World, model: LanguageModel) -> Pipeline | None:
    if plan.pp == 1:
        return None
    from moesaic.train.pipeline import Pipeline  # Slow to import, and rarely used.

    return Pipeline(job, plan, world, model)


def _shared_out(plan: Plan, world: World) -> tuple[DeviceMesh | None, Slices]:
    """The ranks that share out dense parameters, or have copies, along each dimension in which
    there are several; and the slices among them."""
    if plan.shard == plan.tp == 1:
        return None, WHOLE
    part = torch.tensor(plan.part_groups()[plan.part(world.rank)])
    grid = part.view(-1, plan.shard, plan.tp)
    along = {
        "replicate": world.partition(plan.shard_replica_groups()),
        "shard": world.partition(plan.shard_groups()),
        SLICES: world.partition(plan.slice_groups()),
    }
    groups = {name: group for name, group in along.items() if group is not None}
    mesh = DeviceMesh.from_group(
        list(groups.values()), world.device.type, mesh=grid.squeeze(), mesh_dim_names=tuple(groups)
    )
    sliced = mesh[SLICES] if plan.tp > 1 else None
    return mesh, Slices(world.rank % plan.tp, plan.tp, along[SLICES], sliced)


def _shard(
    model: LanguageModel, roots: Sequence[nn.Module], plan: Plan, mesh: DeviceMesh,
    device: torch.device,
) -> None:  # fmt: skip
    """Shard dense parameters over `plan.shard` replicas, copy to the rest (FSDP2), materialise.

    Gradients are summed, not averaged: losses are divided by global counts already. The root holds
    embedding and head, so that a tied weight is one parameter; each stage of a pipeline is a root.
    Columns of the embedding are shared out already, as experts are.
    A stage stays whole until its last backward: others of its micro-batches are on their way.
    """
    from torch.distributed.fsdp import fully_shard  # Slow to import, and rarely used.

    copied = "replicate" in (mesh.mesh_dim_names or ())
    mesh = mesh["replicate", "shard"] if copied else mesh["shard"]
    apart = {m.arena for m in model.modules() if isinstance(m, Bank | Adapters)}
    apart |= {
        m.weight for m in model.modules() if isinstance(m, Embedding | Head) and m.columns.count > 1
    }
    again = None if plan.pp == 1 else False
    for module in (*model.layers, *roots):
        sharded = fully_shard(module, mesh=mesh, ignored_params=apart, reshard_after_forward=again)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=device)
    model.tie()  # to_empty makes two of one shared parameter
