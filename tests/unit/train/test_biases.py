"""Biases of routers follow what the whole batch asked of experts, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.dist.world import World
from moesaic.facts.plan import lay_out
from moesaic.models.initial import InitialSource
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.train.assemble import assemble
from moesaic.train.run import Run

MODEL = {
    "family": "deepseek_v3", "kv_heads": 4, "layers": 3, "dense_layers": 1, "shared": 1,
    "groups": 4, "top_groups": 2, "latent": {"width": 10, "rotary": 4, "value": 6},
}  # fmt: skip
STEP = 0.02


class Choices:
    """Where a run leaves the experts that every token chose."""

    def __init__(self) -> None:
        self.by_step: dict[int, list[Mapping[int, Tensor]]] = {}

    def record(self, step: int, samples: Tensor, choices: Mapping[int, Tensor]) -> None:
        """Keep one micro-batch's."""
        del samples
        self.by_step.setdefault(step, []).append(dict(choices))


def steps(**tables: dict[str, Any]) -> tuple[Run, Choices, int]:
    """A run after six steps, what its tokens chose, and how many assignments were dropped."""
    routing = {"bias_step": STEP, **tables.pop("routing", {})}
    job = tiny_job(model=MODEL, routing=routing, **tables)
    plan, choices = lay_out(job.layout, job.model, 1), Choices()
    run = assemble(job, plan, World.solo(), InitialSource(job.seed, job.model.init_std))
    run.recorder = choices  # type: ignore[assignment]
    samples = RandomSamples(job.model.vocab, job.data.sequence)
    dropped = sum(sum(run.step(samples).dropped.values()) for _ in range(6))
    return run, choices, dropped


@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_biases_follow_all_choices_of_a_batch(capacity: float | None, micro_batches: int) -> None:
    run, choices, dropped = steps(
        routing={"capacity": capacity}, train={"micro_batches": micro_batches}
    )
    assert (dropped > 0) == (capacity is not None)
    routers = dict(run.model.sigmoid_routers())
    assert list(routers) == [1, 2]
    for layer, router in routers.items():
        expected = torch.zeros(8)
        for micro in choices.by_step.values():
            assert len(micro) == micro_batches
            chosen = torch.cat([one[layer].flatten() for one in micro]).tolist()
            for expert in range(8):
                apart = len(chosen) / 8 - chosen.count(expert)
                expected[expert] += STEP if apart > 0 else -STEP if apart < 0 else 0.0
        assert torch.equal(router.bias, expected)
        assert expected.any()


def test_what_is_computed_twice_counts_once() -> None:
    once, _, _ = steps(train={"micro_batches": 2})
    twice, _, _ = steps(train={"micro_batches": 2, "recompute": True})
    for a, b in zip(once.state().pieces, twice.state().pieces, strict=True):
        assert a.key == b.key
        assert torch.equal(a.tensor, b.tensor), a.key


def test_no_step_no_bias() -> None:
    run, _, _ = steps(routing={"bias_step": 0.0})
    assert not any(router.bias.any() for _, router in run.model.sigmoid_routers())


def test_a_bias_is_state_without_moments() -> None:
    run, _, _ = steps()
    keys = [p.key for p in run.state().pieces if p.name == "layers.1.moe.router.bias"]
    assert keys == ["parameter/layers.1.moe.router.bias"]
    assert not any("bias" in item.name for item in run.holdings)
