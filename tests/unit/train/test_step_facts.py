"""What a step tells is the same wherever its layers have left their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moesaic.dist.world import World
from moesaic.facts.plan import lay_out
from moesaic.models.initial import InitialSource
from moesaic.nn.context import LayerFacts
from moesaic.nn.dispatch import Counted, Dispatcher
from moesaic.testing.blocks import load_of
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.train.assemble import assemble
from moesaic.train.run import StepFacts, _on_host

SIGMOIDS = {
    "family": "deepseek_v3", "kv_heads": 4, "layers": 3, "dense_layers": 1, "shared": 1,
    "groups": 4, "top_groups": 2, "latent": {"width": 10, "rotary": 4, "value": 6},
}  # fmt: skip
"""A model whose routers have biases, which follow loads."""


def steps(**tables: Any) -> tuple[list[StepFacts], list[Tensor]]:
    """What three steps of a run tell, and all that it goes on from."""
    job = tiny_job(**tables)
    run = assemble(
        job, lay_out(job.layout, job.model, 1), World.solo(),
        InitialSource(job.seed, job.model.init_std),
    )  # fmt: skip
    samples = RandomSamples(job.model.vocab, job.data.sequence)
    found = [run.step(samples) for _ in range(3)]
    return found, [piece.tensor for piece in run.state().pieces]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("model", [{}, SIGMOIDS])
def test_a_step_with_numbers_where_tokens_are(
    model: dict[str, Any], recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a rank alone has it that never waits: losses, loads, biases and state, bit by bit."""
    tables = {"train": {"micro_batches": 2, "recompute": recompute}}
    tables |= {"model": model, "routing": {"bias_step": 0.02}} if model else {}
    due, due_state = steps(**tables)
    asked = list[bool]()

    def count(
        one: Dispatcher, experts_TK: Tensor, *, training: bool, whole: bool, by: str
    ) -> Counted:
        asked.append(training and whole)
        return one.count_there(experts_TK)

    monkeypatch.setattr(Dispatcher, "count", count)
    found, state = steps(**tables)
    assert asked
    assert all(asked)
    for one, other in zip(found, due, strict=True):
        told, expected = _figures(one), _figures(other)
        assert told == expected
    assert all(torch.equal(a, b) for a, b in zip(state, due_state, strict=True))


def _figures(facts: StepFacts) -> dict[str, Any]:
    """All but times, with lists for tables."""
    figures = {key: value for key, value in vars(facts).items() if key != "phases"}
    for key in ("counts", "by_rank"):
        tables: Mapping[int, Tensor] = figures[key]
        assert all(one.device.type == "cpu" for one in tables.values())
        figures[key] = {layer: one.tolist() for layer, one in tables.items()}
    return figures


def test_a_layers_load_is_read_from_either_place() -> None:
    zero, counts = torch.zeros(()), torch.tensor([[3, 0, 2]])
    facts = LayerFacts(zero, zero, counts[0], counts, 0, None, 0)
    assert load_of(facts) == [[3, 0, 2]]


class Copies(TorchDispatchMode):
    """How often something was copied to another place."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count it."""
        self.number += func._schema.name in {"aten::_to_copy", "aten::copy_"}
        return func(*args, **(kwargs or {}))


def test_tables_come_from_a_device_at_one_go() -> None:
    with FakeTensorMode(), Copies() as copies:
        there = {layer: torch.empty(1, 8, dtype=torch.int64, device="cuda") for layer in (1, 2, 5)}
        tables = _on_host(there)
    assert copies.number == 1
    assert list(tables) == list(there)
    assert {(one.device.type, one.shape) for one in tables.values()} == {("cpu", (1, 8))}


def test_tables_of_the_host_stay_as_they_are() -> None:
    here = {3: torch.tensor([[1, 2]]), 4: torch.tensor([[3, 4]])}
    assert _on_host(here) is here
    assert _on_host({}) == {}
