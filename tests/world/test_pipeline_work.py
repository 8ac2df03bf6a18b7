"""FLOPs of each pipeline action on real ranks equal the workload's."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
from layouts import SIGMOID
from torch.distributed.pipelining import PipelineStage
from torch.utils.flop_counter import FlopCounterMode

from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import plan_from_job
from moesaic.facts.workload import workload
from moesaic.models.init import InitialSource
from moesaic.policy.cost.pipeline import action_work
from moesaic.testing.flops import CUSTOM_FLOPS
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import RankPool
from moesaic.train.assemble import assemble

FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {"model": {"family": "llama", "experts": 0, "top_k": 0}}, "olmoe": {},
    "deepseek_v3": SIGMOID,
}  # fmt: skip
_ACTIONS = {
    "forward_one_chunk": "forward", "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "weight",
}  # fmt: skip
FlopCounts = Counter[tuple[str, int]]
"""FLOPs by kind of action and stage."""


def count_flops(world: World, job: Job) -> FlopCounts:
    """Return the FLOPs of one step on this rank."""
    spent: FlopCounts = Counter()

    def count(name: str) -> Any:
        done = getattr(PipelineStage, name)

        def watched(stage: PipelineStage, *args: Any, **more: Any) -> Any:
            kind = "input" if more.get("full_backward") is False else _ACTIONS[name]
            with FlopCounterMode(display=False, custom_mapping=CUSTOM_FLOPS) as counter:
                found = done(stage, *args, **more)
            spent[kind, stage.stage_index] += counter.get_total_flops()
            return found

        return watched

    run = assemble(job, plan_from_job(job, world.size), world, InitialSource(0, 0.1))
    # The workload takes each sample as one document.
    samples = RandomSamples(job.model.vocab, job.data.sequence, packed=False)
    run.step(samples)  # The first step also infers the shapes of the stages.
    patches = [patch.object(PipelineStage, name, count(name)) for name in _ACTIONS]
    for one in patches:
        one.start()
    run.step(samples)
    for one in patches:
        one.stop()
    run.close()
    return spent


def expected_flops(job: Job, rank: int) -> FlopCounts:
    """Return the same by the workload; each action runs once per micro-batch."""
    plan = plan_from_job(job, 2)
    stages, found = plan.stages, FlopCounts()
    assert stages is not None
    halves = ("input", "weight") if plan.schedule == "zero-bubble" else ("backward",)
    for block in workload(job, plan, rank):
        for stage, names in enumerate(stages):
            if ".".join(block.name.split(".")[:2]) in names:
                for kind in ("forward", *halves):
                    work = action_work(block, kind, is_first_stage=stage == 0)
                    found[kind, stage] += job.train.micro_batches * work.flops
    return found


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
def test_actions_have_the_flops_of_the_workload(ranks: RankPool, name: str, schedule: str) -> None:
    family = FAMILIES[name]
    job = tiny_job(
        **{**family, "model": {**family.get("model", {}), "layers": 4}},
        layout={"pp": 2, "schedule": schedule}, train={"micro_batches": 4},
    )  # fmt: skip
    for rank, found in enumerate(ranks.run(2, count_flops, job)):
        assert +found == +expected_flops(job, rank)
