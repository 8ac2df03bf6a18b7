"""Missing memory of a job that no plan fits, and the single change that helps most."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from moesaic.facts.cluster import Cluster
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.plan.search import Change, RankNeed, SearchFacts, Settings, Shortfall
from moesaic.policy.plan.mapping import max_ranks
from moesaic.policy.plan.space import Candidate
from moesaic.policy.plan.trials import Trials

_MAX_SHAPES = 24
"""Shapes whose memory is computed, those with the least state first."""
_MAX_TRIED = 4
"""Plans that are simulated after each change."""
_MIN_SEQUENCE = 16
_MAX_RANK_FACTOR = 64


class LeastMemory(NamedTuple):
    """Plan with the smallest fraction of memory in use."""

    memory: RankNeed
    settings: Settings
    plan: Plan


Search = Callable[[SearchFacts], Trials]
"""Search with limits; whether something fits, its trials tell."""


def shortfall(facts: SearchFacts, trials: Trials, search: Search) -> Shortfall | None:
    """Return what is short in the plan that comes nearest, and the single changes that help.

    Changes that leave a run's numbers alone come first, then those of micro-batches, of the batch,
    of the sequence, and more devices.
    """
    nearest = least_memory(trials)
    if nearest is None:
        return None
    fitting, nearer = list[Change](), list[Change]()
    for changed_key, options in _changes(facts):
        best: Change | None = None
        for value, changed in options:
            found = _after(changed_key, value, search(changed))
            if found is not None and (
                best is None or found.memory.used_fraction < best.memory.used_fraction
            ):
                best = found
            if found is not None and found.fits:
                break
        if best is not None and best.fits:
            fitting.append(best)
        elif best is not None and best.memory.used_fraction < nearest.memory.used_fraction:
            nearer.append(best)
    nearer.sort(key=lambda one: one.memory.used_fraction)
    helping = [*fitting, *nearer]
    return Shortfall(
        memory=nearest.memory, settings=nearest.settings, plan=nearest.plan,
        change=helping[0] if helping else None, others=helping[1:],
    )  # fmt: skip


def least_memory(trials: Trials) -> LeastMemory | None:
    """Return the plan of a space with the smallest fraction of memory in use, or None.

    In a large space only the shapes with the least state are tried.
    """
    space = trials.space
    shapes = heapq.nsmallest(_MAX_SHAPES, space.shapes(), key=trials.bounds.state_fraction)
    found: LeastMemory | None = None
    for shape in shapes:
        for leaf in _frugal(trials, shape):
            made = trials.plan(leaf)
            if made is None:
                continue
            memory = trials.estimates.memory(*made)
            if found is None or memory.used_fraction < found.memory.used_fraction:
                found = LeastMemory(memory, leaf.settings(), made[1])
    return found


def _frugal(trials: Trials, shape: Candidate) -> Iterator[Candidate]:
    """Yield complete candidates of a shape that may need least memory."""
    space = trials.space
    plain = [one for one in space.children(shape, 0) if not one.overlaps_dispatch]
    for dispatched in plain or space.children(shape, 0)[:1]:
        shards = space.children(dispatched, 1)
        for sharded in {shards[0]: None, shards[-1]: None} if shards else {}:
            yield from space.leaves(sharded, 2)


def _after(key: str, value: Any, trials: Trials) -> Change | None:
    """Return a change with the best plan that a search found after it; None without plans."""
    if trials.found:
        best = min(trials.found, key=lambda one: one.estimate.step_s)
        chosen = best.settings[key] if value is None else value
        return Change(key=key, value=chosen, fits=True, memory=best.memory, plan=best.plan)
    found = least_memory(trials)
    if found is None:
        return None
    chosen = found.settings[key] if value is None else value
    return Change(
        key=key, value=chosen, fits=found.memory.used_fraction <= 1, memory=found.memory,
        plan=found.plan,
    )  # fmt: skip


def _changes(facts: SearchFacts) -> Iterator[tuple[str, Iterator[tuple[Any, SearchFacts]]]]:
    """Yield keys with the values to try, in order, and the facts after each; None: search it."""
    limited = facts.model_copy(
        update={"method": "best-first", "max_tried": _MAX_TRIED, "seeds": [], "limit_s": None}
    )
    for key in facts.pins:
        if key != "train.micro_batches":
            others = [one for one in facts.pins if one != key]
            yield key, iter([(None, limited.model_copy(update={"pins": others}))])
    yield "train.micro_batches", _micro_batches(limited)
    yield "train.batch", _batches(limited)
    yield "data.sequence", _sequences(limited)
    yield "nproc", _more_devices(limited)


def _micro_batches(facts: SearchFacts) -> Iterator[tuple[Any, SearchFacts]]:
    train = facts.job.train
    number = 2 * train.micro_batches
    while "train.micro_batches" in facts.pins and number <= train.batch:
        if train.batch % number == 0:
            yield number, _with_job(facts, "train", {"micro_batches": number})
        number *= 2


def _batches(facts: SearchFacts) -> Iterator[tuple[Any, SearchFacts]]:
    train, batch = facts.job.train, facts.job.train.batch
    while batch % 2 == 0 and batch // 2 >= train.micro_batches:
        batch //= 2
        if batch % train.micro_batches == 0:
            yield batch, _with_job(facts, "train", {"batch": batch})


def _sequences(facts: SearchFacts) -> Iterator[tuple[Any, SearchFacts]]:
    sequence = facts.job.data.sequence
    while sequence % 2 == 0 and sequence // 2 >= _MIN_SEQUENCE:
        sequence //= 2
        yield sequence, _with_job(facts, "data", {"sequence": sequence})


def _with_job(facts: SearchFacts, table: str, values: Settings) -> SearchFacts:
    section = getattr(facts.job, table).model_copy(update=values)
    job: Job = facts.job.model_copy(update={table: section})
    return facts.model_copy(update={"job": job})


def _more_devices(facts: SearchFacts) -> Iterator[tuple[Any, SearchFacts]]:
    """Yield twice the ranks, four times, and so on, on more hosts like the last one if needed."""
    ranks, cluster = facts.ranks, facts.cluster
    while ranks < _MAX_RANK_FACTOR * facts.ranks:
        ranks *= 2
        while max_ranks(cluster) < ranks:
            larger = _with_another_host(cluster)
            if larger is None:
                return
            cluster = larger
        yield ranks, facts.model_copy(update={"ranks": ranks, "cluster": cluster})


def _with_another_host(cluster: Cluster) -> Cluster | None:
    """Return the cluster with another host like the last; None if no link would join it."""
    last, number = cluster.hosts[-1], len(cluster.hosts)
    if not any(link.ends == ["*", "*"] for link in cluster.links):
        return None
    host = last.model_copy(update={"name": f"{last.name}-more-{number}"})
    inside = [
        link.model_copy(update={"ends": [host.name, host.name]})
        for link in cluster.links
        if link.ends == [last.name, last.name]
    ]
    return cluster.model_copy(
        update={"hosts": [*cluster.hosts, host], "links": [*cluster.links, *inside]}
    )
