"""Predicted time and memory of a step under the plans that a search tries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moesaic.facts.cluster import Cluster, Place, place_ranks
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan
from moesaic.facts.plan.search import PlanEstimate, RankNeed, SearchFacts
from moesaic.facts.workload import job_parts, memory_of_parts
from moesaic.policy.cost.memory import tightest_rank
from moesaic.policy.cost.network import NetworkModel
from moesaic.policy.cost.step import JobCosts
from moesaic.policy.cost.timeline import simulate_step


class Estimates(Protocol):
    """Predictions for a job on one cluster; a plan with its places comes with the job under it."""

    def memory(self, job: Job, plan: Plan) -> RankNeed:
        """Return the memory of the tightest rank."""

    def fits(self, job: Job, plan: Plan, stages: Sequence[int] | None = None) -> bool:
        """Return whether the ranks of some pipeline ranks, or all ranks, have enough memory."""

    def step(self, job: Job, plan: Plan) -> PlanEstimate:
        """Return the time of a step."""

    def on_cluster(self, cluster: Cluster) -> Estimates:
        """Return the predictions on another cluster."""

    def note_progress(self) -> None:
        """Take note that the search goes on: with another bound, shape or plan."""


class SimulatedEstimates:
    """Predictions of the cost model and the step simulator."""

    def __init__(
        self, cluster: Cluster, loads: Sequence[NDArray[np.float64]] | None = None
    ) -> None:
        self._cluster, self._loads = cluster, loads
        self._networks: dict[int, tuple[list[Place], NetworkModel]] = {}

    @classmethod
    def from_facts(cls, facts: SearchFacts) -> SimulatedEstimates:
        """Return the predictions for the cluster and the loads of `facts`."""
        loads = None if facts.loads is None else [np.asarray(one) for one in facts.loads]
        return cls(facts.cluster, loads)

    def memory(self, job: Job, plan: Plan) -> RankNeed:
        """Return the memory of the tightest rank."""
        found = tightest_rank(self.costs(job, plan))
        return RankNeed(
            rank=found.rank, device=found.device.model, peak_bytes=int(found.memory.peak_bytes),
            usable_bytes=float(found.device.usable_bytes),
        )  # fmt: skip

    def fits(self, job: Job, plan: Plan, stages: Sequence[int] | None = None) -> bool:
        """Return whether the ranks of some pipeline ranks, or all ranks, have enough memory."""
        costs, parts = self.costs(job, plan), job_parts(job, plan)
        if job.memory is not None:
            return tightest_rank(costs).used_fraction <= 1
        for rank in costs.equal_ranks(in_memory=True):
            device, stage = costs.device(rank), plan.pp_rank(rank)
            if stages is not None and stage not in stages:
                continue
            needs = memory_of_parts(
                parts, rank, self._loads, on_cpu=device.kind == "cpu", threads=device.threads
            )
            if needs.peak_bytes > device.usable_bytes:
                return False
        return True

    def on_cluster(self, cluster: Cluster) -> SimulatedEstimates:
        """Return the predictions on another cluster."""
        return SimulatedEstimates(cluster, self._loads)

    def note_progress(self) -> None:
        """Take note that the search goes on: with another bound, shape or plan."""

    def step(self, job: Job, plan: Plan) -> PlanEstimate:
        """Return the time of a step, with all students."""
        runs = [run for part in self.costs(job, plan).parts() for run in part.step()]
        timeline = simulate_step(runs, plan.ranks)
        seconds = timeline.seconds_by_kind(timeline.critical_rank)
        return PlanEstimate(step_s=timeline.step_s, seconds_by_kind=seconds)

    def costs(self, job: Job, plan: Plan) -> JobCosts:
        """Return the costs of `job` under `plan`."""
        _, network = self.network(plan.ranks)
        return JobCosts.from_job(job, plan, self._cluster, self._loads, network)

    def network(self, num_ranks: int) -> tuple[list[Place], NetworkModel]:
        """Return the places of ranks, and the network between them."""
        if num_ranks not in self._networks:
            places = place_ranks(self._cluster, num_ranks)
            self._networks[num_ranks] = places, NetworkModel(self._cluster, places)
        return self._networks[num_ranks]
