"""Choice of the dispatch method: how tokens travel between expert-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from moesaic.facts.job import Job
from moesaic.facts.job.train import DispatchMethod
from moesaic.facts.plan import Plan

_CHUNK_COUNTS = (2, 4, 8)
_MIN_CHUNK_TOKENS = 16
"""Tokens per chunk, at least; the exchanges of smaller chunks are pure latency."""


def dispatch_methods(plan: Plan, hosts: Sequence[str]) -> list[Plan]:
    """Return `plan` with every dispatch method that ranks on `hosts` (one host per rank) can use.

    The first one is the flat all-to-all, one message per token and expert.
    """
    if plan.ep == 1:
        return [plan]
    methods = [("all_to_all", 1), ("dedup", 1)]
    num_hosts = hosts_per_expert_group(plan.ep_groups(), hosts)
    if 1 < num_hosts < plan.ep:
        methods += [("all_to_all", num_hosts), ("dedup", num_hosts)]
    return [
        plan.model_copy(update={"dispatch": method, "dispatch_hosts": num})
        for method, num in methods
    ]


def overlap_options(plan: Plan, job: Job) -> list[Plan]:
    """Return `plan` with every other overlap setting that `job` leaves open.

    The settings are `overlap_local` and the number of chunks of a rank's tokens.
    """
    tokens = job.train.batch // job.train.micro_batches * job.data.sequence // plan.ranks_per_stage
    chunks, local = [plan.chunks], [plan.overlap_local]
    if job.layout.chunks == "auto":
        chunks = [
            num for num in (1, *_CHUNK_COUNTS) if num == 1 or num * _MIN_CHUNK_TOKENS <= tokens
        ]
    if job.layout.overlap_local == "auto":
        local = [False, True]
    options = [{"chunks": num, "overlap_local": order} for order in local for num in chunks]
    return [
        plan.model_copy(update=one)
        for one in options
        if (one["chunks"], one["overlap_local"]) != (plan.chunks, plan.overlap_local)
    ]


class DispatchFacts(NamedTuple):
    """Facts of the dispatch method of ranks without a cluster file."""

    ep_groups: list[list[int]]
    """Ranks of each expert-parallel group."""
    hosts: list[str]
    """Host of each rank."""
    top_k: int
    """Experts per token."""


class DispatchChoice(NamedTuple):
    """Dispatch method, as in a plan."""

    dispatch: DispatchMethod
    dispatch_hosts: int


def default_dispatch(facts: DispatchFacts) -> DispatchChoice:
    """Return the usual best dispatch method, for links of unknown speed.

    Between hosts tokens are deduplicated; within one host the flat all-to-all is kept.
    """
    groups, hosts = facts.ep_groups, facts.hosts
    spans_hosts = any(len({hosts[rank] for rank in group}) > 1 for group in groups)
    if facts.top_k == 1 or not spans_hosts:
        return DispatchChoice("all_to_all", 1)
    num_hosts = hosts_per_expert_group(groups, hosts)
    return DispatchChoice("dedup", num_hosts if num_hosts < len(groups[0]) else 1)


def hosts_per_expert_group(ep_groups: Sequence[Sequence[int]], hosts: Sequence[str]) -> int:
    """Return the number of hosts per expert-parallel group.

    The result is 1 unless each group has equally many consecutive ranks on every host.
    """
    found = set()
    for group in ep_groups:
        runs = [(host, len(list(run))) for host, run in groupby(hosts[rank] for rank in group)]
        equal = len({size for _, size in runs}) == 1 and len({host for host, _ in runs}) == len(
            runs
        )
        found.add(len(runs) if equal else 1)
    return found.pop() if len(found) == 1 else 1


def dispatch_hosts_warning(plan: Plan) -> str | None:
    """Return a warning if `dispatch_hosts` differs from the hosts of the expert-parallel groups."""
    actual = hosts_per_expert_group(plan.ep_groups(), [place.host for place in plan.places])
    if plan.dispatch_hosts in (1, actual):
        return None
    where = f"{actual} hosts" if actual > 1 else "one host, or unevenly on several"
    effect = "the prediction includes its cost, but there is no saving"
    if plan.num_exchanges == 1:
        effect = "tokens are sent directly, as without it"
    return (
        f"layout.dispatch_hosts = {plan.dispatch_hosts}, but expert-parallel ranks are on {where}: "
        f"{effect}; remove layout.dispatch_hosts"
    )
