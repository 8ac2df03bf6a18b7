"""Predictions of a step as text, for jobs and for traced models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from moesaic.api.memory_here import describe_fit
from moesaic.api.plan_search import without_speeds
from moesaic.base.keys import join_words
from moesaic.base.units import (
    about_range,
    about_seconds,
    format_bytes,
    format_used_bytes,
    plural,
    round_text,
)
from moesaic.cli import screen
from moesaic.facts.cluster import Calibration, describe_step
from moesaic.facts.plan import Plan, describe_plan, dispatch_summary
from moesaic.facts.workload import STEP

if TYPE_CHECKING:
    from moesaic.policy.plan.predict import PlannedJob

_WIDTH = 18
"""Width of the names of rows; block names may be longer."""
_WITHOUT_SPEED = ("ranks", "parameters", "memory per rank", "memory budget", "expert state")
"""Rows about a plan that does not fit, besides memory by kind."""
_EMBEDDING_TEXTS = {
    "whole": "whole table on every rank", "columns": "a column shard on each rank",
}  # fmt: skip


def print_planned_job(planned: PlannedJob, written: Mapping[str, str], ranks: str | None) -> None:
    """Print the predictions for a job, where the number of `ranks` comes from, and what was
    `written`."""
    plan, figures = planned.plan, planned.figures
    if planned.found is None:
        print_verdict(figures)
    total, active = figures["parameters"]["total"], figures["parameters"]["active"]
    run_s, tiers = figures["steps"] * figures["step_s"], figures["memory_tiers"]
    its_device = "its device" if len(figures["devices"]) == 1 else "the slowest rank's device"
    rows = {
        "ranks": ranks,
        "dispatch": _describe_dispatch(figures) if plan.ep > 1 else None,
        "embedding": _describe_embedding(figures),
        "pipeline": _describe_pipeline(figures),
        "balance": _describe_replicas(figures),
        "parameters": f"{total:,}" + (f", {active:,} active per token" if active < total else ""),
        "whole run": f"{figures['steps']:,} steps in {about_seconds(run_s)}"
        f"{_range_text(figures, partial(about_range, run_s))}",
        "tokens": f"{round_text(figures['tokens_per_s'])} per second",
        "utilisation": f"{round_text(100 * figures['utilisation'])}% of the peak matmul rate of "
        f"{its_device}",
        "overlapped": _describe_overlap(figures),
        "checkpoint": _describe_checkpoint(figures),
        **({} if tiers is None else describe_tiers(tiers, figures["step_s"])),
        "drive time": None if tiers is None else _describe_drive(figures),
        "price": _describe_price(figures) if figures["price"] is not None else None,
    }
    _print_prediction(_describe_layout(plan, figures), figures, rows)
    print_parts(without_speeds(figures)["parts"])
    _print_rows(list(written.items()), _WIDTH)


def print_verdict(figures: Mapping[str, Any], advice: str = "") -> None:
    """Print whether the fullest rank fits, and if not, its remedy; `advice` stands for one."""
    screen.print_line(describe_fit(figures, advice))


def print_parts(parts: Sequence[Mapping[str, Any]]) -> None:
    """Print parameters, memory and, if predicted, the time of teacher and students."""
    if not parts:
        return
    names = ["parts", "learns from", "parameters", "memory without temporaries"]
    names += ["step"] * (parts[0].get("step_s") is not None)
    screen.print_table(names, [_part_row(one) for one in parts], left=2)


def _part_row(part: Mapping[str, Any]) -> list[str]:
    teacher = part["teacher"] or ("nothing, frozen" if part["frozen"] else "text")
    auxiliary = part["auxiliary_parameters"]
    numbers = f"{part['parameters']:,}" + f" + {auxiliary:,} auxiliary" * bool(auxiliary)
    row = [f"  {part['name']}", teacher, numbers, format_bytes(part["memory_bytes"])]
    step_s = part.get("step_s")
    return row if step_s is None else [*row, about_seconds(step_s)]


def print_traced_model(figures: Mapping[str, Any]) -> None:
    """Print the predictions for a traced model."""
    opening = (
        f"{figures['model']}, a replica on each of {figures['ranks']} ranks on "
        f"{figures['cluster']} ({figures['device']})"
    )
    print_verdict(figures, "trace a smaller batch")
    samples = f"{round_text(figures['samples_per_s'])} per second"
    _print_prediction(opening, figures, {"samples": samples})


def print_largest_model(figures: Mapping[str, Any]) -> None:
    """Print the largest models of a job's shape, as `Job.largest_model` has them."""
    ranks, hosts = figures["ranks"], figures["hosts"]
    names = [f"{count} x {model}" for model, count in figures["devices"].items()]
    screen.print_line(
        f"{plural(ranks, 'rank')} on {figures['cluster']} ({join_words(names, 'and')}), "
        f"{plural(hosts, 'host')} with {format_bytes(figures['ssd_bytes'])} on a drive; "
        "computed, not measured\n"
    )
    largest = {(one["method"], one["resource"]) for one in figures["largest"]}
    screen.print_table(
        ["method", "limit", "experts per layer", "parameters", ""],
        [
            (one["method"], one["resource"], f"{one['experts']:,}", f"{one['parameters']:,}",
             "bottleneck" * ((one["method"], one["resource"]) in largest))
            for one in figures["limits"]
        ], left=2,
    )  # fmt: skip
    rows = [
        ("active experts", f"{figures['active_fraction']:.0%} per step under even routing"),
        ("memory per rank", f"{format_bytes(figures['budget_bytes'])} at most"),
    ]
    divided = figures["divided"]
    if divided is not None:
        rows.append((
            "in memory", f"{divided['num_blocks']:,} blocks of experts per rank, four per expert; "
            f"{divided['group_size']} of {figures['micro_batches']} micro-batches together",
        ))  # fmt: skip
    rows += [(f"larger: {one['method']}", one["remedy"]) for one in figures["largest"]]
    screen.print_line("")
    _print_rows(rows, _WIDTH)


def describe_tiers(tiers: Mapping[str, Any], step_s: float | None) -> dict[str, str]:
    """Return rows about expert state on a drive, by name; `step_s` is the predicted step time."""
    read, written = tiers["read_bytes_per_step"], tiers["written_bytes_per_step"]
    per_day = 86400 / (step_s or 1.0)
    steps = "a second" if step_s is None else about_seconds(step_s)
    per_step = (
        f"{format_bytes(read)} read and {format_bytes(written)} written per step and rank; "
        f"{format_bytes(per_day * read)} read and {format_bytes(per_day * written)} written per "
        f"day if a step takes {steps}"
    )
    return {
        "memory budget": f"{format_bytes(tiers['host_bytes'])}; the smallest that works is "
        f"{format_bytes(tiers['smallest_budget_bytes'])} (memory.host)",
        "expert state": f"{format_bytes(tiers['expert_state_bytes'])} per rank; "
        f"{format_bytes(tiers['experts_bytes'])} in memory for it and its gradients",
        "drive": f"{format_bytes(tiers['drive_bytes'])} per rank; {per_step} and all experts have "
        "tokens",
        "micro-batches": f"{tiers['micro_batches_together']} at a time pass through a layer",
    }


def _print_prediction(
    opening: str, figures: Mapping[str, Any], extra_rows: Mapping[str, str | None]
) -> None:
    """Print the time of a step by phase and by block, memory by kind, and the bottleneck.

    Args:
        opening: Model, ranks and cluster of the prediction.
        figures: The prediction.
        extra_rows: More rows of text by name; rows that do not apply are None.
    """
    needs = figures["memory_per_rank"]
    kinds = {name: num_bytes for name, num_bytes in needs.items() if name != "peak_bytes"}
    used = format_used_bytes(needs["peak_bytes"], figures["usable_memory_bytes"])
    rows = [
        ("step", f"{describe_step(figures['step_s'], _calibration(figures))}, of which"),
        *((f"  {name}", about_seconds(seconds)) for name, seconds in figures["phases_s"].items()),
        *((name, text) for name, text in extra_rows.items() if text is not None),
        ("memory per rank", f"peak {used}, of which"),
        *((f"  {name.removesuffix('_bytes')}", format_bytes(num_bytes))
          for name, num_bytes in kinds.items() if num_bytes),
    ]  # fmt: skip
    if "bottleneck" in figures:
        rows.append(("bottleneck", figures["bottleneck"]))
    stages = figures["plan"]["pp"] if "plan" in figures else 1
    blocks = _block_rows(
        {name: s for name, s in figures["blocks_s"].items() if name != STEP}, stages
    )
    if figures["blocks_s"].get(STEP):
        blocks.append(("  outside blocks", about_seconds(figures["blocks_s"][STEP])))
    screen.print_line(f"{opening}; predicted{_basis(figures)}, not measured\n")
    if not figures["fits"]:  # Its speed is hypothetical.
        rows = [row for row in rows if row[0] in _WITHOUT_SPEED or row[0] in _kinds(kinds)]
        blocks = []
    _print_rows(rows, _WIDTH)
    _print_rows(blocks, max(_WIDTH, *(len(name) for name, _ in blocks)) if blocks else 0)


def _kinds(kinds: Mapping[str, Any]) -> set[str]:
    """Return the names of the rows of memory by kind."""
    return {f"  {name.removesuffix('_bytes')}" for name in kinds}


def _basis(figures: Mapping[str, Any]) -> str:
    """Return what a prediction is calibrated by."""
    calibration = figures["calibration"]
    if not calibration:
        return ", not calibrated"
    if calibration["source"] is not None:  # `describe_step` names it.
        return "" if figures["loads"] else " for even routing" * bool(figures["plan"]["experts"])
    basis = f", calibrated by {Calibration(**calibration).describe()}"
    return basis + " on other devices" * (figures["device"] not in calibration["devices"])


def _calibration(figures: Mapping[str, Any]) -> Calibration | None:
    calibration = figures["calibration"]
    return Calibration(**calibration) if calibration else None


def _range_text(figures: Mapping[str, Any], text: Callable[[Sequence[float]], str]) -> str:
    """Return `text` of the least and the largest ratio of published runs to their predictions, in
    brackets; empty without such runs."""
    ratios = (figures["calibration"] or {}).get("ratios")
    return f" ({text(ratios)})" if ratios else ""


def _print_rows(rows: Sequence[tuple[str, str]], width: int) -> None:
    for name, value in rows:
        screen.print_line(f"{name:<{width}} {value}")


def _block_rows(blocks_s: Mapping[str, float], pipeline_ranks: int) -> list[tuple[str, str]]:
    """Return a row of each kind of block: the time of all its blocks, on all pipeline ranks."""
    kinds: dict[str, list[float]] = {}
    for name, seconds in blocks_s.items():
        kinds.setdefault(_block_kind(name), []).append(seconds)
    many = f", summed over {pipeline_ranks} pipeline ranks" if pipeline_ranks > 1 else ""
    rows = [("blocks", f"forward, backward and update of a step, with waiting{many}")]
    for kind, times in kinds.items():
        number = f", {len(times)} blocks" if len(times) > 1 else ""
        rows.append((f"  {kind}", f"{about_seconds(sum(times))}{number}"))
    return rows


def _block_kind(block: str) -> str:
    """Return a block's name with * for numbers."""
    return ".".join("*" if part.isdecimal() else part for part in block.split("."))


def _describe_layout(plan: Plan, figures: Mapping[str, Any]) -> str:
    """Return one line about cluster, devices and plan."""
    devices = [f"{count} x {model}" for model, count in figures["devices"].items()]
    loads = f", loads of {figures['loads']}" if figures["loads"] else ""
    return f"{figures['cluster']} ({join_words(devices, 'and')}): {describe_plan(plan)}{loads}"


def _describe_dispatch(figures: Mapping[str, Any]) -> str:
    """Return the dispatch method and the extra time of the alternatives."""
    plan, others = figures["plan"], figures["other_dispatch"]
    chosen, *rest = (
        dispatch_summary(
            setting["dispatch"], setting["dispatch_hosts"], plan["ep"], setting["chunks"],
            setting["overlap_local"],
        )
        for setting in (plan, *others)
    )  # fmt: skip
    alternatives = [
        f"{text} +{about_seconds(other['extra_s'])}"
        for text, other in zip(rest, others, strict=True)
    ]
    return f"tokens {chosen}" + f"; alternatives: {', '.join(alternatives)}" * bool(others)


def _describe_embedding(figures: Mapping[str, Any]) -> str | None:
    other = figures["other_embedding"]
    if other is None:
        return None
    extra_s = other["extra_s"]
    extra = f"{'-' if extra_s < 0 else '+'}{about_seconds(abs(extra_s))}"
    if not other["fits"]:
        extra += ", does not fit in memory"
    chosen = _EMBEDDING_TEXTS[figures["plan"]["embedding"]]
    return f"{chosen}; alternative: {_EMBEDDING_TEXTS[other['embedding']]} {extra}"


def _describe_pipeline(figures: Mapping[str, Any]) -> str | None:
    plan, pipeline = figures["plan"], figures["pipeline"]
    if pipeline is None:
        return None
    return (
        f"{plan['pp']} pipeline ranks, {plan['schedule']}, {plan['micro_batches']} micro-batches: "
        f"bubble {pipeline['bubble']:.0%} (ideal {pipeline['ideal']:.0%})"
    )


def _describe_replicas(figures: Mapping[str, Any]) -> str | None:
    replicas = figures["balance"]
    if replicas is None:
        return None
    tokens = round_text(replicas["replica_tokens"])
    text = f"{replicas['policy']}; a replica costs as much as computing {tokens} routed tokens"
    if replicas["max_bytes"] is not None:
        size = format_bytes(replicas["max_bytes"])
        text += f"; up to {size} per rank and micro-batch in flight, not counted below"
    return text


def _describe_overlap(figures: Mapping[str, Any]) -> str | None:
    seconds = figures["overlapped_s"]
    if not seconds["collectives"]:
        return None
    exposed = f"of which {about_seconds(seconds['exposed'])} are exposed"
    return f"{about_seconds(seconds['collectives'])} of collectives, {exposed}"


def _describe_drive(figures: Mapping[str, Any]) -> str:
    drive = figures["drive"]
    if drive is None:
        return "unknown and not in the step: the cluster file has no disk for some host"
    return (
        f"{about_seconds(drive['busy_s'])} of transfers beside computing, of which "
        f"{about_seconds(drive['wait_s'])} are waited for"
    )


def _describe_checkpoint(figures: Mapping[str, Any]) -> str:
    seconds = figures["checkpoint"]["seconds"]
    written = f"{format_bytes(figures['checkpoint']['host_bytes'])} on the host that writes most"
    if seconds is None:
        return f"{written}; time unknown: the cluster file has no disk for some host"
    return f"{written}, {about_seconds(seconds)} until the slowest disk is done"


def _describe_price(figures: Mapping[str, Any]) -> str:
    per_million = figures["price_per_million_tokens"]
    span = _range_text(figures, lambda two: " to ".join(round_text(x * per_million) for x in two))
    return (
        f"{round_text(per_million)}{span} per million tokens, "
        f"{round_text(figures['price'])} for the whole run, {figures['price_per_hour']:,.2f} per "
        "hour"
    )
