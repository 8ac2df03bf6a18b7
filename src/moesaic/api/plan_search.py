"""Searches for plans, with progress: the fastest layout, the cheapest part of a cluster, and the
largest model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from moesaic.api.progress import LINE_EVERY_S, make_console
from moesaic.base import keys
from moesaic.base.units import format_seconds
from moesaic.facts.plan.search import SearchFacts, SearchMethod, SearchResult

if TYPE_CHECKING:
    from moesaic.facts.cluster import Cluster
    from moesaic.facts.job import Job
    from moesaic.facts.plan import Plan
    from moesaic.facts.plan.search import PlanEstimate, RankNeed
    from moesaic.policy.plan.choices import RecordedLoads
    from moesaic.policy.plan.estimates import Estimates
    from moesaic.policy.plan.predict import PlannedJob
    from moesaic.train.job_file import LoadedJob

SEARCH_S = 60.0
"""Seconds after which a search stops."""
_QUIET_S = 2.0
"""Seconds before a search shows progress."""


class PartChoice(NamedTuple):
    """A part of a cluster with the plan of a job on it."""

    planned: PlannedJob
    """Predictions of the plan."""
    parts: list[dict[str, Any]]
    """Parts that were searched: hosts, ranks, price, speed."""
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
    _best_s: float = float("inf")

    def step(self, step_s: float) -> None:
        """Count a layout whose step was simulated."""
        self._tried, self._best_s = self._tried + 1, min(self._best_s, step_s)
        now = time.monotonic()
        console = make_console("stderr")
        every_s = 0.2 if console.is_terminal else LINE_EVERY_S
        since_s = now - max(self._printed_s, self._began_s + _QUIET_S - every_s)
        if not self.is_shown or since_s < every_s:
            return
        self._printed_s = now
        text = (
            f"searching{self.what}: {self._tried:,} layouts simulated in "
            f"{now - self._began_s:.0f} s, the fastest {format_seconds(self._best_s)} a step"
        )
        console.print(text, end="\r" if console.is_terminal else "\n")


class _ShownEstimates:
    """Estimates that report each simulated step."""

    def __init__(self, estimates: Estimates, progress: SearchProgress) -> None:
        self._estimates, self._progress = estimates, progress

    def memory(self, job: Job, plan: Plan) -> RankNeed:
        """Return the memory of the tightest rank."""
        return self._estimates.memory(job, plan)

    def step(self, job: Job, plan: Plan) -> PlanEstimate:
        """Return the time of a step."""
        found = self._estimates.step(job, plan)
        self._progress.step(found.step_s)
        return found
