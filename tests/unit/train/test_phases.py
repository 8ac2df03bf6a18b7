"""A step is named phases: in order, timed, and a place to strike."""

from __future__ import annotations

import pytest
import torch

from moesaic.dist.world import World
from moesaic.facts.plan import lay_out
from moesaic.models.initial import InitialSource
from moesaic.nn.context import Context
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.train.assemble import assemble
from moesaic.train.run import Run

SAMPLES = RandomSamples(61, 12)
PHASES = [
    "data", "forward", "backward", "forward", "backward", "reduce", "clip", "optimizer", "log",
]  # fmt: skip


def tiny_run() -> Run:
    job = tiny_job(train={"micro_batches": 2})
    plan = lay_out(job.layout, job.model, 1)
    return assemble(job, plan, World.solo(), InitialSource(job.seed, job.model.init_std))


def test_phases_come_in_order_and_are_timed() -> None:
    run, seen = tiny_run(), list[str]()
    run.hook = seen.append
    facts = run.step(SAMPLES)
    assert seen == PHASES
    assert facts.phases.keys() == set(PHASES)
    assert all(seconds >= 0 for seconds in facts.phases.values())


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "reduce", "clip", "optimizer"])
def test_a_step_that_is_struck_changes_nothing(phase: str) -> None:
    def strike(name: str) -> None:
        if name == phase:
            raise InterruptedError(phase)

    run = tiny_run()
    before = {piece.key: piece.tensor.clone() for piece in run.state().pieces}
    run.hook = strike
    with pytest.raises(InterruptedError, match=phase):
        run.step(SAMPLES)
    after = run.state()
    assert after.counters == {"step": 0, "samples": 0, "tokens": 0}
    assert all(torch.equal(before[piece.key], piece.tensor) for piece in after.pieces)


def test_a_model_is_its_blocks_one_after_another() -> None:
    model = tiny_run().model
    tokens = SAMPLES.batch([1, 2]).inputs
    context = Context(model.rotary(torch.arange(12)[None].expand(2, -1)))
    names, x = [], tokens
    for name, block in model.blocks():
        names.append(name)
        x = block(x, context)
    assert names == ["embed", "layers.0", "layers.1", "head"]
    assert torch.equal(x, model(tokens, context))
    assert not torch.equal(x, model(tokens.flip(1), context))
