"""Advice for jobs that do not fit in memory: a greedy search over single changes of the job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from moesaic.base.errors import ConfigError
from moesaic.facts.cluster import Cluster
from moesaic.facts.job import Job
from moesaic.facts.plan import plan_from_job
from moesaic.policy.cost.memory import RankMemory, tightest_rank
from moesaic.policy.cost.step import JobCosts

_MAX_CHANGES = 5
"""Changes made to one job, at most."""
_MAX_REMAINING_FRACTION = 0.99
"""Largest ratio of new to old memory use at which a change is still suggested."""

Changes = dict[str, Any]
"""New values by key, such as "layout.ep"."""


class MemoryAdvice(NamedTuple):
    """Suggested changes, and the memory of the tightest rank after them."""

    changes: Changes
    memory: RankMemory


def suggest_memory_changes(
    job: Job, num_ranks: int, cluster: Cluster, rank_memory: RankMemory
) -> MemoryAdvice:
    """Return the changes that reduce memory use most; the job may still not fit afterwards.

    The changes are empty if none of them helps.

    Args:
        job: the job that does not fit.
        num_ranks: number of ranks.
        cluster: the cluster of these ranks.
        rank_memory: memory of the tightest rank of the unchanged job.
    """
    best = MemoryAdvice({}, rank_memory)
    for _ in range(_MAX_CHANGES):
        candidates = list[tuple[float, int, Changes, RankMemory]]()
        for changes in _candidate_changes(job, num_ranks):
            changed = _apply_changes(job, changes)
            try:
                plan = plan_from_job(changed, num_ranks)
            except ConfigError:
                continue
            needed = tightest_rank(JobCosts.from_job(changed, plan, cluster))
            candidates.append((needed.used_fraction, len(candidates), changes, needed))
        if not candidates:
            break
        used_fraction, _, changes, needed = min(candidates)
        if used_fraction > _MAX_REMAINING_FRACTION * best.memory.used_fraction:
            break
        job, best = _apply_changes(job, changes), MemoryAdvice({**best.changes, **changes}, needed)
        if used_fraction <= 1:
            break
    return best


def _candidate_changes(job: Job, num_ranks: int) -> Iterator[Changes]:
    """Yield changes to try next; some of them are invalid."""
    layout, train = job.layout, job.train
    if not train.recompute:
        yield {"train.recompute": True}
    if train.batch % (2 * train.micro_batches) == 0:
        yield {"train.micro_batches": 2 * train.micro_batches}
    if layout.dp_shard != "all":
        yield {"layout.dp_shard": "all"}
    for table in ("whole", "columns"):
        if layout.embedding != table:
            yield {"layout.embedding": table}
    if 2 * layout.ep <= job.model.experts:
        yield {"layout.ep": 2 * layout.ep}
    if 2 * layout.pp <= num_ranks:
        yield {"layout.pp": 2 * layout.pp}
    if 2 * layout.tp <= num_ranks:
        yield {"layout.tp": 2 * layout.tp}
        if job.model.experts:
            yield {"layout.tp": 2 * layout.tp, "layout.etp": 2 * layout.etp}


def _apply_changes(job: Job, changes: Changes) -> Job:
    sections: dict[str, Changes] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return job.model_copy(
        update={
            section: getattr(job, section).model_copy(update=values)
            for section, values in sections.items()
        }
    )
