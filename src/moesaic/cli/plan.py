"""`moesaic plan`: what a job would need and take on a cluster, without running anything."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesaic.base import keys
from moesaic.base.errors import ConfigError
from moesaic.base.keys import listed
from moesaic.cli import flags, outlook, screen, travel
from moesaic.cli.flags import DryRun, Explain, Json, Out, Sets
from moesaic.cli.trace import Workload, tell
from moesaic.facts.cluster import Cluster, device_at, doubtful, place, price_per_hour
from moesaic.facts.job import Job, ModelConfig
from moesaic.facts.plan import (
    Plan,
    Predictions,
    RankPlace,
    basis,
    completed,
    idle_ranks,
    idle_words,
    misplaced,
    planned,
    ruled,
    short,
)
from moesaic.facts.workload import count
from moesaic.train.jobfile import LoadedJob, load_job, obey

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from moesaic.policy.cost.room import Held
    from moesaic.policy.cost.step import Costs
    from moesaic.policy.cost.traffic import Traffic
    from moesaic.report.loads import Loads
    from moesaic.sim.timeline import Timeline

JobFile = Annotated[
    Path | None, typer.Argument(metavar="JOB.toml", help="The job.", show_default=False)
]
ClusterFile = Annotated[
    Path | None,
    typer.Option("--cluster", metavar="FILE", show_default=False, help="What there is to run on."),
]
Nproc = Annotated[
    int | None,
    typer.Option(
        "--nproc", metavar="N", min=1, show_default=False,
        help="Ranks; unset: as many as fit the cluster.",
    ),
]  # fmt: skip
Layout = Annotated[
    str | None,
    typer.Option(
        "--layout", metavar="KEY=VALUE,...", show_default=False,
        help="Short for --set layout.KEY=VALUE, as in ep=2,shard=2.",
    ),
]  # fmt: skip
Given = Annotated[
    Path | None,
    typer.Option(
        "--plan", metavar="FILE", show_default=False,
        help="Ranks and layout as in this plan, which may have been edited.",
    ),
]  # fmt: skip
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace", metavar="FILE", show_default=False,
        help="Write a timeline of one step, for ui.perfetto.dev.",
    ),
]  # fmt: skip
LoadsOf = Annotated[
    Path | None,
    typer.Option(
        "--loads", metavar="RUN", show_default=False,
        help="Load experts as this run did in its later steps; unset: all alike.",
    ),
]  # fmt: skip
_SHOWN_RANKS = 16
_HOUR_S = 3600.0


def plan(  # noqa: PLR0913 - a parameter for each flag
    job: JobFile = None,
    cluster: ClusterFile = None,
    nproc: Nproc = None,
    layout: Layout = None,
    given: Given = None,
    workload: Workload = None,
    loads: LoadsOf = None,
    sets: Sets = None,
    out: Out = None,
    trace: Trace = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    explain: Explain = None,
) -> int:
    """Say what JOB.toml would need and take on a cluster: memory, time, speed, price.

    Everything is computed, nothing measured. --out FILE receives the plan, which
    `moesaic train JOB.toml --plan FILE` obeys.
    """
    if explain is not None:
        flags.explain_job(flags.JobPlanAndCluster, explain, as_json)
        return 0
    path = flags.need(job or workload, "JOB.toml", "plan")
    if cluster is None:
        raise ConfigError("--cluster is missing: give a file that `moesaic probe` or you wrote")
    with flags.at_cluster(cluster) as where:
        if workload is not None:
            beside = {
                "JOB.toml": job, "--set": sets, "--layout": layout, "--plan": given,
                "--loads": loads, "--out": out, "--trace": trace,
            }  # fmt: skip
            return tell(workload, where, nproc or _most_ranks(where), as_json, beside)
        _check_places(out, trace)
        items = [*(sets or ()), *_layout_sets(layout, sets or ())]
        loaded = load_job(path, items)
        if given is not None:
            loaded = obey(loaded, given, items)
        job_, chosen = loaded.job, _chosen(loaded, nproc, where)
        paths, others = travel.traffic(where, chosen.ranks), travel.NO_OTHERS
        if loaded.plan is None:
            recorded = None if loads is None else _recorded(loads, job_)
            chosen, others = travel.decided(job_, chosen, where, recorded, paths)
            chosen = travel.with_prices(job_, chosen, where, paths)
        facts, timeline = predict(job_, chosen, where, loads, paths)
        facts |= others
    after = []
    if trace is not None and not dry_run:
        flags.write_new("--trace", trace, _trace(timeline, chosen))
        after.append(f"{'timeline':<18} {trace}, for ui.perfetto.dev")
    if out is not None and not dry_run:
        flags.write_new("--out", out, promise(job_, chosen, where, facts, timeline).to_json())
        words = shlex.join(_train_words(path, out, items))
        after += [f"{'next':<18} {words}"] * facts["fits"]
    _warn(facts, [*loaded.warnings, idle_words(chosen, job_)])
    for doubt in doubtful(where):
        screen.warn(doubt)
    travel.warn_of_hosts(chosen)
    _tell(facts, after, as_json)
    return 0


def _tell(facts: dict[str, Any], after: Sequence[str], as_json: bool) -> None:
    if as_json:
        screen.as_json(facts)
        return
    _print(facts)
    for line in after:
        screen.say(line)


def _warn(facts: dict[str, Any], doubts: Sequence[str | None]) -> None:
    """Say on stderr what nobody should train by."""
    if not facts["fits"]:
        screen.warn(f"it does not fit: {facts['binds']}")
    for doubt in doubts:
        if doubt is not None:
            screen.warn(doubt)


def _chosen(loaded: LoadedJob, nproc: int | None, cluster: Cluster) -> Plan:
    """The plan that was given, or the job's own, with places for its ranks on `cluster`."""
    plan = loaded.plan
    if plan is None:
        return placed(planned(loaded.job, nproc or _most_ranks(cluster)), cluster)
    if nproc not in (None, plan.ranks):
        raise ConfigError(
            f"{loaded.plan_origin} is for {plan.ranks} ranks, and --nproc is {nproc}: leave "
            "--nproc out, or leave out the plan"
        )
    chosen = placed(completed(plan, loaded.job), cluster)
    fault = misplaced(plan, chosen.places)
    if fault is not None:
        raise ConfigError(
            f"{loaded.plan_origin}: {fault} in cluster '{cluster.name}': give the cluster that the "
            "plan was made for, plan anew for this one, or remove places from the plan"
        )
    return chosen


def _check_places(out: Path | None, trace: Path | None) -> None:
    """Refuse what cannot be written before anything is; a plan may have been edited."""
    if out is not None:
        flags.check_new("--out", out, "plan.json")
    if trace is not None:
        flags.check_new("--trace", trace, "step.json")
    if out is not None and trace is not None and out.resolve() == trace.resolve():
        raise ConfigError(f"--out and --trace are both '{out}': name two files")


def placed(plan: Plan, cluster: Cluster) -> Plan:
    """`plan` with places for its ranks on `cluster`."""
    places = []
    for one in place(cluster, plan.ranks):
        device = device_at(cluster, one)
        places.append(RankPlace(host=one.host, device=device.model, kind=device.kind))
        if plan.experts and plan.grouped_mm not in ("auto", "torch") and device.kind == "cpu":
            raise ConfigError(
                f'kernels.grouped_mm = "{plan.grouped_mm}" is for GPUs, and rank '
                f"{len(places) - 1} would compute on {device.model} in cluster "
                f"'{cluster.name}': leave it out"
            )
    return plan.model_copy(update={"places": places})


def _layout_sets(layout: str | None, sets: Sequence[str]) -> list[str]:
    """The items of `--set` that `--layout` is short for."""
    items = [] if layout is None else layout.split(",")
    for item in items:
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name and equals and value):
            raise ConfigError(
                f"--layout '{layout}' is not of the form key=value,..., as in ep=2,shard=2"
            )
        if sum(other.partition("=")[0].strip() == name for other in items) > 1:
            raise ConfigError(f"--layout '{layout}' says {name} twice: leave one out")
        for other in sets:
            if other.partition("=")[0].strip() == f"layout.{name}":
                raise ConfigError(
                    f"--layout {item.strip()} and --set {other} say the same key: leave one out"
                )
    return [f"layout.{item.strip()}" for item in items]


def _train_words(job: Path, out: Path, sets: Sequence[str]) -> list[str]:
    """Return the command that trains as planned, without the settings that the plan decides."""
    kept = [item for item in sets if not item.startswith("layout.")]
    words = [word for item in kept for word in ("--set", item)]
    return ["moesaic", "train", str(job), *words, "--plan", str(out)]


def _most_ranks(cluster: Cluster) -> int:
    """Every accelerator; where a host has none, the most ranks that share its cores."""
    total = 0
    for host in cluster.hosts:
        fast = sum(device.count for device in host.devices if device.kind != "cpu")
        total += fast or max(device.count for device in host.devices)
    return total


def _recorded(run: Path, job: Job) -> list[NDArray[np.float64]]:
    """How `run` loaded the experts of each layer, over the last quarter of its recorded steps."""
    from moesaic.report import RunFacts

    found = RunFacts.read(run).loads
    if found is None:
        raise ConfigError(
            f"--loads '{run}' has recorded no loads, as runs of dense models do not: give another "
            "run, or leave --loads out"
        )
    fault = unlike(found, job.model)
    if fault is not None:
        raise ConfigError(
            f"--loads '{run}' {fault}: give a run of this model, or leave --loads out"
        )
    return list(found.recent)


def unlike(loads: Loads, model: ModelConfig) -> str | None:
    """What recorded loads are of, if they are not of `model`, or of nothing."""
    layers, experts = loads.recent.shape
    if (layers, experts) == (len(model.expert_layers), model.experts):
        idle = loads.layers[loads.recent.sum(axis=1) == 0].tolist()
        if not idle:
            return None
        return f"has no tokens of layer {idle[0]} in the last quarter of its recorded steps"
    dense = f", model.dense_layers = {model.dense_layers}" if model.dense_layers else ""
    return (
        f"has the loads of {experts} experts in each of {layers} layers, but model.experts = "
        f"{model.experts} and model.layers = {model.layers}{dense}"
    )


def predict(
    job: Job, layout: Plan, cluster: Cluster, loads: Path | None, traffic: Traffic
) -> tuple[dict[str, Any], Timeline]:
    """What is to be expected, as plain data, and the step behind it; `loads` is a run."""
    from moesaic.policy.cost.room import tightest
    from moesaic.policy.cost.saves import save
    from moesaic.policy.cost.step import Costs
    from moesaic.sim.timeline import run

    places, learnt = place(cluster, layout.ranks), cluster.calibration
    recorded = None if loads is None else _recorded(loads, job)
    costs = Costs.of(job, layout, cluster, recorded, traffic)
    timeline = run(costs.events(), layout.ranks)
    price = price_per_hour(cluster, places)
    outlook.check(cluster.name, timeline.step_s, price)
    slowest, tokens = timeline.slowest, job.train.batch * job.data.sequence
    device = device_at(cluster, places[slowest])
    held = tightest(job, layout, cluster, places, recorded)
    counts, spent = count(job.model), _spent(costs, timeline)
    sent_s, waited_s = timeline.beside_s(slowest)
    if layout.pp == 1:
        phases, blocks = timeline.by_phase(slowest), timeline.by_block(slowest)
    else:  # The first part begins first and is done last; of blocks every part has its own.
        phases, blocks = timeline.by_phase(0), timeline.longest_by_block()
    return {
        "cluster": cluster.name, "loads": None if loads is None else str(loads),
        "calibration": learnt and learnt.model_dump(),
        "plan": layout.decisions(), "device": device.model,
        "devices": dict(Counter(device_at(cluster, one).model for one in places)),
        "pipeline": _pipeline(timeline, layout, job),
        "balance": travel.of_copies(job, layout),
        "parameters": {"total": counts.total, "active": counts.active},
        "memory_per_rank": {**held.needs.by_kind(), "peak_bytes": held.needs.peak_bytes},
        "memory_bytes": held.device.memory_bytes,
        "memory_rank": held.rank,
        "fits": held.share <= 1, "idle_ranks": idle_ranks(layout, job),
        "step_s": timeline.step_s, "steps": job.train.steps,
        "phases_s": phases, "blocks_s": blocks, "spent_s": spent,
        "messages": outlook.messages(costs.work(slowest), job.train.micro_batches),
        "beside_s": {"messages": sent_s, "waited_for": waited_s},
        "tokens_per_s": tokens / timeline.step_s,
        "utilisation": sum(op.flops for op in costs.ops(slowest))
        / (timeline.step_s * device.speed(job.train.precision).flops),
        "save": save(job, layout, cluster, places)._asdict(),
        "price_per_billion_tokens": price / _HOUR_S * timeline.step_s / tokens * 1e9,
        "price_per_hour": price,
        "price": price / _HOUR_S * timeline.step_s * job.train.steps,
        "binds": _binds(held, spent, _relief(job, layout, cluster, held)),
    }, timeline  # fmt: skip


def _spent(costs: Costs, timeline: Timeline) -> dict[str, float]:
    """What the rank that others wait for spends a step on."""
    products_s, passes_s = costs.apart_s(timeline.slowest, costs.ops(timeline.slowest))
    queueing_s = timeline.queueing_s(timeline.slowest)
    return {
        "products": products_s,
        "passes over memory": passes_s,
        "messages": timeline.speaking_s(timeline.slowest) + queueing_s,
        "waiting": timeline.waiting_s(timeline.slowest) - queueing_s,
    }


def _pipeline(timeline: Timeline, layout: Plan, job: Job) -> dict[str, Any] | None:
    """What is lost to waiting between stages, beside what the schedule itself loses."""
    from moesaic.sim.bubble import bubble, closed_form

    if layout.pp == 1:
        return None
    each = layout.num_stages // layout.pp
    form = closed_form(layout.schedule, layout.pp, each, job.train.micro_batches)
    return {"bubble": bubble(timeline), "closed_form": form}


def promise(
    job: Job, plan: Plan, cluster: Cluster, facts: dict[str, Any], timeline: Timeline
) -> Plan:
    """`plan`, whose ranks have places on `cluster`, with what `predict` found of it."""
    from moesaic.sim.outline import outline

    predictions = Predictions(
        cluster=cluster.name,
        basis=basis(job, plan),
        loads=facts["loads"],
        calibration=cluster.calibration,
        step_s=short(facts["step_s"]),
        phases_s={name: short(seconds) for name, seconds in facts["phases_s"].items()},
        blocks_s={name: short(s) for name, s in facts["blocks_s"].items()},
        tokens_per_s=short(facts["tokens_per_s"]),
        memory_bytes={
            name.removesuffix("_bytes"): int(num_bytes)
            for name, num_bytes in facts["memory_per_rank"].items()
        },
        timeline=outline(timeline),
    )
    return plan.model_copy(update={"predictions": predictions})


def _binds(held: Held, spent: dict[str, float], relief: str) -> str:
    if held.share > 1:
        return (
            f"memory: rank {held.rank} needs {screen.size(held.needs.peak_bytes)} and its device, "
            f"{held.device.model}, has {screen.size(held.device.memory_bytes)}; {relief}"
        )
    whole_s = sum(spent.values())
    most, *rest = sorted(spent, key=lambda kind: -spent[kind])
    others = [f"{kind} {spent[kind] / whole_s:.0%}" for kind in rest if spent[kind]]
    return f"{most}: {spent[most] / whole_s:.0%} of a step ({listed(others)})"


def _relief(job: Job, layout: Plan, cluster: Cluster, held: Held) -> str:
    """What would make it fit, or bring it nearer to that, in words; of a job that fits, nothing."""
    from moesaic.policy.relief import relief

    if held.share <= 1:
        return ""
    found = relief(ruled(job, layout), layout.ranks, cluster, place(cluster, layout.ranks), held)
    changes = " and ".join(f"{key} = {keys.toml(value)}" for key, value in found.changes.items())
    size = screen.size(found.held.needs.peak_bytes)
    if found.held.share <= 1:
        return f"it fits with {changes} ({size})"
    remedy = "take devices with more memory, or more ranks for layout.pp to cut the layers into"
    return f"with {changes} it needs {size}; {remedy}" if changes else remedy


def _trace(timeline: Timeline, layout: Plan) -> str:
    """Of a pipeline the ranks that pass the same tokens on stand together."""
    from moesaic.sim.trace import trace

    ranks = [rank for chain in layout.chain_groups() for rank in chain]
    return screen.dumps(trace(timeline, sorted(ranks[:_SHOWN_RANKS]))) + "\n"


def _print(facts: dict[str, Any]) -> None:
    layout, price = facts["plan"], facts["price_per_billion_tokens"]
    total, active = facts["parameters"]["total"], facts["parameters"]["active"]
    run_s = facts["steps"] * facts["step_s"]
    routing = f", loads of {facts['loads']}" if facts["loads"] else ""
    slices = f", matrices over {layout['tp']}" * (layout["tp"] > 1)
    shared = f"over {layout['shard']}" if layout["shard"] > 1 else "on every rank"
    columns = layout["ranks"] // layout["pp"] if layout["embedding"] == "columns" else 1
    slices += f", the embedding's columns over {columns}" * (columns > 1)
    its_device = "its device" if len(facts["devices"]) == 1 else f"the slowest, {facts['device']},"
    outlook.tell(
        f"{layout['ranks']} rank{'s'[: layout['ranks'] > 1]} on {facts['cluster']} "
        f"({_devices(facts)}), experts over {layout['ep']}{routing}, dense "
        f"parameters {shared}{slices}",
        facts,
        {
            **({"tokens travel": travel.in_a_line(facts)} if layout["ep"] > 1 else {}),
            **travel.of_embedding(facts),
            **({"pipeline": _told(facts["pipeline"], layout)} if facts["pipeline"] else {}),
            **travel.copies_in_a_line(facts["balance"]),
            "parameters": f"{total:,}" + (f", {active:,} for a token" if active < total else ""),
            "whole run": f"{facts['steps']:,} steps in {outlook.time(run_s)}",
            "tokens": f"{facts['tokens_per_s']:,.0f} a second",
            "utilisation": f"{facts['utilisation']:.1%} of what {its_device} multiplies at best",
            **_sent(**facts["messages"]),
            **_beside(**facts["beside_s"]),
            "save": _saved(**facts["save"]),
            **({"price": _priced(facts)} if price else {}),
        },
    )


def _devices(facts: dict[str, Any]) -> str:
    """What ranks compute with, in a line; of several devices, how many have each."""
    several = facts["devices"]
    if len(several) == 1:
        return str(facts["device"])
    return listed([f"{count} x {model}" for model, count in several.items()])


def _priced(facts: dict[str, Any]) -> str:
    return (
        f"{facts['price_per_billion_tokens']:,.2f} for a billion tokens, {facts['price']:,.2f} for "
        f"the whole run, {facts['price_per_hour']:,.2f} an hour"
    )


def _sent(step: int, sums: int) -> dict[str, str]:
    """How often ranks speak, in a line, if they do."""
    return {"messages": f"{step:,} a step, {sums:,} of them sums of gradients"} if step else {}


def _beside(messages: float, waited_for: float) -> dict[str, str]:
    """What travels beside computing, in a line, if anything does."""
    if not messages:
        return {}
    waited = f"of which {outlook.time(waited_for)} are waited for"
    return {"beside computing": f"{outlook.time(messages)} of messages, {waited}"}


def _saved(host_bytes: int, seconds: float | None) -> str:
    """A checkpoint, in a line."""
    on_disk = f"{outlook.time(seconds or 0.0)} until the last disk has what it gets"
    if seconds is None:
        on_disk = "and not every host has a disk in the cluster's file"
    return f"{screen.size(host_bytes)} by the host that writes most, {on_disk}"


def _told(pipeline: dict[str, float], layout: dict[str, Any]) -> str:
    """A pipeline, in a line."""
    return (
        f"{layout['pp']} parts, {layout['schedule']}, {layout['micro_batches']} micro-batches: "
        f"bubble {pipeline['bubble']:.0%} (closed form {pipeline['closed_form']:.0%})"
    )
