"""Plans made from a job's layout, and what can be derived from both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from moesaic.base import keys
from moesaic.base.errors import ConfigError
from moesaic.facts.job import Job, LayoutConfig, ModelConfig
from moesaic.facts.job.train import MOMENT_BLOCK, EmbeddingSharding
from moesaic.facts.plan.plan import MAX_RANKS, Plan

_ROUND_SCHEDULES = ("interleaved", "zero-bubble")
"""Schedules that process micro-batches in rounds."""


def plan_from_layout(layout: LayoutConfig, model: ModelConfig, ranks: int) -> Plan:
    """Return the plan of `layout` on `ranks` ranks; other fields are left to the job.

    A dispatch of "auto" becomes a flat all_to_all: a better choice depends on the hosts
    (`policy.plan.dispatch`).
    """
    if ranks > MAX_RANKS:
        raise ConfigError(f"a plan has at most {MAX_RANKS} ranks, not {ranks}: use fewer (--nproc)")
    stage_ranks = ranks // layout.pp
    replicas = stage_ranks // layout.tp
    shard = max(replicas, 1) if layout.dp_shard == "all" else layout.dp_shard
    for key, value, what, total in (
        ("layout.pp", layout.pp, "the number of ranks", ranks),
        ("layout.tp", layout.tp, "the ranks of a pipeline stage", stage_ranks),
        (*_expert_ranks(layout), "the ranks of a pipeline stage", stage_ranks),
        ("layout.dp_shard", shard, "the replicas", replicas),
    ):
        if total % value:
            name = "the number of ranks" if total == ranks else what
            remedy = f"choose a divisor of {total}, or " if total > 1 else "set it to 1, or "
            raise ConfigError(
                f"{key} = {value} does not divide {name} ({total}): "
                f"{remedy}start another number of ranks (--nproc)"
            )
    if layout.ep > 1 and model.experts % layout.ep:
        raise ConfigError(
            f"layout.ep = {layout.ep} does not divide model.experts = {model.experts}: "
            "choose a divisor of the number of experts"
        )
    return Plan(
        ranks=ranks, ep=layout.ep, dp_shard=shard, tp=layout.tp, etp=layout.etp, pp=layout.pp,
        schedule=layout.schedule, experts=model.experts,
        embedding=_embedding_sharding(layout, stage_ranks), **_dispatch_fields(layout),
    )  # fmt: skip


def _dispatch_fields(layout: LayoutConfig) -> dict[str, Any]:
    """Return the plan's dispatch fields."""
    alone = layout.ep == 1  # No token is dispatched; `Job.ineffective_settings` warns.
    hosts = 1 if alone else layout.dispatch_hosts or 1
    if hosts > 1 and layout.dispatch == "auto":
        raise ConfigError(
            f'layout.dispatch_hosts = {hosts} with layout.dispatch = "auto", which finds the hosts '
            'itself: set layout.dispatch to "all_to_all" or "dedup", or remove '
            "layout.dispatch_hosts"
        )
    if layout.ep % hosts:
        raise ConfigError(
            f"layout.dispatch_hosts = {hosts} does not divide layout.ep = {layout.ep}, and every "
            "host has equally many of these ranks: choose a divisor"
        )
    return {
        "dispatch": "all_to_all" if layout.dispatch == "auto" else layout.dispatch,
        "dispatch_hosts": hosts,
        "overlap_local": not alone and layout.overlap_local is True,
        "chunks": 1 if alone or layout.chunks == "auto" else layout.chunks,
    }  # fmt: skip


def _expert_ranks(layout: LayoutConfig) -> tuple[str, int]:
    """Return the name and number of the ranks that together hold all experts once."""
    if layout.etp == 1:
        return "layout.ep", layout.ep
    return "layout.ep * layout.etp", layout.ep * layout.etp


def _embedding_sharding(layout: LayoutConfig, ranks_per_stage: int) -> EmbeddingSharding:
    """Return how the ranks of a pipeline stage hold the embedding table."""
    if layout.embedding != "columns":
        return "whole"
    if layout.tp > 1:
        raise ConfigError(
            f'layout.embedding = "columns" with layout.tp = {layout.tp}, which already shards '
            'the vocabulary: set layout.embedding to "whole", or layout.tp to 1'
        )
    return "columns" if ranks_per_stage > 1 else "whole"


def plan_from_job(job: Job, ranks: int) -> Plan:
    """Return the complete plan of `job` on `ranks` ranks."""
    plan = plan_from_layout(job.layout, job.model, ranks)
    plan = plan.model_copy(update={"grouped_mm": job.kernels.grouped_mm})
    error = pipeline_error(plan, job, "layout.") or embedding_shard_error(plan, job, "layout.")
    if error:
        raise ConfigError(error)
    return complete_plan(plan, job)


def complete_plan(plan: Plan, job: Job) -> Plan:
    """Return `plan` with the fields that it leaves to `job` filled in."""
    return plan.model_copy(
        update={
            "stages": stage_blocks(plan, job.model), "recompute": job.train.recompute,
            "micro_batches": job.train.micro_batches,
            "prices": job.balance.prices or plan.prices,
        }
    )  # fmt: skip


def pipeline_error(plan: Plan, job: Job, table: str = "") -> str | None:
    """Return why the pipeline of `plan` cannot train `job`, with a remedy, or None.

    `table` prefixes the plan's keys in the message: "layout." for those of a job."""
    pp, schedule, micro = plan.pp, plan.schedule, job.train.micro_batches
    if pp == 1:
        return None
    if plan.stages is None and plan.num_stages > job.model.layers:
        return (
            f'{table}pp = {pp} with {table}schedule = "{schedule}" splits the model into '
            f"{plan.num_stages} stages, but model.layers = {job.model.layers}: a stage has at "
            f"least one layer, lower {table}pp"
        )
    if schedule == "1f1b" and micro < pp:
        raises = [f"raise it to {one}, or " for one in _divisors(job.train.batch) if one >= pp]
        return (
            f"train.micro_batches = {micro} is fewer than {table}pp = {pp}, but "
            f'{table}schedule = "1f1b" keeps that many in flight: {"".join(raises[:1])}set '
            f'{table}schedule = "gpipe"'
        )
    if schedule in _ROUND_SCHEDULES and not _has_equal_rounds(micro, pp):
        near = _nearest(
            micro, [one for one in _divisors(job.train.batch) if _has_equal_rounds(one, pp)]
        )
        return (
            f'train.micro_batches = {micro} with {table}schedule = "{schedule}", which '
            f"processes them in {micro} // {pp} = {micro // pp} equal rounds ({table}pp = {pp}), "
            f"but {micro // pp} does not divide {micro}: choose {keys.join_words(near)}"
        )
    if schedule == "zero-bubble" and plan.recomputes(job):
        key = "train.recompute" if plan.recompute is None or table else "recompute"
        return (
            f'{key} = true with {table}schedule = "zero-bubble", whose split '
            "backward would recompute every layer twice: change one of them"
        )
    return None


def _has_equal_rounds(micro: int, pp: int) -> bool:
    """Return True if micro-batches split into equal rounds of `pp` or somewhat more."""
    return micro % max(1, micro // pp) == 0


def _divisors(number: int) -> list[int]:
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


def _nearest(number: int, others: Sequence[int]) -> list[str]:
    """Return the largest of ascending `others` below `number`, and the smallest above, as far as
    they exist."""
    below, above = (one for one in others if one < number), [one for one in others if one > number]
    return [str(one) for one in (*list(below)[-1:], *above[:1])]


def idle_ranks(plan: Plan, job: Job) -> int:
    """Return the number of ranks that have no sample of a micro-batch of `job`."""
    size = job.train.batch // job.train.micro_batches
    return sum(not plan.sample_range(rank, size) for rank in range(plan.ranks))


def idle_ranks_warning(plan: Plan, job: Job) -> str | None:
    """Return a warning about ranks without samples, with a remedy, or None."""
    idle, batch, micro = idle_ranks(plan, job), job.train.batch, job.train.micro_batches
    if not idle:
        return None
    fewer = [
        one
        for one in _divisors(batch)
        if one < micro and batch // one >= plan.dp and _can_pipeline(plan, job, one)
    ]
    remedy = f"lower train.micro_batches to {fewer[-1]}" if fewer else "use fewer ranks"
    return (
        f"{idle} of {plan.ranks} ranks {'has' if idle == 1 else 'have'} no sample in a micro-batch "
        f"(train.batch = {batch}, train.micro_batches = {micro}): {remedy}, or raise train.batch "
        f"to {plan.dp * micro}"
    )


def _can_pipeline(plan: Plan, job: Job, micro: int) -> bool:
    train = job.train.model_copy(update={"micro_batches": micro})
    return pipeline_error(plan, job.model_copy(update={"train": train})) is None


def embedding_shard_error(plan: Plan, job: Job, table: str = "") -> str | None:
    """Return why the embedding of `job` cannot be sharded by columns as in `plan`, or None.

    `table` is as in `pipeline_error`."""
    if plan.embedding_shards == 1:
        return None
    hidden, setting = job.model.hidden, f'{table}embedding = "columns"'
    if hidden % plan.embedding_shards:
        ranks = f"{plan.embedding_shards} ranks" + " of a pipeline stage" * (plan.pp > 1)
        return (
            f"{setting} splits model.hidden = {hidden} columns over {ranks}, which do not divide "
            f'them: set {table}embedding to "whole", or use another number of ranks'
        )
    own = hidden // plan.embedding_shards
    if job.optimizer.moments == "8bit" and own % MOMENT_BLOCK:
        return (
            f'{setting} with optimizer.moments = "8bit", which has blocks of {MOMENT_BLOCK} '
            f'columns: a rank has {own} columns, set optimizer.moments to "bf16" or "full", or '
            f'{table}embedding to "whole"'
        )
    return None


def stage_blocks(plan: Plan, model: ModelConfig) -> list[list[str]]:
    """Return the block names of each stage: those of `plan`, or an even split of the layers."""
    if plan.stages is not None:
        return plan.stages
    blocks, count = block_names(model), plan.num_stages
    cuts = [1 + stage * model.layers // count for stage in range(1, count)]
    return [blocks[start:end] for start, end in zip([0, *cuts], [*cuts, len(blocks)], strict=True)]


def block_names(model: ModelConfig) -> list[str]:
    """Return the names of the blocks of `model`, in order."""
    return ["embed", *(f"layers.{index}" for index in range(model.layers)), "head"]


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
