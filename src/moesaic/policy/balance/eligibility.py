"""Conditions under which a balance policy runs."""

from __future__ import annotations

from moesaic.facts.job import Job
from moesaic.facts.plan import Plan

_MIN_LOAD_FACTOR = 4
"""Smallest load at which `quota` runs: mean routed tokens per rank and layer, in multiples of
`min_replica_tokens`."""


def should_balance(job: Job, plan: Plan) -> bool:
    """Return whether a balance policy runs."""
    return _can_balance(job, plan) and reason_not_to_balance(job, plan) is None


def reason_not_to_balance(job: Job, plan: Plan) -> str | None:
    """Return why no policy runs though experts are sharded, or None if one runs.

    Experts with adapters cannot be replicated, and `max_replicas` may be 0. quota also skips small
    loads, for which deciding costs more than replicas gain.
    """
    if not _can_balance(job, plan):
        return None
    finetune, train = job.finetune, job.train
    if finetune is not None and finetune.method == "lora" and "experts" in finetune.targets:
        return "LoRA adapters of experts cannot be replicated"
    if job.is_by_block:
        return "all micro-batches pass through one block before the next"
    if not job.balance.uses_replicas:
        return "balance.max_replicas = 0 leaves no room for replicas"
    tokens = train.batch // train.micro_batches * job.data.sequence
    load = tokens * job.model.top_k * plan.etp // plan.ranks_per_stage
    min_load = _MIN_LOAD_FACTOR * job.balance.min_replica_tokens
    if job.balance.policy == "quota" and load < min_load:
        return f"a rank has {load:,} routed tokens per layer; replicas pay off from {min_load:,}"
    return None


def _can_balance(job: Job, plan: Plan) -> bool:
    return job.balance.policy != "none" and plan.ep > 1 and bool(job.model.experts)
