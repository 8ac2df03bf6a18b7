"""Assembly of a run: the job's model on its ranks, with gradient buckets, optimizer and pipeline,
ready to step.

One process may assemble several times: train, `close`, then assemble another layout from the same
state with the same results. `Run.state` holds everything that training resumes from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from moesaic.dist.buckets import GradientBuckets, ReducedParameter
from moesaic.dist.state import Source
from moesaic.dist.world import Group, World
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.kernels import device as devices
from moesaic.kernels.grouped_mm import check_backend
from moesaic.models.build import ModelRanks, allocate_model, build_model
from moesaic.models.lm import LanguageModel
from moesaic.models.state import LocalParam, local_params
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
    ranks = ModelRanks.by_plan(plan, world, replicas=needs_prices)
    dtype = DTYPES[job.train.precision]
    model = build_model(job.model, dtype, plan, world.rank, ranks, job.routing, job.finetune)
    for layer in model.decoder_layers():
        layer.recompute = plan.recomputes(job)
    pipeline = _make_pipeline(job, plan, world, model)
    stages = [] if pipeline is None else list(pipeline.stages.values())
    allocate_model(model, world.device, plan, ranks, stages)
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
