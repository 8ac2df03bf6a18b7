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
from collections.abc import Sequence

from moesaic.facts.cluster import Cluster
from moesaic.facts.job import Job
from moesaic.facts.plan.search import SearchFacts, SearchResult, written_keys
from moesaic.policy.plan import search_methods
from moesaic.policy.plan.bound import Bounds
from moesaic.policy.plan.estimates import Estimates
from moesaic.policy.plan.mapping import max_ranks
from moesaic.policy.plan.memory_relief import shortfall
from moesaic.policy.plan.space import Candidate, Space
from moesaic.policy.plan.trials import Trials

_MAX_FAILS = 4
"""Plans in a row that are no faster, before the search turns from likely plans to all of them."""
_SHAPES_TIME = 0.5
"""Fraction of the time limit for bounds of shapes; the rest is for their plans."""


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
    ranks = num_ranks or max_ranks(cluster)
    return SearchFacts(job=job, cluster=cluster, ranks=ranks, pins=pins)


def search_plans(facts: SearchFacts, estimates: Estimates) -> SearchResult:
    """Return the fastest plan that `facts.method` finds, or what is short if none fits.

    The same facts give the same result, unless `facts.limit_s` ends the search.
    """
    trials, is_proven, bound_s = _run(facts, estimates)
    result = trials.result(is_proven=is_proven, bound_s=bound_s)
    if result.best is not None or not trials.space.has_plans:
        return result

    def search(changed: SearchFacts) -> Trials:
        return _run(changed, estimates.on_cluster(changed.cluster))[0]

    return result.model_copy(update={"shortfall": shortfall(facts, trials, search)})


def _run(facts: SearchFacts, estimates: Estimates) -> tuple[Trials, bool, float | None]:
    """Return the trials of a search, whether its best plan is proven, and a bound for all plans."""
    space = Space(facts.job, facts.cluster, facts.ranks, facts.pins)
    trials = Trials(facts, space, estimates, Bounds(space, has_loads=facts.loads is not None))
    for plan in facts.seeds:
        trials.try_plan(plan)
    if facts.method in ("best-first", "milp"):
        return trials, *_best_first(trials)
    is_proven = search_methods.run(facts.method, trials, facts.seed)
    return trials, is_proven, trials.best_s if is_proven and trials.found else None


def _best_first(trials: Trials) -> tuple[bool, float | None]:
    """Try candidates by their bound; return whether the best is proven, and the final bound."""
    space, bounds = trials.space, trials.bounds
    queue: list[tuple[float, int, int, Candidate]] = []
    number = 0

    def push(candidate: Candidate, level: int, least_s: float) -> None:
        nonlocal number
        if bounds.exceeds_memory(candidate, level):
            trials.too_large += 1
            return
        number += 1
        own_s = max(least_s, bounds.seconds(candidate, level))
        heapq.heappush(queue, (own_s, -level, number, candidate))

    first = search_methods.rule_of_thumb(trials)
    if first is not None:
        trials.try_candidate(first)
    is_whole = True
    for shape in space.shapes():
        push(shape, 0, 0.0)
        if trials.used_time(_SHAPES_TIME):
            is_whole = False
            break
    _dive(trials, [(least_s, shape) for least_s, _, _, shape in sorted(queue)])
    while queue:
        least_s, level, _, candidate = heapq.heappop(queue)
        if least_s >= trials.best_s or trials.is_over:
            trials.cut_off += 1 + len(queue)
            is_best = is_whole and least_s >= trials.best_s
            return is_best, min(least_s, trials.best_s) if is_whole else None
        if -level == len(Space.LEVELS):
            trials.try_candidate(candidate, skips_slow=True)
            continue
        for child in space.children(candidate, -level):
            push(child, 1 - level, least_s)
    return is_whole, trials.best_s if is_whole and trials.found else None


def _dive(trials: Trials, shapes: Sequence[tuple[float, Candidate]]) -> None:
    """Try one plan of each promising shape that may fit, until some in a row are no faster."""
    fails = 0
    for least_s, shape in shapes:
        if fails >= _MAX_FAILS or least_s >= trials.best_s or trials.is_over:
            return
        leaf = _likely_leaf(trials, shape)
        if leaf is not None:
            before_s = trials.best_s
            trials.try_candidate(leaf, skips_slow=True)
            fails = 0 if trials.best_s < before_s else fails + 1


def _likely_leaf(trials: Trials, shape: Candidate) -> Candidate | None:
    """Return the first complete candidate of a shape that may fit, with its likely best dispatch
    and even stages; None if there is none."""
    space, bounds = trials.space, trials.bounds
    options = space.children(shape, 0)
    plain = [one for one in options if not one.overlaps_dispatch] or options
    dispatched = min(plain, key=lambda one: bounds.seconds(one, 1))
    for leaf in space.leaves(dispatched, 1):
        if leaf.cuts == "even" and not bounds.exceeds_memory(leaf, len(Space.LEVELS)):
            return leaf
    return None
