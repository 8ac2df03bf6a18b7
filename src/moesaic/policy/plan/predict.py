"""A job on a cluster as a plan, with its predicted time, memory and price, and the reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from moesaic.base.errors import ConfigError
from moesaic.base.units import about_bytes, format_bytes, format_seconds
from moesaic.facts.cluster import (
    Cluster,
    Device,
    device_at,
    place_ranks,
    price_per_hour,
    unit_warnings,
)
from moesaic.facts.job import Job
from moesaic.facts.plan import (
    PhaseSeconds,
    Plan,
    Predictions,
    RankTimeline,
    complete_plan,
    idle_ranks_warning,
    placement_mismatch,
    plan_from_job,
    prediction_digest,
    round_digits,
    stage_blocks,
)
from moesaic.facts.plan.search import SearchResult
from moesaic.facts.workload import (
    COMPUTED_BYTES,
    TracedModel,
    count_parameters,
    traced_blocks,
    traced_memory,
)
from moesaic.policy.balance import break_even_tokens, layer_problem, should_balance
from moesaic.policy.cost.drive import WAIT, DriveTime, Traffic, add_waiting, drive_seconds
from moesaic.policy.cost.event import SegmentRun, Step
from moesaic.policy.cost.memory import RankMemory, checkpoint_cost
from moesaic.policy.cost.network import NetworkModel
from moesaic.policy.cost.step import JobCosts, replicated_step
from moesaic.policy.cost.timeline import (
    Timeline,
    check_step_time,
    ideal_bubble_fraction,
    simulate_step,
)
from moesaic.policy.plan.budget import check_rank_device
from moesaic.policy.plan.choices import Choices, PlanFacts, RecordedLoads, choose_open_settings
from moesaic.policy.plan.dispatch import dispatch_hosts_warning
from moesaic.policy.plan.mapping import assign_places, max_ranks

DOES_NOT_FIT = "the plan does not fit: "
"""Opening of the warning about a plan that does not fit."""
_HOUR_S = 3600.0
_SPAN_KINDS = ("computing_s", "collectives_s", "waiting_s")


class PlannedJob(NamedTuple):
    """A plan of a job for a cluster, with its predictions."""

    plan: Plan
    """Plan with places, chosen settings and predictions."""
    figures: dict[str, Any]
    """Predictions, alternatives and the bottleneck as plain data."""
    timeline: Timeline
    """Simulated step."""
    warnings: list[str]
    """Warnings for the user."""
    facts: PlanFacts
    """Facts that the predictions depend on."""
    found: SearchResult | None = None
    """Result of the search that chose the plan; None without one."""


def choose_plan(
    job: Job,
    cluster: Cluster,
    num_ranks: int | None = None,
    given: Plan | None = None,
    origin: str = "the job",
    loads: RecordedLoads | None = None,
) -> tuple[Choices, PlanFacts]:
    """Return the plan of `job` on `cluster`, and the facts that its predictions depend on.

    Args:
        job: the job.
        cluster: the cluster.
        num_ranks: number of ranks; None: that of `given`, else all that the cluster has room for.
        given: plan to predict as it is; None: choose the settings that the job leaves open.
        origin: prefix of error messages about `given`, or about the job without one.
        loads: expert loads; None for even loads.
    """
    if given is None:
        plan = plan_from_job(job, num_ranks or max_ranks(cluster), origin)
        plan = assign_places(plan, cluster)
    else:
        plan = _place_given_plan(given, job, cluster, num_ranks, origin)
    places = place_ranks(cluster, plan.ranks)
    for device in (device_at(cluster, place) for place in places):
        if job.memory is not None:
            check_rank_device(device.kind, f"on {device.model}")
    facts = PlanFacts(job, cluster, places, NetworkModel(cluster, places), loads)
    return Choices(plan) if given is not None else choose_open_settings(plan, facts), facts


def _place_given_plan(
    plan: Plan, job: Job, cluster: Cluster, num_ranks: int | None, origin: str
) -> Plan:
    """Return `plan` with places for its ranks on `cluster`, which must be those that it has."""
    if num_ranks not in (None, plan.ranks):
        raise ConfigError(
            f"{origin} is for {plan.ranks} ranks, but nproc is {num_ranks}: leave out nproc "
            "or the plan"
        )
    placed = assign_places(complete_plan(plan, job), cluster)
    mismatch = placement_mismatch(plan, placed.places)
    if mismatch is not None:
        raise ConfigError(
            f"{origin}: {mismatch} in cluster '{cluster.name}': give the cluster that the plan was "
            "made for, plan anew for this one, or remove places from the plan"
        )
    return placed


def predict_plan(
    choices: Choices, facts: PlanFacts, tiers: dict[str, Any] | None = None
) -> PlannedJob:
    """Return the predictions of a plan; `tiers` describes its expert state on drives, if any."""
    plan, job, cluster = choices.plan, facts.job, facts.cluster
    costs = facts.costs(plan)
    parts = costs.parts()
    by_part = [part.step() for part in parts]
    step, drive = [run for own in by_part for run in own], None
    if tiers is not None:
        step, drive = _add_drive(step, facts, plan.ranks, tiers["bytes_by_phase"])
    timeline = simulate_step(step, plan.ranks)
    tokens = job.train.batch * job.data.sequence
    price = _price(facts, timeline.step_s, tokens)
    prices = [value for value in price.values() if value is not None]
    check_step_time(cluster.name, timeline.step_s, *prices)
    slowest = timeline.critical_rank
    device, memory = costs.device(slowest), facts.tightest_rank(plan)
    counts, seconds_by_kind = count_parameters(job.model), _seconds_by_kind(parts, timeline)
    if drive is not None:
        seconds_by_kind["drive"] = drive.wait_s
    collectives_s, exposed_s = timeline.overlapped_s(slowest)
    if plan.pp == 1:
        phases, blocks = timeline.seconds_by_phase(slowest), timeline.seconds_by_block(slowest)
    else:  # Pipeline rank 0 starts first and ends last. Blocks are on different pipeline ranks.
        phases, blocks = timeline.seconds_by_phase(0), timeline.max_seconds_by_block()
    bottleneck = _bottleneck(seconds_by_kind, timeline.step_s, drive)
    if memory.used_fraction > 1:
        bottleneck = _missing_memory(memory)
    matmul_flops_per_s = device.matmul_speed(job.train.precision).flops
    figures = {
        **_step_figures(cluster, device, timeline, memory),
        "plan": plan.decisions(), "loads": None if facts.loads is None else facts.loads.run,
        "devices": dict(Counter(place.device for place in plan.places)),
        "other_dispatch": list(choices.other_dispatch), "other_embedding": choices.other_embedding,
        "pipeline": _pipeline_bubble(timeline, plan, job),
        "balance": _replica_costs(job, plan),
        "parameters": {"total": counts.total, "active": counts.active},
        "memory_rank": memory.rank,
        "steps": job.train.steps, "phases_s": phases, "blocks_s": blocks,
        "seconds_by_kind": seconds_by_kind,
        "overlapped_s": {"collectives": collectives_s, "exposed": exposed_s},
        "tokens_per_s": tokens / timeline.step_s,
        "utilisation": sum(part.flops(slowest) for part in parts)
        / (timeline.step_s * matmul_flops_per_s),
        "parts": _describe_parts(parts, by_part, memory.rank) if job.student else [],
        "memory_tiers": tiers, "drive": None if drive is None else drive._asdict(),
        "checkpoint": checkpoint_cost(job, plan, cluster, facts.places)._asdict(),
        **price,
        "bottleneck": bottleneck, "remedy": None,
    }  # fmt: skip
    warnings = [
        None if figures["fits"] else f"{DOES_NOT_FIT}{bottleneck}",
        idle_ranks_warning(plan, job), *unit_warnings(cluster), dispatch_hosts_warning(plan),
        _replicas_warning(figures, memory),
    ]  # fmt: skip
    predictions = _predictions(plan, facts, figures, timeline)
    predicted = plan.model_copy(update={"predictions": predictions})
    texts = [one for one in warnings if one is not None]
    return PlannedJob(predicted, figures, timeline, texts, facts)


def _add_drive(
    step: list[SegmentRun], facts: PlanFacts, num_ranks: int, traffic: Traffic
) -> tuple[list[SegmentRun], DriveTime | None]:
    """Return the step with waiting for drives; without it if the speed of some is unknown."""
    assert facts.job.memory is not None
    busy_s = drive_seconds(traffic, facts.job.memory.ssd, facts.cluster, facts.places)
    return (step, None) if busy_s is None else add_waiting(step, num_ranks, busy_s)


def predict_traced(
    traced: TracedModel, cluster: Cluster, num_ranks: int | None = None
) -> dict[str, Any]:
    """Return the predictions for a traced model as plain data, with a replica on each rank.

    `num_ranks` is None for all ranks that the cluster has room for.
    """
    if cluster.calibration is not None and cluster.calibration.source is not None:
        # Those runs are of language models.
        cluster = cluster.model_copy(update={"calibration": None})
    ranks = num_ranks or max_ranks(cluster)
    step = replicated_step(traced_blocks(traced, ranks), ranks, cluster)
    timeline = simulate_step(step, ranks)
    check_step_time(cluster.name, timeline.step_s)
    slowest = timeline.critical_rank
    devices = [device_at(cluster, one) for one in place_ranks(cluster, ranks)]
    rank = min(range(ranks), key=lambda at: devices[at].usable_bytes)
    memory = RankMemory(rank, traced_memory(traced), devices[rank])
    return {
        **_step_figures(cluster, devices[slowest], timeline, memory),
        "model": traced.name, "ranks": ranks, "parameters": traced.parameters,
        "flops": traced.flops, "phases_s": timeline.seconds_by_phase(slowest),
        "blocks_s": timeline.seconds_by_block(slowest),
        "samples_per_s": ranks * traced.batch / timeline.step_s,
    }  # fmt: skip


def _step_figures(
    cluster: Cluster, device: Device, timeline: Timeline, memory: RankMemory
) -> dict[str, Any]:
    """Return the figures that jobs and traced models share; `device` sets the pace."""
    calibration = cluster.calibration
    return {
        "cluster": cluster.name, "calibration": calibration and calibration.model_dump(),
        "device": device.model,
        **memory.figures(),
        "step_s": timeline.step_s,
    }  # fmt: skip


def _predictions(
    plan: Plan, facts: PlanFacts, figures: dict[str, Any], timeline: Timeline
) -> Predictions:
    """Return the predictions as a plan file has them."""
    return Predictions(
        cluster=facts.cluster.name,
        digest=prediction_digest(facts.job, plan),
        loads=figures["loads"],
        calibration=facts.cluster.calibration,
        step_s=round_digits(figures["step_s"]),
        phases_s={name: round_digits(seconds) for name, seconds in figures["phases_s"].items()},
        blocks_s={name: round_digits(seconds) for name, seconds in figures["blocks_s"].items()},
        tokens_per_s=round_digits(figures["tokens_per_s"]),
        reference_s=_reference_s(facts),
        used_bytes_by_kind={
            name.removesuffix("_bytes"): int(num_bytes)
            for name, num_bytes in figures["memory_per_rank"].items()
        },
        timeline=[
            _rank_timeline(timeline, rank) for rank in dict.fromkeys((timeline.critical_rank, 0))
        ],
    )


def _reference_s(facts: PlanFacts) -> float | None:
    """Return the seconds of the reference work, in the median over ranks; None if unknown."""
    measured = [device_at(facts.cluster, place).reference_s for place in facts.places]
    known = [one for one in measured if one is not None]
    return round_digits(median(known)) if known and len(known) == len(measured) else None


def _rank_timeline(timeline: Timeline, rank: int) -> RankTimeline:
    """Return one rank's seconds by phase, in the order in which its phases begin."""
    phases: dict[str, dict[str, float]] = {}
    for one in timeline.events(rank):
        own = phases.setdefault(one.event.phase, dict.fromkeys(_SPAN_KINDS, 0.0))
        kind = "collectives_s" if one.event.is_communication else "computing_s"
        kind = "waiting_s" if one.event.name == WAIT else kind
        own[kind] += one.elapsed_s - one.waiting_s
        own["waiting_s"] += one.waiting_s
    rounded = {
        phase: {kind: round_digits(seconds) for kind, seconds in own.items()}
        for phase, own in phases.items()
        if any(own.values())
    }
    return RankTimeline(
        rank=rank, phases=[PhaseSeconds(phase=phase, **own) for phase, own in rounded.items()]
    )


def _price(facts: PlanFacts, step_s: float, tokens: int) -> dict[str, float | None]:
    """Return the price of an hour, of the whole run and of a million tokens; None if unknown."""
    per_hour = price_per_hour(facts.cluster, facts.places)
    if not per_hour:
        return dict.fromkeys(("price_per_hour", "price", "price_per_million_tokens"))
    per_step = per_hour / _HOUR_S * step_s
    return {
        "price_per_hour": per_hour,
        "price": per_step * facts.job.train.steps,
        "price_per_million_tokens": per_step / tokens * 1e6,
    }


def _describe_parts(
    parts: Sequence[JobCosts], by_part: Sequence[Step], rank: int
) -> list[dict[str, Any]]:
    """Return the time and the memory of each part alone, as plain data; memory is that of `rank`,
    without temporaries."""
    found = []
    for costs, step in zip(parts, by_part, strict=True):
        part, ranks = costs.part, costs.plan.ranks
        assert part is not None
        needs = part.memory(rank, costs.loads, on_cpu=costs.device(rank).kind == "cpu")
        found.append({**part.describe(needs), "step_s": simulate_step(step, ranks).step_s})
    return found


def _seconds_by_kind(parts: Sequence[JobCosts], timeline: Timeline) -> dict[str, float]:
    """Return the seconds of a step by kind, on the critical rank."""
    rank = timeline.critical_rank
    each = [
        [share * seconds for seconds in costs.matmul_and_elementwise_s(rank, ops)]
        for costs in parts
        for share, ops in costs.ops(rank)
    ]
    matmul_s, elementwise_s = (sum(column) for column in zip(*each, strict=True))
    kinds = timeline.seconds_by_kind(rank)
    del kinds["computing"]
    return {"matmul": matmul_s, "elementwise": elementwise_s, **kinds}


def _pipeline_bubble(timeline: Timeline, plan: Plan, job: Job) -> dict[str, float] | None:
    """Return the predicted bubble fraction and the schedule's ideal one; None without pipeline."""
    if plan.pp == 1:
        return None
    stages_per_rank = plan.num_stages // plan.pp
    ideal = ideal_bubble_fraction(plan.schedule, plan.pp, stages_per_rank, job.train.micro_batches)
    return {"bubble": timeline.bubble_fraction(), "ideal": ideal}


def _replica_costs(job: Job, plan: Plan) -> dict[str, Any] | None:
    """Return the policy of expert replicas and what a replica costs; None without replicas."""
    costs = job.balance.costs or plan.balance_costs
    if costs is None or not should_balance(job, plan):
        return None
    problem = layer_problem(job, plan, job.balance, costs, job.model.expert_layers[0])
    max_replicas = problem.max_replicas
    return {
        "policy": job.balance.policy,
        "replica_tokens": break_even_tokens(problem),
        "max_bytes": None if max_replicas is None else max_replicas * _replica_bytes(job, plan),
    }


def _replicas_warning(figures: dict[str, Any], memory: RankMemory) -> str | None:
    """Return a warning if a plan fits, but not with the most expert replicas; None if it does."""
    most = (figures["balance"] or {}).get("max_bytes")
    free = memory.device.usable_bytes - memory.memory.peak_bytes
    if most is None or not 0 <= free < most:
        return None
    return (
        f"uneven experts may need {format_bytes(most)} more for replicas, but "
        f"{format_bytes(int(free))} are free on rank {memory.rank}: set balance.max_replicas = 0 "
        "for none, or take a plan with more free memory"
    )


def _replica_bytes(job: Job, plan: Plan) -> int:
    """Return the most bytes of one replica per layer on a rank, for one micro-batch.

    Parameters, in the dtype of matmuls, stay until the layer's backward ends. The gradient exists
    during that backward.
    """
    size = 3 * job.model.hidden * job.model.ffn // plan.etp
    names = {f"layers.{index}" for index in job.model.expert_layers}
    layers = [len(names.intersection(stage)) for stage in stage_blocks(plan, job.model)]
    layers_in_use = max(sum(layers[pp_rank :: plan.pp]) for pp_rank in range(plan.pp))
    layers_in_use = 1 if plan.recomputes(job) else layers_in_use
    grad_bytes = 8 if job.train.precision == "fp64" else 4
    return size * (layers_in_use * COMPUTED_BYTES[job.train.precision] + grad_bytes)


def _bottleneck(seconds_by_kind: dict[str, float], step_s: float, drive: DriveTime | None) -> str:
    if drive is not None and drive.busy_s > step_s - drive.wait_s:
        return (
            f"drive: {format_seconds(drive.busy_s)} of transfers, and "
            f"{format_seconds(step_s - drive.wait_s)} of everything else in a step; raise "
            "train.batch or memory.host, or use a faster drive"
        )
    step_s = sum(seconds_by_kind.values())
    largest, *rest = sorted(seconds_by_kind, key=lambda kind: -seconds_by_kind[kind])
    others = [
        f"{kind} {seconds_by_kind[kind] / step_s:.0%}" for kind in rest if seconds_by_kind[kind]
    ]
    return f"{largest}: {seconds_by_kind[largest] / step_s:.0%} of a step ({', '.join(others)})"


def _missing_memory(memory: RankMemory) -> str:
    """Return which rank lacks memory."""
    device = memory.device
    return (
        f"memory: rank {memory.rank} needs {about_bytes(memory.memory.peak_bytes)}, and may use "
        f"{about_bytes(device.usable_bytes)} of its {device.model}"
    )
