"""Settings that a plan chooses where its job leaves them open: the cheapest ones by prediction.

They are the dispatch method, the sharding of the embedding table and the prices of expert replicas.
The `describe_*` functions turn the choices into rows of output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moesaic.cli import prediction, screen
from moesaic.facts.cluster import Cluster, place_ranks
from moesaic.facts.job import Job, Prices
from moesaic.facts.plan import Plan, dispatch_summary, round_digits, stage_blocks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from moesaic.policy.cost.network import NetworkModel


NO_ALTERNATIVES: Mapping[str, Any] = {"other_dispatch": [], "other_embedding": None}
"""Alternatives of a plan that is given, not chosen."""
_EMBEDDING_TEXTS = {
    "whole": "whole table on every rank", "columns": "a column shard on each rank",
}  # fmt: skip


def make_network(cluster: Cluster, ranks: int) -> NetworkModel:
    """Return the network between the places of `ranks` ranks on `cluster`."""
    from moesaic.policy.cost.network import NetworkModel

    return NetworkModel(cluster, place_ranks(cluster, ranks))


def choose_open_settings(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    loads: Sequence[NDArray[np.float64]] | None,
    network: NetworkModel,
) -> tuple[Plan, Mapping[str, Any]]:
    """Return `plan` with the cheapest settings that `job` leaves open, and the alternatives.

    The alternatives are other dispatch methods and the other sharding of the embedding.
    """
    others = list[dict[str, Any]]()
    if "auto" in (job.layout.dispatch, job.layout.overlap_local, job.layout.chunks):
        plan, others = choose_dispatch(job, plan, cluster, loads, network)
    plan, other_embedding = choose_embedding(job, plan, cluster, loads, network)
    return plan, {"other_dispatch": others, "other_embedding": other_embedding}


def choose_dispatch(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    loads: Sequence[NDArray[np.float64]] | None,
    network: NetworkModel,
) -> tuple[Plan, list[dict[str, Any]]]:
    """Return `plan` with the fastest dispatch, and the other methods with their extra seconds.

    The fastest method comes first; then chunks and overlapped local tokens are tried with it, where
    `job` leaves them open. Without `loads` all expert layers are alike, so a few layers suffice to
    compare. Gradient reductions run after backward here: they are the same for every method.
    """
    from moesaic.policy.dispatch import dispatch_methods, overlap_options

    if plan.ep == 1:
        return plan, []
    options = [plan]
    if job.layout.dispatch == "auto":
        options = dispatch_methods(plan, [place.host for place in plan.places])
    small_job = job if loads is not None else _with_fewest_layers(job, plan)

    def step_s(option: Plan) -> float:
        return _step_s(small_job, option, cluster, loads, network, without_overlap=True)

    times = [step_s(option) for option in options]
    fastest = times.index(min(times))
    overlapped = overlap_options(options[fastest], job)
    overlapped_times = [step_s(option) for option in overlapped]
    if overlapped_times and min(overlapped_times) < times[fastest]:
        options.append(overlapped[overlapped_times.index(min(overlapped_times))])
        times.append(min(overlapped_times))
        fastest = len(options) - 1
    scale = len(job.model.expert_layers) / max(len(small_job.model.expert_layers), 1)
    others = [
        {
            "dispatch": option.dispatch,
            "dispatch_hosts": option.dispatch_hosts,
            "chunks": option.chunks,
            "overlap_local": option.overlap_local,
            "extra_s": scale * (seconds - times[fastest]),
        }
        for option, seconds in zip(options, times, strict=True)
    ]
    del others[fastest]
    return options[fastest], others


def choose_embedding(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    loads: Sequence[NDArray[np.float64]] | None,
    network: NetworkModel,
) -> tuple[Plan, dict[str, Any] | None]:
    """Return `plan` with the fastest embedding that fits in memory, and the other one, if any.

    With equal times every rank has the whole table. A tied head gathers all columns and their
    gradients, so column shards may be what does not fit.
    """
    from moesaic.policy.cost.memory import tightest_rank
    from moesaic.policy.embedding import embedding_layouts

    options = embedding_layouts(plan, job) if job.layout.embedding == "auto" else [plan]
    if len(options) == 1:
        return options[0], None
    places = place_ranks(cluster, plan.ranks)

    def cost(option: Plan) -> tuple[bool, float]:
        fits = tightest_rank(job, option, cluster, places, loads).used_fraction <= 1
        return not fits, _step_s(job, option, cluster, loads, network)

    costs = [cost(option) for option in options]
    cheapest = costs.index(min(costs))
    other = 1 - cheapest
    return options[cheapest], {
        "embedding": options[other].embedding,
        "extra_s": costs[other][1] - costs[cheapest][1],
        "fits": not costs[other][0],
    }


def with_prices(job: Job, plan: Plan, cluster: Cluster, network: NetworkModel) -> Plan:
    """Return `plan` with predicted prices of expert replicas, if `job` may have some."""
    from moesaic.policy.balance import can_migrate, predict_prices, should_balance
    from moesaic.policy.cost.step import JobCosts

    if plan.prices is not None or not (should_balance(job, plan) or can_migrate(job, plan)):
        return plan
    costs = JobCosts.from_job(job, plan, cluster, network=network)
    prices = {
        key: round_digits(value) if isinstance(value, float) else value
        for key, value in predict_prices(costs).model_dump().items()
    }
    return plan.model_copy(update={"prices": Prices.model_validate(prices)})


def replica_facts(job: Job, plan: Plan) -> dict[str, Any] | None:
    """Return the policy of expert replicas and what a replica costs; None without replicas."""
    from moesaic.policy.balance import break_even_tokens, layer_problem, should_balance

    prices = job.balance.prices or plan.prices
    if prices is None or not should_balance(job, plan):
        return None
    problem = layer_problem(job, plan, job.balance, prices, job.model.expert_layers[0])
    max_replicas = problem.max_replicas
    return {
        "policy": job.balance.policy,
        "replica_tokens": break_even_tokens(problem),
        "max_bytes": None if max_replicas is None else max_replicas * _replica_bytes(job, plan),
    }


def _replica_bytes(job: Job, plan: Plan) -> int:
    """Return the most bytes of one replica per layer on a rank, for one micro-batch.

    Parameters, in the dtype of matmuls, stay until the layer's backward ends. The gradient exists
    during that backward.
    """
    size = 3 * job.model.hidden * job.model.ffn // plan.etp
    names = {f"layers.{index}" for index in job.model.expert_layers}
    layers = [len(names.intersection(stage)) for stage in stage_blocks(plan, job.model)]
    layers_in_use = max(sum(layers[pp_rank :: plan.pp]) for pp_rank in range(plan.pp))
    recompute = job.train.recompute if plan.recompute is None else plan.recompute
    layers_in_use = 1 if recompute else layers_in_use
    grad_bytes = 8 if job.train.precision == "fp64" else 4
    compute_bytes = {"bf16": 2, "fp16": 2}.get(job.train.precision, grad_bytes)
    return size * (layers_in_use * compute_bytes + grad_bytes)


def describe_replicas(replicas: dict[str, Any] | None) -> dict[str, str]:
    """Return a row about expert replicas, if there are any."""
    if replicas is None:
        return {}
    tokens = f"{replicas['replica_tokens']:,.0f}"
    text = f"{replicas['policy']}; a replica costs as much as computing {tokens} routed tokens"
    if replicas["max_bytes"] is not None:
        size = screen.format_bytes(replicas["max_bytes"])
        text += f"; up to {size} per rank and micro-batch in flight, not counted below"
    return {"balance": text}


def _with_fewest_layers(job: Job, plan: Plan) -> Job:
    """Return `job` with as few layers as still show the differences between dispatch methods."""
    model = job.model
    layers = min(model.layers, max(plan.num_stages, model.dense_layers + 1))
    return job.model_copy(update={"model": model.model_copy(update={"layers": layers})})


def _step_s(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    loads: Sequence[NDArray[np.float64]] | None,
    network: NetworkModel,
    *,
    without_overlap: bool = False,
) -> float:
    """Return the predicted seconds of a step, on request with gradient reductions after backward.

    Without `loads` the stages of `plan` are ignored, since `job` may have fewer layers.
    """
    from moesaic.policy.cost.step import JobCosts
    from moesaic.sim.timeline import simulate_events

    if loads is None:
        plan = plan.model_copy(update={"stages": None})
    costs = replace(
        JobCosts.from_job(job, plan, cluster, loads, network),
        reduces_after_backward=without_overlap,
    )
    return simulate_events(costs.events(), plan.ranks).step_s


def warn_hosts(plan: Plan) -> None:
    """Warn if `dispatch_hosts` differs from the hosts of the expert-parallel groups."""
    from moesaic.policy.dispatch import hosts_per_expert_group

    actual = hosts_per_expert_group(plan, [place.host for place in plan.places])
    if plan.dispatch_hosts in (1, actual):
        return
    where = f"{actual} hosts" if actual > 1 else "one host, or unevenly on several"
    effect = "the prediction includes its cost, but there is no saving"
    if plan.num_exchanges == 1:
        effect = "tokens are sent directly, as without it"
    screen.print_warning(
        f"layout.dispatch_hosts = {plan.dispatch_hosts}, but expert-parallel ranks are on {where}: "
        f"{effect}; remove layout.dispatch_hosts"
    )


def describe_dispatch(facts: dict[str, Any]) -> str:
    """Return the dispatch method and the extra time of the alternatives, in a line."""
    plan, others = facts["plan"], facts["other_dispatch"]
    settings = [plan, *others]
    some_chunked = any(setting["chunks"] > 1 for setting in settings)
    some_overlap = any(setting["overlap_local"] for setting in settings)

    def describe(setting: dict[str, Any]) -> str:
        """Name also what a setting lacks, if another one has it."""
        text = dispatch_summary(
            setting["dispatch"], setting["dispatch_hosts"], plan["ep"], setting["chunks"],
            setting["overlap_local"],
        )  # fmt: skip
        text += " in one chunk" * (some_chunked and setting["chunks"] == 1)
        return text + " without overlap" * (some_overlap and not setting["overlap_local"])

    text = f"tokens {describe(plan)}"
    if not others:
        return text
    alternatives = [
        f"{describe(other)} +{prediction.format_seconds(other['extra_s'])}" for other in others
    ]
    return f"{text}; alternatives: {', '.join(alternatives)}"


def describe_embedding(facts: dict[str, Any]) -> dict[str, str]:
    """Return a row about the embedding table, if its sharding was chosen."""
    other = facts["other_embedding"]
    if other is None:
        return {}
    extra_s = other["extra_s"]
    extra = f"{'-' if extra_s < 0 else '+'}{prediction.format_seconds(abs(extra_s))}"
    if not other["fits"]:
        extra += ", does not fit in memory"
    chosen = _EMBEDDING_TEXTS[facts["plan"]["embedding"]]
    return {"embedding": f"{chosen}; alternative: {_EMBEDDING_TEXTS[other['embedding']]} {extra}"}
