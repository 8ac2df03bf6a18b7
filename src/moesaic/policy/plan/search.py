"""Search for the fastest plan that fits, over the keys that a job leaves open.

The engine asks through `decide`:

    policy = partial(search_plans, estimates=SimulatedEstimates.from_facts(facts))
    result = decide(policy, facts, log)

The search is best first: a queue of partly decided candidates by their lower bound. A complete
candidate is simulated. When the least bound in the queue reaches the fastest plan, that plan is
proven to be the best of the space.
"""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

from moesaic.facts.cluster import Cluster
from moesaic.facts.job import Job
from moesaic.facts.plan.search import RankNeed, SearchFacts, SearchResult, written_keys
from moesaic.policy.plan import search_methods
from moesaic.policy.plan.cuts_milp import check_scipy
from moesaic.policy.plan.estimates import Estimates
from moesaic.policy.plan.mapping import hosts_without_speed, max_ranks, only_hosts
from moesaic.policy.plan.remedy import shortfall
from moesaic.policy.plan.space import Candidate, Space
from moesaic.policy.plan.trials import Trials
from moesaic.policy.plan.work import Work

_MAX_FAILS = 4
"""Plans in a row that are no faster, before the search turns from likely plans to all of them."""
_MAX_DISPATCHES = 6
"""Dispatch methods of a usual layout that are tried, at most."""
_USUAL_WORK, _SHAPES_WORK = 0.3, 0.6
"""Fractions of the limit of work after which usual layouts, and bounds of shapes, must end."""
_DIVE_WORK = 0.7
"""Fraction of the limit of work after which no more likely plans are tried."""
_EXPLAIN_WORK = 0.5
"""Fraction of the limit of work to find what helps if nothing fits."""


def search_facts(
    job: Job,
    cluster: Cluster,
    num_ranks: int | None = None,
    *,
    opens_micro_batches: bool = False,
) -> SearchFacts:
    """Return the facts of a search that pins what `job` writes.

    Use `facts.model_copy(update=...)` for a method, limits or loads.

    Args:
        job: the job, as parsed from its file: it knows which keys the file has.
        cluster: the cluster.
        num_ranks: world size; None: all that the cluster has room for.
        opens_micro_batches: whether the file says `train.micro_batches = "auto"`.
    """
    pins = written_keys(job)
    if opens_micro_batches:
        pins.remove("train.micro_batches")
    usable, left_out = _usable_hosts(job, cluster, num_ranks)
    ranks = num_ranks or max_ranks(usable)
    return SearchFacts(job=job, cluster=usable, ranks=ranks, pins=pins, left_out=left_out)


def _usable_hosts(job: Job, cluster: Cluster, num_ranks: int | None) -> tuple[Cluster, list[str]]:
    """Return the hosts that compute in the precision of `job`, and the names of the others; all
    hosts if the ranks need them."""
    left_out = hosts_without_speed(cluster, job.train.precision)
    hosts = [host for host in cluster.hosts if host.name not in left_out]
    if not hosts:
        return cluster, []
    usable = only_hosts(cluster, hosts)
    return (usable, left_out) if max_ranks(usable) >= (num_ranks or 1) else (cluster, [])


def search_plans(facts: SearchFacts, estimates: Estimates) -> SearchResult:
    """Return the fastest plan that `facts.method` finds, or what is short if none fits.

    The same facts give the same result on every machine.
    """
    if facts.method == "milp":
        check_scipy()
    trials, is_proven, bound_s = _run(facts, estimates)
    result = trials.result(is_proven=is_proven, bound_s=bound_s)
    explains = facts.explains_shortfall and trials.space.has_plans
    if result.best is not None or not explains:
        return result

    def search(changed: SearchFacts, work: Work) -> RankNeed | None:
        limit = None if facts.max_work is None else max(int(work.left), 1)
        own = changed.model_copy(update={"max_work": limit})
        found, is_proven, bound_s = _run(own, estimates.on_cluster(changed.cluster))
        work.add(found.work.done)
        best = found.result(is_proven=is_proven, bound_s=bound_s).best
        return None if best is None else best.memory

    limit = None if facts.max_work is None else _EXPLAIN_WORK * facts.max_work
    short = shortfall(facts, estimates, search, Work(limit))
    if short is not None and not short.memory.short_bytes:  # The method had not tried that plan.
        trials.try_plan(short.plan)
        return trials.result(is_proven=False, bound_s=bound_s)
    return result.model_copy(update={"shortfall": short})


def _run(facts: SearchFacts, estimates: Estimates) -> tuple[Trials, bool, float | None]:
    """Return the trials of a search, whether its best plan is proven, and a bound for all plans."""
    trials = Trials(facts, estimates)
    for plan in facts.seeds:
        trials.try_plan(plan)
    if facts.method in ("best-first", "milp"):
        return trials, *_BestFirst(trials).run()
    is_proven = search_methods.run(facts.method, trials, facts.seed)
    return trials, is_proven, trials.best_s if is_proven and trials.found else None


class _BestFirst:
    """Queue of partly decided candidates by their bound."""

    def __init__(self, trials: Trials) -> None:
        self._trials, self._space, self._bounds = trials, trials.space, trials.bounds
        self._queue: list[_Entry] = []
        self._number = 0
        self._shapes = self._space.shapes()
        """Shapes that are not queued yet."""

    def run(self) -> tuple[bool, float | None]:
        """Try candidates; return whether the best is proven, and a bound for all of them."""
        trials = self._trials
        first = search_methods.rule_of_thumb(trials)
        if first is not None:
            trials.try_candidate(first)
        self._try_usual()
        is_whole = self._push_shapes(_SHAPES_WORK)
        self._dive()
        while not trials.is_over:
            if self._queue and self._queue[0].least_s < trials.best_s:
                self._expand(heapq.heappop(self._queue))
            elif is_whole:
                break
            else:
                is_whole = self._push_shapes(1.0)
        least_s = self._queue[0].least_s if self._queue else math.inf
        trials.cut_off += len(self._queue)
        is_best, least_s = is_whole and least_s >= trials.best_s, min(least_s, trials.best_s)
        return is_best, None if least_s == math.inf else self._bound(least_s, is_whole)

    def _try_usual(self) -> None:
        """Try usual layouts of large runs, those with the least bounds first."""
        trials, bounds, fails = self._trials, self._bounds, 0
        shapes = {one: bounds.seconds(one, -1) for one in search_methods.usual_shapes(trials)}
        for shape in sorted(shapes, key=shapes.__getitem__):
            if shapes[shape] >= trials.best_s or fails == _MAX_FAILS or self._is_over(_USUAL_WORK):
                break
            before, before_s = trials.tried, trials.best_s
            for leaf in search_methods.likely_leaves(trials, shape)[:_MAX_DISPATCHES]:
                if bounds.seconds(leaf, len(Space.LEVELS) - 1) < trials.best_s:  # With any cuts.
                    for cuts in self._space.children(leaf, 3)[::-1]:
                        trials.try_candidate(cuts, skips_slow=True)
            if trials.tried > before:
                fails = 0 if trials.best_s < before_s else fails + 1

    def _is_over(self, fraction: float) -> bool:
        return self._trials.is_over or self._trials.work.used(fraction)

    def _bound(self, queued_s: float, is_whole: bool) -> float | None:
        """Return a bound for all plans, from that of the queued shapes."""
        if is_whole:
            return queued_s
        rest_s = self._bounds.matmul_seconds()
        return None if rest_s is None else min(rest_s, queued_s)

    def _push(self, candidate: Candidate, level: int, least_s: float) -> None:
        self._trials.estimates.note_progress()
        if self._bounds.exceeds_memory(candidate, level):
            self._trials.too_large += 1
            return
        self._number += 1
        own_s = max(least_s, self._bounds.seconds(candidate, level))
        if math.isinf(own_s):  # No stage boundaries fit.
            self._trials.too_large += 1
            return
        heapq.heappush(self._queue, _Entry(own_s, -level, self._number, candidate))

    def _push_shapes(self, fraction: float) -> bool:
        """Queue more shapes by quick bounds, up to a fraction of the work; return whether all are
        queued."""
        for shape in self._shapes:
            self._push(shape, -1, 0.0)
            if self._trials.work.used(fraction):
                return False
        return True

    def _expand(self, entry: _Entry) -> None:
        level, candidate = -entry.depth, entry.candidate
        if level == len(Space.LEVELS):
            self._trials.try_candidate(candidate, skips_slow=True)
            return
        children = [candidate] if level < 0 else self._space.children(candidate, level)
        for child in children:
            self._push(child, level + 1, entry.least_s)

    def _dive(self) -> None:
        """Try one plan of each promising shape that may fit, until some in a row are no faster."""
        trials, fails, done = self._trials, 0, list[_Entry]()
        while self._queue and fails < _MAX_FAILS and not trials.work.used(_DIVE_WORK):
            entry = heapq.heappop(self._queue)
            if entry.depth > 0:
                self._expand(entry)
                continue
            done.append(entry)
            if entry.least_s >= trials.best_s or trials.is_over:
                break
            for leaf in search_methods.likely_leaves(trials, entry.candidate)[:1]:
                before_s = trials.best_s
                trials.try_candidate(leaf, skips_slow=True)
                fails = 0 if trials.best_s < before_s else fails + 1
        for entry in done:
            heapq.heappush(self._queue, entry)


class _Entry(NamedTuple):
    """Candidate in the queue."""

    least_s: float
    """Seconds of a step that no plan below it can beat."""
    depth: int
    """Its level, negative: candidates with more decisions come first."""
    number: int
    """Number of its entry, which keeps the order of equal ones."""
    candidate: Candidate
