"""fp16: an overflow on one rank skips the step on all, and every layout gives the same results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layouts import ASKING, place_random_replicas, plain, put_together, worst_tensor

from moesaic.base.errors import DivergedError
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import plan_from_layout
from moesaic.models.init import InitialSource
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import RankPool
from moesaic.testing.runs import overflow_gradients, start_run
from moesaic.train.assemble import assemble

TIED = {"model": {"family": "qwen3_moe", "tied": True, "vocab": 60}}
FP16 = {"precision": "fp16", "micro_batches": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp": (2, {}), "ep2": (2, {"ep": 2}), "sharded": (2, {"ep": 2, "dp_shard": 2}),
    "tp": (2, {"tp": 2, "etp": 2}), "zero-bubble": (2, {"pp": 2, "schedule": "zero-bubble"}),
    "tp, sharded": (4, {"tp": 2, "dp_shard": 2, "ep": 2}),
    "pipeline, columns": (4, {"pp": 2, "embedding": "columns"}),
}  # fmt: skip


def overflow(world: World, job: Job, replica_seed: int | None) -> Any:
    """Train three steps; in the second one, one gradient of the last rank is infinite."""
    run, samples = start_run(job, world), RandomSamples(job.model.vocab, job.data.sequence)
    place_random_replicas(run, replica_seed)
    facts_by_step, states = [], []
    for step in range(3):
        if step == 1 and world.rank == world.size - 1:
            *_, layer = run.part.model.decoder_layers()
            handle = overflow_gradients(layer)
        facts = run.step(samples)
        if step == 1 and world.rank == world.size - 1:
            handle.remove()
        facts_by_step.append((facts.is_skipped, facts.loss_scale, dict(run.counters)))
        states.append([plain(shard) for shard in run.state().shards])
    made = sum(getattr(moe.balancer, "made", 0) for _, moe in run.part.model.expert_layers())
    run.close()
    return facts_by_step, states, made


@pytest.mark.parametrize("name", [*LAYOUTS, "replicas"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: RankPool, name: str) -> None:
    size, layout = LAYOUTS.get(name, (4, {"ep": 4}))
    job, seed = tiny_job(layout=layout, train=FP16, **TIED), None
    if name == "replicas":
        seed, train = 7, {**FP16, "recompute": True}
        job = tiny_job(layout=layout, train=train, balance=ASKING, **TIED)
    results = ranks.run(size, overflow, job, seed)
    assert all(result[0] == results[0][0] for result in results)
    assert (results[0][2] > 0) == (name == "replicas")
    records = results[0][0]
    assert [(skipped, scale) for skipped, scale, _ in records] == [
        (False, 2.0**16), (True, 2.0**16), (False, 2.0**15),
    ]  # fmt: skip
    assert records[2][2]["skipped"] == 1
    before, after, last = (put_together([r[1][step] for r in results]) for step in range(3))
    assert all(np.array_equal(before[key], after[key]) for key in before)
    assert not all(np.array_equal(after[key], last[key]) for key in after)


def diverge(world: World, layout: dict[str, Any]) -> str:
    """Return the error of a first step with weights so large that the loss is not finite."""
    job = tiny_job(layout=layout, train=FP16, **TIED)
    run = assemble(
        job, plan_from_layout(job.layout, job.model, world.size), world, InitialSource(1, 3e3)
    )
    try:
        run.step(RandomSamples(job.model.vocab, job.data.sequence))
    except DivergedError as error:
        return str(error)
    finally:
        run.close()
    return "no error"


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_loss_that_is_not_finite_stops_all_ranks(ranks: RankPool, name: str) -> None:
    size, layout = LAYOUTS[name]
    errors = ranks.run(size, diverge, layout)
    assert "no loss scale helps" in errors[0]
    assert errors == [errors[0]] * size


def unscaled_gradients(world: World, layout: dict[str, Any], tables: dict[str, Any]) -> Any:
    job = tiny_job(layout=layout, **tables)
    run = start_run(job, world)
    run.compute_gradients(RandomSamples(job.model.vocab, job.data.sequence))
    factor = 2.0 ** run.counters["loss_scale_exponent"]
    found = [
        plain(shard) for item in run.part.trainable
        for shard in item.tensor_shards("gradient", item.grad / factor, world.rank)
    ]  # fmt: skip
    run.close()
    return found


def test_two_ranks_equal_one(ranks: RankPool) -> None:
    """Gradients agree up to the rounding of fp16."""
    tables = {"model": {"vocab": 60}, "train": FP16}
    alone = put_together(ranks.run(1, unscaled_gradients, {}, tables))
    for layout in ({}, {"ep": 2}, {"ep": 2, "dp_shard": 2}, {"tp": 2}, {"pp": 2}):
        together = put_together(ranks.run(2, unscaled_gradients, layout, tables))
        assert worst_tensor(together, alone) < 5e-3
