"""Checks of a plan against the job and the machines that it is used with."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from moesaic.base import keys
from moesaic.base.config import list_mistakes, parse, read_json
from moesaic.base.errors import ConfigError
from moesaic.facts.job import Job
from moesaic.facts.job.train import MOMENT_BLOCK, grouped_mm_fault
from moesaic.facts.plan.plan import OTHER_RANKS, Plan, RankPlace, block_names

_DIGEST_DIGITS = 16
_ROUND_SCHEDULES = ("interleaved", "zero-bubble")
"""Schedules that process micro-batches in rounds."""


def load_plan(path: Path) -> Plan:
    """Return the plan in the file at `path`."""
    origin = f"plan '{path}'"
    raw = read_json(path, origin, "give a file that `moesaic plan --out` wrote")
    return parse(Plan, raw, origin)


def check_plan(plan: Plan, job: Job, origin: str, other_ranks: str = OTHER_RANKS) -> None:
    """Raise ConfigError if `plan` cannot train `job`; the message starts with `origin`.

    The remedy `other_ranks` stands beside a change of the plan.
    """
    alone = _model_error(plan, job) or _student_error(plan, job)  # Others may only follow from it.
    errors = (
        [alone]
        if alone
        else [
            _tensor_parallel_error(plan, job),
            _stages_error(plan, job),
            pipeline_error(plan, job),
            embedding_shard_error(plan, job, other_ranks),
            grouped_mm_fault(plan.grouped_mm, job.train) if job.model.experts else None,
        ]
    )
    found = [("", error) for error in errors if error is not None]
    if found:
        raise ConfigError(list_mistakes(found, origin, (), {}))


def _model_error(plan: Plan, job: Job) -> str | None:
    """Return which number of the plan contradicts the job, or None."""
    replan = "plan this job anew (moesaic plan)"
    if plan.experts != job.model.experts:
        return f"experts = {plan.experts}, but model.experts = {job.model.experts}: {replan}"
    if plan.ep > 1 and not plan.experts:
        return f"ep = {plan.ep} with a dense model (experts = 0): set ep = 1"
    expert_layers = [str(layer) for layer in job.model.expert_layers]
    for layer in plan.expert_placement_by_layer:
        if layer not in expert_layers:
            return (
                f'expert_placement_by_layer has layer "{layer}", but layers with experts are '
                f"{expert_layers[0]} to {expert_layers[-1]}: remove it"
            )
    if plan.micro_batches not in (None, job.train.micro_batches):
        return (
            f"micro_batches = {plan.micro_batches}, but train.micro_batches = "
            f"{job.train.micro_batches}, and a plan must not change it, since results depend on "
            f"it: make them equal, or {replan}"
        )
    return None


def _tensor_parallel_error(plan: Plan, job: Job) -> str | None:
    """Return why TP ranks cannot split the job's matrices and tokens, or None."""
    model, finetune = job.model, job.finetune
    widths = {
        "model.heads": model.heads, "model.kv_heads": model.kv_heads, "model.vocab": model.vocab,
        "data.sequence": job.data.sequence,
        "model.shared_experts * model.ffn": model.shared_experts * model.ffn,
    }  # fmt: skip
    for layer in range(model.layers - len(model.expert_layers)):
        widths[f"the width of feed-forward network {layer}"] = model.ffn_width(layer)
    for key, ranks, sizes, total in (
        ("tp", plan.tp, widths, math.gcd(*widths.values())),
        ("etp", plan.etp, {"model.ffn": model.ffn}, math.gcd(model.ffn, plan.tp)),
    ):
        for width, size in sizes.items():
            if size % ranks:
                return (
                    f"{key} = {ranks} does not divide {width} = {size}, which these ranks split: "
                    f"use {keys.list_divisors(total)}"
                )
    if plan.etp > 1 and not model.experts:
        return f"etp = {plan.etp} with a dense model (model.experts = 0): set etp = 1"
    adapted = finetune.targets if finetune is not None and finetune.method == "lora" else []
    if plan.etp > 1 and "experts" in adapted:
        return (
            f'etp = {plan.etp} with "experts" in finetune.targets: adapters of experts cannot be '
            'sharded, set etp = 1, or remove "experts"'
        )
    return _moment_block_error(plan, job)


def _moment_block_error(plan: Plan, job: Job) -> str | None:
    """Return which matrix would be sharded inside a block of its 8-bit moments, or None."""
    if job.optimizer.moments != "8bit":
        return None
    finetune = job.finetune
    # A frozen matrix has an adapter instead, whose A has as many columns.
    trained = None if finetune is None or finetune.method == "full" else finetune.targets
    for target, matrix, ranks, width in _column_shards(plan, job):
        if ranks > 1 and (trained is None or target in trained) and width // ranks % MOMENT_BLOCK:
            return (
                f'optimizer.moments = "8bit" has blocks of {MOMENT_BLOCK} columns, but shards of '
                f'{matrix} over {ranks} TP ranks have {width // ranks}: set it to "bf16" or '
                '"full", or lower tp and etp'
            )
    return None


def _column_shards(plan: Plan, job: Job) -> Iterator[tuple[str, str, int, int]]:
    """Yield adapter target, name, ranks and columns of each matrix that is sharded by column."""
    model = job.model
    values = model.head_dim if model.latent is None else model.latent.v_head_dim
    yield "attention", "the output of attention", plan.tp, model.heads * values
    for layer in range(model.layers - len(model.expert_layers)):
        name = f"the output of feed-forward network {layer}"
        yield "ffn", name, plan.tp, model.ffn_width(layer)
    shared = model.shared_experts * model.ffn
    yield "shared", "the output of shared experts", plan.tp, shared
    yield "experts", "the output of experts", plan.etp, model.ffn


def _student_error(plan: Plan, job: Job) -> str | None:
    """Return which split of the teacher's layers does not work with students, or None."""
    for key, value in (("tp", plan.tp), ("etp", plan.etp), ("pp", plan.pp)):
        if job.student and value > 1:
            return (
                f"{key} = {value} with [[student]]: students need the teacher's whole layers on "
                f"each rank, set {key} = 1 (ep and dp_shard may be larger)"
            )
    return None


def _stages_error(plan: Plan, job: Job) -> str | None:
    """Return where the plan's stages differ from the model's blocks in order, or None."""
    if plan.stages is None:
        return None
    blocks, listed = block_names(job.model), [name for stage in plan.stages for name in stage]
    for has, wanted in zip_longest(listed, blocks):
        if has != wanted:
            found, next_block = (name and f"block '{name}'" for name in (has, wanted))
            return (
                f"stages has {found or 'no block'} where {next_block or 'no block'} comes next: "
                f"list the blocks from '{blocks[0]}' to '{blocks[-1]}' once, in their order"
            )
    if [] in plan.stages:
        return f"stages[{plan.stages.index([])}] is empty: give it a block, or lower pp"
    return None


def pipeline_error(plan: Plan, job: Job) -> str | None:
    """Return why the pipeline of `plan` cannot train `job`, with a remedy, or None."""
    pp, schedule, micro = plan.pp, plan.schedule, job.train.micro_batches
    if pp == 1:
        return None
    if plan.stages is None and plan.num_stages > job.model.layers:
        return (
            f'pp = {pp} with schedule = "{schedule}" splits the model into {plan.num_stages} '
            f"stages, but model.layers = {job.model.layers}: a stage has at least one layer, "
            "lower pp"
        )
    if schedule == "1f1b" and micro < pp:
        return (
            f'train.micro_batches = {micro} is fewer than pp = {pp}, but schedule = "1f1b" keeps '
            f'that many in flight: raise train.micro_batches to {pp}, or set schedule = "gpipe"'
        )
    if schedule in _ROUND_SCHEDULES and micro % max(1, micro // pp):
        return (
            f'train.micro_batches = {micro} with schedule = "{schedule}", which processes them in '
            f"equal rounds of pp = {pp} or somewhat more: choose a multiple of {pp}"
        )
    if schedule == "zero-bubble" and plan.recomputes(job):
        return (
            'recompute = true with schedule = "zero-bubble", whose split backward would recompute '
            'every layer twice: set recompute = false, or schedule = "1f1b"'
        )
    return None


def embedding_shard_error(plan: Plan, job: Job, other_ranks: str = OTHER_RANKS) -> str | None:
    """Return why the embedding of `job` cannot be sharded by columns as in `plan`, or None."""
    shards, hidden = plan.embedding_shards, job.model.hidden
    if hidden % shards:
        return (
            f'embedding = "columns" splits model.hidden = {hidden} columns over the {shards} ranks '
            f'of a pipeline stage: set embedding = "whole", or use {other_ranks}'
        )
    if shards > 1 and job.optimizer.moments == "8bit" and hidden // shards % MOMENT_BLOCK:
        return (
            f'embedding = "columns" with optimizer.moments = "8bit", which has blocks of '
            f"{MOMENT_BLOCK} columns: a rank has {hidden // shards} columns, set optimizer.moments "
            'to "bf16" or "full", or set embedding = "whole"'
        )
    return None


def prediction_digest(job: Job, plan: Plan) -> str:
    """Return a digest of what predictions depend on, except machines: the job's work and the plan's
    decisions."""
    decided = plan.model_dump(exclude={"places", "predictions", "balance_costs", "grouped_mm"})
    work: dict[str, Any] = {
        "model": job.model.model_dump(exclude={"extras", "init_std", "max_positions"}),
        "routing": job.routing.router,
        "data": job.data.model_dump(include={"sequence", "packing"}),
        "train": job.train.model_dump(include={"batch", "micro_batches", "precision"}),
        "clips": job.train.clip > 0,
        "moments": job.optimizer.moments,
        "finetune": job.finetune and job.finetune.model_dump(exclude={"alpha"}),
        "asynchronous": job.checkpoint.asynchronous,
        "plan": decided,
    }
    if job.student:
        students = [one.model_dump(exclude={"source", "lr"}) for one in job.student]
        work |= {"students": students, "distill": job.distill.model_dump()}
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
