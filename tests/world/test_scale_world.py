"""fp16 over ranks: one rank's overflow is everyone's, and any layout gives the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from layouts import plain, put_together, worst_tensor

from moesaic.base.errors import DivergedError
from moesaic.dist.world import World
from moesaic.facts.plan import lay_out
from moesaic.models.initial import InitialSource
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import Ranks
from moesaic.train.assemble import assemble

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "copies": (2, {}), "ep2": (2, {"ep": 2}), "sharded": (2, {"ep": 2, "shard": 2}),
    "slices": (2, {"tp": 2, "etp": 2}), "zero-bubble": (2, {"pp": 2, "schedule": "zero-bubble"}),
    "slices, sharded": (4, {"tp": 2, "shard": 2, "ep": 2}),
    "pipeline, columns": (4, {"pp": 2, "embedding": "columns"}),
}  # fmt: skip


class Struck(torch.autograd.Function):
    """The same numbers; in backward one gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        grad = grads[0].clone()
        grad.view(-1)[0] = torch.inf
        return grad


def struck(world: World, layout: dict[str, Any]) -> Any:
    """Three steps; in the second one gradient of the last rank is infinite. Both ends are tied."""
    model = {"family": "qwen3_moe", "tied": True, "vocab": 60}
    train = {"precision": "fp16", "micro_batches": 2}
    job = tiny_job(layout=layout, model=model, train=train)
    plan = lay_out(job.layout, job.model, world.size)
    run = assemble(job, plan, world, InitialSource(job.seed, job.model.init_std))
    samples = RandomSamples(job.model.vocab, job.data.sequence)
    told, states = [], []
    for step in range(3):
        if step == 1 and world.rank == world.size - 1:
            *_, layer = run.model.decoder_layers()
            handle = layer.register_forward_hook(lambda *a: Struck.apply(a[2]))
        facts = run.step(samples)
        if step == 1 and world.rank == world.size - 1:
            handle.remove()
        told.append((facts.skipped, facts.scale, dict(run.counters)))
        states.append([plain(piece) for piece in run.state().pieces])
    run.close()
    return told, states


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_overflow_of_one_rank_is_skipped_by_all(ranks: Ranks, name: str) -> None:
    results = ranks.run(LAYOUTS[name][0], struck, LAYOUTS[name][1])
    assert all(result[0] == results[0][0] for result in results)
    told = results[0][0]
    assert [(skipped, scale) for skipped, scale, _ in told] == [
        (False, 2.0**16), (True, 2.0**16), (False, 2.0**15),
    ]  # fmt: skip
    assert told[2][2]["skipped"] == 1
    before, after, last = (put_together([r[1][step] for r in results]) for step in range(3))
    assert all(np.array_equal(before[key], after[key]) for key in before)
    assert not all(np.array_equal(after[key], last[key]) for key in after)


def diverge(world: World, layout: dict[str, Any]) -> str:
    """What the first step says of weights so large that the loss itself is no number."""
    model = {"family": "qwen3_moe", "tied": True, "vocab": 60}
    job = tiny_job(layout=layout, model=model, train={"precision": "fp16", "micro_batches": 2})
    run = assemble(job, lay_out(job.layout, job.model, world.size), world, InitialSource(1, 3e3))
    try:
        run.step(RandomSamples(job.model.vocab, job.data.sequence))
    except DivergedError as error:
        return str(error)
    finally:
        run.close()
    return "nothing"


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_loss_that_no_scale_helps_ends_all_ranks_at_once(ranks: Ranks, name: str) -> None:
    size, layout = LAYOUTS[name]
    said = ranks.run(size, diverge, layout)
    assert "no loss scale helps" in said[0]
    assert said == [said[0]] * size


def steps(world: World, layout: dict[str, Any], tables: dict[str, Any]) -> Any:
    job = tiny_job(layout=layout, **tables)
    plan = lay_out(job.layout, job.model, world.size)
    run = assemble(job, plan, world, InitialSource(job.seed, job.model.init_std))
    run.gradients(RandomSamples(job.model.vocab, job.data.sequence))
    factor = 2.0 ** run.counters["scale_exponent"]
    found = [
        plain(piece) for item in run.holdings
        for piece in item.pieces("gradient", item.grad / factor, world.rank)
    ]  # fmt: skip
    run.close()
    return found


def test_two_ranks_equal_one(ranks: Ranks) -> None:
    """Up to the rounding of fp16: gradients of one batch."""
    tables = {"model": {"vocab": 60}, "train": {"precision": "fp16", "micro_batches": 2}}
    alone = put_together(ranks.run(1, steps, {}, tables))
    for layout in ({}, {"ep": 2}, {"ep": 2, "shard": 2}, {"tp": 2}, {"pp": 2}):
        together = put_together(ranks.run(2, steps, layout, tables))
        assert worst_tensor(together, alone) < 5e-3
