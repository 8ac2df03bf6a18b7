"""Remedy of a job that does not fit: the fewest changes with which a plan of it fits.

Every verb asks here. Keys of the layout and `train.recompute` change first, since results do not
depend on them. Then come more micro-batches, 8-bit moments, a smaller batch, shorter samples and
more devices.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from moesaic.base.errors import ConfigError
from moesaic.base.keys import assignments
from moesaic.base.units import format_used_bytes
from moesaic.facts.cluster import Cluster, Link
from moesaic.facts.cluster.presets import NETWORKS, PRESETS
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.plan.search import (
    SEARCH_KEYS,
    RankNeed,
    Remedy,
    SearchFacts,
    Settings,
    Shortfall,
)
from moesaic.policy.plan.estimates import Estimates, SimulatedEstimates
from moesaic.policy.plan.mapping import max_ranks
from moesaic.policy.plan.predict import DOES_NOT_FIT, PlannedJob, choose_plan
from moesaic.policy.plan.space import Candidate, Space
from moesaic.policy.plan.trials import Trials
from moesaic.policy.plan.work import Work

REMEDY_WORK = 5_000
"""Work to find the remedy of a plan that was not searched: a few seconds."""
_NOTHING_FITS = "no change was found with which it fits"
_NO_REMEDY = f"{_NOTHING_FITS}: use a smaller model, or devices with more memory"
_OTHER_STAGES = "the same layout fits with other stage boundaries"
"""Remedy of a plan file whose layout fits, but not as the file cuts it."""
_MICRO_BATCHES = "train.micro_batches"
_MOMENTS = "optimizer.moments"
_STAGES = "stages"
_NOTES = {
    _MICRO_BATCHES: "; auxiliary losses are then taken over smaller micro-batches",
    _MOMENTS: "; the optimizer's state is then rounded to 8 bits, which changes results",
    "nproc": "; nproc needs more hosts or devices like the last",
}
"""Effects of a change beside memory, by its key."""
_KEPT = {
    "layout.dispatch", "layout.dispatch_hosts", "layout.chunks", "layout.overlap_local",
    _MICRO_BATCHES, _STAGES,
}  # fmt: skip
"""Keys that are no changes of a layout."""
_SPLITS = {"layout.pp", "layout.tp", "layout.etp"}
"""Keys that split layers or matrices, and so cost speed: others come before them."""
_KEYS_BY_LEVEL: tuple[tuple[str, ...], ...] = (
    ("layout.pp", "layout.schedule", "layout.tp", "layout.etp", "layout.ep", "train.recompute"),
    (), ("layout.dp_shard",), ("layout.embedding",),
)  # fmt: skip
"""Keys that candidates of a level have decided, in addition to those of the level before."""
_TRIES_SHARE = 0.8
"""Fraction of the work for changes that may fit; the rest is for what comes nearest."""
_STEP_SHARE = 0.3
"""Fraction of the work that is left, for one step of the way to a remedy."""
_PLANNED = 200.0
"""Work of the plan of a changed job."""
_SHAPE_OPTION = 0.01
"""Work of a shape that is listed, whether a valid one or not."""
_MAX_SHAPES = 24
"""Shapes whose memory is computed, those with the least state first."""
_MIN_SEQUENCE = 16
_MAX_RANK_FACTOR = 64

Planned = Callable[[SearchFacts, Work], RankNeed | None]
"""Function of changed facts and a counter of its work: the memory of the plan that the verb makes
then; None without one."""


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
    written = {*facts.pins, *(key for key in SEARCH_KEYS if _value(facts.job, key) != "auto")}
    written.discard("layout.dispatch_hosts")  # Unset: as the dispatch method needs.
    pins = [key for key in (*SEARCH_KEYS, _STAGES) if key in written or key == _STAGES]
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


class LeastMemory(NamedTuple):
    """Plan with the smallest fraction of memory in use."""

    memory: RankNeed
    settings: Settings
    plan: Plan
    candidate: Candidate


def least_memory(trials: Trials) -> LeastMemory | None:
    """Return the plan of a space with the smallest fraction of memory in use, or None.

    In a large space only the shapes with the least state are tried, as far as the work allows.
    """
    shapes = heapq.nsmallest(
        _MAX_SHAPES, _split_shapes(trials),
        key=lambda one: (trials.bounds.state_fraction(one), not one.recompute),
    )  # fmt: skip
    found: LeastMemory | None = None
    for leaf in (leaf for shape in shapes for leaf in _low_memory_leaves(trials, shape)):
        if found is not None and trials.work.used():
            break
        made = trials.plan(leaf)
        if made is None:
            continue
        memory = trials.estimates.memory(*made)
        if found is None or memory.used_fraction < found.memory.used_fraction:
            found = LeastMemory(memory, leaf.settings(), made[1], leaf)
    return found


def _split_shapes(trials: Trials) -> Iterator[Candidate]:
    """Yield valid shapes, those that split a model most first, for up to half of the work."""
    space, number = trials.space, 0
    options = sorted(
        space.shape_options(), reverse=True,
        key=lambda one: one.pp * max(one.tp, one.ep * one.etp),
    )  # fmt: skip
    trials.work.add(_SHAPE_OPTION * len(options))
    for shape in options:
        if number >= _MAX_SHAPES and trials.work.used(0.5):
            return
        if space.plan(shape) is not None:
            number += 1
            yield shape


def _low_memory_leaves(trials: Trials, shape: Candidate) -> Iterator[Candidate]:
    """Yield complete candidates of a shape that may need least memory."""
    space = trials.space
    plain = [one for one in space.children(shape, 0) if not one.overlaps_dispatch]
    for dispatched in plain or space.children(shape, 0)[:1]:
        shards = space.children(dispatched, 1)
        for sharded in {shards[-1]: None, shards[0]: None} if shards else {}:
            yield from space.leaves(sharded, 2)


def _find(
    facts: SearchFacts, estimates: Estimates, planned: Planned, work: Work, own: RankNeed | None
) -> Remedy | None:
    """Return the remedy for changes of pinned keys; without changes if none helps.

    `own` is the memory of the job itself.
    """
    is_least, tries = True, work.part(_TRIES_SHARE)
    for beside, changed in _changes_beside_layout(facts):
        if tries.used():
            is_least = False
            break
        layouts = _LayoutChanges(
            changed, estimates.on_cluster(changed.cluster), tries.part(_STEP_SHARE)
        )
        found = layouts.first_that_fits(planned, tries)
        is_least = is_least and layouts.is_complete
        if found is None and not beside and not layouts.is_complete:
            near = _LayoutChanges(facts, estimates, tries.part(_STEP_SHARE)).nearest(planned, tries)
            if near is not None and near[1].used_fraction <= 1:
                found = _without_needless(facts, *near, planned, tries)
        if found is not None:
            changes, memory = found
            both = {**changes, **beside}
            return Remedy(changes=both, fits=True, is_least=is_least, memory=memory)
    nearest = _LayoutChanges(facts, estimates, work.part(1.0)).nearest(planned, work)
    if nearest is None:
        return None
    changes, memory = nearest
    if memory.used_fraction <= 1:  # The limit of work had left it untried.
        changes, memory = _without_needless(facts, changes, memory, planned, work)
        return Remedy(changes=changes, fits=True, is_least=False, memory=memory)
    if own is not None and memory.used_fraction >= own.used_fraction:
        changes, memory = {}, own
    return Remedy(changes=changes, fits=False, is_least=is_least, memory=memory)


def _without_needless(
    facts: SearchFacts, changes: Settings, memory: RankNeed, planned: Planned, work: Work
) -> tuple[Settings, RankNeed]:
    """Return changes that fit without those that are not needed, and the memory then."""
    for key in sorted(changes, key=lambda one: one not in _SPLITS):
        fewer = {name: value for name, value in changes.items() if name != key}
        made = None if work.used() else planned(_with_values(facts, fewer), work)
        if made is not None and made.used_fraction <= 1:
            changes, memory = fewer, made
    return changes, memory


class _LayoutChanges:
    """Search for the fewest changes of a layout that fit: best first, by their number."""

    def __init__(self, facts: SearchFacts, estimates: Estimates, work: Work) -> None:
        self._facts = facts
        self._own = {
            key: _value(facts.job, key) for key in facts.pins
            if key not in _KEPT
            and not (key == "layout.schedule" and facts.job.layout.schedule == "1f1b")
        }  # fmt: skip
        """Values of the keys that may change."""
        pins = [one for one in facts.pins if one not in self._own]
        self.trials = Trials(facts.model_copy(update={"pins": pins}), estimates, work)
        self._number = 0
        self.is_complete = True
        """True if the result needed no limit."""

    def first_that_fits(self, planned: Planned, work: Work) -> tuple[Settings, RankNeed] | None:
        """Return the fewest changes, and the memory of the plan that is made then; `work` counts
        making it."""
        trials, seen = self.trials, set[str]()
        for candidate in self._by_changes():
            changes, made = self.changes(candidate), trials.plan(candidate)
            if repr(changes) in seen or made is None or not trials.estimates.fits(*made):
                continue
            seen.add(repr(changes))
            memory = planned(_with_values(self._facts, changes), work)
            if memory is not None and memory.used_fraction <= 1:
                return changes, memory
            if work.used() and memory is None:
                # The search may not have reached this plan, which fits.
                self.is_complete = False
                return changes, trials.estimates.memory(*made)
        return None

    def _by_changes(self) -> Iterator[Candidate]:
        """Yield complete candidates, those with the fewest changes first, as far as work allows."""
        space, queue = self.trials.space, list[_Entry]()
        shapes = deque(sorted(space.shape_options(), key=lambda one: len(self.changes(one, 0))))
        self.trials.work.add(_SHAPE_OPTION * len(shapes))
        while shapes or queue:
            if self.trials.work.used():
                self.is_complete = False
                return
            if shapes and (not queue or len(self.changes(shapes[0], 0)) <= queue[0].number):
                shape = shapes.popleft()
                if space.plan(shape) is not None:
                    self._push(queue, shape, 0)
                continue
            entry = heapq.heappop(queue)
            level, candidate = -entry.depth, entry.candidate
            if level == len(Space.LEVELS):
                yield candidate
                continue
            for child in space.children(candidate, level):
                self._push(queue, child, level + 1)

    def nearest(self, planned: Planned, work: Work) -> tuple[Settings, RankNeed] | None:
        """Return the changes with the least memory, and the memory of the plan that is made then;
        `work` counts making it."""
        found = least_memory(self.trials)
        if found is None:
            return None
        changes = self.changes(found.candidate)
        made = planned(_with_values(self._facts, changes), work)
        return changes, found.memory if made is None else made

    def changes(self, candidate: Candidate, level: int = len(Space.LEVELS)) -> Settings:
        """Return the changed keys among those that a candidate of a level has decided."""
        whole = max(self._facts.ranks // candidate.pp // candidate.tp, 1)
        found = dict[str, Any]()
        for key in (key for keys in _KEYS_BY_LEVEL[: level + 1] for key in keys):
            if key not in self._own:
                continue
            own, value = self._own[key], getattr(candidate, key.partition(".")[2])
            is_shard = key == "layout.dp_shard"
            if value != (whole if is_shard and own == "all" else own):
                found[key] = "all" if is_shard and value == whole > 1 else value
        return found

    def _push(self, queue: list[_Entry], candidate: Candidate, level: int) -> None:
        self.trials.estimates.note_bound()
        changes = self.changes(candidate, level)
        if self.trials.bounds.exceeds_memory(candidate, level):
            return
        far = sum(_distance(value, self._own[key]) for key, value in changes.items())
        self._number += 1
        used = self.trials.bounds.state_fraction(candidate, level)
        splits = len(_SPLITS.intersection(changes))
        train, replicas = self._facts.job.train, self._facts.ranks // candidate.pp // candidate.tp
        idles = train.batch // candidate.micro_batches < replicas
        entry = _Entry(len(changes), idles, splits, far, -level, used, self._number, candidate)
        heapq.heappush(queue, entry)


class _Entry(NamedTuple):
    """Candidate in the queue."""

    number: int
    """Number of its changes."""
    idles: bool
    """True if some ranks have no sample in a micro-batch."""
    splits: int
    """Number of changes that split layers or matrices."""
    distance: float
    """Sum of the doublings of values."""
    depth: int
    """Its level, negative: candidates with more decisions come first."""
    used: float
    """Fraction of memory that its state takes at least."""
    order: int
    """Number of the entry."""
    candidate: Candidate


def _distance(value: Any, own: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int) or not isinstance(own, int):
        return 1.0
    return abs(math.log2(value / own))


def _value(job: Job, key: str) -> Any:
    """Return the value of a key of the job; "auto" for one that is unset."""
    table, _, name = key.partition(".")
    value = getattr(getattr(job, table), name)
    return "auto" if value is None else value


def _changes_beside_layout(facts: SearchFacts) -> Iterator[tuple[Settings, SearchFacts]]:
    """Yield changes beside those of the layout, in order, and the facts after each."""
    yield {}, facts
    train, splits, number = facts.job.train, list[Settings](), facts.job.train.micro_batches
    while _MICRO_BATCHES in facts.pins and 2 * number <= train.batch:
        number *= 2
        if train.batch % number == 0:
            splits.append({_MICRO_BATCHES: number})
    yield from (_changed(facts, split) for split in splits)
    if "moments" not in facts.job.optimizer.model_fields_set:
        for split in ({}, *splits):
            yield _changed(facts, {**split, _MOMENTS: "8bit"})
    batch = train.batch
    while batch % 2 == 0 and batch // 2 % train.micro_batches == 0:
        batch //= 2
        yield _changed(facts, {"train.batch": batch})
    for more in ({}, *splits[-1:]):
        sequence = facts.job.data.sequence
        while sequence % 2 == 0 and sequence // 2 >= _MIN_SEQUENCE:
            sequence //= 2
            yield _changed(facts, {**more, "data.sequence": sequence})
    for ranks, cluster in _more_devices(facts.ranks, facts.cluster):
        yield {"nproc": ranks}, facts.model_copy(update={"ranks": ranks, "cluster": cluster})


def _changed(facts: SearchFacts, values: Settings) -> tuple[Settings, SearchFacts]:
    return values, _with_values(facts, values)


def _with_values(facts: SearchFacts, values: Settings) -> SearchFacts:
    """Return facts whose job has other values of some keys."""
    tables: dict[str, Settings] = {}
    for key, value in values.items():
        table, _, name = key.partition(".")
        tables.setdefault(table, {})[name] = value
    job = facts.job.model_copy(
        update={
            table: getattr(facts.job, table).model_copy(update=own) for table, own in tables.items()
        }
    )
    return facts.model_copy(update={"job": job})


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
