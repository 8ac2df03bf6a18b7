"""Fewest changes of a layout with which a job fits, and the layout that needs least memory."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.plan.search import RankNeed, SearchFacts, Settings
from moesaic.policy.plan.estimates import Estimates
from moesaic.policy.plan.space import Candidate, Space
from moesaic.policy.plan.trials import Trials
from moesaic.policy.plan.work import Work

MICRO_BATCHES, STAGES = "train.micro_batches", "stages"
_KEPT = {
    "layout.dispatch", "layout.dispatch_hosts", "layout.chunks", "layout.overlap_local",
    MICRO_BATCHES, STAGES,
}  # fmt: skip
"""Keys that are no changes of a layout."""
SPLITS = {"layout.pp", "layout.tp", "layout.etp"}
"""Keys that split layers or matrices, and so cost speed: others come before them."""
_KEYS_BY_LEVEL: tuple[tuple[str, ...], ...] = (
    ("layout.pp", "layout.schedule", "layout.tp", "layout.etp", "layout.ep", "train.recompute"),
    (), ("layout.dp_shard",), ("layout.embedding",),
)  # fmt: skip
"""Keys that candidates of a level have decided, in addition to those of the level before."""
_SHAPE_OPTION = 0.01
"""Work of a shape that is listed, whether a valid one or not."""
_MAX_SHAPES = 24
"""Shapes whose memory is computed, those with the least state first."""
_MAX_VARIANTS = 4
"""Dispatch methods of one layout that are tried, those with the most chunks first."""
_MAX_PLANNED = 4
"""Layouts of a job for which the verb makes a plan, at most: it may choose another dispatch method
than the one that fits."""

Planned = Callable[[SearchFacts, Work], RankNeed | None]
"""Function of changed facts and a counter of its work: the memory of the plan that the verb makes
then; None without one."""


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
        trials.estimates.note_progress()
        if space.plan(shape) is not None:
            number += 1
            yield shape


def _low_memory_leaves(trials: Trials, shape: Candidate) -> Iterator[Candidate]:
    """Yield complete candidates of a shape that may need least memory."""
    space = trials.space
    methods = space.children(shape, 0)
    plain = [one for one in methods if not one.overlaps_dispatch] or methods[:1]
    most = max(methods, key=lambda one: one.chunks, default=shape)
    for dispatched in [*plain, *([most] if most.chunks > 1 and most not in plain else [])]:
        shards = space.children(dispatched, 1)
        for sharded in {shards[-1]: None, shards[0]: None} if shards else {}:
            yield from space.leaves(sharded, 2)


class LayoutChanges:
    """Search for the fewest changes of a layout that fit: best first, by their number."""

    def __init__(self, facts: SearchFacts, estimates: Estimates, work: Work) -> None:
        self._facts = facts
        self._values = {
            key: value_of(facts.job, key) for key in facts.pins
            if key not in _KEPT
            and not (key == "layout.schedule" and facts.job.layout.schedule == "1f1b")
        }  # fmt: skip
        """Values of the keys that may change."""
        pins = [key for key in facts.pins if key not in self._values]
        self.trials = Trials(facts.model_copy(update={"pins": pins}), estimates, work)
        self._number, self._planned = 0, set[str]()
        self.is_complete = True
        """True if the result needed no limit."""

    def first_that_fits(
        self, planned: Planned, work: Work, most: int | None
    ) -> tuple[Settings, RankNeed] | None:
        """Return the fewest changes, up to so many, and the memory of the plan that is made then.

        `work` counts making it. Only a few layouts are planned.
        """
        for number, candidate in enumerate(self.that_fit(most)):
            if number == _MAX_PLANNED:
                self.is_complete = False
                break
            found = self.planned_with(candidate, planned, work)
            if found is not None:
                return found
        return None

    def planned_with(
        self, candidate: Candidate, planned: Planned, work: Work
    ) -> tuple[Settings, RankNeed] | None:
        """Return the changes for a candidate that fits, with the memory of the plan that is made
        then; None if it does not fit."""
        changes = self.changes(candidate)
        self._planned.add(repr(changes))
        memory = planned(with_values(self._facts, changes), work)
        if memory is None and work.used():
            # The search may not have reached this plan, which fits.
            self.is_complete = False
            made = self.trials.plan(candidate)
            if made is None:
                return None
            memory = self.trials.estimates.memory(*made)
        return None if memory is None or memory.used_fraction > 1 else (changes, memory)

    def that_fit(self, most: int | None = None) -> Iterator[Candidate]:
        """Yield candidates that fit, those with the fewest changes first, up to so many."""
        for candidate in self._by_changes():
            changes = self.changes(candidate)
            if most is not None and len(changes) > most:
                return
            if repr(changes) not in self._planned and self.fits(candidate):
                yield candidate

    def variants(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield a candidate, and those with the same changes that may need less memory."""
        yield candidate
        methods = self.trials.space.children(candidate, 0)
        most_chunks = heapq.nlargest(_MAX_VARIANTS, methods, key=lambda method: method.chunks)
        for variant in most_chunks:
            yield from self.trials.space.leaves(variant, 2)

    def fits(self, candidate: Candidate) -> bool:
        """Return whether a complete candidate is valid and fits."""
        made = self.trials.plan(candidate)
        return made is not None and self.trials.estimates.fits(*made)

    def _by_changes(self) -> Iterator[Candidate]:
        """Yield complete candidates, those with the fewest changes first, as far as work allows."""
        space, queue = self.trials.space, list[_Entry]()
        shapes = deque(sorted(space.shape_options(), key=lambda shape: len(self.changes(shape, 0))))
        self.trials.work.add(_SHAPE_OPTION * len(shapes))
        while shapes or queue:
            if self.trials.work.used():
                self.is_complete = False
                return
            if shapes and (not queue or len(self.changes(shapes[0], 0)) <= queue[0].number):
                shape = shapes.popleft()
                self.trials.estimates.note_progress()
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

    def changes(self, candidate: Candidate, level: int = len(Space.LEVELS)) -> Settings:
        """Return the changed keys among those that a candidate of a level has decided."""
        whole = max(self._facts.ranks // candidate.pp // candidate.tp, 1)
        found = dict[str, Any]()
        for key in (key for keys in _KEYS_BY_LEVEL[: level + 1] for key in keys):
            if key not in self._values:
                continue
            before, value = self._values[key], getattr(candidate, key.partition(".")[2])
            is_shard = key == "layout.dp_shard"
            if value != (whole if is_shard and before == "all" else before):
                found[key] = "all" if is_shard and value == whole > 1 else value
        return found

    def _push(self, queue: list[_Entry], candidate: Candidate, level: int) -> None:
        self.trials.estimates.note_progress()
        changes = self.changes(candidate, level)
        if self.trials.bounds.exceeds_memory(candidate, level):
            return
        far = sum(_distance(value, self._values[key]) for key, value in changes.items())
        self._number += 1
        used = self.trials.bounds.state_fraction(candidate, level)
        splits = len(SPLITS.intersection(changes))
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


def value_of(job: Job, key: str) -> Any:
    """Return the value of a key of the job; "auto" for one that is unset."""
    table, _, name = key.partition(".")
    value = getattr(getattr(job, table), name)
    return "auto" if value is None else value


def with_values(facts: SearchFacts, values: Settings) -> SearchFacts:
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
