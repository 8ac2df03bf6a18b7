"""Assembly of a language model's run: its parts on their ranks, objective and walk, ready to step.

The model is one part, and each student of the job another one on the same ranks.

One process may assemble several times: train, `close`, then assemble another layout from the same
state with the same results. `Run.state` holds everything that training resumes from.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn

from moesaic.base.decisions import Decision
from moesaic.dist.state import Source
from moesaic.dist.world import Group, World
from moesaic.facts.job import Job
from moesaic.facts.job.distill import StudentConfig, student_prefix, students_in_order
from moesaic.facts.plan import Plan, student_plan
from moesaic.kernels import device as devices
from moesaic.kernels.grouped_mm import check_backend
from moesaic.models.build import ModelRanks, allocate_model, build_model
from moesaic.models.lm import LanguageModel
from moesaic.models.state import local_params, router_biases
from moesaic.models.student import auxiliary_params, build_auxiliary
from moesaic.policy import balance as policies
from moesaic.train import balancing
from moesaic.train.expert_migration import ExpertMigration
from moesaic.train.lm_stats import LMStepStats
from moesaic.train.micro_batches import BlockWalk
from moesaic.train.objectives.credibility import CredibilityObjective
from moesaic.train.objectives.distill import DistillObjective, StudentObjective
from moesaic.train.objectives.lm import LanguageModelObjective
from moesaic.train.parts import Part, PartPlacement, make_part
from moesaic.train.run import Run
from moesaic.train.tiers import ExpertTiers, make_tiers
from moesaic.train.walk import MicroBatchWalk, Walk

DTYPES = {
    "fp32": torch.float32, "bf16": torch.float32, "fp16": torch.float32, "fp64": torch.float64,
}  # fmt: skip
"""Storage dtype of weights, by `train.precision`."""

LMRun: TypeAlias = Run[LanguageModelObjective, LMStepStats]
"""Run of a language model."""


def assemble(
    job: Job, plan: Plan, world: World, source: Source, counters: dict[str, int] | None = None,
    log: Callable[[str], None] | None = None, decisions: list[Decision[Any, Any]] | None = None,
) -> LMRun:  # fmt: skip
    """Build the job's model by `plan`, filled from `source`.

    Args:
        job: the job.
        plan: layout of the model over ranks.
        world: the ranks, as many as the plan has.
        source: values of parameters and moments.
        counters: position in the run; None for a new run.
        log: receives a message before slow work.
        decisions: receives what policies decide.
    """
    check_backend(plan.grouped_mm if job.model.experts else "auto", world.device)
    migrates = policies.can_migrate(job, plan)
    needs_costs = migrates or policies.should_balance(job, plan)
    ranks = ModelRanks.by_plan(plan, world, replicas=needs_costs)
    tiers = make_tiers(job, plan, world, DTYPES[job.train.precision])
    try:
        run = _make_run(job, plan, world, ranks, tiers, dict(counters or {}))
    except BaseException:
        if tiers is not None:
            tiers.close()
        raise
    part, model = run.objective.part, run.objective.part.model
    try:
        if migrates:
            items = [*part.trainable, *part.frozen]
            run.objective.migration = ExpertMigration(
                job, plan, world, model, items, part.optimizer
            )
        if policies.should_balance(job, plan):
            for _, bank in model.expert_banks():
                bank.whole_arena()  # Refuses replicas of experts without a place.
        source.fill(run.state().shards)
        if needs_costs:
            found = [] if decisions is None else decisions
            part.plan = balancing.attach_balancers(model, job, plan, world, found, log)
    except BaseException:
        run.close()  # Parameter hooks keep the model alive.
        raise
    return run


def _make_run(
    job: Job, plan: Plan, world: World, ranks: ModelRanks, tiers: ExpertTiers | None,
    counters: dict[str, int],
) -> LMRun:  # fmt: skip
    """Return the run, whose parameters have no values yet."""
    placement, *others = place_parts(job, plan)
    with ExitStack() as stack:
        part, walk = _make_part(job, placement, world, ranks, tiers)
        stack.callback(part.close)  # Parameter hooks keep the model alive.
        objective, students = LanguageModelObjective(job, world, part), list[StudentObjective]()
        for other, config in zip(others, students_in_order(job.student), strict=True):
            students.append(_make_student(job, plan, config, other, world))
            stack.callback(students[-1].part.close)
        if students:
            objective = DistillObjective(job, world, part, students)
        if job.credibility is not None:
            objective = CredibilityObjective(job, world, part)
        run: LMRun = Run(
            job, world, [placement, *others], [part, *(one.part for one in students)], objective,
            walk, unit_group=world.partition(plan.stage_groups()), counters=counters,
        )  # fmt: skip
        stack.pop_all()
    return run


def place_parts(job: Job, plan: Plan) -> list[PartPlacement]:
    """Return the placements of the model, laid out by `plan`, and of its students, each behind its
    teacher."""
    ranks = range(plan.ranks)
    title = "the teacher" if job.student else ""
    return [PartPlacement("", plan, ranks, title)] + [
        PartPlacement(
            student_prefix(one.name), student_plan(plan, job, one)[1], ranks,
            f'student "{one.name}"', one.lr,
        )
        for one in students_in_order(job.student)
    ]  # fmt: skip


def _make_student(
    job: Job, plan: Plan, config: StudentConfig, placement: PartPlacement, world: World
) -> StudentObjective:
    """Return a student with its part, whose parameters have no values yet."""
    own_job, own_plan = student_plan(plan, job, config)
    dtype = DTYPES[job.train.precision]
    ranks = ModelRanks.by_plan(own_plan, world)
    model = build_model(config.model, dtype, own_plan, world.rank, ranks, own_job.routing)
    for layer in model.decoder_layers():
        layer.recompute = own_plan.recomputes(own_job)
    allocate_model(model, world.device, own_plan, ranks)
    auxiliary = build_auxiliary(config, job.model_of(config.teacher), dtype, world.device)
    params = [
        replace(item, losses=config.trained_by(item.name))
        for item in (
            *local_params(model, own_plan, world.rank),
            *auxiliary_params(auxiliary, placement.ranks),
        )
    ]
    part = make_part(
        model, placement, world, params, own_job,
        buffers=list(router_biases(model, own_plan, world.rank)),
    )  # fmt: skip
    objective = StudentObjective(own_job, world, part, config, auxiliary)
    part.trained_losses_at = objective.trained_losses_at
    return objective


def _make_part(
    job: Job,
    placement: PartPlacement,
    world: World,
    ranks: ModelRanks,
    tiers: ExpertTiers | None,
) -> tuple[Part[LanguageModel], Walk[LanguageModelObjective]]:
    """Return the model's part, whose parameters have no values yet, and the walk."""
    plan = placement.plan
    model = build_model(
        job.model, DTYPES[job.train.precision], plan, world.rank, ranks, job.routing, job.finetune,
        None if tiers is None else tiers.places,
    )  # fmt: skip
    for layer in model.decoder_layers():
        layer.recompute = plan.recomputes(job)
    if job.distill.frozen:
        model.requires_grad_(False)
    walk, roots = _make_walk(job, plan, world, model, tiers)
    allocate_model(model, world.device, plan, ranks, roots)
    devices.activate(world.device)
    if tiers is not None:
        devices.return_large_tensors()
    part = make_part(
        model, placement, world, local_params(model, plan, world.rank), job,
        buffers=list(router_biases(model, plan, world.rank)),
        tp_group=model.tp.group,
    )  # fmt: skip
    part.tiers = tiers
    part.tied_weight_group = _tied_weight_group(job, plan, world)
    return part, walk


def _tied_weight_group(job: Job, plan: Plan, world: World) -> Group | None:
    """Return the group of the first and last pipeline rank if they share a tied weight."""
    if plan.pp == 1 or not job.model.tied:
        return None
    return world.partition([[chain[0], chain[-1]] for chain in plan.pp_groups()])


def _make_walk(
    job: Job, plan: Plan, world: World, model: LanguageModel, tiers: ExpertTiers | None
) -> tuple[Walk[LanguageModelObjective], list[nn.Module]]:
    """Return the walk over the micro-batches, and the modules that it calls; none if it calls the
    whole model."""
    precision = job.train.precision
    if plan.pp > 1:
        from moesaic.train.pipeline import Pipeline  # Slow to import, and rarely used.

        pipeline = Pipeline(job, plan, world, model)
        return pipeline, list(pipeline.stages.values())
    if job.is_by_block:
        group_size = job.train.micro_batches if tiers is None else tiers.num_micro_batches
        walk = BlockWalk(precision, world.device, group_size, tiers)
        return walk, [block for _, block in model.blocks()]
    return MicroBatchWalk(precision, world.device), []
