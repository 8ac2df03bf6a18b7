"""Space of a search: the plans that a job leaves open on a number of ranks.

A `Candidate` has a value for every key. A search decides them level by level: first the shape
(micro-batches, recomputation, pipeline, tensor and expert parallelism), then the dispatch method,
the sharding of dense parameters, the embedding and the stage boundaries. Each level checks its
candidates by the checks of plans (`facts.plan.checks`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from moesaic.base.errors import ConfigError
from moesaic.base.keys import assignments
from moesaic.facts.cluster import Cluster
from moesaic.facts.job import Job
from moesaic.facts.job.train import DispatchMethod, EmbeddingSharding, PipelineSchedule
from moesaic.facts.plan import Plan, RankPlace, plan_from_job
from moesaic.facts.plan.search import SEARCH_KEYS, Settings
from moesaic.policy.plan.choices import embedding_layouts
from moesaic.policy.plan.dispatch import dispatch_methods, overlap_options
from moesaic.policy.plan.mapping import assign_places

SCHEDULES: tuple[PipelineSchedule, ...] = ("1f1b", "gpipe", "interleaved", "zero-bubble")
"""Pipeline schedules, the usual one first."""
_MAX_MICRO_BATCHES = 20
"""Numbers of micro-batches that a search tries, at most; of more divisors it skips close ones."""
Cuts = Literal["even", "balanced"]
"""Stage boundaries: equal numbers of layers, or equal seconds within memory (`cuts`)."""


class Candidate(NamedTuple):
    """Values of all keys that a search may choose."""

    micro_batches: int
    recompute: bool
    pp: int
    schedule: PipelineSchedule
    tp: int
    etp: int
    ep: int
    dispatch: DispatchMethod = "all_to_all"
    dispatch_hosts: int = 1
    chunks: int = 1
    overlap_local: bool = False
    dp_shard: int = 1
    embedding: EmbeddingSharding = "whole"
    cuts: Cuts = "even"

    @property
    def overlaps_dispatch(self) -> bool:
        """True if experts compute while tokens travel."""
        return self.ep > 1 and (self.chunks > 1 or self.overlap_local)

    def settings(self) -> Settings:
        """Return the values by key of the job."""
        values: Settings = dict(self._asdict())
        train = {f"train.{key}": values.pop(key) for key in ("micro_batches", "recompute")}
        stages = {"stages": values.pop("cuts")}
        return {**{f"layout.{key}": value for key, value in values.items()}, **train, **stages}


class Space:
    """Candidates of a job on a number of ranks; pinned keys keep their values."""

    LEVELS = ("dispatch", "dp_shard", "embedding", "cuts")
    """Decisions after the shape, in order."""

    def __init__(self, job: Job, cluster: Cluster, ranks: int, pins: Sequence[str]) -> None:
        self.job, self.cluster, self.ranks = job, cluster, ranks
        self._pins = frozenset(pins)
        self._plans: dict[Candidate, tuple[Job, Plan] | None] = {}
        self._places: list[RankPlace] | None = None
        self._expert_placements: dict[int, list[list[int]]] = {}
        """Placement by `ep`: plans share it, which saves most of their memory."""
        self.faults: dict[str, None] = {}
        """Reasons why candidates are no valid plans, in order."""

    def is_open(self, key: str) -> bool:
        """Return whether the search chooses the value of `key`, such as "layout.ep"."""
        return key not in self._pins

    def values(self, key: str, options: Sequence[Any]) -> Sequence[Any]:
        """Return the values to try for `key`: its own if it is pinned."""
        if self.is_open(key):
            return options
        table, _, name = key.partition(".")
        return [getattr(getattr(self.job, table), name)]

    @property
    def has_plans(self) -> bool:
        """True if some candidate was a valid plan."""
        return any(found is not None for found in self._plans.values())

    def conflict(self) -> str:
        """Return why no plan is valid: the fewest pins that exclude each other, and the error."""
        pins, space = [key for key in SEARCH_KEYS if key in self._pins], self
        for pin in list(pins):
            fewer = [key for key in pins if key != pin]
            smaller = Space(self.job, self.cluster, self.ranks, fewer)
            if next(smaller.shapes(), None) is None:
                pins, space = fewer, smaller
        error = next(iter(space.faults), "no layout is valid for this job")
        if len(pins) < 2:
            return error
        values = {key: space.values(key, [])[0] for key in pins}
        return f"{assignments(values)} exclude each other on {self.ranks} ranks: {error}"

    def shapes(self) -> Iterator[Candidate]:
        """Yield every valid shape, with the first choice for all other keys."""
        return (shape for shape in self.shape_options() if self.plan(shape) is not None)

    def shape_options(self) -> Iterator[Candidate]:
        """Yield shapes that may be valid, with the first choice for all other keys."""
        for micro_batches in self.values("train.micro_batches", self.micro_batches()):
            for pp in self.values("layout.pp", divisors(self.ranks)):
                schedules = self.values("layout.schedule", SCHEDULES if pp > 1 else SCHEDULES[:1])
                for schedule in schedules:
                    for recompute in self.values("train.recompute", (False, True)):
                        first = Candidate(micro_batches, recompute, pp, schedule, 1, 1, 1)
                        yield from self._splits(first)

    def micro_batches(self) -> list[int]:
        """Return the numbers of micro-batches to try."""
        numbers = divisors(self.job.train.batch)
        ratio = numbers[-1] ** (1 / (_MAX_MICRO_BATCHES - 1))
        found = numbers if len(numbers) <= _MAX_MICRO_BATCHES else numbers[:1]
        for number in numbers if found is not numbers else ():
            if number >= ratio * found[-1]:
                found.append(number)
        return found

    def _splits(self, first: Candidate) -> Iterator[Candidate]:
        """Yield `first` with every tensor and expert parallelism that may be valid."""
        model, stage_ranks = self.job.model, max(self.ranks // first.pp, 1)
        if self.is_open("layout.pp") and first.pp > model.layers:
            return
        widths = math.gcd(model.heads, model.kv_heads, model.vocab, self.job.data.sequence)
        for tp in self.values("layout.tp", divisors(math.gcd(stage_ranks, widths))):
            shards = divisors(math.gcd(tp, model.ffn)) if model.experts else [1]
            for etp in self.values("layout.etp", shards):
                most = math.gcd(stage_ranks // etp, model.experts) if model.experts else 1
                for ep in self.values("layout.ep", divisors(max(most, 1))):
                    yield self.pinned(first._replace(tp=tp, etp=etp, ep=ep))

    def pinned(self, candidate: Candidate) -> Candidate:
        """Return `candidate` with the pinned values of what comes after the shape."""
        layout = self.job.layout
        changes = {
            key: getattr(layout, key)
            for key in ("dispatch", "dispatch_hosts", "chunks", "overlap_local", "embedding")
            if not self.is_open(f"layout.{key}")
        }
        if not self.is_open("layout.dp_shard"):
            whole = max(self.ranks // candidate.pp // candidate.tp, 1)
            changes["dp_shard"] = whole if layout.dp_shard == "all" else layout.dp_shard
        return candidate._replace(**changes)

    def children(self, candidate: Candidate, level: int) -> list[Candidate]:
        """Return the valid candidates of a level below `candidate`; the last level is complete."""
        options = getattr(self, f"_{self.LEVELS[level]}_options")(candidate)
        return [one for one in options if self.plan(one) is not None]

    def _dispatch_options(self, candidate: Candidate) -> list[Candidate]:
        found = self.plan(candidate)
        if found is None or candidate.ep == 1:
            return [candidate]
        plan, options = found[1], list[Candidate]()
        for method in dispatch_methods(plan, [place.host for place in plan.places]):
            for one in (method, *overlap_options(method, self.job)):
                option = candidate._replace(
                    dispatch=one.dispatch, dispatch_hosts=one.dispatch_hosts, chunks=one.chunks,
                    overlap_local=one.overlap_local,
                )  # fmt: skip
                if self.pinned(option) == option:
                    options.append(option)
        # A pinned number of hosts need not be that of the cluster.
        return options or [candidate]

    def with_fewest_chunks(self, candidate: Candidate) -> Candidate:
        """Return `candidate` with as few chunks of the dispatch as the job lets it have."""
        if candidate.ep == 1 or not self.is_open("layout.chunks"):
            return candidate
        return candidate._replace(chunks=1)

    def _dp_shard_options(self, candidate: Candidate) -> list[Candidate]:
        if not self.is_open("layout.dp_shard"):
            return [candidate]
        replicas = self.ranks // candidate.pp // candidate.tp
        return [candidate._replace(dp_shard=one) for one in divisors(replicas)]

    def _embedding_options(self, candidate: Candidate) -> list[Candidate]:
        found = self.plan(candidate)
        if found is None or not self.is_open("layout.embedding"):
            return [candidate]
        options = embedding_layouts(found[1], found[0])
        return [candidate._replace(embedding=one.embedding) for one in options]

    def _cuts_options(self, candidate: Candidate) -> list[Candidate]:
        # The plan of balanced cuts is the even one; the search sets its stages.
        is_open = candidate.pp > 1 and self.is_open("stages")
        options: tuple[Cuts, ...] = ("even", "balanced") if is_open else ("even",)
        return [candidate._replace(cuts=one) for one in options]

    def leaves(self, candidate: Candidate, level: int = 0) -> Iterator[Candidate]:
        """Yield every complete candidate below `candidate`, a candidate of `level`."""
        if level == len(self.LEVELS):
            yield candidate
            return
        for one in self.children(candidate, level):
            yield from self.leaves(one, level + 1)

    def plan(self, candidate: Candidate) -> tuple[Job, Plan] | None:
        """Return the job under `candidate` and its plan with even stages, or None if invalid."""
        key = candidate._replace(cuts="even")
        if key not in self._plans:
            try:
                self._plans[key] = self._make_plan(key)
            except (ConfigError, ValueError) as error:
                self.faults.setdefault(_sentence(error))
                self._plans[key] = None
        return self._plans[key]

    def _make_plan(self, candidate: Candidate) -> tuple[Job, Plan]:
        values: dict[str, dict[str, Any]] = {"layout": {}, "train": {}}
        for key, value in candidate.settings().items():
            table, _, name = key.partition(".")
            if name:
                values[table][name] = value
        if values["layout"]["dispatch_hosts"] == 1:
            values["layout"]["dispatch_hosts"] = None
        sections = {
            table: getattr(self.job, table).model_copy(update=own) for table, own in values.items()
        }
        job = Job.model_validate({**dict(self.job), **sections}, by_name=True, by_alias=False)
        plan = plan_from_job(job, self.ranks)
        if self._places is None:  # They are the same for all plans.
            self._places = assign_places(plan, self.cluster).places
        experts = self._expert_placements.setdefault(candidate.ep, plan.expert_placement)
        return job, plan.model_copy(update={"places": self._places, "expert_placement": experts})


def _sentence(error: Exception) -> str:
    """Return what an error says, without the decoration of pydantic."""
    details = getattr(error, "errors", None)
    text = details(include_url=False)[0]["msg"] if details is not None else str(error)
    return str(text).removeprefix("Value error, ").removeprefix("the job: ")


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, the smallest first."""
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return small + [number // one for one in small[::-1] if one * one != number]
