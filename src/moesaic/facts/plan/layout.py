"""Plans made from a job's layout, and what can be derived from both."""

from __future__ import annotations

import math
import re
from typing import Any

from moesaic.base.config import list_mistakes, parse
from moesaic.base.errors import ConfigError
from moesaic.base.units import plural
from moesaic.facts.job import Job, LayoutConfig, ModelConfig, StudentConfig, student_job
from moesaic.facts.plan.checks import check_plan
from moesaic.facts.plan.plan import OTHER_RANKS, Plan, group_faults, stage_blocks

_JOB_NAMES = {
    **{key: f"layout.{key}" for key in LayoutConfig.model_fields},
    "experts": "model.experts",
    "grouped_mm": "kernels.grouped_mm",
    "ranks": "nproc",
    "recompute": "train.recompute",
}
"""Names in a job of what sentences about plans name."""
_PLAN_NAMES = re.compile(
    r"(?<![\w.])(?:(?:ep|etp|tp|pp)\b"
    rf"|(?:{'|'.join(_JOB_NAMES)})(?= = ))"
)
"""Names of settings in a sentence about a plan; `experts` and the like are also words."""


def plan_from_layout(layout: LayoutConfig, model: ModelConfig, ranks: int) -> Plan:
    """Return the plan of `layout` on `ranks` ranks; other fields are left to the job.

    A dispatch of "auto" becomes a flat all_to_all: a better choice depends on the hosts
    (`policy.plan.dispatch`).
    """
    return parse(Plan, _decisions(layout, model, ranks), "layout")


def fewest_ranks(layout: LayoutConfig) -> int:
    """Return the fewest ranks that `layout` divides."""
    sharded = 1 if layout.dp_shard == "all" else layout.dp_shard
    return layout.pp * math.lcm(layout.tp * sharded, layout.ep * layout.etp)


def _decisions(layout: LayoutConfig, model: ModelConfig, ranks: int) -> dict[str, Any]:
    """Return the fields of the plan of `layout`, before any check."""
    dispatches, stage_ranks = layout.ep > 1, ranks // layout.pp
    is_flat = not dispatches or layout.dispatch == "auto" or layout.dispatch_hosts is None
    return {
        **layout.model_dump(include={"ep", "tp", "etp", "pp", "schedule"}),
        "ranks": ranks,
        "experts": model.experts,
        "dp_shard": max(stage_ranks // layout.tp, 1)
        if layout.dp_shard == "all"
        else layout.dp_shard,
        "dispatch": "all_to_all" if layout.dispatch == "auto" else layout.dispatch,
        "dispatch_hosts": 1 if is_flat else layout.dispatch_hosts,
        "overlap_local": dispatches and layout.overlap_local is True,
        "chunks": 1 if not dispatches or layout.chunks == "auto" else layout.chunks,
        "embedding": "columns" if layout.embedding == "columns" and stage_ranks > 1 else "whole",
    }


def plan_from_job(job: Job, ranks: int, origin: str = "the job") -> Plan:
    """Return the complete plan of `job` on `ranks` ranks.

    Raise ConfigError if it has none; the message starts with `origin` and has the job's keys.
    """
    fewest = fewest_ranks(job.layout)
    other = f"{OTHER_RANKS} (--nproc N, nproc=N in Python)"
    if fewest != ranks:
        other = f"{plural(fewest, 'rank')} (--nproc {fewest}, nproc={fewest} in Python)"
    try:
        faults = list(group_faults(_decisions(job.layout, job.model, ranks), other, "layout"))
        if faults:
            raise ConfigError(list_mistakes([("", one) for one in faults], "layout", (), {}))
        plan = plan_from_layout(job.layout, job.model, ranks)
        plan = plan.model_copy(update={"grouped_mm": job.kernels.grouped_mm})
        check_plan(plan, job, "layout", other)
    except ConfigError as error:
        sentence = str(error).removeprefix("layout: ")
        named = _PLAN_NAMES.sub(lambda found: _JOB_NAMES[found[0]], sentence)
        raise ConfigError(f"{origin}: {named}") from None
    return complete_plan(plan, job)


def student_plan(plan: Plan, job: Job, student: StudentConfig) -> tuple[Job, Plan]:
    """Return the job of `student` alone and its plan, on the ranks of `plan`, which rules `job`."""
    alone = student_job(job_under_plan(job, plan), student)
    own = plan_from_job(alone, plan.ranks, f'student "{student.name}"')
    return alone, own.model_copy(update={"places": plan.places})


def job_under_plan(job: Job, plan: Plan) -> Job:
    """Return `job` with the plan's decisions in place of its own where they differ.

    A value such as "auto" stays if the plan has what it stands for.
    """
    own = _decisions(job.layout, job.model, plan.ranks)
    planned = plan.model_dump(include=set(LayoutConfig.model_fields))
    changes = {key: value for key, value in planned.items() if value != own[key]}
    return job.model_copy(
        update={
            "layout": job.layout.model_copy(update=changes),
            "kernels": job.kernels.model_copy(update={"grouped_mm": plan.grouped_mm}),
            "train": job.train.model_copy(update={"recompute": plan.recomputes(job)}),
        }
    )


def complete_plan(plan: Plan, job: Job) -> Plan:
    """Return `plan` with the fields that it leaves to `job` filled in."""
    return plan.model_copy(
        update={
            "stages": stage_blocks(plan, job.model), "recompute": job.train.recompute,
            "micro_batches": job.train.micro_batches,
            "balance_costs": job.balance.costs or plan.balance_costs,
        }
    )  # fmt: skip


def idle_ranks_warning(plan: Plan, job: Job) -> str | None:
    """Return a warning about ranks without samples, with a remedy, or None."""
    batch, micro = job.train.batch, job.train.micro_batches
    idle = sum(not plan.sample_range(rank, batch // micro) for rank in range(plan.ranks))
    if not idle:
        return None
    return (
        f"{idle} of {plan.ranks} ranks {'has' if idle == 1 else 'have'} no sample in a micro-batch "
        f"(train.batch = {batch}, train.micro_batches = {micro}): "
        f"{'lower train.micro_batches, ' * (micro > 1)}use fewer ranks, or raise train.batch to "
        f"{plan.dp * micro}"
    )


def dispatch_summary(
    dispatch: str, dispatch_hosts: int, ep: int, chunks: int = 1, overlap_local: bool = False
) -> str:
    """Return in words how tokens are dispatched between `ep` ranks."""
    via_hosts, suffix = 1 < dispatch_hosts < ep, f" in {chunks} chunks" * (chunks > 1)
    suffix += " while local ones are computed" * overlap_local
    if dispatch == "all_to_all":
        return "once per expert" + f" via {dispatch_hosts} hosts" * via_hosts + suffix
    return f"once per {f'host ({dispatch_hosts} hosts)' if via_hosts else 'rank'}{suffix}"


def describe_plan(plan: Plan) -> str:
    """Return a plan as one line of text."""
    if plan.ranks == 1:
        return "1 rank holds everything"
    parts = [f"{plan.ranks} ranks"]
    if plan.pp > 1:
        parts.append(f"layers over {plan.pp} pipeline ranks ({plan.schedule})")
    if plan.experts:
        parts.append(f"experts over {plan.ep}" if plan.ep > 1 else "experts on every rank")
    if plan.ep > 1:
        dispatch = plan.dispatch, plan.dispatch_hosts, plan.ep, plan.chunks, plan.overlap_local
        parts.append(f"tokens {dispatch_summary(*dispatch)}")
    if plan.tp > 1:
        parts.append(f"matrices over {plan.tp} TP ranks")
    if plan.etp > 1:
        parts.append(f"expert matrices over {plan.etp}")
    if plan.embedding_shards > 1:
        parts.append(f"embedding columns over {plan.embedding_shards}")
    parts.append(
        f"dense parameters over {plan.dp_shard}"
        if plan.dp_shard > 1
        else "dense parameters on every rank"
    )
    return ", ".join(parts)
