"""Candidate layouts of the embedding table."""

from __future__ import annotations

from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, embedding_shard_error


def embedding_layouts(plan: Plan, job: Job) -> list[Plan]:
    """Return `plan` with a replicated table, and with a column-sharded one if that is possible."""
    whole, columns = (plan.model_copy(update={"embedding": how}) for how in ("whole", "columns"))
    if plan.tp > 1 or plan.ranks_per_stage == 1 or embedding_shard_error(columns, job) is not None:
        return [whole]
    return [whole, columns]
