"""Reasons for the place and the time of one block of the model under a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moesaic.base import keys
from moesaic.base.errors import ConfigError
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, stage_blocks
from moesaic.facts.workload import STEP
from moesaic.policy.cost.timeline import Timeline, simulate_step
from moesaic.policy.plan.choices import PlanFacts


def explain_block(plan: Plan, facts: PlanFacts, timeline: Timeline, block: str) -> dict[str, Any]:
    """Return where a block is, what it holds and how its seconds come about, as plain data.

    Args:
        plan: the plan.
        facts: facts that its predictions depend on.
        timeline: simulated step.
        block: name of the block, such as "layers.0.moe".
    """
    rank = _rank_with(block, plan, facts.job, timeline)
    costs = facts.costs(plan)
    names = [one.name for one in costs.blocks(rank)]
    if block not in names:
        known = list(dict.fromkeys(one for one in names if one != STEP))
        raise ConfigError(
            f"--why {block}: {keys.suggest_choice(block, known, f'one of {keys.show(known)}')}"
        )
    own = next(one for one in costs.blocks(rank) if one.name == block)
    pp_rank = plan.pp_rank(rank)
    stage = [
        n
        for n, blocks in enumerate(stage_blocks(plan, facts.job.model))
        if own.spec.model_block in blocks
    ]
    rows = dict[tuple[str, str], dict[str, Any]]()
    for one in timeline.events(rank):
        if one.event.block != block:
            continue
        row = rows.setdefault(
            (one.event.phase, one.event.name),
            {
                "phase": one.event.phase, "name": one.event.name,
                "is_collective": one.event.is_communication, "busy_s": 0.0, "waiting_s": 0.0,
                "overlapped_s": 0.0,
            },
        )  # fmt: skip
        row["busy_s"] += one.elapsed_s - one.waiting_s
        row["waiting_s"] += one.waiting_s
        row["overlapped_s"] += one.async_s
    return {
        "block": block, "rank": rank, "pipeline_rank": pp_rank, "stage": stage[0] if stage else 0,
        "place": _describe_place(plan, own.spec.experts, own.spec.kind),
        "parameters": sum(one.size for one in own.spec.parameters),
        "saved_bytes": own.saved_bytes, "seconds": sum(
            row["busy_s"] + row["waiting_s"] for row in rows.values()
        ),
        "step_s": timeline.step_s, "events": list(rows.values()),
    }  # fmt: skip


def block_seconds(plan: Plan, facts: PlanFacts, block: str) -> float:
    """Return the seconds of a block in a step under `plan`, waiting included."""
    step = [run for part in facts.costs(plan).parts() for run in part.step()]
    timeline = simulate_step(step, plan.ranks)
    if plan.pp > 1:
        return timeline.max_seconds_by_block().get(block, 0.0)
    return timeline.seconds_by_block(timeline.critical_rank).get(block, 0.0)


def _rank_with(block: str, plan: Plan, job: Job, timeline: Timeline) -> int:
    """Return the critical rank, or in a pipeline the first rank that has the block."""
    if plan.pp == 1:
        return timeline.critical_rank
    layer = ".".join(block.split(".")[:2]) if block.startswith("layers.") else block
    for number, blocks in enumerate(stage_blocks(plan, job.model)):
        if layer in blocks:
            return number % plan.pp * plan.ranks_per_stage
    return 0


def _describe_place(plan: Plan, experts: Sequence[int], kind: str) -> str:
    """Return in words which ranks share the block."""
    texts = list[str]()
    if experts and plan.ep > 1:
        texts.append(f"{len(experts)} of {plan.experts} experts on each of {plan.ep} ranks")
    elif experts:
        texts.append("all experts on every rank")
    if experts and plan.etp > 1:
        texts.append(f"expert matrices over {plan.etp} ranks")
    if plan.tp > 1:
        texts.append(f"dense matrices over {plan.tp} TP ranks")
    if kind == "embed" and plan.embedding_shards > 1:
        texts.append(f"columns over {plan.embedding_shards} ranks")
    if plan.dp_shard > 1:
        texts.append(f"dense parameters sharded over {plan.dp_shard} replicas")
    return ", ".join(texts) or f"whole on each of {plan.ranks_per_stage} ranks"
