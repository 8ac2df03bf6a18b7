"""Remedy of a job that does not fit: the fewest changes with which a plan of it fits.

Every verb asks here. Keys of the layout and `train.recompute` change first, since results do not
depend on them. Then come more micro-batches, 8-bit moments, a smaller batch, shorter samples and
more devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
    "nproc": "; more ranks need more hosts or devices like the last",
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


def with_remedy(planned: PlannedJob, facts: SearchFacts) -> PlannedJob:
    """Return a planned job that does not fit with its remedy.

    `facts` are those of a search for its layout.
    """
    remedy = describe_remedy(find_remedy(facts))
    bottleneck = f"{planned.figures['bottleneck']}; {remedy_text(remedy)}"
    figures = {**planned.figures, "bottleneck": bottleneck, "remedy": remedy}
    others = [one for one in planned.warnings if not one.startswith(DOES_NOT_FIT)]
    return planned._replace(figures=figures, warnings=[f"{DOES_NOT_FIT}{bottleneck}", *others])


def find_remedy(facts: SearchFacts) -> Remedy | None:
    """Return the remedy of a job whose plan has the layout of its file; None without any plan."""
    written = {*facts.pins, *(key for key in SEARCH_KEYS if value_of(facts.job, key) != "auto")}
    written.discard("layout.dispatch_hosts")  # Unset: as the dispatch method needs.
    pins = [key for key in (*SEARCH_KEYS, STAGES) if key in written or key == STAGES]
    facts, work = facts.model_copy(update={"pins": pins}), Work(REMEDY_WORK)
    own = _memory_without_search(facts, work)
    return _find(facts, SimulatedEstimates.from_facts(facts), _memory_without_search, work, own)


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
        found, is_complete = _ChainSearch(chain, estimates, planned, tries).first_that_fits()
        is_least = is_least and is_complete
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
    """Return the changes with the least memory, and the memory of the plan that is made then.

    Beside those of the layout they are the most micro-batches and 8-bit moments.
    """
    least: tuple[Settings, RankNeed] | None = None
    for beside, changed in (chain[-1] for chain in _changes_beside_layout(facts)):
        if not beside.keys() <= {MICRO_BATCHES, _MOMENTS}:
            break
        layouts = LayoutChanges(changed, estimates, work.part(_STEP_SHARE))
        found = least_memory(layouts.trials)
        if found is None:
            continue
        if least is None or found.memory.used_fraction < least[1].used_fraction:
            least = {**layouts.changes(found.candidate), **beside}, found.memory
    if least is None:
        return None
    made = planned(with_values(facts, least[0]), work)
    return least if made is None else (least[0], made)


class _ChainSearch:
    """Search for the first change of a chain with which some layout fits.

    Each change of a chain needs less memory than the one before, so bisection finds it.
    """

    def __init__(self, chain: _Chain, estimates: Estimates, planned: Planned, tries: Work) -> None:
        self._chain, self._planned, self._tries = chain, planned, tries
        self._estimates = estimates.on_cluster(chain[-1][1].cluster)

    def first_that_fits(self) -> tuple[tuple[Settings, RankNeed] | None, bool]:
        """Return all changes then, with the memory; and whether no limit of work was met.

        Changes of the layout are the fewest with which the last change of the chain fits.
        """
        layouts = self._layouts(-1)
        last = next(layouts.that_fit(), None)
        if last is None:
            return (None, True) if layouts.is_complete else (self._by_least_memory(), False)
        most, is_complete = len(layouts.changes(last)), True
        first, last = self._first(last, most)
        for at in range(first, len(self._chain)):
            beside, own = self._chain[at][0], self._layouts(at)
            number = self._chain[at][1].job.train.micro_batches
            found = own.planned_with(
                last._replace(micro_batches=number), self._planned, self._tries
            )
            limit = most if at < len(self._chain) - 1 else None
            found = found or own.first_that_fits(self._planned, self._tries, limit)
            is_complete = is_complete and own.is_complete
            if found is not None:
                return ({**found[0], **beside}, found[1]), is_complete
            if self._tries.used():
                return None, False
        return None, is_complete

    def _by_least_memory(self) -> tuple[Settings, RankNeed] | None:
        """Return changes with the layout that needs least memory, or None if it does not fit."""
        layouts = self._layouts(-1)
        near = least_memory(layouts.trials)
        if near is None or near.memory.used_fraction > 1:
            return None
        at, candidate = self._first(near.candidate, None)
        beside, changed = self._chain[at]
        found = self._layouts(at).planned_with(candidate, self._planned, self._tries)
        if found is None:
            return None
        changes, memory = _without_needless(changed, *found, self._planned, self._tries)
        return {**changes, **beside}, memory

    def _first(self, candidate: Candidate, most: int | None) -> tuple[int, Candidate]:
        """Return the number of the first change with which `candidate`, or one with at most so
        many changes of the layout, fits; and that candidate."""
        low, high = 0, len(self._chain) - 1
        while low < high and not self._tries.used():
            middle = (low + high) // 2
            layouts = self._layouts(middle)
            own = candidate._replace(micro_batches=self._chain[middle][1].job.train.micro_batches)
            found = next(filter(layouts.fits, layouts.like(own)), None)
            if found is None and most is not None:
                found = next(layouts.that_fit(most), None)
            if found is None:
                low = middle + 1
            else:
                high, candidate = middle, found
        return high, candidate

    def _layouts(self, at: int) -> LayoutChanges:
        return LayoutChanges(self._chain[at][1], self._estimates, self._tries.part(_STEP_SHARE))


def _without_needless(
    facts: SearchFacts, changes: Settings, memory: RankNeed, planned: Planned, work: Work
) -> tuple[Settings, RankNeed]:
    """Return changes that fit without those that are not needed, and the memory then."""
    for key in sorted(changes, key=lambda one: one not in SPLITS):
        fewer = {name: value for name, value in changes.items() if name != key}
        made = None if work.used() else planned(with_values(facts, fewer), work)
        if made is not None and made.used_fraction <= 1:
            changes, memory = fewer, made
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
