"""Phases of a step: their order, their times, and faults injected into them."""

from __future__ import annotations

import pytest
import torch

from moesaic.nn.inputs import Inputs
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.runs import start_run
from moesaic.testing.states import live_values
from moesaic.train.assemble import LMRun

SAMPLES = RandomSamples(61, 12)
PHASES = [
    "data", "forward", "backward", "forward", "backward", "reduce", "clip", "optimizer", "log",
]  # fmt: skip


def tiny_run() -> LMRun:
    job = tiny_job(train={"micro_batches": 2})
    return start_run(job)


def test_phases_come_in_order_and_are_timed() -> None:
    run, seen = tiny_run(), list[str]()
    run.phase_hook = seen.append
    facts = run.step(SAMPLES)
    assert seen == PHASES
    assert facts.phases.keys() == set(PHASES)
    assert all(seconds >= 0 for seconds in facts.phases.values())


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "reduce", "clip", "optimizer"])
def test_a_failed_step_changes_nothing(phase: str) -> None:
    def fail(name: str) -> None:
        if name == phase:
            raise InterruptedError(phase)

    run = tiny_run()
    before = {shard.key: live_values(shard).clone() for shard in run.state().shards}
    run.phase_hook = fail
    with pytest.raises(InterruptedError, match=phase):
        run.step(SAMPLES)
    after = run.state()
    assert after.counters == {"step": 0, "samples": 0, "tokens": 0}
    assert all(torch.equal(before[shard.key], live_values(shard)) for shard in after.shards)


def test_a_model_is_its_blocks_one_after_another() -> None:
    model = tiny_run().part.model
    tokens = SAMPLES.batch([1, 2]).inputs
    inputs = Inputs(model.rotary(torch.arange(12)[None].expand(2, -1)))
    names, x = [], tokens
    for name, block in model.blocks():
        names.append(name)
        x, _ = block(x, inputs)
    assert names == ["embed", "layers.0", "layers.1", "head"]
    assert torch.equal(x, model(tokens, inputs)[0])
    assert not torch.equal(x, model(tokens.flip(1), inputs)[0])
