"""How tokens had best travel between the ranks that share out the experts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from moesaic.facts.job import Job
from moesaic.facts.plan import Plan

_CUTS = (2, 4, 8)
_LEAST_TOKENS = 16
"""Of a chunk: below, its exchanges are all latency."""


def ways(plan: Plan, hosts: Sequence[str]) -> list[Plan]:
    """`plan` with every way that tokens can travel between ranks on these `hosts`, rank by rank.

    The first is straight and once for each expert.
    """
    if plan.ep == 1:
        return [plan]
    found = [("rows", 1), ("visits", 1)]
    several = hosts_of(plan, hosts)
    if 1 < several < plan.ep:
        found += [("rows", several), ("visits", several)]
    return [plan.model_copy(update={"dispatch": by, "hosts": num}) for by, num in found]


def cuts(plan: Plan, job: Job) -> list[Plan]:
    """`plan` with every other way to compute while tokens travel that `job` leaves open: what is
    local first, and all numbers of chunks that the tokens of its ranks may go in."""
    tokens = job.train.batch // job.train.micro_batches * job.data.sequence // plan.span
    chunks, local = [plan.chunks], [plan.local]
    if job.layout.chunks == "auto":
        chunks = [num for num in (1, *_CUTS) if num == 1 or num * _LEAST_TOKENS <= tokens]
    if job.layout.local == "auto":
        local = ["along", "first"]
    found = [{"chunks": num, "local": order} for order in local for num in chunks]
    return [
        plan.model_copy(update=one)
        for one in found
        if (one["chunks"], one["local"]) != (plan.chunks, plan.local)
    ]


def usual(plan: Plan, hosts: Sequence[str], top_k: int) -> Plan:
    """`plan` with the way that is as a rule the best, where nobody knows the links: between hosts
    each token once, within a host straight to each expert."""
    apart = any(len({hosts[rank] for rank in group}) > 1 for group in plan.expert_groups())
    if top_k == 1 or not apart:
        return plan
    return next(one for one in reversed(ways(plan, hosts)) if one.dispatch == "visits")


def hosts_of(plan: Plan, hosts: Sequence[str]) -> int:
    """On how many hosts each group of those ranks is, if it has as many of them on each, host after
    host; else 1."""
    found = set()
    for group in plan.expert_groups():
        runs = [(host, len(list(run))) for host, run in groupby(hosts[rank] for rank in group)]
        equal = len({size for _, size in runs}) == 1 and len({host for host, _ in runs}) == len(
            runs
        )
        found.add(len(runs) if equal else 1)
    return found.pop() if len(found) == 1 else 1
