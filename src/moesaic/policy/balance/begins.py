"""Whether a policy is to be asked at all, and why not."""

from __future__ import annotations

from moesaic.facts.job import Job
from moesaic.facts.plan import Plan

_WORTH_WHILE = 4
"""Times the least rows of a copy that a rank has of a layer, on average, for `quota` to begin."""


def balances(job: Job, plan: Plan) -> bool:
    """Whether anything is to be balanced."""
    return _may_balance(job, plan) and stands_aside(job, plan) is None


def stands_aside(job: Job, plan: Plan) -> str | None:
    """Return why a policy is not asked though experts are sharded; None: it is asked.

    Experts with adapters have no copies; nothing is decided where there is no room for copies; and
    quota leaves ranks with few rows alone, where deciding costs more than copies gain."""
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
    if job.balance.policy == "quota" and rows < least:
        return f"a rank has {rows:,} rows of a layer at a time, and copies may pay from {least:,}"
    return None


def _may_balance(job: Job, plan: Plan) -> bool:
    return job.balance.policy != "none" and plan.ep > 1 and bool(job.model.experts)
