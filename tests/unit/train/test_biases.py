"""Router biases follow the experts requested in the whole batch, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.runs import start_run
from moesaic.testing.states import live_values
from moesaic.train.assemble import LMRun

MODEL = {
    "family": "deepseek_v3", "kv_heads": 4, "layers": 3, "dense_layers": 1, "shared_experts": 1,
    "expert_groups": 4, "top_expert_groups": 2,
    "latent": {"kv_lora_rank": 10, "qk_rope_head_dim": 4, "v_head_dim": 6},
}  # fmt: skip
STEP = 0.02


class Choices:
    """Recorder that keeps the experts of every token."""

    def __init__(self) -> None:
        self.by_step: dict[int, list[Mapping[int, Tensor]]] = {}

    def record(self, step: int, samples: Tensor, choices: Mapping[int, Tensor]) -> None:
        """Keep the choices of one micro-batch."""
        del samples
        self.by_step.setdefault(step, []).append(dict(choices))


def train_steps(**tables: dict[str, Any]) -> tuple[LMRun, Choices, int]:
    """Return a run after six steps, its recorded choices and its dropped assignments."""
    routing = {"bias_update_rate": STEP, **tables.pop("routing", {})}
    job = tiny_job(model=MODEL, routing=routing, **tables)
    run, choices = start_run(job), Choices()
    run.objective.routing_recorder = choices  # type: ignore[assignment]
    samples = RandomSamples(job.model.vocab, job.data.sequence)
    dropped = sum(sum(run.step(samples).dropped.values()) for _ in range(6))
    return run, choices, dropped


@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_biases_follow_all_choices_of_a_batch(capacity: float | None, micro_batches: int) -> None:
    run, choices, dropped = train_steps(
        routing={"capacity_factor": capacity}, train={"micro_batches": micro_batches}
    )
    assert (dropped > 0) == (capacity is not None)
    routers = dict(run.part.model.sigmoid_routers())
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


def test_recomputed_layers_count_once() -> None:
    once, _, _ = train_steps(train={"micro_batches": 2})
    twice, _, _ = train_steps(train={"micro_batches": 2, "recompute": True})
    for a, b in zip(once.state().shards, twice.state().shards, strict=True):
        assert a.key == b.key
        assert torch.equal(live_values(a), live_values(b)), a.key


def test_no_update_rate_no_bias() -> None:
    run, _, _ = train_steps(routing={"bias_update_rate": 0.0})
    assert not any(router.bias.any() for _, router in run.part.model.sigmoid_routers())


def test_a_bias_is_state_without_moments() -> None:
    run, _, _ = train_steps()
    keys = [p.key for p in run.state().shards if p.name == "layers.1.moe.router.bias"]
    assert keys == ["parameter/layers.1.moe.router.bias"]
    assert not any("bias" in item.name for item in run.part.trainable)
