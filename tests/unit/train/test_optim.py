"""AdamW against torch.optim.AdamW, and schedules by hand."""

from __future__ import annotations

import pytest
import torch

from moesaic.facts.job import OptimizerConfig, ScheduleConfig
from moesaic.train.optim import AdamW, learning_rate


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
    ours.attach("w", values)
    for step in range(1, 6):
        grad = torch.randn_like(values)
        theirs.grad = grad * clip
        reference.step()
        ours.update("w", values, grad.clone(), step, lr=0.01, clip=clip, decay=decay)
    torch.testing.assert_close(values, theirs.detach(), rtol=1e-12, atol=1e-12)


def test_an_empty_shard_is_left_alone() -> None:
    ours = AdamW(OptimizerConfig())
    empty = torch.empty(0, 4)
    ours.attach("w", empty)
    ours.update("w", empty, empty, 1, lr=0.1, clip=0.5, decay=True)


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
    tensors = (values, *ours.attach("w", values))
    before = [tensor._version for tensor in tensors]
    ours.update("w", values, torch.randn(4, 4), 1, lr=0.1, clip=1.0, decay=True)
    assert all(t._version > b for t, b in zip(tensors, before, strict=True))
