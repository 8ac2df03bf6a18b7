"""Checks of a plan against the job and the machines that it is used with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from moesaic.base.config import parse, read_json
from moesaic.base.errors import ConfigError
from moesaic.facts.job import Job
from moesaic.facts.job.train import grouped_mm_fault
from moesaic.facts.plan.layout import block_names, embedding_shard_error, pipeline_error
from moesaic.facts.plan.plan import Plan, RankPlace

_DIGEST_DIGITS = 16
_DIGEST_FIELDS = {
    "ranks", "ep", "dp_shard", "tp", "etp", "pp", "schedule", "dispatch", "dispatch_hosts",
    "overlap_local", "chunks", "grouped_mm", "embedding", "expert_placement",
    "expert_placement_by_layer", "stages",
}  # fmt: skip
"""Plan fields that a step's cost depends on, besides `places`."""


def load_plan(path: Path) -> Plan:
    """Return the plan in the file at `path`."""
    origin = f"--plan '{path}'"
    raw = read_json(path, origin, "give a file that `moesaic plan --out` wrote")
    return parse(Plan, raw, origin)


def check_plan(plan: Plan, job: Job, origin: str) -> None:
    """Raise ConfigError if `plan` cannot train `job`; the message starts with `origin`."""
    replan = "plan this job anew (moesaic plan)"
    if plan.experts != job.model.experts:
        raise ConfigError(
            f"{origin}: experts = {plan.experts}, but model.experts = {job.model.experts}: {replan}"
        )
    if plan.ep > 1 and not plan.experts:
        raise ConfigError(f"{origin}: ep = {plan.ep} with a dense model (experts = 0): set ep = 1")
    for layer in plan.expert_placement_by_layer:
        if int(layer) not in job.model.expert_layers:
            expert_layers = job.model.expert_layers
            raise ConfigError(
                f"{origin}: expert_placement_by_layer has layer {layer}, but layers with experts "
                f"are {expert_layers[0]} to {expert_layers[-1]}: remove it"
            )
    tp_error = job.tensor_parallel_error(plan.tp, plan.etp)
    if tp_error is not None:
        raise ConfigError(f"{origin}: {tp_error}")
    job_micro_batches = job.train.micro_batches
    if plan.micro_batches not in (None, job_micro_batches):
        raise ConfigError(
            f"{origin}: micro_batches = {plan.micro_batches}, but train.micro_batches = "
            f"{job_micro_batches}, and a plan must not change it, since results depend on it: "
            f"make them equal, or {replan}"
        )
    if plan.stages is not None:
        _check_blocks(plan.stages, block_names(job.model), origin)
    error = (
        pipeline_error(plan, job)
        or embedding_shard_error(plan, job)
        or _grouped_mm_error(plan, job)
    )
    if error:
        raise ConfigError(f"{origin}: {error}")


def _grouped_mm_error(plan: Plan, job: Job) -> str | None:
    """Return why the plan's expert kernels cannot serve the job, or None."""
    planned, wanted = plan.grouped_mm, job.kernels.grouped_mm
    if not job.model.experts:
        return None
    if planned != wanted and "fp8" in (planned, wanted):
        return (
            f'grouped_mm = "{planned}", but kernels.grouped_mm = "{wanted}", and a plan must not '
            "change to or from fp8, since results depend on it: make them equal, or plan this job "
            "anew (moesaic plan)"
        )
    return grouped_mm_fault(planned, job.train)


def _check_blocks(stages: list[list[str]], blocks: Sequence[str], origin: str) -> None:
    listed = [name for stage in stages for name in stage]
    at = [index for index, stage in enumerate(stages) for _ in stage]
    for name, index in zip(listed, at, strict=True):
        if name not in blocks:
            raise ConfigError(
                f"{origin}: stages[{index}] lists block '{name}', which the model does not have: "
                f"its blocks are {blocks[0]}, {blocks[1]} to {blocks[-2]} and {blocks[-1]}"
            )
        if listed.count(name) > 1:
            raise ConfigError(f"{origin}: stages lists block '{name}' twice: once is enough")
    for place, name in enumerate(blocks):
        if name not in listed:
            # Suggest the stage of the preceding block, which keeps the order.
            stage = at[listed.index(blocks[place - 1])] if place else 0
            raise ConfigError(f"{origin}: no stage lists block '{name}': add it to stages[{stage}]")
    for name, index, block in zip(listed, at, blocks, strict=True):
        if name != block:
            raise ConfigError(
                f"{origin}: stages[{index}] has block '{name}' out of order: keep the "
                "order of the model"
            )
    if [] in stages:
        raise ConfigError(
            f"{origin}: stages[{stages.index([])}] is empty: give it a block, or lower pp"
        )


def job_under_plan(job: Job, plan: Plan) -> Job:
    """Return `job` with the plan's decisions in place of its own."""
    own = job.layout.model_dump()
    if own["dp_shard"] == "all":
        own["dp_shard"] = plan.dp
    if own["dispatch_hosts"] is None:
        own["dispatch_hosts"] = 1
    if own["overlap_local"] == "auto":
        own["overlap_local"] = False
    if own["chunks"] == "auto":
        own["chunks"] = 1
    if own["embedding"] == "auto":
        own["embedding"] = "whole"
    decided = plan.model_dump(include=set(own))
    changes = {key: value for key, value in decided.items() if value != own[key]}
    layout = job.layout.model_copy(update=changes)
    train = job.train
    if plan.recompute is not None and plan.recompute != train.recompute:
        train = train.model_copy(update={"recompute": plan.recompute})
    kernels = job.kernels
    if plan.grouped_mm != kernels.grouped_mm:
        kernels = kernels.model_copy(update={"grouped_mm": plan.grouped_mm})
    return job.model_copy(update={"layout": layout, "kernels": kernels, "train": train})


def prediction_digest(job: Job, plan: Plan) -> str:
    """Return a digest of what predictions depend on, except machines: the job's work and the plan's
    decisions."""
    job = job_under_plan(job, plan)
    decided = plan.model_dump(include=_DIGEST_FIELDS)
    # Defaults are left out, so that digests of plans without these keys stay valid.
    if not plan.overlap_local:
        del decided["overlap_local"]
    if plan.grouped_mm != "fp8":  # The cost model has the same figures for torch and triton.
        del decided["grouped_mm"]
    if not plan.expert_placement_by_layer:
        del decided["expert_placement_by_layer"]
    work = {
        "model": job.model.model_dump(exclude={"extras", "init_std", "max_positions"}),
        "routing": job.routing.router,
        "data": job.data.model_dump(include={"sequence", "packing"}),
        "train": job.train.model_dump(include={"batch", "micro_batches", "precision", "recompute"}),
        "clips": job.train.clip > 0,
        "moments": job.optimizer.moments,
        "finetune": job.finetune and job.finetune.model_dump(exclude={"alpha"}),
        "asynchronous": job.checkpoint.asynchronous,
        "plan": decided,
    }
    return hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()[:_DIGEST_DIGITS]


def placement_mismatch(plan: Plan, actual: Sequence[RankPlace]) -> str | None:
    """Return which rank does not run on the device or host that `plan` was made for, or None.

    Names of hosts may differ. Devices, and which ranks share a host, may not.
    """
    if not plan.places:
        return None
    for rank, (planned, real) in enumerate(zip(plan.places, actual, strict=True)):
        for what, wanted, has in (
            ("a device of kind", planned.kind, real.kind),
            ("a", planned.device, real.device),
        ):
            if _normalised_name(wanted) != _normalised_name(has):
                return f"rank {rank} is planned for {what} '{wanted}', but it has '{has}'"
    wanted_hosts, hosts = _first_rank_of_host(plan.places), _first_rank_of_host(actual)
    for rank, (wanted_first, first) in enumerate(zip(wanted_hosts, hosts, strict=True)):
        if wanted_first == first:
            continue
        planned_at = "a host of its own" if wanted_first == rank else f"rank {wanted_first}'s host"
        real_at = "another host" if first == rank else f"rank {first}'s host"
        return f"rank {rank} is planned for {planned_at}, but it runs on {real_at}"
    return None


def check_places(plan: Plan, actual: Sequence[RankPlace], origin: str) -> None:
    """Raise ConfigError if the ranks do not run on the machines that `plan` was made for."""
    mismatch = placement_mismatch(plan, actual)
    if mismatch is not None:
        raise ConfigError(
            f"{origin}: {mismatch}: start the ranks on the machines of the plan, plan anew for "
            "these, or remove places from the plan"
        )


def _first_rank_of_host(places: Sequence[RankPlace]) -> list[int]:
    """Return for each rank the first rank on its host."""
    first: dict[str, int] = {}
    return [first.setdefault(place.host, rank) for rank, place in enumerate(places)]


def _normalised_name(text: str) -> str:
    """Return a name without differences in blanks and capitals."""
    return " ".join(text.split()).casefold()
