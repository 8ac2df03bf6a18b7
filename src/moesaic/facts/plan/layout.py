"""From what a job says of its layout to a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from moesaic.base import keys
from moesaic.base.errors import ConfigError
from moesaic.facts.job import Job, LayoutConfig, ModelConfig
from moesaic.facts.job.train import MOMENT_BLOCK, Embedding
from moesaic.facts.plan.plan import MOST_RANKS, Plan

_IN_ROUNDS = ("interleaved", "zero-bubble")
"""Schedules that take micro-batches round by round."""


def lay_out(layout: LayoutConfig, model: ModelConfig, ranks: int) -> Plan:
    """The plan that `layout` means on `ranks` ranks; anything else is as the job says.

    Where it leaves open how tokens travel they do so straight, once for each expert: what is better
    depends on hosts (`policy.dispatch`).
    """
    if ranks > MOST_RANKS:
        raise ConfigError(
            f"a plan has {MOST_RANKS} ranks at most, not {ranks}: ask for fewer (--nproc)"
        )
    part = ranks // layout.pp
    replicas = part // layout.tp
    shard = max(replicas, 1) if layout.shard == "all" else layout.shard
    for key, value, what, many in (
        ("layout.pp", layout.pp, "the number of ranks", ranks),
        ("layout.tp", layout.tp, "the ranks of a part of the pipeline", part),
        (*_homes(layout), "the ranks of a part of the pipeline", part),
        ("layout.shard", shard, "the replicas", replicas),
    ):
        if many % value:
            of = "the number of ranks" if many == ranks else what
            ways = f"choose a divisor of {many}, or " if many > 1 else "set it to 1, or "
            raise ConfigError(
                f"{key} = {value} does not divide {of} ({many}): "
                f"{ways}start another number of ranks (--nproc)"
            )
    if layout.ep > 1 and model.experts % layout.ep:
        raise ConfigError(
            f"layout.ep = {layout.ep} does not divide model.experts = {model.experts}: "
            "choose a divisor of the number of experts"
        )
    return Plan(
        ranks=ranks, ep=layout.ep, shard=shard, tp=layout.tp, etp=layout.etp, pp=layout.pp,
        schedule=layout.schedule, experts=model.experts,
        embedding=_embedding(layout, part), **_travelling(layout),
    )  # fmt: skip


def _travelling(layout: LayoutConfig) -> dict[str, Any]:
    """How tokens travel to experts of other ranks, and when local ones are computed."""
    alone = layout.ep == 1  # Then no token travels, whatever is said of it: `Job.idle` tells.
    hosts = 1 if alone else layout.hosts or 1
    if hosts > 1 and layout.dispatch == "auto":
        raise ConfigError(
            f'layout.hosts = {hosts} with layout.dispatch = "auto", which finds the hosts '
            'itself: set layout.dispatch to "rows" or "visits", or leave layout.hosts out'
        )
    if layout.ep % hosts:
        raise ConfigError(
            f"layout.hosts = {hosts} does not divide layout.ep = {layout.ep}, and each host "
            "has as many of those ranks: choose a divisor"
        )
    return {
        "dispatch": "rows" if layout.dispatch == "auto" else layout.dispatch, "hosts": hosts,
        "local": "along" if alone or layout.local == "auto" else layout.local,
        "chunks": 1 if alone or layout.chunks == "auto" else layout.chunks,
    }  # fmt: skip


def _homes(layout: LayoutConfig) -> tuple[str, int]:
    """Ranks that between them hold all experts once, and what the job calls their number."""
    if layout.etp == 1:
        return "layout.ep", layout.ep
    return "layout.ep * layout.etp", layout.ep * layout.etp


def _embedding(layout: LayoutConfig, part: int) -> Embedding:
    """What of the table each of the `part` ranks of a part has; one has all columns."""
    if layout.embedding != "columns":
        return "whole"
    if layout.tp > 1:
        raise ConfigError(
            f'layout.embedding = "columns" with layout.tp = {layout.tp}, whose slices share out '
            'the words of the table already: set layout.embedding to "whole", or layout.tp to 1'
        )
    return "columns" if part > 1 else "whole"


def planned(job: Job, ranks: int) -> Plan:
    """The plan that `job` itself means on `ranks` ranks, with nothing left to the job."""
    plan = lay_out(job.layout, job.model, ranks)
    plan = plan.model_copy(update={"grouped_mm": job.kernels.grouped_mm})
    fault = pipeline_fault(plan, job, "layout.") or columns_fault(plan, job, "layout.")
    if fault:
        raise ConfigError(fault)
    return completed(plan, job)


def completed(plan: Plan, job: Job) -> Plan:
    """`plan` with what it leaves to `job`, which it rules."""
    return plan.model_copy(
        update={
            "stages": stages(plan, job.model), "recompute": job.train.recompute,
            "micro_batches": job.train.micro_batches,
            "prices": job.balance.prices or plan.prices,
        }
    )  # fmt: skip


def pipeline_fault(plan: Plan, job: Job, table: str = "") -> str | None:
    """What keeps the pipeline of `plan` from training `job`, and the remedy; its keys are of a
    job's `table`, or of a plan."""
    pp, schedule, micro = plan.pp, plan.schedule, job.train.micro_batches
    if pp == 1:
        return None
    if plan.stages is None and plan.num_stages > job.model.layers:
        return (
            f'{table}pp = {pp} with {table}schedule = "{schedule}" cuts the model into '
            f"{plan.num_stages} stages, and model.layers = {job.model.layers}: a stage has one "
            f"layer at least, lower {table}pp"
        )
    if schedule == "1f1b" and micro < pp:
        enough = [f"raise it to {one}, or " for one in _divisors(job.train.batch) if one >= pp]
        return (
            f"train.micro_batches = {micro} is fewer than {table}pp = {pp}, and the parts of "
            f'schedule "1f1b" work on as many at a time: {"".join(enough[:1])}set '
            f'{table}schedule = "gpipe"'
        )
    if schedule in _IN_ROUNDS and not _even(micro, pp):
        near = _nearest(micro, [one for one in _divisors(job.train.batch) if _even(one, pp)])
        return (
            f'train.micro_batches = {micro} with {table}schedule = "{schedule}", which takes them '
            f"in {micro} // {pp} = {micro // pp} equal rounds ({table}pp = {pp}), and "
            f"{micro // pp} does not divide {micro}: choose {keys.listed(near)}"
        )
    recompute = job.train.recompute if plan.recompute is None else plan.recompute
    if schedule == "zero-bubble" and recompute:
        key = "train.recompute" if plan.recompute is None or table else "recompute"
        return (
            f'{key} = true with {table}schedule = "zero-bubble", whose backward comes in '
            "pieces that would each compute a layer again: set one of them otherwise"
        )
    return None


def _even(micro: int, pp: int) -> bool:
    """Whether so many micro-batches come in equal rounds, each of `pp` of them or somewhat more."""
    return micro % max(1, micro // pp) == 0


def _divisors(number: int) -> list[int]:
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


def _nearest(number: int, others: Sequence[int]) -> list[str]:
    """The largest of ascending `others` below `number`, and the smallest above, if there are."""
    below, above = (one for one in others if one < number), [one for one in others if one > number]
    return [str(one) for one in (*list(below)[-1:], *above[:1])]


def idle_ranks(plan: Plan, job: Job) -> int:
    """Ranks of `plan` that have no sample of a micro-batch of `job`."""
    size = job.train.batch // job.train.micro_batches
    return sum(not plan.rows(rank, size) for rank in range(plan.ranks))


def idle_words(plan: Plan, job: Job) -> str | None:
    """What a person should know of ranks that have no sample, and the remedy; None: all have."""
    idle, batch, micro = idle_ranks(plan, job), job.train.batch, job.train.micro_batches
    if not idle:
        return None
    fewer = [
        one
        for one in _divisors(batch)
        if one < micro and batch // one >= plan.replicas and _can_pipe(plan, job, one)
    ]
    lower = f"lower train.micro_batches to {fewer[-1]}" if fewer else "take fewer ranks"
    return (
        f"{idle} of {plan.ranks} ranks {'has' if idle == 1 else 'have'} no sample in a micro-batch "
        f"(train.batch = {batch}, train.micro_batches = {micro}): {lower}, or raise train.batch to "
        f"{plan.replicas * micro}"
    )


def _can_pipe(plan: Plan, job: Job, micro: int) -> bool:
    train = job.train.model_copy(update={"micro_batches": micro})
    return pipeline_fault(plan, job.model_copy(update={"train": train})) is None


def columns_fault(plan: Plan, job: Job, table: str = "") -> str | None:
    """What keeps ranks from sharing out the columns of the embedding of `job`, if `plan` asks for
    that, and the remedy; keys as above."""
    if plan.columns == 1:
        return None
    hidden, said = job.model.hidden, f'{table}embedding = "columns"'
    if hidden % plan.columns:
        of = f"{plan.columns} ranks" + " of a part of the pipeline" * (plan.pp > 1)
        return (
            f"{said} shares out model.hidden = {hidden} columns over {of}, which do not divide "
            f'them: set {table}embedding to "whole", or take another number of ranks'
        )
    own = hidden // plan.columns
    if job.optimizer.moments == "8bit" and own % MOMENT_BLOCK:
        return (
            f'{said} with optimizer.moments = "8bit", which has blocks of {MOMENT_BLOCK} columns: '
            f'a rank has {own} columns, set optimizer.moments to "bf16" or "full", or '
            f'{table}embedding to "whole"'
        )
    return None


def stages(plan: Plan, model: ModelConfig) -> list[list[str]]:
    """Names of the blocks of each stage: those of `plan`, or as many layers in each as go."""
    if plan.stages is not None:
        return plan.stages
    blocks, count = block_names(model), plan.num_stages
    cuts = [1 + stage * model.layers // count for stage in range(1, count)]
    return [blocks[start:end] for start, end in zip([0, *cuts], [*cuts, len(blocks)], strict=True)]


def block_names(model: ModelConfig) -> list[str]:
    """The named blocks of `model`, in order."""
    return ["embed", *(f"layers.{index}" for index in range(model.layers)), "head"]


def travel_words(dispatch: str, hosts: int, ep: int, chunks: int = 1, local: str = "along") -> str:
    """How tokens travel between `ep` ranks on so many hosts."""
    several, how = 1 < hosts < ep, f" in {chunks} parts" * (chunks > 1)
    how += " while local ones are computed" * (local == "first")
    if dispatch == "rows":
        return "once to each expert" + f" by way of {hosts} hosts" * several + how
    return f"once to each {f'of {hosts} hosts' if several else 'rank'}{how}"


def in_words(plan: Plan) -> str:
    """A plan as a person reads it."""
    if plan.ranks == 1:
        return "1 rank holds everything"
    parts = [f"{plan.ranks} ranks"]
    if plan.pp > 1:
        parts.append(f"layers over {plan.pp} parts, {plan.schedule}")
    if plan.experts:
        parts.append(f"experts over {plan.ep}" if plan.ep > 1 else "experts on every rank")
    if plan.ep > 1:
        ways = plan.dispatch, plan.hosts, plan.ep, plan.chunks, plan.local
        parts.append(f"tokens {travel_words(*ways)}")
    if plan.tp > 1:
        parts.append(f"matrices in {plan.tp} slices")
    if plan.etp > 1:
        parts.append(f"those of experts in {plan.etp}")
    if plan.columns > 1:
        parts.append(f"the embedding's columns over {plan.columns}")
    parts.append(f"dense over {plan.shard}" if plan.shard > 1 else "dense parameters on every rank")
    return ", ".join(parts)
