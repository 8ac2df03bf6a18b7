"""Smallest change with which a job that does not fit in memory would fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from moesaic.base.errors import ConfigError
from moesaic.base.keys import assignments
from moesaic.base.units import format_bytes
from moesaic.facts.job import Job
from moesaic.facts.plan import plan_from_job
from moesaic.facts.plan.search import SearchFacts, Settings
from moesaic.policy.cost.memory import RankMemory
from moesaic.policy.plan.choices import embedding_layouts
from moesaic.policy.plan.estimates import SimulatedEstimates
from moesaic.policy.plan.predict import DOES_NOT_FIT, PlannedJob, choose_plan

NOTHING_FITS = "no change was found with which it fits"
"""Start of a message; the search for a remedy does not try everything."""
NO_REMEDY = f"{NOTHING_FITS}: use a smaller model, or devices with more memory"
_MICRO_BATCHES = "train.micro_batches"
_SHRINKING = ("train.batch", "data.sequence")
"""Keys whose values become smaller."""
_MAX_CHANGES = 4
"""Keys of the layout to change, at most."""
_MAX_TRIED = 160
"""Sets of changes whose memory is computed, at most."""
_NEAR = 1.25
"""Used fraction with defaults up to which settings that a plan chooses may make a job fit."""
_KEPT = 2
"""Sets of changes of one size that are extended by another key: those with the least memory."""
_MIN_SEQUENCE = 16


class Remedy(NamedTuple):
    """Changes with which a job fits, or comes nearest."""

    changes: Settings
    """New values by key of the job."""
    peak_bytes: int
    """Memory of the fullest rank after them."""
    fits: bool


def with_remedy(planned: PlannedJob, facts: SearchFacts) -> PlannedJob:
    """Return a planned job that does not fit with the smallest change that makes it fit.

    `facts` are those of a search for its layout; the remedy may change keys that they pin.
    """
    remedy = find_remedy(facts)
    bottleneck = f"{planned.figures['bottleneck'].partition('; ')[0]}; {_remedy_text(remedy)}"
    figures = {
        **planned.figures,
        "bottleneck": bottleneck, "remedy": None if remedy is None else remedy._asdict(),
    }  # fmt: skip
    others = [one for one in planned.warnings if not one.startswith(DOES_NOT_FIT)]
    return planned._replace(figures=figures, warnings=[f"{DOES_NOT_FIT}{bottleneck}", *others])


def find_remedy(facts: SearchFacts) -> Remedy | None:
    """Return the smallest change of a job with which it fits, else the one that helps most; None if
    none helps.

    Changes of the layout and of recomputation come first, since results do not depend on them. Then
    come more micro-batches, a smaller batch and shorter samples. Pins of `facts` are ignored.
    """
    search, train = _MemorySearch(facts), facts.job.train
    nearest = search.best_layout({})
    tries = [nearest]
    if not search.fits(nearest) and train.batch > train.micro_batches:
        tries.append(search.best_layout({_MICRO_BATCHES: train.batch}))
    if not any(map(search.fits, tries)):
        tries += [{**nearest, key: value} for key, value in _smaller(facts.job)]
    fitting = next((one for one in tries if search.fits(one)), None)
    if fitting is not None:
        fewest = search.reduced(fitting)
        return search.as_planned(fewest) or search.as_planned(fitting)
    return search.as_planned(nearest, must_fit=False) if nearest else None


class _MemorySearch:
    """Search over sets of changes, by the memory of the fullest rank."""

    def __init__(self, facts: SearchFacts) -> None:
        self._facts, self._estimates = facts, SimulatedEstimates.from_facts(facts)
        self._fractions: dict[str, float | None] = {}

    def best_layout(self, start: Settings) -> Settings:
        """Return the smallest set of changes of the layout beside `start` that fits, or the one
        with the least memory."""
        sets, best = [start], start
        for _ in range(_MAX_CHANGES):
            wider = dict[str, Settings]()
            for changes in sets:
                for more in _options(_changed(self._facts.job, changes), self._facts.ranks):
                    both = {**changes, **more}
                    if not more.keys() & changes and self._used(both) is not None:
                        wider[_name(both)] = both
            sets = sorted(wider.values(), key=self._least)[:_KEPT]
            if sets and self._least(sets[0]) < self._least(best):
                best = sets[0]
            if self.fits(best) or not sets:
                return best
        return best

    def fits(self, changes: Settings) -> bool:
        """Return whether the changed job is valid and fits."""
        return self._least(changes) <= 1

    def reduced(self, changes: Settings) -> Settings:
        """Return the part of `changes` that is needed, with the least values."""
        for key in list(changes):
            fewer = {name: value for name, value in changes.items() if name != key}
            if self._fits_as_planned(fewer):
                changes = fewer
        for key, value in list(changes.items()):
            while isinstance(value, int) and value % 2 == 0 and key not in _SHRINKING:
                value //= 2
                if self.fits({**changes, key: value}):
                    changes = {**changes, key: value}
        return changes

    def _fits_as_planned(self, changes: Settings) -> bool:
        """Return whether the changed job fits, also with what a plan chooses for it."""
        is_near = self._least(changes) <= _NEAR
        return self.fits(changes) or (is_near and self.as_planned(changes) is not None)

    def _least(self, changes: Settings) -> float:
        fraction = self._used(changes)
        return math.inf if fraction is None else fraction

    def _used(self, changes: Settings) -> float | None:
        """Return the used fraction of the fullest device, with defaults for what is open; None for
        an invalid job."""
        key = _name(changes)
        if key not in self._fractions and len(self._fractions) >= _MAX_TRIED:
            return None
        if key not in self._fractions:
            job = _changed(self._facts.job, changes)
            try:
                plan = plan_from_job(job, self._facts.ranks)
                is_open = job.layout.embedding == "auto"
                self._fractions[key] = min(
                    self._estimates.memory(job, one).used_fraction
                    for one in (embedding_layouts(plan, job) if is_open else [plan])
                )
            except ConfigError:
                self._fractions[key] = None
        return self._fractions[key]

    def as_planned(self, changes: Settings, *, must_fit: bool = True) -> Remedy | None:
        """Return changes with the memory that a plan of the changed job has; None if it is too
        much."""
        needed = _planned_memory(_changed(self._facts.job, changes), self._facts)
        if needed is None or (must_fit and needed.used_fraction > 1):
            return None
        return Remedy(changes, int(needed.memory.peak_bytes), needed.used_fraction <= 1)


def _planned_memory(job: Job, facts: SearchFacts) -> RankMemory | None:
    try:
        choices, plan_facts = choose_plan(job, facts.cluster, facts.ranks)
    except ConfigError:
        return None
    return plan_facts.tightest_rank(choices.plan)


def _options(job: Job, ranks: int) -> Iterator[Settings]:
    """Yield single changes to try; some of them are invalid."""
    layout, train = job.layout, job.train
    if not train.recompute:
        yield {"train.recompute": True}
    if layout.dp_shard != "all":
        yield {"layout.dp_shard": "all"}
    for table in ("whole", "columns"):
        if layout.embedding not in (table, "auto"):
            yield {"layout.embedding": table}
    for name, most in (("ep", min(ranks, job.model.experts)), ("pp", ranks), ("tp", ranks)):
        size = 2 * getattr(layout, name)
        while size <= most:
            yield {f"layout.{name}": size}
            size *= 2


def _smaller(job: Job) -> Iterator[tuple[str, int]]:
    """Yield smaller batches, then shorter samples."""
    train, sequence = job.train, job.data.sequence
    batch = train.batch
    while batch % 2 == 0 and batch // 2 % train.micro_batches == 0:
        batch //= 2
        yield "train.batch", batch
    while sequence % 2 == 0 and sequence // 2 >= _MIN_SEQUENCE:
        sequence //= 2
        yield "data.sequence", sequence


def _name(changes: Settings) -> str:
    return repr(sorted(changes.items()))


def _changed(job: Job, changes: Mapping[str, Any]) -> Job:
    tables: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        table, _, name = key.partition(".")
        tables.setdefault(table, {})[name] = value
    return job.model_copy(
        update={
            table: getattr(job, table).model_copy(update=values) for table, values in tables.items()
        }
    )


def _remedy_text(remedy: Remedy | None) -> str:
    if remedy is None:
        return NO_REMEDY
    size = format_bytes(remedy.peak_bytes)
    if remedy.fits:
        return f"it fits with {assignments(remedy.changes)} ({size})"
    return f"{NOTHING_FITS}: {assignments(remedy.changes)} comes nearest ({size})"
