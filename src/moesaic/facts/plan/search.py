"""Facts and result of a search for the fastest plan of a job, as plain data."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from moesaic.base.config import Section
from moesaic.facts.cluster import Cluster
from moesaic.facts.job import Job
from moesaic.facts.job.train import LayoutConfig, TrainConfig
from moesaic.facts.plan.plan import Plan

SearchMethod = Literal[
    "best-first", "exhaustive", "hill-climbing", "mcmc", "milp", "rule-of-thumb"
]  # fmt: skip
"""Methods of searching the layouts that a job leaves open. milp: best first, with stage boundaries
of HiGHS."""

Settings = dict[str, Any]
"""Values by key of the job, such as "layout.ep"; "stages" is "even" or "balanced"."""

LAYOUT_KEYS = (
    "layout.pp", "layout.schedule", "layout.tp", "layout.etp", "layout.ep", "layout.dp_shard",
    "layout.embedding", "layout.dispatch", "layout.dispatch_hosts", "layout.chunks",
    "layout.overlap_local",
)  # fmt: skip
"""Keys of the layout that a search may choose."""
SEARCH_KEYS = (*LAYOUT_KEYS, "train.recompute", "train.micro_batches")
"""Keys of a job that a search may choose."""
SEARCH_WORK = 50_000
"""Work after which a search stops: about a minute of one core."""


def written_keys(job: Job) -> list[str]:
    """Return the keys, of those that a search may choose, to which the job gives a value.

    A key that is written with its default value counts, one with the value "auto" does not.
    `train.micro_batches` always counts: results depend on it.
    """
    found = set[str]()
    tables: tuple[tuple[str, LayoutConfig | TrainConfig], ...] = (
        ("layout", job.layout), ("train", job.train),
    )  # fmt: skip
    for table, section in tables:
        for name in section.model_fields_set:
            if getattr(section, name) not in ("auto", None):
                found.add(f"{table}.{name}")
    found.add("train.micro_batches")
    return [key for key in SEARCH_KEYS if key in found]


class SearchFacts(Section):
    """Facts that a search depends on."""

    job: Job
    """Job whose keys are pinned or open."""
    cluster: Cluster
    """Cluster to plan for."""
    left_out: list[str] = Field(default_factory=list)
    """Hosts that the cluster lacks, because they have no speed for the job's precision."""
    ranks: int = Field(ge=1)
    """World size."""
    pins: list[str]
    """Keys of the job that keep their values, of `SEARCH_KEYS`; the others are open."""
    loads_run: str | None = None
    """Run that recorded the loads; unset: even loads."""
    loads: list[list[float]] | None = None
    """Load of each expert, by expert layer, [layers][experts]; unset: even loads."""
    method: SearchMethod = "best-first"
    """Method of searching."""
    max_work: int | None = Field(default=None, ge=1)
    """Work after which the search stops with a gap, in milliseconds of one core of the machine of
    the records; unset: when it ends."""
    max_tried: int | None = Field(default=None, ge=1)
    """Plans whose step is simulated, at most; unset: no limit."""
    seeds: list[Plan] = Field(default_factory=list)
    """Plans to try first, such as the best ones for a part of the cluster."""
    explains_shortfall: bool = True
    """True to find what is short, and what helps, if no plan fits."""
    num_runners_up: int = Field(default=5, ge=0)
    """Plans to report besides the best."""
    seed: int = Field(default=0, ge=0)
    """Seed of the methods that draw at random."""


class PlanEstimate(Section):
    """Predicted time and memory of a step under one plan."""

    step_s: float = Field(gt=0)
    """Seconds of a step."""
    seconds_by_kind: dict[str, Annotated[float, Field(ge=0)]]
    """Seconds of computing, collectives and waiting on the slowest rank."""


class RankNeed(Section):
    """Memory of the rank with the largest fraction of its device's usable memory in use."""

    rank: int = Field(ge=0)
    """Global rank."""
    device: str
    """Model of its device."""
    peak_bytes: int = Field(ge=0)
    """Bytes at the peak of a step."""
    usable_bytes: float = Field(gt=0)
    """Memory of the device that a plan may use, in bytes."""

    @property
    def used_fraction(self) -> float:
        """Peak as a fraction of the device's usable memory; above 1 the rank does not fit."""
        return self.peak_bytes / self.usable_bytes

    @property
    def short_bytes(self) -> float:
        """Bytes that the device lacks; 0 if the rank fits."""
        return max(0.0, self.peak_bytes - self.usable_bytes)


class FoundPlan(Section):
    """A plan that fits, with its estimate."""

    settings: Settings
    """Values of all keys that a search may choose, pinned ones too."""
    plan: Plan
    """Complete plan with places, without predictions."""
    estimate: PlanEstimate
    """Predicted step."""
    memory: RankNeed
    """Memory of the tightest rank."""


class RunnerUp(FoundPlan):
    """A plan that fits and is slower than the best."""

    loses_s: float = Field(ge=0)
    """Seconds of a step that it takes more than the best plan."""
    kind: str
    """Kind of work in which it loses most: computing, collectives or waiting."""
    kind_loses_s: float
    """Seconds that it loses in that kind."""


class Remedy(Section):
    """Changes with which a job that does not fit would fit, or come nearest."""

    changes: Settings
    """New values by key of the job; "nproc": more devices like the cluster's."""
    fits: bool
    """True if the job fits after exactly these changes."""
    is_least: bool
    """True if no fewer changes make it fit, or none at all if `fits` is false; false if a limit of
    work left some untried."""
    memory: RankNeed
    """Memory of the tightest rank after these changes."""


class Shortfall(Section):
    """Missing memory, if no plan fits."""

    memory: RankNeed
    """Tightest rank of the plan that comes nearest."""
    settings: Settings
    """Settings of that plan."""
    plan: Plan
    """Plan that comes nearest."""
    remedy: Remedy | None = None
    """Changes that help; unset if none does."""


class SearchResult(Section):
    """Outcome of a search."""

    method: SearchMethod
    """Method that searched."""
    best: FoundPlan | None
    """Fastest plan found; unset if none fits."""
    runners_up: list[RunnerUp] = Field(default_factory=list)
    """Next fastest plans found, fastest first."""
    tried: int = Field(ge=0)
    """Plans whose step was simulated."""
    too_large: int = Field(default=0, ge=0)
    """Plans that do not fit in memory."""
    cut_off: int = Field(default=0, ge=0)
    """Groups of plans that a bound ruled out, or that were open at the limit of work."""
    work: int = Field(default=0, ge=0)
    """Work of the search, as in `SearchFacts.max_work`."""
    is_limited: bool = False
    """True if the limit of work ended the search."""
    is_proven: bool
    """True if no plan of the space is faster."""
    bound_s: float | None = None
    """Seconds of a step that no plan of the space can beat; unset if unknown."""
    shortfall: Shortfall | None = None
    """Missing memory; unset if a plan fits."""
    conflict: str | None = None
    """Pins that exclude each other, and why; unset if a plan is valid."""

    @property
    def gap(self) -> float | None:
        """Largest possible gain as a fraction of the best step; None if unknown."""
        if self.best is None or self.bound_s is None:
            return None
        return max(0.0, 1 - self.bound_s / self.best.estimate.step_s)


def runner_up(found: FoundPlan, best: FoundPlan) -> RunnerUp:
    """Return `found` with the seconds that it loses to `best`, and the kind in which."""
    own, least = found.estimate.seconds_by_kind, best.estimate.seconds_by_kind
    lost = {kind: seconds - least[kind] for kind, seconds in own.items()}
    kind = max(lost, key=lost.__getitem__)
    return RunnerUp(
        **dict(found), loses_s=max(0.0, found.estimate.step_s - best.estimate.step_s),
        kind=kind, kind_loses_s=lost[kind],
    )  # fmt: skip
