"""What would make a job fit: one change after another, each the one that helps most."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from moesaic.base.errors import ConfigError
from moesaic.facts.cluster import Cluster, Place
from moesaic.facts.job import Job
from moesaic.facts.plan import planned
from moesaic.policy.cost.room import Held, tightest

_MOST = 5
"""Changes that are made to one job."""
_ENOUGH = 0.99
"""What is needed afterwards of what was, or less, for a change to be worth its words."""

Change = dict[str, Any]
"""New values by key."""


class Relief(NamedTuple):
    """A changed job."""

    changes: Change
    held: Held


def relief(job: Job, ranks: int, cluster: Cluster, places: list[Place], held: Held) -> Relief:
    """The best that is found; it does not change anything where nothing helps, and may not fit.

    Args:
        job: the job that does not fit.
        ranks: how many it has.
        cluster: where those are.
        places: of each rank.
        held: what the rank needs that has the least room.
    """
    best = Relief({}, held)
    for _ in range(_MOST):
        found = list[tuple[float, int, Change, Held]]()
        for changes in _changes(job, ranks):
            changed = _changed(job, changes)
            try:
                plan = planned(changed, ranks)
            except ConfigError:
                continue
            if changed.uncut(plan.tp, plan.etp) is None:
                needs = tightest(changed, plan, cluster, places)
                found.append((needs.share, len(found), changes, needs))
        if not found:
            break
        share, _, changes, needs = min(found)
        if share > _ENOUGH * best.held.share:
            break
        job, best = _changed(job, changes), Relief({**best.changes, **changes}, needs)
        if share <= 1:
            break
    return best


def _changes(job: Job, ranks: int) -> Iterator[Change]:
    """Steps that can be taken from here; some are impossible."""
    layout, train = job.layout, job.train
    if not train.recompute:
        yield {"train.recompute": True}
    if train.batch % (2 * train.micro_batches) == 0:
        yield {"train.micro_batches": 2 * train.micro_batches}
    if layout.shard != "all":
        yield {"layout.shard": "all"}
    for table in ("whole", "columns"):
        if layout.embedding != table:
            yield {"layout.embedding": table}
    if 2 * layout.ep <= job.model.experts:
        yield {"layout.ep": 2 * layout.ep}
    if 2 * layout.pp <= ranks:
        yield {"layout.pp": 2 * layout.pp}
    if 2 * layout.tp <= ranks:
        yield {"layout.tp": 2 * layout.tp}
        if job.model.experts:
            yield {"layout.tp": 2 * layout.tp, "layout.etp": 2 * layout.etp}


def _changed(job: Job, changes: Change) -> Job:
    tables: dict[str, Change] = {}
    for key, value in changes.items():
        table, _, name = key.partition(".")
        tables.setdefault(table, {})[name] = value
    return job.model_copy(
        update={
            table: getattr(job, table).model_copy(update=values) for table, values in tables.items()
        }
    )
