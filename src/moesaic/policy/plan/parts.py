"""Parts of a cluster: which of its hosts and devices to take for a job, at the least price."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from moesaic.facts.cluster import Cluster, Host, place_ranks, price_per_hour
from moesaic.facts.plan.search import SearchFacts, SearchResult
from moesaic.policy.plan.mapping import max_ranks, only_hosts

_MAX_PARTS = 64
"""Parts to search, at most."""


class Part(NamedTuple):
    """Some hosts of a cluster, with a number of ranks."""

    cluster: Cluster
    """The hosts, with the links between them."""
    ranks: int
    price_per_hour: float
    """Price of its devices and hosts; 0 if unknown."""


class PartSearch(NamedTuple):
    """A part with the result of its search."""

    part: Part
    facts: SearchFacts
    result: SearchResult
    tokens_per_s: float
    """Tokens a second of the best plan; 0 if none fits."""

    @property
    def price_per_token(self) -> float:
        """Price of a token; infinite if no plan fits."""
        if not self.tokens_per_s:
            return float("inf")
        return self.part.price_per_hour / 3600 / self.tokens_per_s


def cluster_parts(cluster: Cluster) -> list[Part]:
    """Return parts of a cluster: numbers of hosts of each kind, by powers of two, and powers of two
    of the devices of a single host.

    The cheapest come first; of equal prices those with most ranks, without prices with fewest.
    """
    kinds = list[list[Host]]()
    for host in cluster.hosts:
        unnamed = host.model_copy(update={"name": "-"})
        for kind in kinds:
            if kind[0].model_copy(update={"name": "-"}) == unnamed:
                kind.append(host)
                break
        else:
            kinds.append([host])
    found = list[Part]()
    for numbers in itertools.product(*(_counts(len(kind)) for kind in kinds)):
        taken = {host.name for kind, n in zip(kinds, numbers, strict=True) for host in kind[:n]}
        hosts = [host for host in cluster.hosts if host.name in taken]
        if not hosts:
            continue
        part = only_hosts(cluster, hosts)
        most = max_ranks(part)
        sizes = _device_counts(hosts[0]) if len(hosts) == 1 else [most]
        for ranks in sizes:
            price = price_per_hour(part, place_ranks(part, ranks))
            found.append(Part(part, ranks, price))

    def order(part: Part) -> tuple[float, int]:
        price = part.price_per_hour
        return price, -part.ranks if price else part.ranks

    return sorted(found, key=order)[:_MAX_PARTS]


def _counts(most: int) -> list[int]:
    """Return 0, the powers of two below `most`, and `most`."""
    return [0, *(2**power for power in range(most.bit_length()) if 2**power < most), most]


def _device_counts(host: Host) -> list[int]:
    """Return numbers of ranks on one host."""
    accelerators = sum(one.count for one in host.devices if one.kind != "cpu")
    if accelerators:
        return _counts(accelerators)[1:]
    return sorted(one.count for one in host.devices)


Search = Callable[[SearchFacts], SearchResult]
"""Function of facts: the result of their search."""


def search_parts(parts: Sequence[Part], facts: SearchFacts, search: Search) -> Iterator[PartSearch]:
    """Yield the search of each part, in their order."""
    for part in parts:
        own = facts.model_copy(update=_where(part))
        yield _searched(part, own, search)


def _where(part: Part) -> dict[str, Any]:
    return {"cluster": part.cluster, "ranks": part.ranks}


def _searched(part: Part, facts: SearchFacts, search: Search) -> PartSearch:
    result, tokens = search(facts), facts.job.train.batch * facts.job.data.sequence
    speed = 0.0 if result.best is None else tokens / result.best.estimate.step_s
    return PartSearch(part, facts, result, speed)


def cheapest_that_fits(
    parts: Sequence[Part], facts: SearchFacts, search: Search
) -> list[PartSearch]:
    """Return the searches of parts, in their order, up to the first on which a plan fits.

    Each part is searched for any plan that fits, with its share of the work; the part on which one
    is found is then searched for its fastest plan, with all of the work.
    """
    share = shared_work(facts, len(parts)).model_copy(update={"max_tried": 1})
    done = list[PartSearch]()
    for one in search_parts(parts, share, search):
        if one.result.best is not None:
            seeds = [one.result.best.plan]
            own = facts.model_copy(update={**_where(one.part), "seeds": seeds})
            return [*done, _searched(one.part, own, search)]
        done.append(one)
    return done


def shared_work(facts: SearchFacts, searches: int) -> SearchFacts:
    """Return the facts of one of several searches that share the limit of work."""
    limit = facts.max_work
    each = None if limit is None else max(limit // searches, 1)
    return facts.model_copy(update={"max_work": each})


def least_cost(searches: Sequence[PartSearch], floor: float) -> PartSearch | None:
    """Return the search with the least price per token of those that reach `floor` tokens a second;
    None if none does. Without prices it is the one with the fewest ranks."""
    reaching = [one for one in searches if one.tokens_per_s >= floor and one.tokens_per_s]
    return min(
        reaching, default=None,
        key=lambda one: (one.price_per_token, one.part.ranks, -one.tokens_per_s),
    )  # fmt: skip
