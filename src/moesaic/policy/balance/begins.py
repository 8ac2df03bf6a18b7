"""Whether a policy is to be asked at all, and why not."""

from __future__ import annotations

from moesaic.facts.job import Job
from moesaic.facts.plan import Plan

_WORTH_WHILE = 4
"""Times the least rows of a copy that a rank has of a layer, on average, for `auto` to begin."""


def balances(job: Job, plan: Plan) -> bool:
    """Whether anything is to be balanced."""
    return _may_balance(job, plan) and stands_aside(job, plan) is None


def stands_aside(job: Job, plan: Plan) -> str | None:
    """Why nobody is asked though experts are shared out, for a person: experts that have adapters
    have no copies, nobody decides on copies that there is no room for, and a policy that may choose
    leaves alone where there is little to do."""
    if not _may_balance(job, plan):
        return None
    finetune, train = job.finetune, job.train
    if finetune is not None and finetune.method == "lora" and "experts" in finetune.targets:
        return "experts have adapters, which have no copies"
    if not job.balance.copies_are_made:
        return "for there is no room for any (balance.copies = 0)"
    tokens = train.batch // train.micro_batches * job.data.sequence
    rows = tokens * job.model.top_k * plan.etp // plan.span
    least = _WORTH_WHILE * job.balance.least_rows
    if job.balance.policy == "auto" and rows < least:
        return f"a rank has {rows:,} rows of a layer at a time, and copies may pay from {least:,}"
    return None


def _may_balance(job: Job, plan: Plan) -> bool:
    return job.balance.policy != "none" and plan.ep > 1 and bool(job.model.experts)
