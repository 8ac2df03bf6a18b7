"""AdamW against torch.optim.AdamW, and schedules against values by hand."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moesaic.dist.world import World
from moesaic.facts.expert_blocks import STATE
from moesaic.facts.job import OptimizerConfig, ScheduleConfig
from moesaic.facts.plan import plan_from_layout
from moesaic.models.init import InitialSource
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.places import make_places
from moesaic.testing.states import live_values
from moesaic.train import optim
from moesaic.train.assemble import assemble
from moesaic.train.optim import AdamW, learning_rate, zero_moments

GRADIENTS = (range(1, 8), (2, 6), ())
"""Steps in which each of three experts has a gradient."""


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
    moments = zero_moments(values)
    for step in range(1, 6):
        grad = torch.randn_like(values)
        theirs.grad = grad * clip
        reference.step()
        ours.update([values], [grad.clone()], [moments], step, lr=0.01, clip=clip, decay=decay)
    torch.testing.assert_close(values, theirs.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("part", [64, 1 << 20])
def test_skipped_updates_are_applied_part_by_part_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, part: int
) -> None:
    """Expert 0 has a gradient in each step, 1 in some, 2 in none; all equal plain updates."""
    monkeypatch.setattr(optim, "_CACHED_ELEMENTS", part)
    width, ours = 333, AdamW(OptimizerConfig(betas=[0.8, 0.9], weight_decay=0.3))
    plain = [[torch.randn(width).to(dtype), *zero_moments(torch.zeros(width))] for _ in range(3)]
    with make_places(tmp_path / "experts", 3, width, 4, dtype) as places:
        ours.register_places(places)
        for slot in range(3):
            plain[slot] = [one.to(dtype) for one in plain[slot]]
            with places.borrow(slot, writes=True) as row:
                row.copy_(plain[slot][0])
        for step in range(1, 8):
            grads = [torch.randn(width).to(dtype) if step in steps else None for steps in GRADIENTS]
            ours.begin_update(step, 0.1 / step)
            for slot, grad in enumerate(grads):
                if grad is not None:
                    with places.hold([slot]):
                        places.add_gradient(slot, grad)
            ours.update_places(places, step, lr=0.1 / step, clip=1.0)
            assert len(ours._updates) == step
            for (values, *moments), grad in zip(plain, grads, strict=True):
                grad = torch.zeros_like(values) if grad is None else grad
                ours.update(
                    [values], [grad], [tuple(moments)], step, lr=0.1 / step, clip=1.0, decay=True
                )
        for slot, tensors in enumerate(plain):
            for kind, expected in zip(STATE, tensors, strict=True):
                with places.borrow(slot, kind) as row:
                    assert torch.equal(row, expected), (slot, kind)
        ours.begin_update(8, 0.1)
        assert ours._updates == [], "no expert needs them any more"


class Counting(TorchDispatchMode):
    """Counter of dispatched operations."""

    number = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.number += 1
        return function(*args, **(kwargs or {}))


def test_a_block_takes_few_operations_and_equals_single_parameters() -> None:
    """Results agree bit for bit, and operations do not grow with the number of parameters."""
    job = tiny_job(train={"clip": 0.01})
    runs = [
        assemble(
            job, plan_from_layout(job.layout, job.model, 1), World.solo(), InitialSource(1, 0.2)
        )
        for _ in range(2)
    ]
    samples = RandomSamples(job.model.vocab, job.data.sequence)
    once, single = runs
    counts = []
    for run in runs:
        for _ in range(3):
            run.compute_gradients(samples)
            blocks = [
                list(some) for _, some in groupby(run.part.flat_params, key=lambda one: one.block)
            ]
            groups = blocks if run is once else [[one] for one in run.part.flat_params]
            with Counting() as counting:
                for some in groups:
                    run.part.optimizer.update_block(
                        some, 0, run.counters["step"] + 1, lr=0.01, clip=0.5
                    )
            run.counters["step"] += 1
            for item in run.part.trainable:
                item.parameter.grad = None
        counts.append(counting.number)
    found, expected = ({p.key: live_values(p) for p in run.state().shards} for run in runs)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    blocks_of_two = 2 * len({item.block for item in single.part.trainable})
    assert counts[0] < 20 * blocks_of_two
    assert counts[0] < 0.7 * counts[1]


def test_an_empty_shard_is_left_alone() -> None:
    ours = AdamW(OptimizerConfig())
    empty = torch.empty(0, 4)
    ours.update([empty], [empty], [zero_moments(empty)], 1, lr=0.1, clip=0.5, decay=True)


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


def test_an_update_bumps_version_counters() -> None:
    """A save that overlaps training detects by these counts that a tensor changed."""
    ours = AdamW(OptimizerConfig())
    values = torch.randn(4, 4)
    moments = zero_moments(values)
    tensors = (values, *moments)
    before = [tensor._version for tensor in tensors]
    ours.update([values], [torch.randn(4, 4)], [moments], 1, lr=0.1, clip=1.0, decay=True)
    assert all(t._version > b for t, b in zip(tensors, before, strict=True))
