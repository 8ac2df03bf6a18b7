"""What a plan decides where its job does not: how tokens travel to experts, what of the embedding
each rank has, and what copies of experts cost; the cheapest, and what a person is told of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moesaic.cli import outlook, screen
from moesaic.facts.cluster import Cluster, place
from moesaic.facts.job import Job, Prices
from moesaic.facts.plan import Plan, short, stages, travel_words

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from moesaic.policy.cost.traffic import Traffic


NO_OTHERS: Mapping[str, Any] = {"other_ways": [], "other_embedding": None}
"""Of a plan that is not chosen, but given."""


def traffic(cluster: Cluster, ranks: int) -> Traffic:
    """Between the places of so many ranks on `cluster`."""
    from moesaic.policy.cost.traffic import Traffic

    return Traffic(cluster, place(cluster, ranks))


def decided(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    loads: Sequence[NDArray[np.float64]] | None,
    traffic: Traffic,
) -> tuple[Plan, Mapping[str, Any]]:
    """`plan` with the cheapest of all that `job` leaves open; and what else it could be: other ways
    of tokens, and the other embedding."""
    others = list[dict[str, Any]]()
    if "auto" in (job.layout.dispatch, job.layout.local, job.layout.chunks):
        plan, others = cheapest(job, plan, cluster, loads, traffic)
    plan, table = with_table(job, plan, cluster, loads, traffic)
    return plan, {"other_ways": others, "other_embedding": table}


def cheapest(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    loads: Sequence[NDArray[np.float64]] | None,
    traffic: Traffic,
) -> tuple[Plan, list[dict[str, Any]]]:
    """`plan` with the way of tokens that makes a step the shortest, and then with what shortens it
    further, chunks and local tokens first, where `job` leaves that open; and other ways, with about
    how much longer a step would be.

    Without `loads` all expert layers are alike, and as few as there can be show which one it is.
    Sums of gradients travel whichever it is, and are left to the end.
    """
    from moesaic.policy.dispatch import cuts, ways

    if plan.ep == 1:
        return plan, []
    found = [plan]
    if job.layout.dispatch == "auto":
        found = ways(plan, [place.host for place in plan.places])
    small = job if loads is not None else _low(job, plan)

    def step_s(one: Plan) -> float:
        return _step_s(small, one, cluster, loads, traffic, late=True)

    known = [step_s(one) for one in found]
    least = known.index(min(known))
    cut = cuts(found[least], job)
    taken = [step_s(one) for one in cut]
    if taken and min(taken) < known[least]:
        found.append(cut[taken.index(min(taken))])
        known.append(min(taken))
        least = len(found) - 1
    times = len(job.model.expert_layers) / max(len(small.model.expert_layers), 1)
    others = [
        {
            "dispatch": one.dispatch,
            "hosts": one.hosts,
            "chunks": one.chunks,
            "local": one.local,
            "more_s": times * (step - known[least]),
        }
        for one, step in zip(found, known, strict=True)
    ]
    del others[least]
    return found[least], others


def with_table(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    loads: Sequence[NDArray[np.float64]] | None,
    traffic: Traffic,
) -> tuple[Plan, dict[str, Any] | None]:
    """`plan`, in which each rank has so much of the embedding's table that a step is the shortest,
    where `job` leaves that open; all of it where that makes no difference. What does not fit in
    memory comes last: for a tied head the columns come together, and so do their gradients. And the
    other choice if there is one, with about how much longer a step would be."""
    from moesaic.policy.cost.room import tightest
    from moesaic.policy.table import tables

    found = tables(plan, job) if job.layout.embedding == "auto" else [plan]
    if len(found) == 1:
        return found[0], None
    places = place(cluster, plan.ranks)

    def cost(one: Plan) -> tuple[bool, float]:
        fits = tightest(job, one, cluster, places, loads).share <= 1
        return not fits, _step_s(job, one, cluster, loads, traffic)

    costs = [cost(one) for one in found]
    least = costs.index(min(costs))
    other = 1 - least
    return found[least], {
        "embedding": found[other].embedding,
        "more_s": costs[other][1] - costs[least][1],
        "fits": not costs[other][0],
    }


def with_prices(job: Job, plan: Plan, cluster: Cluster, traffic: Traffic) -> Plan:
    """`plan` with what copies of experts cost and save there, if `job` would have some."""
    from moesaic.policy.balance import balances, planned, rehomes
    from moesaic.policy.cost.step import Costs

    if plan.prices is not None or not (balances(job, plan) or rehomes(job, plan)):
        return plan
    found = planned(Costs.of(job, plan, cluster, traffic=traffic)).model_dump()
    rounded = {key: short(one) if isinstance(one, float) else one for key, one in found.items()}
    return plan.model_copy(update={"prices": Prices.model_validate(rounded)})


def of_copies(job: Job, plan: Plan) -> dict[str, Any] | None:
    """What is done about uneven experts, and how many rows make up for a copy; None: nothing is."""
    from moesaic.policy.balance import balances, copy_rows, setting_of

    prices = job.balance.prices or plan.prices
    if prices is None or not balances(job, plan):
        return None
    setting = setting_of(job, plan, job.balance, prices, job.model.expert_layers[0])
    most = None if setting.room is None else setting.room * _copy_bytes(job, plan)
    return {"policy": job.balance.policy, "copy_rows": copy_rows(setting), "most_bytes": most}


def _copy_bytes(job: Job, plan: Plan) -> int:
    """What a rank holds at most for one copy in each of its layers and one micro-batch: parameters
    until backward is through with a layer, in the type of products, and while that is, the
    gradient."""
    size = 3 * job.model.hidden * job.model.ffn // plan.etp
    names = {f"layers.{index}" for index in job.model.expert_layers}
    layers = [len(names.intersection(stage)) for stage in stages(plan, job.model)]
    held = max(sum(layers[part :: plan.pp]) for part in range(plan.pp))
    recompute = job.train.recompute if plan.recompute is None else plan.recompute
    held = 1 if recompute else held
    wide = 8 if job.train.precision == "fp64" else 4
    narrow = {"bf16": 2, "fp16": 2}.get(job.train.precision, wide)
    return size * (held * narrow + wide)


def copies_in_a_line(found: dict[str, Any] | None) -> dict[str, str]:
    """What is done about uneven experts, in a line, if anything is."""
    if found is None:
        return {}
    costs = f"a copy of an expert costs as much as {found['copy_rows']:,.0f} of a layer's rows"
    most = found["most_bytes"]
    beside = ""
    if most is not None:
        room = f"up to {screen.size(most)} a rank for each micro-batch under way"
        beside = f"; {room}, beside what stands here"
    return {"balance": f"{found['policy']}; {costs}{beside}"}


def _low(job: Job, plan: Plan) -> Job:
    """With as few layers as show what differs between plans like `plan`."""
    model = job.model
    layers = min(model.layers, max(plan.num_stages, model.dense_layers + 1))
    return job.model_copy(update={"model": model.model_copy(update={"layers": layers})})


def _step_s(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    loads: Sequence[NDArray[np.float64]] | None,
    traffic: Traffic,
    *,
    late: bool = False,
) -> float:
    """Seconds of a step, whose sums of gradients may be left to the end; without `loads` of a job
    that may have other layers than the plan says."""
    from moesaic.policy.cost.step import Costs
    from moesaic.sim.timeline import run

    if loads is None:
        plan = plan.model_copy(update={"stages": None})
    costs = replace(Costs.of(job, plan, cluster, loads, traffic), late=late)
    return run(costs.events(), plan.ranks).step_s


def warn_of_hosts(plan: Plan) -> None:
    """Say so if tokens would travel by way of hosts that are not those of the cluster."""
    from moesaic.policy.dispatch import hosts_of

    there = hosts_of(plan, [place.host for place in plan.places])
    if plan.hosts in (1, there):
        return
    found = f"on {there} hosts" if there > 1 else "on one host, or unevenly on several"
    means = "what it costs is foretold, what it would save is not there, so leave layout.hosts out"
    if plan.trips == 1:
        means = "tokens go straight, as without it, so leave layout.hosts out"
    screen.warn(
        f"hosts = {plan.hosts}, but the ranks that share out the experts are {found}: {means}"
    )


def in_a_line(facts: dict[str, Any]) -> str:
    """How tokens get to their experts, and what other ways would cost, in a line."""
    layout, ep = facts["plan"], facts["plan"]["ep"]
    every = [layout, *facts["other_ways"]]
    cut, first = (
        any(one[key] != usual for one in every)
        for key, usual in (("chunks", 1), ("local", "along"))
    )

    def words(one: dict[str, Any]) -> str:
        """Of others, what they have not."""
        said = travel_words(one["dispatch"], one["hosts"], ep, one["chunks"], one["local"])
        said += " in one part" * (cut and one["chunks"] == 1)
        return said + " together with local ones" * (first and one["local"] == "along")

    chosen = words(layout)
    others = [f"{outlook.time(one['more_s'])} if {words(one)}" for one in facts["other_ways"]]
    return f"{chosen}; longer by about {', '.join(others)}" if others else chosen


def of_embedding(facts: dict[str, Any]) -> dict[str, str]:
    """What of the embedding's table each rank has, in a line, where that was chosen."""
    other = facts["other_embedding"]
    if other is None:
        return {}
    words = {"whole": "whole on every rank", "columns": "columns of it on each rank"}
    more_s = other["more_s"]
    long = f"{'longer' if more_s > 0 else 'shorter'} by about {outlook.time(abs(more_s))}"
    if more_s == 0:
        long = "as long"
    if not other["fits"]:
        long += ", and too large for memory,"
    here = words[facts["plan"]["embedding"]]
    return {"embedding": f"{here}; {long} if {words[other['embedding']]}"}
