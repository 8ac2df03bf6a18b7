"""A plan from its file, held against the job and the machines that are to obey it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from moesaic.base.config import parse, read_json
from moesaic.base.errors import ConfigError
from moesaic.facts.job import Job
from moesaic.facts.job.train import grouped_mm_fault
from moesaic.facts.plan.layout import block_names, columns_fault, pipeline_fault
from moesaic.facts.plan.plan import Plan, RankPlace

_DIGITS = 16
_DECISIVE = {
    "ranks", "ep", "shard", "tp", "etp", "pp", "schedule", "dispatch", "hosts", "local",
    "chunks", "grouped_mm", "embedding", "homes_by_rank", "homes_of_layers", "stages",
}  # fmt: skip
"""What of a plan a step's cost depends on, besides its places."""


def load_plan(path: Path) -> Plan:
    """The plan in the file at `path`."""
    origin = f"--plan '{path}'"
    raw = read_json(path, origin, "give a file that `moesaic plan --out` wrote")
    return parse(Plan, raw, origin)


def check(plan: Plan, job: Job, origin: str) -> None:
    """Raise unless `job` can be trained as `plan` says; `origin` opens the message."""
    again = "plan this job anew (moesaic plan)"
    if plan.experts != job.model.experts:
        raise ConfigError(
            f"{origin}: experts = {plan.experts}, but model.experts = {job.model.experts}: {again}"
        )
    if plan.ep > 1 and not plan.experts:
        raise ConfigError(f"{origin}: ep = {plan.ep} with a dense model (experts = 0): set ep = 1")
    for layer in plan.homes_of_layers:
        if int(layer) not in job.model.expert_layers:
            sparse = job.model.expert_layers
            raise ConfigError(
                f"{origin}: homes_of_layers has layer {layer}, and layers with experts are "
                f"{sparse[0]} to {sparse[-1]}: remove it"
            )
    uncut = job.uncut(plan.tp, plan.etp)
    if uncut is not None:
        raise ConfigError(f"{origin}: {uncut}")
    wanted = job.train.micro_batches
    if plan.micro_batches not in (None, wanted):
        raise ConfigError(
            f"{origin}: micro_batches = {plan.micro_batches}, but train.micro_batches = {wanted}, "
            "and the numbers of a run depend on it, so that no plan may change it: "
            f"make them equal, or {again}"
        )
    if plan.stages is not None:
        _check_blocks(plan.stages, block_names(job.model), origin)
    fault = pipeline_fault(plan, job) or columns_fault(plan, job) or _grouped_mm_fault(plan, job)
    if fault:
        raise ConfigError(f"{origin}: {fault}")


def _grouped_mm_fault(plan: Plan, job: Job) -> str | None:
    """Return why the plan's expert kernels cannot serve the job, or None."""
    ours, asked = plan.grouped_mm, job.kernels.grouped_mm
    if not job.model.experts:
        return None
    if ours != asked and "fp8" in (ours, asked):
        return (
            f'grouped_mm = "{ours}", but kernels.grouped_mm = "{asked}", and fp8 changes the '
            "numbers of a run, so that no plan may set it: make them equal, or plan this job anew "
            "(moesaic plan)"
        )
    return grouped_mm_fault(ours, job.train)


def _check_blocks(stages: list[list[str]], blocks: Sequence[str], origin: str) -> None:
    listed = [name for stage in stages for name in stage]
    at = [index for index, stage in enumerate(stages) for _ in stage]
    for name, index in zip(listed, at, strict=True):
        if name not in blocks:
            raise ConfigError(
                f"{origin}: stages[{index}] lists block '{name}', which the model has not: its "
                f"blocks are {blocks[0]}, {blocks[1]} to {blocks[-2]} and {blocks[-1]}"
            )
        if listed.count(name) > 1:
            raise ConfigError(f"{origin}: stages lists block '{name}' twice: once is enough")
    for place, name in enumerate(blocks):
        if name not in listed:
            # Where the block before it stands, it would be in order.
            stage = at[listed.index(blocks[place - 1])] if place else 0
            raise ConfigError(f"{origin}: no stage lists block '{name}': add it to stages[{stage}]")
    for name, index, block in zip(listed, at, blocks, strict=True):
        if name != block:
            raise ConfigError(
                f"{origin}: stages[{index}] has block '{name}' in another place than the model: "
                "keep the order of the model"
            )
    if [] in stages:
        raise ConfigError(
            f"{origin}: stages[{stages.index([])}] is empty: give it a block, or lower pp"
        )


def ruled(job: Job, plan: Plan) -> Job:
    """`job` with what the plan decides in the place of what it said itself."""
    said = job.layout.model_dump()
    if said["shard"] == "all":
        said["shard"] = plan.replicas
    if said["hosts"] is None:
        said["hosts"] = 1
    if said["local"] == "auto":
        said["local"] = "along"
    if said["chunks"] == "auto":
        said["chunks"] = 1
    if said["embedding"] == "auto":
        said["embedding"] = "whole"
    decided = plan.model_dump(include=set(said))
    changes = {key: value for key, value in decided.items() if value != said[key]}
    layout = job.layout.model_copy(update=changes)
    train = job.train
    if plan.recompute is not None and plan.recompute != train.recompute:
        train = train.model_copy(update={"recompute": plan.recompute})
    kernels = job.kernels
    if plan.grouped_mm != kernels.grouped_mm:
        kernels = kernels.model_copy(update={"grouped_mm": plan.grouped_mm})
    return job.model_copy(update={"layout": layout, "kernels": kernels, "train": train})


def basis(job: Job, plan: Plan) -> str:
    """A digest of what predictions of a step rest on, machines aside: the job's work, the plan's
    decisions."""
    job = ruled(job, plan)
    decided = plan.model_dump(include=_DECISIVE)
    # So has every plan that does not say, and digests of those are kept.
    if plan.local == "along":
        del decided["local"]
    if plan.grouped_mm != "fp8":  # The cost model has no other figures for torch and triton.
        del decided["grouped_mm"]
    if not plan.homes_of_layers:
        del decided["homes_of_layers"]
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
    return hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()[:_DIGITS]


def misplaced(plan: Plan, found: Sequence[RankPlace]) -> str | None:
    """Which rank stands elsewhere than on the machines that `plan` was made for, if one does.

    Names of hosts may differ; devices, and which ranks share a host, may not.
    """
    if not plan.places:
        return None
    for rank, (planned, here) in enumerate(zip(plan.places, found, strict=True)):
        for what, wanted, has in (
            ("a device of kind", planned.kind, here.kind),
            ("a", planned.device, here.device),
        ):
            if _plain(wanted) != _plain(has):
                return f"rank {rank} is planned for {what} '{wanted}', but it has '{has}'"
    wanted_hosts, hosts = _first_of_host(plan.places), _first_of_host(found)
    for rank, (wanted_first, first) in enumerate(zip(wanted_hosts, hosts, strict=True)):
        if wanted_first == first:
            continue
        planned_at = "a host of its own" if wanted_first == rank else f"rank {wanted_first}'s host"
        here_at = "another host" if first == rank else f"rank {first}'s host"
        return f"rank {rank} is planned for {planned_at}, but it runs on {here_at}"
    return None


def check_places(plan: Plan, found: Sequence[RankPlace], origin: str) -> None:
    """Raise unless the ranks stand on the machines that `plan` was made for."""
    fault = misplaced(plan, found)
    if fault is not None:
        raise ConfigError(
            f"{origin}: {fault}: start the ranks on the machines of the plan, plan anew for these, "
            "or remove places from the plan"
        )


def _first_of_host(places: Sequence[RankPlace]) -> list[int]:
    """For each rank the first rank on its host."""
    first: dict[str, int] = {}
    return [first.setdefault(place.host, rank) for rank, place in enumerate(places)]


def _plain(text: str) -> str:
    """Without the blanks and capitals in which one name may be written several ways."""
    return " ".join(text.split()).casefold()
