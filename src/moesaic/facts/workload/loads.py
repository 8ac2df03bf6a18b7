"""How many rows each expert gets from each rank, where routing is even or a load was recorded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moesaic.base.errors import ConfigError
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan

Counts = NDArray[np.int64]


def expert_counts(job: Job, plan: Plan, load: ArrayLike | None) -> Counts:
    """Assignments [ranks, experts] of one layer over one global micro-batch.

    Args:
        job: the job.
        plan: which rank has which samples.
        load: assignments by expert, or by rank and expert; None: experts in turn, nothing dropped.
    """
    size = job.train.batch // job.train.micro_batches
    ends = np.array([plan.rows(rank, size).stop for rank in range(plan.ranks)], np.int64)
    experts = np.arange(plan.experts)
    if load is None:
        reached = ends[:, None] * job.data.sequence * job.model.top_k
        return _between((reached + plan.experts - 1 - experts) // plan.experts)
    given = np.asarray(load, np.int64)
    if given.shape == (plan.experts,):
        return _between(given * ends[:, None] // size)
    if given.shape == (plan.ranks, plan.experts):
        return given
    raise ConfigError(
        f"a load of shape {given.shape} does not fit {plan.experts} experts on {plan.ranks} ranks: "
        f"give assignments by expert [{plan.experts}], or [{plan.ranks}, {plan.experts}]"
    )


def _between(reached: Counts) -> Counts:
    """What each rank adds to what was reached before it."""
    return np.diff(reached, axis=0, prepend=0)


def slots_of(counts: Counts, plan: Plan, rank: int, group: Sequence[int]) -> list[int]:
    """Rows of each of the slots of `rank`."""
    rows: list[int] = counts[list(group)].sum(axis=0)[list(plan.homes(rank))].tolist()
    return rows


def traffic(counts: Counts, plan: Plan, rank: int, group: Sequence[int]) -> tuple[list[int], ...]:
    """Rows from `rank` to each of `group`, and to `rank` from each."""
    by_home = counts[list(group)][:, plan.slots()].reshape(len(group), len(group), -1).sum(axis=2)
    me = list(group).index(rank)
    return by_home[me].tolist(), by_home[:, me].tolist()
