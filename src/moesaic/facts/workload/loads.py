"""How many rows each expert gets from each rank, where routing is even or a load was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moesaic.base.errors import ConfigError
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan

Counts = NDArray[np.int64]


def expert_counts(job: Job, plan: Plan, load: ArrayLike | None) -> Counts:
    """Assignments [ranks, experts] of one layer over one global micro-batch, none dropped.

    In a pipeline the ranks are those of the part that has the layer, by their place in it; slices
    of the same experts are one, as their tokens are joined.

    Args:
        job: the job.
        plan: which rank has which samples, and which run of their tokens.
        load: by expert, how its share of assignments compares to others': tokens of all ranks
            spread alike, and the job says how many there are. By rank and expert: assignments as
            they are. None: even.
    """
    given = np.ones(plan.experts, np.int64) if load is None else np.asarray(load)
    places = plan.span // plan.etp
    if given.shape == (places, plan.experts):
        return given.astype(np.int64)
    if given.shape != (plan.experts,):
        raise ConfigError(
            f"a load of shape {given.shape} does not fit {plan.experts} experts on {places} "
            f"ranks: give it by expert [{plan.experts}], or [{places}, {plan.experts}]"
        )
    if not (given.sum() > 0 and given.min() >= 0):
        raise ConfigError("a load of no assignments, or of less than none: give some above 0")
    size = job.train.batch // job.train.micro_batches
    last = range(plan.etp - 1, plan.span, plan.etp)
    ends = np.array([_end(plan, rank, size, job.data.sequence) for rank in last])
    reached = _shared_out(ends * job.model.top_k, given.astype(np.float64))
    counts: Counts = np.diff(reached, axis=0, prepend=0)
    return counts


def _end(plan: Plan, rank: int, batch: int, sequence: int) -> int:
    """Where the tokens of `rank` end among those of `batch` samples, one after another."""
    rows = plan.rows(rank, batch)
    return sequence * rows.start + (rank % plan.tp + 1) * len(rows) * sequence // plan.tp


def _shared_out(totals: NDArray[np.int64], weights: NDArray[np.float64]) -> Counts:
    """Each of `totals` shared out in whole numbers by `weights`; a larger total takes from nobody.

    This is the method of Sainte-Lague: who gets the next one is who has the least for its weight.
    Of equals it is the first, so that equal weights are served in turn.
    """
    taken = weights > 0
    held: Counts = np.floor(totals[:, None] / weights.sum() * weights + 0.5).astype(np.int64)
    over = held.sum(axis=1) - totals
    with np.errstate(divide="ignore"):
        while over.any():
            more, less = np.flatnonzero(over < 0), np.flatnonzero(over > 0)
            next_one = np.where(taken, (2 * held[more] + 1) / weights, np.inf)
            held[more, next_one.argmin(axis=1)] += 1
            last_one = np.where(taken, (2 * held[less] - 1) / weights, -np.inf)
            held[less, last_one.shape[1] - 1 - last_one[:, ::-1].argmax(axis=1)] -= 1
            over = held.sum(axis=1) - totals
    return held


def slots_of(counts: Counts, plan: Plan, rank: int, group: Sequence[int]) -> list[int]:
    """Rows of each of the slots of `rank`, from all of `group`."""
    arriving = counts[_places(plan, group)].sum(axis=0)
    rows: list[int] = arriving[list(plan.homes(rank))].tolist()
    return rows


def leaving(counts: Counts, plan: Plan, rank: int) -> int:
    """Assignments of the tokens that go to experts from `rank`."""
    return int(counts[_places(plan, [rank])].sum())


def _places(plan: Plan, group: Sequence[int]) -> list[int]:
    """Of ranks in their part of the pipeline; those that have the same experts are one."""
    return [rank % plan.span // plan.etp for rank in group]


class Routed(NamedTuple):
    """Rows of one rank in one expert layer."""

    leaving: int
    """Assignments of the tokens that go to experts from it."""
    slots: list[int]
    """Rows that arrive at each of its slots."""
    travels: bool
    """Whether some may come from other ranks."""


def routed(job: Job, plan: Plan, rank: int, loads: Sequence[ArrayLike] | None) -> list[Routed]:
    """Rows of `rank` in each expert layer; `loads` as `expert_counts` takes each, None: even."""
    group = next(group for group in plan.expert_groups() if rank in group)

    def rows(load: ArrayLike | None) -> Routed:
        counts = expert_counts(job, plan, load)
        slots = slots_of(counts, plan, rank, group)
        return Routed(leaving(counts, plan, rank), slots, plan.ep > 1)

    if loads is None:
        return [rows(None)] * len(job.model.expert_layers)
    return [rows(load) for load in loads]


def traffic(counts: Counts, plan: Plan, rank: int, group: Sequence[int]) -> tuple[list[int], ...]:
    """Rows from `rank` to each of `group`, and to `rank` from each."""
    rows = counts[_places(plan, group)][:, plan.slots()]
    by_home = rows.reshape(len(group), len(group), -1).sum(axis=2)
    me = list(group).index(rank)
    return by_home[me].tolist(), by_home[:, me].tolist()
