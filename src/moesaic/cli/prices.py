"""The prices that a run's recorded loads are held against, and where they come from, for `replay`.

A run that balanced nothing went by none. Then they are found as a job would find them: its own, its
plan's, or what is usual of the devices that the run says it had.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from moesaic.facts.job import Job, Prices
from moesaic.facts.plan import Plan
from moesaic.policy.balance import Rank, balances, rehomes, usual

if TYPE_CHECKING:
    from moesaic.report import RunFacts

_THREADS = re.compile(r"(\d+) threads? a rank")
_NO_HOSTS = "on how many hosts is not on record, taken for one"
_NOTHING = (
    "usual of one thread of a processor, all ranks on one host: what the run had is not on record"
)


class Priced(NamedTuple):
    """Prices, and where they come from."""

    prices: Prices
    source: str

    def words(self) -> str:
        """For a person."""
        return f"prices {self.source}; {self.prices.words()}"


def priced(run: RunFacts, job: Job, plan: Plan, given: Prices | None) -> Priced:
    """What a policy is to count on that is asked about `run`: what is `given`, if anything is."""
    if given is not None:
        return Priced(given, "given")
    if plan.prices is not None and (balances(job, plan) or rehomes(job, plan)):
        return Priced(plan.prices, "of the run")
    if job.balance.prices is not None:
        return Priced(job.balance.prices, "of the job")
    if plan.prices is not None:
        return Priced(plan.prices, "of the plan")
    ranks, source = _ranks(run, plan)
    return Priced(usual(job, plan, ranks), source)


def _ranks(run: RunFacts, plan: Plan) -> tuple[list[Rank], str]:
    """Where each rank ran, as far as that is on record, and in words."""
    part = run.parts[-1] if run.parts else None
    if part is not None and len(part.machines) == plan.ranks:
        ranks = [Rank(str(one.host), one.kind, one.threads) for one in part.machines]
        return ranks, _words(ranks, _hosts(ranks))
    hosts = _hosts_of(plan)
    device = "unknown" if part is None else part.device
    if device == "unknown":
        kinds = {place.kind for place in plan.places}
        if not kinds:
            return [Rank(host, "cpu", 1) for host in hosts], _NOTHING
        kind = "cpu" if "cpu" in kinds else kinds.pop()
    else:
        kind = "cpu" if re.match(r"cpu\b", device) else "gpu"
    threads = _THREADS.search(device)
    ranks = [Rank(host, kind, int(threads[1]) if threads else 1) for host in hosts]
    known = plan.places or len(set(hosts)) > 1
    return ranks, _words(ranks, _hosts(ranks) if known else _NO_HOSTS)


def _hosts_of(plan: Plan) -> list[str]:
    """The host of each rank, by what a plan says; one host if it says nothing."""
    if plan.places:
        return [place.host for place in plan.places]
    found, each = ["0"] * plan.ranks, plan.ep // plan.hosts
    for group in plan.expert_groups():
        for place, rank in enumerate(group):
            found[rank] = str(place // each)
    return found


def _hosts(ranks: list[Rank]) -> str:
    number = len({rank.host for rank in ranks})
    return "one host" if number == 1 else f"{number} hosts"


def _words(ranks: list[Rank], hosts: str) -> str:
    threads = min(rank.threads for rank in ranks)
    if all(rank.kind != "cpu" for rank in ranks):
        return f"usual of such devices: {ranks[0].kind}, {hosts}"
    return f"usual of such devices: cpu, {threads} thread{'s' * (threads != 1)} a rank, {hosts}"
