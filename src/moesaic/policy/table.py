"""What of the embedding's table ranks may have."""

from __future__ import annotations

from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, columns_fault


def tables(plan: Plan, job: Job) -> list[Plan]:
    """`plan` with the whole table on every rank, and with its columns shared out, if that goes."""
    whole, columns = (plan.model_copy(update={"embedding": how}) for how in ("whole", "columns"))
    if plan.tp > 1 or plan.span == 1 or columns_fault(columns, job) is not None:
        return [whole]
    return [whole, columns]
