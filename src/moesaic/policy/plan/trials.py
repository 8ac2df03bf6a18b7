"""Trials of candidates: each plan is estimated once, and the fastest ones that fit are kept."""

from __future__ import annotations

import math
from itertools import pairwise

from moesaic.base.errors import ConfigError
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, block_names, check_plan, job_under_plan, stage_blocks
from moesaic.facts.plan.search import (
    FoundPlan,
    SearchFacts,
    SearchResult,
    Settings,
    runner_up,
)
from moesaic.policy.plan.cuts import best_cuts
from moesaic.policy.plan.cuts_milp import solve_cuts
from moesaic.policy.plan.estimates import Estimates
from moesaic.policy.plan.mapping import assign_places
from moesaic.policy.plan.space import Candidate
from moesaic.policy.plan.work import CountedBounds, CountedEstimates, CountedSpace, Work


class Trials:
    """Estimates of the candidates of one search."""

    def __init__(self, facts: SearchFacts, estimates: Estimates, work: Work | None = None) -> None:
        self.facts, self.work = facts, work or Work(facts.max_work)
        self.space = CountedSpace(facts.job, facts.cluster, facts.ranks, facts.pins, self.work)
        self.bounds = CountedBounds(self.space, self.work, has_loads=facts.loads is not None)
        self.estimates = CountedEstimates(estimates, self.work)
        self.found: list[FoundPlan] = []
        """Plans that fit, in the order of their trials."""
        self.tried = self.too_large = self.cut_off = 0
        self.best_s = math.inf
        """Seconds of the fastest plan found."""
        self._seconds: dict[str, float] = {}

    @property
    def is_over(self) -> bool:
        """True if a limit of the search is reached."""
        max_tried = self.facts.max_tried
        return (max_tried is not None and self.tried >= max_tried) or self.work.used()

    def try_candidate(self, candidate: Candidate, *, skips_slow: bool = False) -> float:
        """Return the seconds of a step of a complete candidate; infinity if it does not fit.

        With `skips_slow` also infinity if a bound shows that it is no faster than the best.
        """
        made = self.plan(candidate)
        if made is None:
            return math.inf
        job, plan = made
        stages = stage_blocks(plan, job.model)
        if self.bounds.stages_exceed_memory(candidate, stages):
            self.too_large += 1
            return math.inf
        if skips_slow and self.bounds.stages_seconds(candidate, stages) >= self.best_s:
            self.cut_off += 1
            return math.inf
        if _has_even_stages(plan, job):
            candidate = candidate._replace(cuts="even")
        return self._try(job, plan, candidate.settings())

    def try_plan(self, plan: Plan) -> float:
        """Return the seconds of a step of a given plan; infinity if it fails a check or memory."""
        job = job_under_plan(self.facts.job, plan)
        try:
            check_plan(plan, job, "seed")
            plan = assign_places(plan.model_copy(update={"predictions": None}), self.facts.cluster)
        except ConfigError:
            return math.inf
        layout = {f"layout.{key}": value for key, value in _layout(plan).items()}
        settings = {
            **layout, "train.micro_batches": job.train.micro_batches,
            "train.recompute": job.train.recompute,
            "stages": "even" if _has_even_stages(plan, job) else "balanced",
        }  # fmt: skip
        return self._try(job, plan, settings)

    def _try(self, job: Job, plan: Plan, settings: Settings) -> float:
        key = plan.model_dump_json(exclude={"places", "predictions", "expert_placement"})
        if key in self._seconds:
            return self._seconds[key]
        if not self.estimates.fits(job, plan):
            self.too_large += 1
            self._seconds[key] = math.inf
            return math.inf
        memory = self.estimates.memory(job, plan)
        estimate = self.estimates.step(job, plan)
        self.tried += 1
        self._seconds[key] = estimate.step_s
        self.found.append(FoundPlan(settings=settings, plan=plan, estimate=estimate, memory=memory))
        self.best_s = min(self.best_s, estimate.step_s)
        return estimate.step_s

    def plan(self, candidate: Candidate) -> tuple[Job, Plan] | None:
        """Return the job under a complete candidate and its plan, or None if there is none."""
        found = self.space.plan(candidate)
        if found is None or candidate.cuts == "even":
            return found
        stages = self._balanced_stages(candidate, *found)
        if stages is None:
            return None
        job, plan = found[0], found[1].model_copy(update={"stages": stages})
        try:
            check_plan(plan, job, "cuts")
        except ConfigError:
            return None
        return job, plan

    def _balanced_stages(
        self, candidate: Candidate, job: Job, plan: Plan
    ) -> list[list[str]] | None:
        """Return the blocks of each stage by the fastest cuts that fit."""
        names, known = block_names(job.model), dict[object, bool]()

        # Several stages of a pipeline rank share its memory: the trial decides.
        def may_fit(stage: int, start: int, end: int) -> bool:
            return plan.num_stages > plan.pp or not self.bounds.stage_exceeds_memory(
                candidate, stage, start, end
            )

        def fits(stage: int, start: int, end: int) -> bool:
            if not may_fit(stage, start, end):
                return False
            if plan.num_stages > plan.pp:
                return True
            key = stage, self.bounds.like_blocks(start, end)
            if key not in known:
                stages: list[list[str]] = [[] for _ in range(plan.num_stages)]
                stages[stage] = names[start:end]
                own = plan.model_copy(update={"stages": stages})
                known[key] = self.estimates.fits(job, own, [stage])
            return known[key]

        seconds = self.bounds.block_seconds(candidate)
        if self.facts.method == "milp":
            found = solve_cuts(seconds, candidate.micro_batches, may_fit)
        else:
            found = best_cuts(seconds, candidate.micro_batches, fits)
        if found is None:
            return None
        return [names[start:end] for start, end in pairwise((*found.starts, len(names)))]

    def result(self, *, is_proven: bool, bound_s: float | None) -> SearchResult:
        """Return the outcome of the search."""
        ranked = sorted(self.found, key=lambda one: one.estimate.step_s)
        best = ranked[0] if ranked else None
        others = ranked[1 : 1 + self.facts.num_runners_up]
        return SearchResult(
            method=self.facts.method, best=best,
            runners_up=[runner_up(one, best) for one in others] if best is not None else [],
            tried=self.tried, too_large=self.too_large, cut_off=self.cut_off, is_proven=is_proven,
            bound_s=bound_s, work=round(self.work.done),
            is_limited=not is_proven and self.work.used(),
            conflict=None if self.space.has_plans else self.space.conflict(),
        )  # fmt: skip


def _layout(plan: Plan) -> Settings:
    """Return the settings of a plan's layout."""
    keys = {
        "pp", "schedule", "tp", "etp", "ep", "dp_shard", "embedding", "dispatch", "dispatch_hosts",
        "chunks", "overlap_local",
    }  # fmt: skip
    return plan.model_dump(include=keys)


def _has_even_stages(plan: Plan, job: Job) -> bool:
    """Return whether each stage of a plan has the blocks that it has by default."""
    even = plan.model_copy(update={"stages": None})
    return stage_blocks(plan, job.model) == stage_blocks(even, job.model)
