"""Facts of a step do not depend on the device of its layers' counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moesaic.facts.plan import Plan
from moesaic.nn.dispatch.dispatcher import DispatchCounts, Dispatcher
from moesaic.nn.reports import MoEReport
from moesaic.testing.blocks import expert_load
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.runs import start_run
from moesaic.testing.states import live_values
from moesaic.train.lm_stats import LMStepStats
from moesaic.train.objectives.lm import _copy_to_host

SIGMOIDS = {
    "family": "deepseek_v3", "kv_heads": 4, "layers": 3, "dense_layers": 1, "shared_experts": 1,
    "expert_groups": 4, "top_expert_groups": 2,
    "latent": {"kv_lora_rank": 10, "qk_rope_head_dim": 4, "v_head_dim": 6},
}  # fmt: skip
"""Model whose routers have biases, which follow loads."""


def train_steps(**tables: Any) -> tuple[list[LMStepStats], list[Tensor]]:
    """Return the facts of three steps of a run, and its state."""
    job = tiny_job(**tables)
    run = start_run(job)
    samples = RandomSamples(job.model.vocab, job.data.sequence)
    facts = [run.step(samples) for _ in range(3)]
    return facts, [live_values(shard) for shard in run.state().shards]


@pytest.mark.parametrize(
    ("model", "recompute"),
    [
        ({}, False), (SIGMOIDS, True), pytest.param({}, True, marks=pytest.mark.soak),
        pytest.param(SIGMOIDS, False, marks=pytest.mark.soak),
    ],
)  # fmt: skip
def test_counts_on_the_device_give_the_same_step(
    model: dict[str, Any], recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts on the device, as on a single rank that never waits, give the same losses, loads,
    biases and state, bit for bit."""
    tables = {"train": {"micro_batches": 2, "recompute": recompute}}
    tables |= {"model": model, "routing": {"bias_update_rate": 0.02}} if model else {}
    pytest.importorskip("triton")
    due, due_state = train_steps(**tables)
    calls = list[bool]()

    def count(
        one: Dispatcher,
        experts_TK: Tensor,
        *,
        training: bool,
        allow_device_counts: bool,
        backend: str,
    ) -> DispatchCounts:
        calls.append(training and allow_device_counts)
        return one.count_on_device(experts_TK)

    monkeypatch.setattr(Dispatcher, "count", count)
    found, state = train_steps(**tables)
    assert calls
    assert all(calls)
    for one, other in zip(found, due, strict=True):
        actual, expected = _figures(one), _figures(other)
        assert actual == expected
    assert all(torch.equal(a, b) for a, b in zip(state, due_state, strict=True))


def _figures(facts: LMStepStats) -> dict[str, Any]:
    """Return all facts except times, with tables as lists."""
    figures = {key: value for key, value in vars(facts).items() if key != "phases"}
    for key in ("counts", "counts_by_rank"):
        tables: Mapping[int, Tensor] = figures[key]
        assert all(one.device.type == "cpu" for one in tables.values())
        figures[key] = {layer: one.tolist() for layer, one in tables.items()}
    return figures


def test_expert_load_of_one_ep_group() -> None:
    zero, counts = torch.zeros(()), torch.tensor([[3, 0, 2]])
    report = MoEReport(2, 5, zero, zero, counts[0], counts[0], counts[0], counts, 0)
    plan = Plan(ranks=2, ep=1, dp_shard=1, experts=3)
    assert expert_load(report, plan, 1) == [[0, 0, 0], [3, 0, 2]]


class Copies(TorchDispatchMode):
    """Counter of copies to another device."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count copies."""
        self.number += func._schema.name in {"aten::_to_copy", "aten::copy_"}
        return func(*args, **(kwargs or {}))


def test_tables_are_copied_from_a_device_at_once() -> None:
    with FakeTensorMode(), Copies() as copies:
        on_device = {
            layer: torch.empty(1, 8, dtype=torch.int64, device="cuda") for layer in (1, 2, 5)
        }
        tables = _copy_to_host(on_device)
    assert copies.number == 1
    assert list(tables) == list(on_device)
    assert {(one.device.type, one.shape) for one in tables.values()} == {("cpu", (1, 8))}


def test_tables_of_the_host_stay_as_they_are() -> None:
    here = {3: torch.tensor([[1, 2]]), 4: torch.tensor([[3, 4]])}
    assert _copy_to_host(here) is here
    assert _copy_to_host({}) == {}
