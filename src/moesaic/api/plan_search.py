"""Searches for plans, with progress: the fastest layout, the cheapest part of a cluster, and the
largest model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from rich.console import Console

from moesaic.api.progress import LINE_EVERY_S, make_console
from moesaic.base import keys
from moesaic.base.errors import ConfigError
from moesaic.base.units import plural
from moesaic.facts.plan.search import SearchFacts, SearchMethod, SearchResult

if TYPE_CHECKING:
    from moesaic.facts.cluster import Cluster
    from moesaic.facts.job import Job
    from moesaic.policy.plan.choices import RecordedLoads
    from moesaic.policy.plan.estimates import Estimates
    from moesaic.policy.plan.predict import PlannedJob
    from moesaic.train.job_file import LoadedJob

_QUIET_S = 2.0
"""Seconds before a search shows progress."""
_SPEEDS = (
    "step_s", "phases_s", "blocks_s", "seconds_by_kind", "overlapped_s", "tokens_per_s",
    "samples_per_s", "utilisation", "price", "price_per_million_tokens",
)  # fmt: skip
"""Figures that a plan cannot reach if it does not fit."""


class PartChoice(NamedTuple):
    """A part of a cluster with the plan of a job on it."""

    planned: PlannedJob
    """Predictions of the plan."""
    parts: list[dict[str, Any]]
    """Parts that were searched, cheapest first: hosts, ranks, price, speed, and how well."""
    is_reached: bool
    """True if a plan fits and reaches the floor."""


@dataclass
class SearchProgress:
    """Progress of a search on stderr: nothing for two seconds, then one line that is renewed."""

    is_shown: bool
    what: str = ""
    """Part of the search that runs."""
    _began_s: float = field(default_factory=time.monotonic)
    _printed_s: float = 0.0
    _tried: int = 0

    def begin(self, what: str) -> None:
        """Name the part of the search that begins, and count its layouts anew."""
        self.what, self._tried = what, 0

    def step(self) -> None:
        """Count a layout whose step was simulated."""
        self._tried += 1
        self.show()

    def show(self) -> None:
        """Show the progress, if the line is due."""
        if not self.is_shown:
            return
        now = time.monotonic()
        if now < max(self._printed_s, self._began_s + _QUIET_S - 0.2) + 0.2:
            return
        console = make_console("stderr")
        every_s = 0.2 if console.is_terminal else LINE_EVERY_S
        since_s = now - max(self._printed_s, self._began_s + _QUIET_S - every_s)
        if since_s < every_s:
            return
        self._printed_s = now
        done = f"{plural(self._tried, 'layout')} simulated in " * bool(self._tried)
        text = f"searching{self.what}: {done}{now - self._began_s:.0f} s"
        console.print(f"\r{text:<100}" if console.is_terminal else text, end=self._end(console))

    def clear(self) -> None:
        """End the line of a terminal, if there is one."""
        console = make_console("stderr")
        if self._printed_s and console.is_terminal:
            console.print("\r" + " " * 100, end="\r")
        self._printed_s = 0.0

    @staticmethod
    def _end(console: Console) -> str:
        return "" if console.is_terminal else "\n"


@contextmanager
def shown_search(facts: SearchFacts, progress: SearchProgress) -> Iterator[Estimates]:
    """Yield estimates for `facts` that show progress; the line is removed at the end."""
    from moesaic.policy.plan.found import WatchedEstimates

    try:
        yield WatchedEstimates.watching(facts, progress.step, progress.show)
    finally:
        progress.clear()


def facts_of_search(
    loaded: LoadedJob[Job],
    cluster: Cluster,
    *,
    nproc: int | None,
    method: str,
    max_work: int | None,
    loads: RecordedLoads | None,
) -> SearchFacts:
    """Return the facts of a search for the layout of a job."""
    from moesaic.policy.plan.search import search_facts

    keys.check_choice("method", method, get_args(SearchMethod))
    facts = search_facts(
        loaded.job, cluster, nproc, opens_micro_batches=loaded.has_open_micro_batches
    )
    changes: dict[str, Any] = {"method": method, "max_work": max_work}
    if loads is not None:
        changes |= {
            "loads_run": loads.run, "loads": [[float(x) for x in one] for one in loads.by_layer]
        }  # fmt: skip
    return facts.model_copy(update=changes)


def search_job(facts: SearchFacts, *, is_shown: bool) -> PlannedJob:
    """Return the predictions of the fastest plan, or of the one that comes nearest if none fits."""
    from moesaic.policy.plan.found import predict_found, run_search

    with shown_search(facts, SearchProgress(is_shown)) as estimates:
        result = run_search(facts, estimates)
    return predict_found(facts, result)


def search_remedy(facts: SearchFacts, *, is_shown: bool) -> dict[str, Any] | None:
    """Return the remedy of a job that does not fit, as plain data; only a terminal shows progress.

    `facts` are those of a search for its layout.
    """
    from moesaic.policy.plan.remedy import describe_remedy, find_remedy

    is_shown = is_shown and make_console("stderr").is_terminal
    with shown_search(facts, SearchProgress(is_shown, " for a change that fits")) as estimates:
        return describe_remedy(find_remedy(facts, estimates))


def search_largest(facts: SearchFacts, *, is_shown: bool) -> dict[str, Any]:
    """Return the largest model of a job's shape that fits into memory, as plain data."""
    from moesaic.policy.plan.found import run_search
    from moesaic.policy.plan.largest import largest_in_memory

    progress = SearchProgress(is_shown, " for the largest model")

    def search(own: SearchFacts) -> SearchResult:
        with shown_search(own, progress) as estimates:
            return run_search(own, estimates)

    return largest_in_memory(facts, search)


def choose_part(facts: SearchFacts, floor: float | None, *, is_shown: bool) -> PartChoice:
    """Return the part of a cluster with the least price per token that reaches `floor` tokens a
    second; with None the part with the least price per hour on which a plan was found."""
    from moesaic.policy.plan.found import predict_found, run_search
    from moesaic.policy.plan.parts import (
        cheapest_that_fits,
        cluster_parts,
        least_cost,
        search_parts,
        shared_work,
    )

    parts, progress = cluster_parts(facts.cluster), SearchProgress(is_shown)
    if floor is not None and not any(part.price_per_hour for part in parts):
        raise ConfigError(
            "--min-cost needs prices: set price_per_hour of devices or hosts in the cluster file"
        )
    quiet = facts.model_copy(update={"explains_shortfall": False})

    def search(own: SearchFacts) -> SearchResult:
        names = [host.name for host in own.cluster.hosts]
        more = f" and {plural(len(names) - 1, 'more host')}" * (len(names) > 1)
        progress.begin(f" {plural(own.ranks, 'rank')} on {names[0]}{more}")
        with shown_search(own, progress) as estimates:
            return run_search(own, estimates)

    if floor is None:
        done = cheapest_that_fits(parts, quiet, search)
        chosen = done[-1] if done[-1].result.best is not None else None
    else:
        done = list(search_parts(parts, shared_work(quiet, len(parts)), search))
        chosen = least_cost(done, floor)
    is_reached = chosen is not None
    if chosen is None:
        fastest = max(done, key=lambda one: one.tokens_per_s)
        chosen = fastest if fastest.tokens_per_s else done[-1]
    if chosen.result.best is None:
        explained = facts.model_copy(
            update={"cluster": chosen.part.cluster, "ranks": chosen.part.ranks}
        )
        chosen = chosen._replace(facts=explained, result=search(explained))
    planned = predict_found(chosen.facts, chosen.result)
    return PartChoice(planned, [_describe_part(one) for one in done], is_reached)


def _describe_part(one: Any) -> dict[str, Any]:
    part, price = one.part, one.part.price_per_hour or None
    return {
        "hosts": [host.name for host in part.cluster.hosts], "ranks": part.ranks,
        "price_per_hour": price, "fits": one.result.best is not None,
        "is_proven": one.result.is_proven, "gap": one.result.gap,
        "tokens_per_s": one.tokens_per_s or None,
        "price_per_million_tokens": 1e6 * one.price_per_token
        if price and one.tokens_per_s else None,
    }  # fmt: skip


def explain_block(planned: PlannedJob, block: str) -> dict[str, Any]:
    """Return where a block of a planned job is and what its seconds come from, with those under the
    runners-up of a search."""
    from moesaic.policy.plan import why
    from moesaic.policy.plan.found import differences

    found = why.explain_block(planned.plan, planned.facts, planned.timeline, block)
    others = list[dict[str, Any]]()
    best = None if planned.found is None else planned.found.best
    for one in () if planned.found is None else planned.found.runners_up:
        assert best is not None
        facts = planned.facts.under(one.plan)
        others.append({
            "differs": differences(one.settings, best.settings),
            "seconds": why.block_seconds(one.plan, facts, block), "loses_s": one.loses_s,
        })  # fmt: skip
    return {**found, "others": others}


def compare_plans(first: PlannedJob, second: PlannedJob) -> dict[str, Any]:
    """Return how two planned jobs differ: settings, seconds by kind of work, memory and price.

    Speeds and prices of one that does not fit are None.
    """
    figures = without_speeds(first.figures), without_speeds(second.figures)
    plans = [one["plan"] for one in figures]
    names = [
        key for key in plans[0]
        if key not in ("places", "balance_costs") and plans[0][key] != plans[1].get(key)
    ]  # fmt: skip
    by_kind = [one["seconds_by_kind"] for one in figures]
    kinds = dict.fromkeys(kind for one in by_kind for kind in one or ())
    steps_s = [one["step_s"] for one in figures]
    keys_of_both = (
        "step_s", "tokens_per_s", "fits", "price_per_million_tokens", "device_memory_bytes",
        "usable_memory_bytes", "bottleneck", "remedy",
    )  # fmt: skip
    return {
        "settings": {key: [plan[key] for plan in plans] for key in names},
        "seconds_by_kind": {
            kind: [None if one is None else one.get(kind, 0.0) for one in by_kind] for kind in kinds
        },
        "peak_bytes": [one["memory_per_rank"]["peak_bytes"] for one in figures],
        **{key: [one[key] for one in figures] for key in keys_of_both},
        "speedup": None if None in steps_s else steps_s[0] / steps_s[1],
    }  # fmt: skip


def without_speeds(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a plan, with None for speeds and prices if it does not fit."""
    if figures["fits"]:
        return dict(figures)
    known = {name: None if name in _SPEEDS else value for name, value in figures.items()}
    parts = figures.get("parts")
    return known | ({"parts": [{**one, "step_s": None} for one in parts]} if parts else {})
