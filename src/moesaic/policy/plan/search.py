"""Search for the fastest plan that fits, over the keys that a job leaves open.

The engine asks through `decide`:

    policy = partial(search_plans, estimates=SimulatedEstimates.from_facts(facts))
    result = decide(policy, facts, log)
"""

from __future__ import annotations

from moesaic.facts.cluster import Cluster
from moesaic.facts.job import Job
from moesaic.facts.plan.search import SearchFacts, SearchResult, written_keys
from moesaic.policy.plan.estimates import Estimates
from moesaic.policy.plan.mapping import max_ranks


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
    raise NotImplementedError
