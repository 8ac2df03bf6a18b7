"""Prices of expert replicas for `replay`, and their source.

They are the prices of the run, its job or its plan. Without any of these, they are typical values
of the devices that the run used.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from moesaic.facts.job import Job, Prices
from moesaic.facts.plan import Plan
from moesaic.policy.balance import RankDevice, can_migrate, default_prices, should_balance

if TYPE_CHECKING:
    from moesaic.report import RunStats

_THREADS = re.compile(r"(\d+) threads? per rank")
_UNKNOWN_HOSTS = "hosts not recorded, one assumed"
_UNKNOWN_DEVICES = (
    "typical of one CPU thread per rank on one host; the run has not recorded its devices"
)


class SourcedPrices(NamedTuple):
    """Prices and their source."""

    prices: Prices
    source: str

    def describe(self) -> str:
        """Return both as one line of text."""
        return f"prices {self.source}; {self.prices.describe()}"


def find_prices(run: RunStats, job: Job, plan: Plan, requested: Prices | None) -> SourcedPrices:
    """Return the prices that a policy assumes for `run`: the `requested` ones, if any."""
    if requested is not None:
        return SourcedPrices(requested, "given")
    if plan.prices is not None and (should_balance(job, plan) or can_migrate(job, plan)):
        return SourcedPrices(plan.prices, "of the run")
    if job.balance.prices is not None:
        return SourcedPrices(job.balance.prices, "of the job")
    if plan.prices is not None:
        return SourcedPrices(plan.prices, "of the plan")
    ranks, source = _find_ranks(run, plan)
    return SourcedPrices(default_prices(job, plan, ranks), source)


def _find_ranks(run: RunStats, plan: Plan) -> tuple[list[RankDevice], str]:
    """Return the recorded host and device of each rank, and a description of them."""
    launch = run.launches[-1] if run.launches else None
    if launch is not None and len(launch.machines) == plan.ranks:
        ranks = [RankDevice(str(one.host), one.kind, one.threads) for one in launch.machines]
        return ranks, _describe_ranks(ranks, _describe_hosts(ranks))
    hosts = _hosts_of(plan)
    device = "unknown" if launch is None else launch.device
    if device == "unknown":
        kinds = {place.kind for place in plan.places}
        if not kinds:
            return [RankDevice(host, "cpu", 1) for host in hosts], _UNKNOWN_DEVICES
        kind = "cpu" if "cpu" in kinds else kinds.pop()
    else:
        kind = "cpu" if re.match(r"cpu\b", device) else "gpu"
    threads = _THREADS.search(device)
    ranks = [RankDevice(host, kind, int(threads[1]) if threads else 1) for host in hosts]
    known = plan.places or len(set(hosts)) > 1
    return ranks, _describe_ranks(ranks, _describe_hosts(ranks) if known else _UNKNOWN_HOSTS)


def _hosts_of(plan: Plan) -> list[str]:
    """Return the host of each rank by its plan; one host if the plan names none."""
    if plan.places:
        return [place.host for place in plan.places]
    hosts, ranks_per_host = ["0"] * plan.ranks, plan.ep // plan.dispatch_hosts
    for group in plan.ep_groups():
        for index, rank in enumerate(group):
            hosts[rank] = str(index // ranks_per_host)
    return hosts


def _describe_hosts(ranks: list[RankDevice]) -> str:
    number = len({rank.host for rank in ranks})
    return "one host" if number == 1 else f"{number} hosts"


def _describe_ranks(ranks: list[RankDevice], hosts: str) -> str:
    threads = min(rank.num_threads for rank in ranks)
    if all(rank.kind != "cpu" for rank in ranks):
        return f"typical of such devices: {ranks[0].kind}, {hosts}"
    return f"typical of such devices: cpu, {threads} thread{'s' * (threads != 1)} per rank, {hosts}"
