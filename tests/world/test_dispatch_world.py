"""Every dispatch method, in chunks and with local tokens first, equals one process.

`test_table.py` covers every family and the other axes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from layouts import SIGMOID, assert_same, outcome, reference

from moesaic.dist.all_to_all import Transport, Work
from moesaic.dist.world import World
from moesaic.facts.plan import plan_from_layout
from moesaic.models.build import make_dispatch_ranks
from moesaic.nn.dispatch.all_to_all import ExpertInputs
from moesaic.nn.dispatch.dispatcher import Dispatcher
from moesaic.nn.experts.bank import ExpertBank
from moesaic.testing.jobs import tiny_job
from moesaic.testing.ranks import RankPool

STEPS = 2
PLACEMENT = [[5, 2], [7, 0], [1, 6], [4, 3]]
DROPS = {
    "model": {"top_k": 2},
    "routing": {"router": "gshard", "capacity_factor": 1.0, "balance_loss": 1.0},
}
TP_SIZES = {"model": {"vocab": 64}}
MICRO = {"train": {"micro_batches": 2}}
LORA = {"finetune": {"method": "lora", "rank": 4}}
ONE_EXPERT = {"routing": {"router": "balanced"}, "model": {"top_k": 1}}
EVERY_EXPERT = {"model": {"top_k": 8}}
FEW_TOKENS = {"data": {"sequence": 7}}
ALL_TO_ALL, DEDUP = {"dispatch": "all_to_all"}, {"dispatch": "dedup"}
HOSTS = {"dispatch_hosts": 2}
LOCAL = {"overlap_local": True}
PIPELINE = {"pp": 2, "schedule": "zero-bubble"}
CASES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (4, {"ep": 4, **DEDUP}, {"model": {"top_k": 1}}),
    (4, {"ep": 4, **DEDUP}, ONE_EXPERT),
    (8, {"ep": 8, "dispatch_hosts": 4, "dp_shard": 4, **DEDUP}, {}),
    (4, {"ep": 4, "dispatch_hosts": 4, **DEDUP}, {}),
    (8, {"ep": 8, **HOSTS, **DEDUP}, {**DROPS, **MICRO}),
    (4, {"ep": 4, **HOSTS, **DEDUP}, EVERY_EXPERT),
    (4, {"ep": 4, **HOSTS, **DEDUP}, ONE_EXPERT),
    (4, {"ep": 4, **HOSTS, **DEDUP}, LORA),
    (2, {"ep": 2, "chunks": 64, **ALL_TO_ALL}, FEW_TOKENS),
    (4, {"ep": 4, "chunks": 5, **HOSTS, **ALL_TO_ALL}, DROPS),
    (4, {"ep": 4, "chunks": 2, **ALL_TO_ALL}, EVERY_EXPERT),
    (4, {"ep": 4, "chunks": 4, **DEDUP}, ONE_EXPERT),
    (4, {"ep": 2, "chunks": 3, **PIPELINE, **DEDUP}, {"train": {"micro_batches": 4}, **LORA}),
    (4, {"ep": 2, "tp": 2, "dp_shard": 2, "chunks": 2, **ALL_TO_ALL}, TP_SIZES),
    (2, {"ep": 2, "chunks": 3, **LOCAL, **ALL_TO_ALL}, {**DROPS, **MICRO}),
    (4, {"ep": 4, "chunks": 64, **HOSTS, **LOCAL, **DEDUP}, FEW_TOKENS),
    (4, {"ep": 4, "chunks": 2, **HOSTS, **LOCAL, **DEDUP}, {"train": {"recompute": True}}),
    (4, {"ep": 4, **LOCAL, **DEDUP}, ONE_EXPERT),
    (4, {"ep": 4, **LOCAL, **ALL_TO_ALL}, EVERY_EXPERT),
    (4, {"ep": 4, **HOSTS, "chunks": 2, **LOCAL, **DEDUP}, {**LORA, **MICRO}),
    (4, {"ep": 2, **LOCAL, **PIPELINE, **DEDUP}, {"train": {"micro_batches": 4}}),
    (4, {"ep": 2, "tp": 2, "etp": 2, **LOCAL, **DEDUP}, TP_SIZES),
]


@pytest.mark.parametrize(("size", "layout", "tables"), CASES, ids=str)
def test_fp64(ranks: RankPool, size: int, layout: dict[str, Any], tables: dict[str, Any]) -> None:
    one = reference(ranks, STEPS, **tables)
    assert_same(outcome(ranks, size, tiny_job(**tables, layout=layout), STEPS), one)
    assert ("capacity_factor" in str(tables)) == (sum(step["dropped"] for step in one.steps) > 0)


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize(
    "layout",
    [DEDUP, {"chunks": 3, **DEDUP}, {**LOCAL, **DEDUP}, {**LOCAL, **ALL_TO_ALL}],
    ids=str,
)
def test_fp64_for_any_expert_placement(ranks: RankPool, layout: dict[str, Any], hosts: int) -> None:
    job = tiny_job(**DROPS, layout={"ep": 4, "dispatch_hosts": hosts, **layout})
    several = outcome(ranks, 4, job, STEPS, placement=PLACEMENT)
    assert_same(several, reference(ranks, STEPS, **DROPS))


@pytest.mark.parametrize(
    ("size", "layout", "tables"),
    [
        (
            4,
            {"ep": 4, "dp_shard": 2},
            {**SIGMOID, "train": {"micro_batches": 4, "recompute": True}},
        ),
        (4, {"ep": 4}, {**DROPS, "train": {"precision": "fp32"}}),
        (8, {"ep": 4, "tp": 2, "etp": 2}, TP_SIZES),
    ],
)
def test_hierarchical_all_to_all_is_bit_identical(
    ranks: RankPool, size: int, layout: dict[str, Any], tables: dict[str, Any]
) -> None:
    flat, hierarchical = (
        outcome(ranks, size, tiny_job(**tables, layout=layout | ALL_TO_ALL | hosts), STEPS)
        for hosts in ({}, HOSTS)
    )
    assert flat.steps == hierarchical.steps
    for one, other in (
        (flat.gradients, hierarchical.gradients),
        (flat.state, hierarchical.state),
    ):
        assert all(np.array_equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("method", [ALL_TO_ALL, DEDUP], ids=str)
def test_forward_has_equal_bits_in_chunks(ranks: RankPool, method: dict[str, Any]) -> None:
    """Gradients of weights are summed chunk by chunk."""
    whole, cut = (
        outcome(
            ranks,
            2,
            tiny_job(train={"precision": "fp32"}, layout={"ep": 2, "chunks": chunks, **method}),
            1,
        )
        for chunks in (1, 3)
    )
    assert [step["loss"] for step in whole.steps] == [step["loss"] for step in cut.steps]
    assert not all(np.array_equal(whole.gradients[k], cut.gradients[k]) for k in whole.gradients)


@pytest.mark.parametrize("method", [ALL_TO_ALL, DEDUP], ids=str)
def test_local_tokens_are_computed_during_exchanges(
    ranks: RankPool, method: dict[str, Any]
) -> None:
    """One half during dispatch and one during combine, in forward and backward."""
    passes = ranks.run(2, order_of_events, {"ep": 2, **LOCAL, **method})
    expected = ["start", "compute", "wait", "compute", "start", "compute", "wait"]
    assert passes == [[["start", "sort", *expected[1:]], expected]] * 2


def test_local_tokens_are_computed_before_between_and_after_chunks(ranks: RankPool) -> None:
    passes = ranks.run(2, order_of_events, {"ep": 2, "chunks": 2, **LOCAL, **ALL_TO_ALL})
    first = ["start", "compute", "wait", "start", "compute", "start", "compute"]
    forward = [*first, "wait", "compute", "wait", "start", "compute", "wait"]
    opposite = {"start": "wait", "wait": "start"}
    backward = [opposite.get(event, event) for event in reversed(forward)]
    assert passes == [[["start", "sort", *forward[1:]], backward]] * 2


def order_of_events(world: World, layout: dict[str, Any]) -> list[list[str]]:
    """Return the events of a layer's forward pass, and of its backward pass."""
    job, events = tiny_job(layout=layout), list[str]()
    plan = plan_from_layout(job.layout, job.model, world.size)
    groups = make_dispatch_ranks(plan, world)
    recording = tuple(RecordingTransport(one, events) for one in groups.transports)
    dispatcher = RecordingDispatcher(
        8,
        replace(groups, transports=recording),
        dedup=plan.dispatch == "dedup",
        num_chunks=plan.chunks,
        overlap_local=True,
    )
    dispatcher.events = events
    bank = ExpertBank(range(4), hidden=8, ffn=4)
    torch.nn.init.normal_(bank.arena)
    tokens = torch.randn(12, 8, requires_grad=True)
    chosen = torch.rand(12, 8).topk(3, dim=1)
    weights = chosen.values.requires_grad_()
    with bank.expert_function(dispatcher.num_expert_calls) as compute:

        def recording_compute(*inputs: Any) -> torch.Tensor:
            events.append("compute")
            results = compute(*inputs)
            results.register_hook(lambda _: events.append("compute"))
            return results

        slots = dispatcher.assign_slots(dispatcher.count(chosen.indices, training=True))
        out = dispatcher.start_dispatch(tokens, weights, slots).run_experts(recording_compute)
    forward = events.copy()
    events.clear()
    out.sum().backward()
    return [forward, events]


class RecordingDispatcher(Dispatcher):
    """A dispatcher that records when it sorts local tokens."""

    events: list[str]

    def _local_inputs(self, *arguments: Any) -> Iterator[ExpertInputs]:
        self.events.append("sort")
        yield from super()._local_inputs(*arguments)


@dataclass
class RecordingTransport:
    """A transport that records starts and waits."""

    transport: Transport
    events: list[str]

    @property
    def name(self) -> str:
        return self.transport.name

    @property
    def group(self) -> Any:
        return self.transport.group

    def start(self, *arguments: Any) -> Any:
        self.events.append("start")
        received, work = self.transport.start(*arguments)
        return received, RecordingWork(work, self.events)

    def close(self) -> None:
        self.transport.close()


@dataclass
class RecordingWork:
    """An exchange under way."""

    work: Work
    events: list[str]

    def wait(self) -> None:
        self.work.wait()
        self.events.append("wait")
