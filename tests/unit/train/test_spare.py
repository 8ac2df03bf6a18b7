"""The memory of gradients goes round, and no number shows it."""

from __future__ import annotations

import pytest
import torch

from moesaic.dist.world import World
from moesaic.facts.plan import lay_out
from moesaic.models.initial import InitialSource
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.train.assemble import assemble
from moesaic.train.run import Run


def make(**train: object) -> tuple[Run, RandomSamples]:
    job = tiny_job(train=train)
    plan = lay_out(job.layout, job.model, 1)
    run = assemble(job, plan, World.solo(), InitialSource(job.seed, job.model.init_std))
    return run, RandomSamples(job.model.vocab, job.data.sequence)


def test_a_step_takes_the_memory_of_the_one_before() -> None:
    run, samples = make()
    banks = [bank for _, bank in run.model.banks()]
    run.step(samples)
    before = {bank.spare[0].data_ptr() for bank in banks}
    during: set[int] = set()

    def look(phase: str) -> None:
        if phase == "clip":
            during.update(
                bank.arena.grad.data_ptr() for bank in banks if bank.arena.grad is not None
            )

    run.hook = look
    run.step(samples)
    assert during == before
    assert len(before) == len(banks)
    run.validate(samples, 4)
    assert not any(bank.spare for bank in banks), "validation needs no gradients"


@pytest.mark.parametrize("train", [{}, {"micro_batches": 4}, {"recompute": True}])
def test_fresh_memory_gives_the_same_bits(train: dict[str, object]) -> None:
    weights = []
    for fresh in (False, True):
        run, samples = make(**train)
        for _ in range(4):
            run.step(samples)
            for _, bank in run.model.banks():
                assert len(bank.spare) == 1
                if fresh:
                    bank.spare.clear()
                else:
                    bank.spare[0].fill_(torch.nan)  # Whatever is in it must not matter.
        weights.append([piece.tensor.clone() for piece in run.state().pieces])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
