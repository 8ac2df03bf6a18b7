"""AdamW against torch.optim.AdamW, and schedules by hand."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moesaic.dist.world import World
from moesaic.facts.job import OptimizerConfig, ScheduleConfig
from moesaic.facts.plan import lay_out
from moesaic.models.initial import InitialSource
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.train.assemble import assemble
from moesaic.train.optim import AdamW, learning_rate, zeros


@pytest.mark.parametrize("clip", [1.0, 0.3])
@pytest.mark.parametrize("decay", [True, False])
def test_equals_torch(clip: float, decay: bool) -> None:
    config = OptimizerConfig(lr=0.01, betas=[0.8, 0.9], weight_decay=0.3)
    ours = AdamW(config)
    values = torch.randn(7, 5, dtype=torch.float64)
    theirs = torch.nn.Parameter(values.clone())
    reference = torch.optim.AdamW(
        [theirs], lr=0.01, betas=(0.8, 0.9), weight_decay=0.3 if decay else 0.0, eps=config.epsilon
    )
    moments = zeros(values)
    for step in range(1, 6):
        grad = torch.randn_like(values)
        theirs.grad = grad * clip
        reference.step()
        ours.update([values], [grad.clone()], [moments], step, lr=0.01, clip=clip, decay=decay)
    torch.testing.assert_close(values, theirs.detach(), rtol=1e-12, atol=1e-12)


class Counting(TorchDispatchMode):
    """Operations that torch is asked for."""

    number = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.number += 1
        return function(*args, **(kwargs or {}))


def test_a_block_takes_few_operations_and_is_what_single_parameters_are() -> None:
    """Bit for bit, in a run; operations do not grow with parameters."""
    job = tiny_job(train={"clip": 0.01})
    runs = [
        assemble(job, lay_out(job.layout, job.model, 1), World.solo(), InitialSource(1, 0.2))
        for _ in range(2)
    ]
    samples = RandomSamples(job.model.vocab, job.data.sequence)
    once, single = runs
    counts = []
    for run in runs:
        for _ in range(3):
            run.gradients(samples)
            blocks = [list(some) for _, some in groupby(run.updated, key=lambda one: one.block)]
            groups = blocks if run is once else [[one] for one in run.updated]
            with Counting() as counting:
                for some in groups:
                    run.optimizer.apply(some, 0, run.counters["step"] + 1, lr=0.01, clip=0.5)
            run.counters["step"] += 1
            for item in run.holdings:
                item.parameter.grad = None
        counts.append(counting.number)
    found, expected = ({p.key: p.tensor for p in run.state().pieces} for run in runs)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    blocks_of_two = 2 * len({item.block for item in single.holdings})
    assert counts[0] < 20 * blocks_of_two
    assert counts[0] < 0.7 * counts[1]


def test_an_empty_shard_is_left_alone() -> None:
    ours = AdamW(OptimizerConfig())
    empty = torch.empty(0, 4)
    ours.update([empty], [empty], [zeros(empty)], 1, lr=0.1, clip=0.5, decay=True)


def test_schedules() -> None:
    cosine = ScheduleConfig(kind="cosine", warmup=4, final=0.1)
    rates = [learning_rate(step, 12, 2.0, cosine) for step in range(1, 13)]
    assert rates[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert rates[7] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert rates[-1] == pytest.approx(0.2)
    assert rates[3:] == sorted(rates[3:], reverse=True)
    linear = ScheduleConfig(kind="linear", warmup=0, final=0.0)
    assert [learning_rate(s, 4, 1.0, linear) for s in (1, 2, 4)] == pytest.approx([0.75, 0.5, 0.0])
    constant = ScheduleConfig(kind="constant", warmup=2)
    assert [learning_rate(s, 9, 1.0, constant) for s in (1, 2, 9)] == [0.5, 1.0, 1.0]


def test_an_update_is_counted_by_the_tensors_it_changes() -> None:
    """A save that copies while training goes on tells by these counts that it was overtaken."""
    ours = AdamW(OptimizerConfig())
    values = torch.randn(4, 4)
    moments = zeros(values)
    tensors = (values, *moments)
    before = [tensor._version for tensor in tensors]
    ours.update([values], [torch.randn(4, 4)], [moments], 1, lr=0.1, clip=1.0, decay=True)
    assert all(t._version > b for t, b in zip(tensors, before, strict=True))
