"""Work of a search, counted: it ends at the same place on every machine, idle or busy.

Bounds, cuts, memory and simulated steps count by what they took on one idle core of the machine of
the records, in milliseconds. Their seconds elsewhere change no result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from moesaic.facts.cluster import Cluster
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.plan.search import PlanEstimate, RankNeed
from moesaic.policy.plan.bound import Bounds
from moesaic.policy.plan.estimates import Estimates
from moesaic.policy.plan.space import Candidate, Space

_BOUND, _BOUND_PER_RANK = 0.8, 0.018
_SHAPE_BOUND, _SHAPE_BOUND_PER_RANK = 0.6, 0.0005
"""Work of a bound without blocks of experts."""
_MEMORY_BOUND, _MEMORY_BOUND_PER_RANK = 0.4, 0.0002
_STEP, _STEP_PER_RANK = 130.0, 0.4
_MEMORY, _MEMORY_PER_BLOCK, _MEMORY_PER_EXPERT, _MEMORY_PER_RANK = 2.0, 0.5, 0.01, 0.0004
"""Memory of ranks: at all, for each block, and for each of its experts on a rank and each rank."""
_PLAN, _PLAN_PER_RANK = 0.1, 0.00008
_CUT = 0.03
"""Work of a block on a stage, for stage boundaries."""


class Work:
    """Work that a search has done, and its limit."""

    def __init__(self, limit: float | None = None, whole: Work | None = None) -> None:
        self.done, self.limit = 0.0, math.inf if limit is None else limit
        self._whole = whole
        """Work that this is a part of."""

    @property
    def left(self) -> float:
        """Work up to the limit; infinite without one."""
        return max(0.0, self.limit - self.done)

    def add(self, amount: float) -> None:
        """Count work, here and in the whole that this is a part of."""
        self.done += amount
        if self._whole is not None:
            self._whole.add(amount)

    def used(self, fraction: float = 1.0) -> bool:
        """Return whether a fraction of the limit is used up."""
        return self.done >= fraction * self.limit

    def part(self, fraction: float) -> Work:
        """Return a counter from 0 whose limit is a fraction of what is left here."""
        return Work(fraction * self.left, self)


class CountedSpace(Space):
    """Space that counts the plans it makes."""

    def __init__(
        self, job: Job, cluster: Cluster, ranks: int, pins: Sequence[str], work: Work
    ) -> None:
        super().__init__(job, cluster, ranks, pins)
        self._counter = work

    def plan(self, candidate: Candidate) -> tuple[Job, Plan] | None:
        """Return the job under `candidate` and its plan with even stages, or None if invalid."""
        known = len(self._plans)
        found = super().plan(candidate)
        self._counter.add((_PLAN + _PLAN_PER_RANK * self.ranks) * (len(self._plans) - known))
        return found


class CountedBounds(Bounds):
    """Lower bounds that count their work."""

    def __init__(self, space: Space, work: Work, *, has_loads: bool = False) -> None:
        super().__init__(space, has_loads=has_loads)
        self._counter, self._counted = work, set[tuple[Candidate, int]]()
        self._bound = _BOUND + _BOUND_PER_RANK * space.ranks
        self._shape_bound = _SHAPE_BOUND + _SHAPE_BOUND_PER_RANK * space.ranks
        self._memory_bound = _MEMORY_BOUND + _MEMORY_BOUND_PER_RANK * space.ranks

    def seconds(self, candidate: Candidate, level: int) -> float:
        """Return seconds of a step that no plan below `candidate` can beat."""
        if (candidate, level) not in self._counted:
            self._counted.add((candidate, level))
            self._counter.add(self._shape_bound if level < 0 else self._bound)
        return super().seconds(candidate, level)

    def stages_seconds(self, candidate: Candidate, stages: Sequence[Sequence[str]]) -> float:
        """Return seconds that a step of a complete candidate with these stages takes at least."""
        self._counter.add(self._bound)
        return super().stages_seconds(candidate, stages)

    def exceeds_memory(self, candidate: Candidate, level: int) -> bool:
        """Return whether no plan below `candidate` fits, by what memory holds at least."""
        self._counter.add(self._memory_bound)
        return super().exceeds_memory(candidate, level)

    def block_seconds(self, candidate: Candidate) -> list[list[float]]:
        """Return the seconds of a micro-batch by pipeline stage and block, [stages][blocks]."""
        rows = super().block_seconds(candidate)
        self._counter.add(_CUT * sum(map(len, rows)))
        return rows


class CountedEstimates:
    """Predictions that count their work."""

    def __init__(self, estimates: Estimates, work: Work) -> None:
        self._estimates, self._counter = estimates, work

    def memory(self, job: Job, plan: Plan) -> RankNeed:
        """Return the memory of the tightest rank."""
        self._counter.add(_memory_work(job, plan, job.model.layers))
        return self._estimates.memory(job, plan)

    def fits(self, job: Job, plan: Plan, stages: Sequence[int] | None = None) -> bool:
        """Return whether the ranks of some pipeline ranks, or all ranks, have enough memory."""
        blocks = job.model.layers
        if stages is not None and plan.stages is not None:
            blocks = sum(len(plan.stages[stage]) for stage in stages)
        self._counter.add(_memory_work(job, plan, blocks))
        return self._estimates.fits(job, plan, stages)

    def step(self, job: Job, plan: Plan) -> PlanEstimate:
        """Return the time of a step."""
        self._counter.add(_STEP + _STEP_PER_RANK * plan.ranks)
        return self._estimates.step(job, plan)

    def on_cluster(self, cluster: Cluster) -> CountedEstimates:
        """Return the predictions on another cluster, counted here too."""
        return CountedEstimates(self._estimates.on_cluster(cluster), self._counter)

    def note_progress(self) -> None:
        """Take note that the search goes on: with another bound, shape or plan."""
        self._estimates.note_progress()


def _memory_work(job: Job, plan: Plan, blocks: int) -> float:
    """Return the work of the memory of some blocks."""
    experts = job.model.experts / plan.ep
    each = _MEMORY_PER_BLOCK + _MEMORY_PER_EXPERT * experts + _MEMORY_PER_RANK * plan.ranks
    return _MEMORY + blocks * each
