"""Choice of the settings that a job leaves open: the cheapest ones by prediction.

They are the dispatch method, the sharding of the embedding table and the costs of expert replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moesaic.facts.cluster import Cluster, Place
from moesaic.facts.job import BalanceCosts, Job
from moesaic.facts.plan import Plan, embedding_shard_error, round_digits
from moesaic.policy.balance import can_migrate, predict_balance_costs, should_balance
from moesaic.policy.cost.memory import RankMemory, tightest_rank
from moesaic.policy.cost.network import NetworkModel
from moesaic.policy.cost.step import JobCosts
from moesaic.policy.cost.timeline import simulate_step
from moesaic.policy.plan.dispatch import dispatch_methods, overlap_options

Alternative = dict[str, Any]
"""Settings that were not chosen, as plain data, with their extra seconds."""


class RecordedLoads(NamedTuple):
    """Expert loads that a run recorded."""

    run: str
    """Path of the run."""
    by_layer: Sequence[NDArray[np.float64]]
    """Load of each expert, by expert layer, [experts]."""


@dataclass(frozen=True)
class PlanFacts:
    """Facts that the predicted cost of a plan depends on."""

    job: Job
    cluster: Cluster
    places: Sequence[Place]
    """Place of each rank."""
    network: NetworkModel
    """Network between these places."""
    loads: RecordedLoads | None
    """Expert loads; None for even loads."""

    @property
    def loads_by_layer(self) -> Sequence[NDArray[np.float64]] | None:
        """Load of each expert, by expert layer; None for even loads."""
        return None if self.loads is None else self.loads.by_layer

    def costs(self, plan: Plan) -> JobCosts:
        """Return the costs of the job under `plan`."""
        return JobCosts.from_job(self.job, plan, self.cluster, self.loads_by_layer, self.network)

    def tightest_rank(self, plan: Plan) -> RankMemory:
        """Return the rank with the largest fraction of its device's memory in use."""
        return tightest_rank(self.costs(plan))

    def step_s(self, plan: Plan, *, without_overlap: bool = False) -> float:
        """Return the predicted seconds of a step, on request with gradient reductions after
        backward.

        Without loads the stages of `plan` are ignored, since the job may have fewer layers.
        """
        if self.loads is None:
            plan = plan.model_copy(update={"stages": None})
        costs = replace(self.costs(plan), reduces_after_backward=without_overlap)
        return simulate_step(costs.step(), plan.ranks).step_s


class Choices(NamedTuple):
    """A plan with chosen settings, and the settings that were not chosen."""

    plan: Plan
    other_dispatch: Sequence[Alternative] = ()
    """Other dispatch methods."""
    other_embedding: Alternative | None = None
    """Other sharding of the embedding table, and whether it fits in memory."""


def choose_open_settings(plan: Plan, facts: PlanFacts) -> Choices:
    """Return `plan` with the cheapest settings that the job leaves open."""
    others, layout = list[Alternative](), facts.job.layout
    if "auto" in (layout.dispatch, layout.overlap_local, layout.chunks):
        plan, others = _choose_dispatch(plan, facts)
    plan, other_embedding = _choose_embedding(plan, facts)
    return Choices(_with_balance_costs(plan, facts), others, other_embedding)


def _choose_dispatch(plan: Plan, facts: PlanFacts) -> tuple[Plan, list[Alternative]]:
    """Return `plan` with the fastest dispatch, and the other methods with their extra seconds.

    The fastest method comes first; then chunks and overlapped local tokens are tried with it, where
    the job leaves them open. Without loads all expert layers are alike, so a few layers suffice to
    compare. Gradient reductions run after backward here: they are the same for every method.
    """
    if plan.ep == 1:
        return plan, []
    job, options = facts.job, [plan]
    if job.layout.dispatch == "auto":
        options = dispatch_methods(plan, [place.host for place in plan.places])
    small_job = job if facts.loads is not None else _with_fewest_layers(job, plan)
    small_facts = replace(facts, job=small_job)

    def step_s(option: Plan) -> float:
        return small_facts.step_s(option, without_overlap=True)

    times = [step_s(option) for option in options]
    fastest = times.index(min(times))
    overlapped = overlap_options(options[fastest], job)
    overlapped_times = [step_s(option) for option in overlapped]
    if overlapped_times and min(overlapped_times) < times[fastest]:
        options.append(overlapped[overlapped_times.index(min(overlapped_times))])
        times.append(min(overlapped_times))
        fastest = len(options) - 1
    scale = len(job.model.expert_layers) / max(len(small_job.model.expert_layers), 1)
    settings = {"dispatch", "dispatch_hosts", "chunks", "overlap_local"}
    others = [
        {**option.model_dump(include=settings), "extra_s": scale * (seconds - times[fastest])}
        for option, seconds in zip(options, times, strict=True)
    ]
    del others[fastest]
    return options[fastest], others


def _choose_embedding(plan: Plan, facts: PlanFacts) -> tuple[Plan, Alternative | None]:
    """Return `plan` with the fastest embedding that fits in memory, and the other one, if any.

    With equal times every rank has the whole table. A tied head gathers all columns and their
    gradients, so column shards may be what does not fit.
    """
    is_open = facts.job.layout.embedding == "auto"
    options = embedding_layouts(plan, facts.job) if is_open else [plan]
    if len(options) == 1:
        return options[0], None
    costs = [(facts.tightest_rank(one).used_fraction > 1, facts.step_s(one)) for one in options]
    cheapest = costs.index(min(costs))
    other = 1 - cheapest
    return options[cheapest], {
        "embedding": options[other].embedding,
        "extra_s": costs[other][1] - costs[cheapest][1],
        "fits": not costs[other][0],
    }


def embedding_layouts(plan: Plan, job: Job) -> list[Plan]:
    """Return `plan` with a replicated table, and with a column-sharded one if that is possible."""
    whole, columns = (plan.model_copy(update={"embedding": how}) for how in ("whole", "columns"))
    if plan.tp > 1 or plan.ranks_per_stage == 1 or embedding_shard_error(columns, job) is not None:
        return [whole]
    return [whole, columns]


def _with_balance_costs(plan: Plan, facts: PlanFacts) -> Plan:
    """Return `plan` with predicted costs of expert replicas, if the job may have some."""
    job = facts.job
    if plan.balance_costs is not None or not (should_balance(job, plan) or can_migrate(job, plan)):
        return plan
    even = replace(facts, loads=None)
    costs = {
        key: round_digits(value) if isinstance(value, float) else value
        for key, value in predict_balance_costs(even.costs(plan)).model_dump().items()
    }
    return plan.model_copy(update={"balance_costs": BalanceCosts.model_validate(costs)})


def _with_fewest_layers(job: Job, plan: Plan) -> Job:
    """Return `job` with as few layers as still show the differences between dispatch methods."""
    model = job.model
    layers = min(model.layers, max(plan.num_stages, model.dense_layers + 1))
    return job.model_copy(update={"model": model.model_copy(update={"layers": layers})})
