"""`moesaic plan`: predicted memory, time and price of a job on a cluster, without running it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesaic.base import keys
from moesaic.base.errors import ConfigError
from moesaic.base.keys import join_words
from moesaic.cli import flags, plan_choices, prediction, screen
from moesaic.cli.flags import DryRun, Explain, Json, Out, Sets
from moesaic.cli.loads import recorded_loads
from moesaic.cli.trace import Workload, plan_workload
from moesaic.facts.cluster import Cluster, device_at, place_ranks, price_per_hour, unit_warnings
from moesaic.facts.job import Job
from moesaic.facts.plan import (
    Plan,
    Predictions,
    RankPlace,
    complete_plan,
    idle_ranks,
    idle_ranks_warning,
    job_under_plan,
    placement_mismatch,
    plan_from_job,
    prediction_digest,
    round_digits,
)
from moesaic.facts.workload import count_parameters
from moesaic.train.job_file import LoadedJob, apply_plan, load_job

if TYPE_CHECKING:
    from moesaic.policy.cost.memory import RankMemory
    from moesaic.policy.cost.network import NetworkModel
    from moesaic.policy.cost.step import JobCosts
    from moesaic.sim.timeline import Timeline

JobFile = Annotated[
    Path | None, typer.Argument(metavar="JOB.toml", help="Job file.", show_default=False)
]
ClusterFile = Annotated[
    Path | None,
    typer.Option(
        "--cluster", metavar="FILE", show_default=False,
        help="Cluster file: hosts, devices and links.",
    ),
]  # fmt: skip
Nproc = Annotated[
    int | None,
    typer.Option(
        "--nproc", metavar="N", min=1, show_default=False,
        help="Number of ranks; unset: all that the cluster has room for.",
    ),
]  # fmt: skip
Layout = Annotated[
    str | None,
    typer.Option(
        "--layout", metavar="KEY=VALUE,...", show_default=False,
        help="Short for --set layout.KEY=VALUE, as in ep=2,dp_shard=2.",
    ),
]  # fmt: skip
PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--plan", metavar="FILE", show_default=False,
        help="Use the ranks and layout of this plan, which may be edited.",
    ),
]  # fmt: skip
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace", metavar="FILE", show_default=False,
        help="Write a timeline of one step, for ui.perfetto.dev.",
    ),
]  # fmt: skip
LoadsRun = Annotated[
    Path | None,
    typer.Option(
        "--loads", metavar="RUN", show_default=False,
        help="Assume the expert loads of the last steps of this run; unset: even loads.",
    ),
]  # fmt: skip
_SHOWN_RANKS = 16
_HOUR_S = 3600.0


def plan(  # noqa: PLR0913 - a parameter for each flag
    job_path: JobFile = None,
    cluster_path: ClusterFile = None,
    nproc: Nproc = None,
    layout: Layout = None,
    plan_file: PlanFile = None,
    workload: Workload = None,
    loads: LoadsRun = None,
    sets: Sets = None,
    out: Out = None,
    trace: Trace = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    explain: Explain = None,
) -> int:
    """Predict memory, time, speed and price of a job on a cluster.

    Nothing is measured and no rank starts. --out FILE writes the plan for
    `moesaic train JOB.toml --plan FILE`.
    """
    if explain is not None:
        flags.print_job_explanation(flags.JobPlanAndCluster, explain, as_json)
        return 0
    path = flags.require(job_path or workload, "JOB.toml", "plan")
    if cluster_path is None:
        raise ConfigError("--cluster is missing: give a cluster file; `moesaic probe` writes one")
    with flags.open_cluster(cluster_path) as cluster:
        if workload is not None:
            job_flags = {
                "JOB.toml": job_path, "--set": sets, "--layout": layout, "--plan": plan_file,
                "--loads": loads, "--out": out, "--trace": trace,
            }  # fmt: skip
            num_ranks = nproc or _max_ranks(cluster)
            return plan_workload(workload, cluster, num_ranks, as_json, job_flags)
        _check_outputs(out, trace)
        items = [*(sets or ()), *_layout_sets(layout, sets or ())]
        loaded = load_job(path, items)
        if plan_file is not None:
            loaded = apply_plan(loaded, plan_file, items)
        job, plan = loaded.job, _resolve_plan(loaded, nproc, cluster)
        network = plan_choices.make_network(cluster, plan.ranks)
        alternatives = plan_choices.NO_ALTERNATIVES
        if loaded.plan is None:
            plan, alternatives = _choose_settings(job, plan, cluster, loads, network)
        facts, timeline = predict(job, plan, cluster, loads, network)
        facts |= alternatives
    written = []
    if trace is not None and not dry_run:
        flags.write_new_file("--trace", trace, _render_trace(timeline, plan))
        written.append(f"{'timeline':<18} {trace}, for ui.perfetto.dev")
    if out is not None and not dry_run:
        predicted = with_predictions(job, plan, cluster, facts, timeline)
        flags.write_new_file("--out", out, predicted.to_json())
        words = shlex.join(_train_command(path, out, items))
        written += [f"{'next':<18} {words}"] * facts["fits"]
    warnings = [*loaded.warnings, idle_ranks_warning(plan, job), *unit_warnings(cluster)]
    _print_warnings(facts, warnings)
    plan_choices.warn_hosts(plan)
    _print_result(facts, written, as_json)
    return 0


def _choose_settings(
    job: Job, plan: Plan, cluster: Cluster, loads: Path | None, network: NetworkModel
) -> tuple[Plan, Mapping[str, Any]]:
    """Return `plan` with the settings that `job` leaves open, and the alternatives."""
    recorded = None if loads is None else recorded_loads(loads, job)
    plan, alternatives = plan_choices.choose_open_settings(job, plan, cluster, recorded, network)
    return plan_choices.with_prices(job, plan, cluster, network), alternatives


def _print_result(facts: dict[str, Any], written: Sequence[str], as_json: bool) -> None:
    if as_json:
        screen.print_json(facts)
        return
    _print_facts(facts)
    for line in written:
        screen.print_line(line)


def _print_warnings(facts: dict[str, Any], warnings: Sequence[str | None]) -> None:
    if not facts["fits"]:
        screen.print_warning(f"the plan does not fit: {facts['bottleneck']}")
    for warning in warnings:
        if warning is not None:
            screen.print_warning(warning)


def _resolve_plan(loaded: LoadedJob[Job], nproc: int | None, cluster: Cluster) -> Plan:
    """Return the given plan, or the job's own, with places for its ranks on `cluster`."""
    plan = loaded.plan
    if plan is None:
        return assign_places(plan_from_job(loaded.job, nproc or _max_ranks(cluster)), cluster)
    if nproc not in (None, plan.ranks):
        raise ConfigError(
            f"{loaded.plan_origin} is for {plan.ranks} ranks, but --nproc is {nproc}: remove "
            "--nproc, or remove --plan"
        )
    placed = assign_places(complete_plan(plan, loaded.job), cluster)
    mismatch = placement_mismatch(plan, placed.places)
    if mismatch is not None:
        raise ConfigError(
            f"{loaded.plan_origin}: {mismatch} in cluster '{cluster.name}': give the cluster that "
            "the plan was made for, plan anew for this one, or remove places from the plan"
        )
    return placed


def _check_outputs(out: Path | None, trace: Path | None) -> None:
    """Refuse output files that exist or cannot be written."""
    if out is not None:
        flags.check_new_file("--out", out, "plan.json")
    if trace is not None:
        flags.check_new_file("--trace", trace, "step.json")
    if out is not None and trace is not None and out.resolve() == trace.resolve():
        raise ConfigError(f"--out and --trace are both '{out}': name two files")


def assign_places(plan: Plan, cluster: Cluster) -> Plan:
    """Return `plan` with a host and device of `cluster` for each rank."""
    places = []
    for rank, place in enumerate(place_ranks(cluster, plan.ranks)):
        device = device_at(cluster, place)
        places.append(RankPlace(host=place.host, device=device.model, kind=device.kind))
        if plan.experts and plan.grouped_mm not in ("auto", "torch") and device.kind == "cpu":
            raise ConfigError(
                f'kernels.grouped_mm = "{plan.grouped_mm}" needs GPUs, but rank {rank} is on '
                f"{device.model} in cluster '{cluster.name}': remove it"
            )
    return plan.model_copy(update={"places": places})


def _layout_sets(layout: str | None, sets: Sequence[str]) -> list[str]:
    """Return the items of `--set` that `--layout` abbreviates."""
    items = [] if layout is None else layout.split(",")
    for item in items:
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name and equals and value):
            raise ConfigError(
                f"--layout '{layout}' is not of the form key=value,..., as in ep=2,dp_shard=2"
            )
        if sum(other.partition("=")[0].strip() == name for other in items) > 1:
            raise ConfigError(f"--layout '{layout}' sets {name} twice: remove one")
        for other in sets:
            if other.partition("=")[0].strip() == f"layout.{name}":
                raise ConfigError(
                    f"--layout {item.strip()} and --set {other} set the same key: remove one"
                )
    return [f"layout.{item.strip()}" for item in items]


def _train_command(job: Path, out: Path, sets: Sequence[str]) -> list[str]:
    """Return the words of the train command; the plan replaces settings of the layout."""
    kept = [item for item in sets if not item.startswith("layout.")]
    words = [word for item in kept for word in ("--set", item)]
    return ["moesaic", "train", str(job), *words, "--plan", str(out)]


def _max_ranks(cluster: Cluster) -> int:
    """Return the number of accelerators; hosts without any count ranks that share their cores."""
    total = 0
    for host in cluster.hosts:
        accelerators = sum(device.count for device in host.devices if device.kind != "cpu")
        total += accelerators or max(device.count for device in host.devices)
    return total


def predict(
    job: Job, plan: Plan, cluster: Cluster, loads: Path | None, network: NetworkModel
) -> tuple[dict[str, Any], Timeline]:
    """Return the prediction as plain data, and the timeline of the step; `loads` is a run."""
    from moesaic.policy.cost.checkpoint import checkpoint_cost
    from moesaic.policy.cost.memory import tightest_rank
    from moesaic.policy.cost.step import JobCosts
    from moesaic.sim.timeline import simulate_events

    places, calibration = place_ranks(cluster, plan.ranks), cluster.calibration
    recorded = None if loads is None else recorded_loads(loads, job)
    costs = JobCosts.from_job(job, plan, cluster, recorded, network)
    timeline = simulate_events(costs.events(), plan.ranks)
    price = price_per_hour(cluster, places)
    prediction.check_step_time(cluster.name, timeline.step_s, price)
    slowest, tokens = timeline.critical_rank, job.train.batch * job.data.sequence
    device = device_at(cluster, places[slowest])
    memory = tightest_rank(job, plan, cluster, places, recorded)
    counts, seconds_by_kind = count_parameters(job.model), _seconds_by_kind(costs, timeline)
    collectives_s, exposed_s = timeline.overlapped_s(slowest)
    if plan.pp == 1:
        phases, blocks = timeline.seconds_by_phase(slowest), timeline.seconds_by_block(slowest)
    else:  # Pipeline rank 0 starts first and ends last. Blocks are on different pipeline ranks.
        phases, blocks = timeline.seconds_by_phase(0), timeline.max_seconds_by_block()
    return {
        "cluster": cluster.name, "loads": None if loads is None else str(loads),
        "calibration": calibration and calibration.model_dump(),
        "plan": plan.decisions(), "device": device.model,
        "devices": dict(Counter(device_at(cluster, place).model for place in places)),
        "pipeline": _pipeline_bubble(timeline, plan, job),
        "balance": plan_choices.replica_facts(job, plan),
        "parameters": {"total": counts.total, "active": counts.active},
        "memory_per_rank": {**memory.memory.by_kind(), "peak_bytes": memory.memory.peak_bytes},
        "memory_bytes": memory.device.memory_bytes,
        "memory_rank": memory.rank,
        "fits": memory.used_fraction <= 1, "idle_ranks": idle_ranks(plan, job),
        "step_s": timeline.step_s, "steps": job.train.steps,
        "phases_s": phases, "blocks_s": blocks, "seconds_by_kind": seconds_by_kind,
        "collectives": prediction.count_collectives(
            costs.blocks(slowest), job.train.micro_batches
        ),
        "overlapped_s": {"collectives": collectives_s, "exposed": exposed_s},
        "tokens_per_s": tokens / timeline.step_s,
        "utilisation": sum(op.flops for op in costs.ops(slowest))
        / (timeline.step_s * device.matmul_speed(job.train.precision).flops),
        "save": checkpoint_cost(job, plan, cluster, places)._asdict(),
        "price_per_billion_tokens": price / _HOUR_S * timeline.step_s / tokens * 1e9,
        "price_per_hour": price,
        "price": price / _HOUR_S * timeline.step_s * job.train.steps,
        "bottleneck": _bottleneck(
            memory, seconds_by_kind, _memory_remedy(job, plan, cluster, memory)
        ),
    }, timeline  # fmt: skip


def _seconds_by_kind(costs: JobCosts, timeline: Timeline) -> dict[str, float]:
    """Return the seconds of a step by kind, on the critical rank."""
    rank = timeline.critical_rank
    matmul_s, elementwise_s = costs.matmul_and_elementwise_s(rank, costs.ops(rank))
    queueing_s = timeline.queueing_s(rank)
    return {
        "matmul": matmul_s,
        "elementwise": elementwise_s,
        "collectives": timeline.communication_s(rank) + queueing_s,
        "waiting": timeline.waiting_s(rank) - queueing_s,
    }


def _pipeline_bubble(timeline: Timeline, plan: Plan, job: Job) -> dict[str, Any] | None:
    """Return the predicted bubble fraction and the schedule's ideal one; None without pipeline."""
    from moesaic.sim.bubble import bubble_fraction, ideal_bubble_fraction

    if plan.pp == 1:
        return None
    stages_per_rank = plan.num_stages // plan.pp
    ideal = ideal_bubble_fraction(plan.schedule, plan.pp, stages_per_rank, job.train.micro_batches)
    return {"bubble": bubble_fraction(timeline), "closed_form": ideal}


def with_predictions(
    job: Job, plan: Plan, cluster: Cluster, facts: dict[str, Any], timeline: Timeline
) -> Plan:
    """Return `plan`, placed on `cluster`, with the predictions in `facts` and `timeline`."""
    from moesaic.sim.timeline_summary import summarize_timeline

    predictions = Predictions(
        cluster=cluster.name,
        digest=prediction_digest(job, plan),
        loads=facts["loads"],
        calibration=cluster.calibration,
        step_s=round_digits(facts["step_s"]),
        phases_s={name: round_digits(seconds) for name, seconds in facts["phases_s"].items()},
        blocks_s={name: round_digits(s) for name, s in facts["blocks_s"].items()},
        tokens_per_s=round_digits(facts["tokens_per_s"]),
        memory_bytes={
            name.removesuffix("_bytes"): int(num_bytes)
            for name, num_bytes in facts["memory_per_rank"].items()
        },
        timeline=summarize_timeline(timeline),
    )
    return plan.model_copy(update={"predictions": predictions})


def _bottleneck(memory: RankMemory, seconds_by_kind: dict[str, float], remedy: str) -> str:
    if memory.used_fraction > 1:
        return (
            f"memory: rank {memory.rank} needs {screen.format_bytes(memory.memory.peak_bytes)}, "
            f"but {memory.device.model} has {screen.format_bytes(memory.device.memory_bytes)}; "
            f"{remedy}"
        )
    step_s = sum(seconds_by_kind.values())
    largest, *rest = sorted(seconds_by_kind, key=lambda kind: -seconds_by_kind[kind])
    others = [
        f"{kind} {seconds_by_kind[kind] / step_s:.0%}" for kind in rest if seconds_by_kind[kind]
    ]
    return f"{largest}: {seconds_by_kind[largest] / step_s:.0%} of a step ({', '.join(others)})"


def _memory_remedy(job: Job, plan: Plan, cluster: Cluster, memory: RankMemory) -> str:
    """Return changes with which the job fits, or comes nearer to that; empty if it fits."""
    from moesaic.policy.memory_advice import suggest_memory_changes

    if memory.used_fraction <= 1:
        return ""
    places = place_ranks(cluster, plan.ranks)
    advice = suggest_memory_changes(job_under_plan(job, plan), plan.ranks, cluster, places, memory)
    changes = " and ".join(f"{key} = {keys.toml(value)}" for key, value in advice.changes.items())
    size = screen.format_bytes(advice.memory.memory.peak_bytes)
    if advice.memory.used_fraction <= 1:
        return f"it fits with {changes} ({size})"
    remedy = "use devices with more memory, or more ranks with a larger layout.pp"
    return f"with {changes} it needs {size}; {remedy}" if changes else remedy


def _render_trace(timeline: Timeline, plan: Plan) -> str:
    """Return the trace of the first ranks; all pipeline ranks of the same micro-batches come
    together."""
    from moesaic.sim.perfetto import perfetto_trace

    ranks = [rank for group in plan.pp_groups() for rank in group]
    return screen.dumps(perfetto_trace(timeline, sorted(ranks[:_SHOWN_RANKS]))) + "\n"


def _print_facts(facts: dict[str, Any]) -> None:
    plan, price = facts["plan"], facts["price_per_billion_tokens"]
    total, active = facts["parameters"]["total"], facts["parameters"]["active"]
    run_s = facts["steps"] * facts["step_s"]
    its_device = "its device" if len(facts["devices"]) == 1 else "the slowest rank's device"
    rows = {"dispatch": plan_choices.describe_dispatch(facts)} if plan["ep"] > 1 else {}
    rows |= plan_choices.describe_embedding(facts)
    if facts["pipeline"]:
        rows["pipeline"] = _describe_pipeline(facts["pipeline"], plan)
    rows |= {
        **plan_choices.describe_replicas(facts["balance"]),
        "parameters": f"{total:,}" + (f", {active:,} active per token" if active < total else ""),
        "whole run": f"{facts['steps']:,} steps in {prediction.format_seconds(run_s)}",
        "tokens": f"{facts['tokens_per_s']:,.0f} per second",
        "utilisation": f"{facts['utilisation']:.1%} of the peak matmul rate of {its_device}",
        **_describe_collectives(**facts["collectives"]),
        **_describe_overlap(**facts["overlapped_s"]),
        "checkpoint": _describe_save(**facts["save"]),
        **({"price": _describe_price(facts)} if price else {}),
    }
    prediction.print_prediction(_describe_layout(facts), facts, rows)


def _describe_layout(facts: dict[str, Any]) -> str:
    """Return one line about ranks, devices and layout."""
    plan = facts["plan"]
    parts = [
        f"{plan['ranks']} rank{'s'[: plan['ranks'] > 1]} on {facts['cluster']} "
        f"({_describe_devices(facts)})",
        f"experts over {plan['ep']}",
    ]
    parts += [f"loads of {facts['loads']}"] * bool(facts["loads"])
    shards = f"over {plan['dp_shard']}" if plan["dp_shard"] > 1 else "on every rank"
    parts.append(f"dense parameters {shards}")
    parts += [f"matrices over {plan['tp']} TP ranks"] * (plan["tp"] > 1)
    columns = plan["ranks"] // plan["pp"] if plan["embedding"] == "columns" else 1
    parts += [f"embedding columns over {columns}"] * (columns > 1)
    return ", ".join(parts)


def _describe_devices(facts: dict[str, Any]) -> str:
    devices = facts["devices"]
    if len(devices) == 1:
        return str(facts["device"])
    return join_words([f"{count} x {model}" for model, count in devices.items()], "and")


def _describe_price(facts: dict[str, Any]) -> str:
    return (
        f"{facts['price_per_billion_tokens']:,.2f} per billion tokens, {facts['price']:,.2f} for "
        f"the whole run, {facts['price_per_hour']:,.2f} per hour"
    )


def _describe_collectives(per_step: int, gradient_reductions: int) -> dict[str, str]:
    if not per_step:
        return {}
    text = f"{per_step:,} per step, {gradient_reductions:,} of them gradient reductions"
    return {"collectives": text}


def _describe_overlap(collectives: float, exposed: float) -> dict[str, str]:
    """Return a row about overlapped collectives, in seconds, if there are any."""
    if not collectives:
        return {}
    exposed_part = f"of which {prediction.format_seconds(exposed)} are exposed"
    return {
        "overlapped": f"{prediction.format_seconds(collectives)} of collectives, {exposed_part}"
    }


def _describe_save(host_bytes: int, seconds: float | None) -> str:
    written = f"{screen.format_bytes(host_bytes)} on the host that writes most"
    if seconds is None:
        return f"{written}; time unknown: the cluster file has no disk for some host"
    return f"{written}, {prediction.format_seconds(seconds)} until the slowest disk is done"


def _describe_pipeline(pipeline: dict[str, float], plan: dict[str, Any]) -> str:
    return (
        f"{plan['pp']} pipeline ranks, {plan['schedule']}, {plan['micro_batches']} micro-batches: "
        f"bubble {pipeline['bubble']:.0%} (ideal {pipeline['closed_form']:.0%})"
    )
