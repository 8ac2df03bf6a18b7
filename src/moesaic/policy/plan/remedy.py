"""Remedy of a job that does not fit: the fewest changes with which a plan of it fits.

Every verb asks here. Keys of the layout and `train.recompute` change first, since results do not
depend on them. Then come more micro-batches, 8-bit moments, a smaller batch, shorter samples and
more devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from moesaic.base.errors import ConfigError
from moesaic.base.keys import assignments
from moesaic.base.units import format_used_bytes
from moesaic.facts.cluster import Cluster, Link
from moesaic.facts.cluster.presets import NETWORKS, PRESETS
from moesaic.facts.plan.search import (
    SEARCH_KEYS,
    RankNeed,
    Remedy,
    SearchFacts,
    Settings,
    Shortfall,
)
from moesaic.policy.plan.estimates import Estimates, SimulatedEstimates
from moesaic.policy.plan.layout_changes import (
    MICRO_BATCHES,
    SPLITS,
    STAGES,
    LayoutChanges,
    Planned,
    least_memory,
    value_of,
    with_values,
)
from moesaic.policy.plan.mapping import max_ranks
from moesaic.policy.plan.predict import DOES_NOT_FIT, PlannedJob, choose_plan
from moesaic.policy.plan.space import Candidate, divisors
from moesaic.policy.plan.trials import Trials
from moesaic.policy.plan.work import Work

REMEDY_WORK = 5_000
"""Work to find the remedy of a plan that was not searched: a few seconds."""
_NOTHING_FITS = "no change was found with which it fits"
_NO_REMEDY = f"{_NOTHING_FITS}: use a smaller model, or devices with more memory"
_OTHER_STAGES = "the same layout fits with other stage boundaries"
"""Remedy of a plan file whose layout fits, but not as the file cuts it."""
_MOMENTS = "optimizer.moments"
_NOTES = {
    MICRO_BATCHES: "; auxiliary losses are then taken over smaller micro-batches",
    _MOMENTS: "; the optimizer's state is then rounded to 8 bits, which changes results",
    "nproc": "; ranks beyond the devices of the cluster need more of them",
}
"""Effects of a change beside memory, by its key."""
_TRIES_SHARE = 0.8
"""Fraction of the work for changes that may fit; the rest is for what comes nearest."""
_STEP_SHARE = 0.3
"""Fraction of the work that is left, for one step of the way to a remedy."""
_PLANNED = 200.0
"""Work of the plan of a changed job."""
_MIN_SEQUENCE = 16
_MAX_RANK_FACTOR = 64

_Chain = Sequence[tuple[Settings, SearchFacts]]
"""Changes beside those of the layout, and the facts after each; each needs less memory than the
one before."""


def with_remedy(planned: PlannedJob, remedy: Mapping[str, Any] | None) -> PlannedJob:
    """Return a planned job that does not fit with its remedy, as `describe_remedy` has it."""
    bottleneck = f"{planned.figures['bottleneck']}; {remedy_text(remedy)}"
    figures = {**planned.figures, "bottleneck": bottleneck, "remedy": remedy}
    others = [one for one in planned.warnings if not one.startswith(DOES_NOT_FIT)]
    return planned._replace(figures=figures, warnings=[f"{DOES_NOT_FIT}{bottleneck}", *others])


def find_remedy(facts: SearchFacts, estimates: Estimates | None = None) -> Remedy | None:
    """Return the remedy of a job whose plan has the layout of its file; None without any plan.

    `estimates` are those for `facts`, and take note of progress.
    """
    written = {*facts.pins, *(key for key in SEARCH_KEYS if value_of(facts.job, key) != "auto")}
    written.discard("layout.dispatch_hosts")  # Unset: as the dispatch method needs.
    pins = [key for key in (*SEARCH_KEYS, STAGES) if key in written or key == STAGES]
    facts, work = facts.model_copy(update={"pins": pins}), Work(REMEDY_WORK)
    watched = estimates or SimulatedEstimates.from_facts(facts)

    def planned(changed: SearchFacts, work: Work) -> RankNeed | None:
        watched.note_progress()
        return _memory_without_search(changed, work)

    return _find(facts, watched, planned, work, planned(facts, work))


def _memory_without_search(facts: SearchFacts, work: Work) -> RankNeed | None:
    """Return the memory of the plan with the layout of a job."""
    work.add(_PLANNED)
    try:
        choices, plan_facts = choose_plan(facts.job, facts.cluster, facts.ranks)
    except ConfigError:
        return None
    found = plan_facts.tightest_rank(choices.plan)
    return RankNeed(
        rank=found.rank, device=found.device.model, peak_bytes=int(found.memory.peak_bytes),
        usable_bytes=float(found.device.usable_bytes),
    )  # fmt: skip


def shortfall(
    facts: SearchFacts, estimates: Estimates, search: Planned, work: Work
) -> Shortfall | None:
    """Return what is short in the plan that comes nearest, and the remedy; None without any plan.

    Nothing is short if the search had not tried that plan.

    `search` returns the memory of the best plan that the same search finds for changed facts.
    """
    nearest = least_memory(Trials(facts, estimates, work.part(_STEP_SHARE)))
    if nearest is None:
        return None
    fits = nearest.memory.used_fraction <= 1
    remedy = None if fits else _find(facts, estimates, search, work, nearest.memory)
    return Shortfall(
        memory=nearest.memory, settings=nearest.settings, plan=nearest.plan, remedy=remedy
    )


def _find(
    facts: SearchFacts, estimates: Estimates, planned: Planned, work: Work, own: RankNeed | None
) -> Remedy | None:
    """Return the remedy for changes of pinned keys; without changes if none helps.

    `own` is the memory of the job itself.
    """
    is_least, tries = True, work.part(_TRIES_SHARE)
    for chain in _changes_beside_layout(facts):
        if tries.used():
            is_least = False
            break
        search = _ChainSearch(chain, estimates, planned, tries)
        found = search.first_that_fits()
        is_least = is_least and search.is_complete
        if found is not None:
            changes, memory = found
            return Remedy(changes=changes, fits=True, is_least=is_least, memory=memory)
    nearest = _nearest(facts, estimates, planned, work)
    if nearest is None:
        return None
    changes, memory = nearest
    if memory.used_fraction <= 1:  # The limit of work had left it untried.
        changes, memory = _without_needless(facts, changes, memory, planned, work)
        return Remedy(changes=changes, fits=True, is_least=False, memory=memory)
    if own is not None and memory.used_fraction >= own.used_fraction:
        changes, memory = {}, own
    return Remedy(changes=changes, fits=False, is_least=is_least, memory=memory)


def _nearest(
    facts: SearchFacts, estimates: Estimates, planned: Planned, work: Work
) -> tuple[Settings, RankNeed] | None:
    """Return the first changes whose plan fits, else those with the least memory; and its memory.

    Beside those of the layout they are the most micro-batches and 8-bit moments.
    """
    least: tuple[Settings, RankNeed] | None = None
    for other_changes, changed in (chain[-1] for chain in _changes_beside_layout(facts)):
        if not other_changes.keys() <= {MICRO_BATCHES, _MOMENTS}:
            break
        layouts = LayoutChanges(changed, estimates, work.part(_STEP_SHARE))
        found = least_memory(layouts.trials)
        if found is None:
            continue
        changes, memory = {**layouts.changes(found.candidate), **other_changes}, found.memory
        if memory.used_fraction <= 1:
            memory = planned(with_values(facts, changes), work) or memory
            if memory.used_fraction <= 1:
                return changes, memory
        if least is None or memory.used_fraction < least[1].used_fraction:
            least = changes, memory
    if least is None:
        return None
    made = planned(with_values(facts, least[0]), work)
    return least if made is None else (least[0], made)


class _Taken(NamedTuple):
    """Layout whose plan fits after a change of a chain."""

    at: int
    """Number of that change."""
    changes: Settings
    """Changes of the layout."""
    memory: RankNeed


class _ChainSearch:
    """Search for the first change of a chain with which some layout fits.

    Each change of a chain needs less memory than the one before, so bisection finds it.
    """

    def __init__(self, chain: _Chain, estimates: Estimates, planned: Planned, tries: Work) -> None:
        self._chain, self._planned, self._tries = chain, planned, tries
        self._estimates = estimates.on_cluster(chain[-1][1].cluster)
        self._last = len(chain) - 1
        self.is_complete = True
        """True if no limit was met."""

    def first_that_fits(self) -> tuple[Settings, RankNeed] | None:
        """Return all changes then, with the memory.

        Changes of the layout are the fewest with which the last change of the chain fits.
        """
        layouts = self._layouts(self._last)
        candidate = next(layouts.that_fit(), None)
        self._note(layouts)
        if candidate is None:
            return None if layouts.is_complete else self._by_least_memory()
        most = len(layouts.changes(candidate))
        first, candidate = self._first(candidate, most)
        if first < self._last:
            taken = self._take(first, candidate, most)
            if taken is not None:
                return self._all_changes(taken)
        taken = self._take(self._last, candidate, None)
        if taken is None:
            return None
        is_same = taken.changes == layouts.changes(candidate)
        return self._all_changes(self._fewest(first + 1 if is_same else 0, taken))

    def _by_least_memory(self) -> tuple[Settings, RankNeed] | None:
        """Return changes with the layout that needs least memory, or None if it does not fit."""
        least = least_memory(self._layouts(self._last).trials)
        if least is None or least.memory.used_fraction > 1:
            return None
        first, candidate = self._first(least.candidate, None)
        taken = self._take(first, candidate, 0)
        if taken is None and first < self._last:
            taken = self._take(self._last, candidate, 0)
            taken = None if taken is None else self._fewest(first + 1, taken)
        if taken is None:
            return None
        changed = self._chain[taken.at][1]
        changes, memory = _without_needless(
            changed, taken.changes, taken.memory, self._planned, self._tries
        )
        return self._all_changes(_Taken(taken.at, changes, memory))

    def _first(self, candidate: Candidate, most: int | None) -> tuple[int, Candidate]:
        """Return the number of the first change with which `candidate`, or one with at most so
        many changes of the layout, fits; and that candidate."""
        low, high = 0, self._last
        while low < high and not self._tries.used():
            middle = (low + high) // 2
            layouts = self._layouts(middle)
            variants = layouts.variants(self._at(middle, candidate))
            found = next(filter(layouts.fits, variants), None)
            if found is None and most is not None:
                found = next(layouts.that_fit(most), None)
            if found is None:
                low = middle + 1
                self._note(layouts)
            else:
                high, candidate = middle, found
        self.is_complete = self.is_complete and low == high
        return high, candidate

    def _take(self, at: int, candidate: Candidate, most: int | None) -> _Taken | None:
        """Return the layout of `candidate`, else that with the fewest changes, up to so many.

        Its plan fits after that change of the chain.
        """
        layouts = self._layouts(at)
        found = layouts.planned_with(self._at(at, candidate), self._planned, self._tries)
        if found is None and most != 0:
            found = layouts.first_that_fits(self._planned, self._tries, most)
        self._note(layouts)
        return None if found is None else _Taken(at, *found)

    def _fewest(self, low: int, taken: _Taken) -> _Taken:
        """Return the same layout after the first change, from number `low`, with which its plan
        fits."""
        steps = [facts for _, facts in self._chain[low : taken.at]]
        found = _first_planned(steps, taken.changes, self._planned, self._tries)
        self.is_complete = self.is_complete and not self._tries.used()
        return taken if found is None else _Taken(low + found[0], taken.changes, found[1])

    def _all_changes(self, taken: _Taken) -> tuple[Settings, RankNeed]:
        return {**taken.changes, **self._chain[taken.at][0]}, taken.memory

    def _at(self, at: int, candidate: Candidate) -> Candidate:
        return candidate._replace(micro_batches=self._chain[at][1].job.train.micro_batches)

    def _layouts(self, at: int) -> LayoutChanges:
        return LayoutChanges(self._chain[at][1], self._estimates, self._tries.part(_STEP_SHARE))

    def _note(self, layouts: LayoutChanges) -> None:
        self.is_complete = self.is_complete and layouts.is_complete


def _first_planned(
    steps: Sequence[SearchFacts], changes: Settings, planned: Planned, work: Work
) -> tuple[int, RankNeed] | None:
    """Return the number of the first step whose plan with these changes fits, and its memory.

    The steps are bisected as far as the work allows; None if none was found.
    """
    low, high, found = 0, len(steps), None
    while low < high and not work.used():
        middle = (low + high) // 2
        memory = planned(with_values(steps[middle], changes), work)
        if memory is None or memory.used_fraction > 1:
            low = middle + 1
        else:
            high, found = middle, (middle, memory)
    return found


def _without_needless(
    facts: SearchFacts, changes: Settings, memory: RankNeed, planned: Planned, work: Work
) -> tuple[Settings, RankNeed]:
    """Return changes that fit without those that are not needed, and the memory then.

    Changes on which results depend go first; micro-batches become as few as suffice.
    """
    order = (_MOMENTS, MICRO_BATCHES, *sorted(SPLITS))
    for key in sorted(changes, key=lambda key: order.index(key) if key in order else len(order)):
        fewer = {name: value for name, value in changes.items() if name != key}
        made = None if work.used() else planned(with_values(facts, fewer), work)
        if made is not None and made.used_fraction <= 1:
            changes, memory = fewer, made
        elif key == MICRO_BATCHES:
            chains = _more_micro_batches(with_values(facts, fewer))
            numbers = sorted(step[key] for chain in chains for step in chain)
            numbers = [number for number in numbers if number < changes[key]]
            steps = [with_values(facts, {key: number}) for number in numbers]
            found = _first_planned(steps, fewer, planned, work)
            if found is not None:
                changes, memory = {**changes, key: numbers[found[0]]}, found[1]
    return changes, memory


def _changes_beside_layout(facts: SearchFacts) -> Iterator[_Chain]:
    """Yield changes beside those of the layout, in order, with the facts after each."""
    train, splits = facts.job.train, _more_micro_batches(facts)
    chains: list[list[Settings]] = [[{}], *splits]
    if "moments" not in facts.job.optimizer.model_fields_set:
        chains += [[{**one, _MOMENTS: "8bit"} for one in chain] for chain in chains]
    batch = train.batch
    while batch % 2 == 0 and batch // 2 % train.micro_batches == 0:
        batch //= 2
        chains.append([{"train.batch": batch}])
    for more in ({}, *(chain[-1] for chain in splits[-1:])):
        sequence = facts.job.data.sequence
        while sequence % 2 == 0 and sequence // 2 >= _MIN_SEQUENCE:
            sequence //= 2
            chains.append([{**more, "data.sequence": sequence}])
    for chain in chains:
        yield [(one, with_values(facts, one)) for one in chain]
    for ranks, cluster in _more_devices(facts.ranks, facts.cluster):
        more = {"ranks": ranks, "cluster": cluster}
        yield [({"nproc": ranks}, facts.model_copy(update=more))]


def _more_micro_batches(facts: SearchFacts) -> list[list[Settings]]:
    """Return larger numbers of micro-batches: those that leave no rank idle, and the others.

    A pipeline holds activations of several micro-batches. More of them need no more memory if each
    replica has as many samples in all.
    """
    train, layout = facts.job.train, facts.job.layout
    if MICRO_BATCHES not in facts.pins:
        return []
    numbers = [one for one in divisors(train.batch) if one > train.micro_batches]
    replicas = max(facts.ranks // layout.pp // layout.tp, 1)
    even = [one for one in numbers if train.batch // one % replicas == 0]
    busy = [one for one in numbers if train.batch // one >= replicas]
    busy = even if even and layout.pp > 1 else busy
    idle = [one for one in numbers if train.batch // one < replicas]
    chains = [[{MICRO_BATCHES: one} for one in chain] for chain in (busy, idle) if chain]
    if layout.pp > 1 and layout.schedule != "1f1b":
        # The schedule may hold all micro-batches at one time, or need multiples of a number.
        return [[one] for chain in chains for one in chain]
    return chains


def _more_devices(ranks: int, cluster: Cluster) -> Iterator[tuple[int, Cluster]]:
    """Yield twice the ranks, four times, and so on, on more hosts like the last one if needed."""
    most = _MAX_RANK_FACTOR * ranks
    while ranks < most:
        ranks *= 2
        while max_ranks(cluster) < ranks:
            larger = _with_another_host(cluster)
            if larger is None:
                return
            cluster = larger
        yield ranks, cluster


def _with_another_host(cluster: Cluster) -> Cluster | None:
    """Return the cluster with another host like the last; None if no link would join it.

    Hosts like those of a preset have its network.
    """
    last, number = cluster.hosts[-1], len(cluster.hosts)
    networks = []
    if not any(link.ends == ["*", "*"] for link in cluster.links):
        models = {PRESETS[name]["devices"][0]["model"]: name for name in NETWORKS}
        preset = models.get(last.devices[0].model)
        if number > 1 or preset is None:
            return None
        networks = [
            Link(ends=["*", "*"], kind="network", latency_s=5e-6, bandwidth=NETWORKS[preset])
        ]
    host = last.model_copy(update={"name": f"{last.name}-more-{number}"})
    inside = [
        link.model_copy(update={"ends": [host.name, host.name]})
        for link in cluster.links
        if link.ends == [last.name, last.name]
    ]
    links = [*cluster.links, *inside, *networks]
    return cluster.model_copy(update={"hosts": [*cluster.hosts, host], "links": links})


def describe_remedy(remedy: Remedy | None) -> dict[str, Any] | None:
    """Return a remedy as plain data."""
    if remedy is None:
        return None
    return {
        "changes": remedy.changes, "peak_bytes": remedy.memory.peak_bytes,
        "usable_bytes": remedy.memory.usable_bytes, "fits": remedy.fits,
        "is_least": remedy.is_least,
    }  # fmt: skip


def remedy_text(remedy: Mapping[str, Any] | None) -> str:
    """Return in words with which changes a job fits, or which come nearest; `remedy` is as
    `describe_remedy` has it."""
    if remedy is None:
        return _NO_REMEDY
    size = f" ({format_used_bytes(remedy['peak_bytes'], remedy['usable_bytes'])})"
    text = _NO_REMEDY if remedy["is_least"] else _NOTHING_FITS
    if not remedy["changes"]:
        return f"{_OTHER_STAGES}{size}" if remedy["fits"] else text
    told = assignments(remedy["changes"])
    learns = "".join(text for key, text in _NOTES.items() if key in remedy["changes"])
    if not remedy["fits"]:
        return f"{text}; {told} comes nearest{size}{learns}"
    least = "the smallest change that fits" if remedy["is_least"] else "a change that fits"
    return f"{least}: {told}{size}{learns}"
