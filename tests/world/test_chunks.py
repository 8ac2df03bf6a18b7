"""Tokens that travel to their experts in chunks: the numbers of one process, whatever the way.

Here is what is about chunks; under other axes, and in every family, they are in the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from layouts import Outcome, assert_same, outcome
from test_dedup import DROPS, PLACEMENT, TP_SIZES

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
ROWS, VISITS = {"dispatch": "all_to_all"}, {"dispatch": "dedup"}
FIRST = {"overlap_local": True}
MICRO = {"train": {"micro_batches": 2}}
LORA = {"finetune": {"method": "lora", "rank": 4}}
HALVES = {"pp": 2, "schedule": "zero-bubble"}
CASES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {"ep": 2, "chunks": 64, **ROWS}, {"data": {"sequence": 7}}),
    (4, {"ep": 4, "chunks": 5, "dispatch_hosts": 2, **ROWS}, DROPS),
    (4, {"ep": 4, "chunks": 64, "dispatch_hosts": 2, **VISITS}, {"data": {"sequence": 7}}),
    (4, {"ep": 4, "chunks": 2, **ROWS}, {"model": {"top_k": 8}}),
    (
        4, {"ep": 4, "chunks": 4, **VISITS},
        {"routing": {"router": "balanced"}, "model": {"top_k": 1}},
    ),
    (4, {"ep": 2, "chunks": 3, **HALVES, **VISITS}, {"train": {"micro_batches": 4}, **LORA}),
    (4, {"ep": 2, "tp": 2, "dp_shard": 2, "chunks": 2, **ROWS}, TP_SIZES),
    (2, {"ep": 2, "chunks": 3, **FIRST, **ROWS}, {**DROPS, **MICRO}),
    (2, {"ep": 2, "chunks": 64, **FIRST, **VISITS}, {"data": {"sequence": 7}}),
    (4, {"ep": 4, "dispatch_hosts": 2, **FIRST, **ROWS}, DROPS),
    (4, {"ep": 4, "chunks": 2, "dispatch_hosts": 2, **FIRST, **VISITS},
     {"train": {"recompute": True}}),
    (4, {"ep": 4, **FIRST, **VISITS}, {"routing": {"router": "balanced"}, "model": {"top_k": 1}}),
    (4, {"ep": 4, **FIRST, **ROWS}, {"model": {"top_k": 8}}),
    (4, {"ep": 4, "dispatch_hosts": 2, "chunks": 2, **FIRST, **VISITS}, {**LORA, **MICRO}),
    (4, {"ep": 2, **FIRST, **HALVES, **VISITS}, {"train": {"micro_batches": 4}}),
    (4, {"ep": 2, "tp": 2, "etp": 2, **FIRST, **VISITS}, TP_SIZES),
]  # fmt: skip
_references: dict[str, Outcome] = {}


@pytest.mark.parametrize(("size", "layout", "tables"), CASES, ids=str)
def test_fp64(ranks: RankPool, size: int, layout: dict[str, Any], tables: dict[str, Any]) -> None:
    key = str(tables)
    if key not in _references:
        _references[key] = outcome(ranks, 1, tiny_job(**tables), STEPS)
    found = outcome(ranks, size, tiny_job(**{**tables, "layout": layout}), STEPS)
    assert_same(found, _references[key])


@pytest.mark.parametrize("hosts", [1, 2])
def test_fp64_wherever_experts_live(ranks: RankPool, hosts: int) -> None:
    one = outcome(ranks, 1, tiny_job(**DROPS), STEPS)
    job = tiny_job(**DROPS, layout={"ep": 4, "chunks": 3, "dispatch_hosts": hosts, **VISITS})
    assert_same(outcome(ranks, 4, job, STEPS, placement=PLACEMENT), one)


@pytest.mark.parametrize("way", [ROWS, VISITS], ids=["rows", "visits"])
def test_what_tokens_become_does_not_depend_on_chunks(ranks: RankPool, way: dict[str, Any]) -> None:
    """Forward each token has the same bits; gradients of weights are summed chunk by chunk."""
    train = {"precision": "fp32"}
    whole, cut = (
        outcome(ranks, 2, tiny_job(train=train, layout={"ep": 2, "chunks": num, **way}), 1)
        for num in (1, 3)
    )
    assert [step["loss"] for step in whole.steps] == [step["loss"] for step in cut.steps]
    assert not all(np.array_equal(whole.gradients[k], cut.gradients[k]) for k in whole.gradients)


@pytest.mark.parametrize("way", [ROWS, VISITS], ids=["rows", "visits"])
def test_what_is_local_is_computed_while_tokens_travel(
    ranks: RankPool, way: dict[str, Any]
) -> None:
    """Half of it on their way to experts, half on the way of results; so in backward. Which rows
    stand where is found on the way, too."""
    passes = ranks.run(2, order_of_things, {"ep": 2, **FIRST, **way})
    expected = ["leave", "compute", "come", "compute", "leave", "compute", "come"]
    assert passes == [[["leave", "sort", *expected[1:]], expected]] * 2


def test_what_is_local_is_computed_before_between_and_after_chunks(ranks: RankPool) -> None:
    passes = ranks.run(2, order_of_things, {"ep": 2, "chunks": 2, **FIRST, **ROWS})
    first = ["leave", "compute", "come", "leave", "compute", "leave", "compute"]
    ahead = [*first, "come", "compute", "come", "leave", "compute", "come"]
    turned = {"leave": "come", "come": "leave"}
    behind = [turned.get(one, one) for one in reversed(ahead)]
    assert passes == [[["leave", "sort", *ahead[1:]], behind]] * 2


def order_of_things(world: World, layout: dict[str, Any]) -> list[list[str]]:
    """What a layer does forward, and then backward."""
    job = tiny_job(layout=layout)
    plan, told = plan_from_layout(job.layout, job.model, world.size), list[str]()
    own = make_dispatch_ranks(plan, world)
    own = replace(own, transports=tuple(Telling(carrier, told) for carrier in own.transports))
    dispatcher = Watched(
        8, own, dedup=plan.dispatch == "dedup", num_chunks=plan.chunks, overlap_local=True
    )
    dispatcher.told = told
    bank = ExpertBank(range(4), hidden=8, ffn=4)
    torch.nn.init.normal_(bank.arena)
    tokens = torch.randn(12, 8, requires_grad=True)
    chosen = torch.rand(12, 8).topk(3, dim=1)
    weights = chosen.values.requires_grad_()

    with bank.expert_function(dispatcher.num_expert_calls) as compute:

        def telling(*there: Any) -> torch.Tensor:
            told.append("compute")
            results = compute(*there)
            results.register_hook(lambda _: told.append("compute"))
            return results

        counted = dispatcher.count(chosen.indices, training=True)
        out = dispatcher.start_dispatch(
            tokens, weights, dispatcher.assign_slots(counted)
        ).run_experts(telling)
    ahead = told.copy()
    told.clear()
    out.sum().backward()
    return [ahead, told]


class Watched(Dispatcher):
    """A dispatcher that says when it sorts what is local."""

    told: list[str]

    def _local_inputs(self, *there: Any) -> Iterator[ExpertInputs]:
        self.told.append("sort")
        yield from super()._local_inputs(*there)


@dataclass
class Telling:
    """A carrier that says what it does."""

    carrier: Transport
    told: list[str]

    @property
    def name(self) -> str:
        return self.carrier.name

    @property
    def group(self) -> Any:
        return self.carrier.group

    def start(
        self, rows: torch.Tensor, send: list[int], receive: list[int], into: Any = None
    ) -> Any:
        self.told.append("leave")
        landing, work = self.carrier.start(rows, send, receive, into)
        return landing, Waiting(work, self.told)

    def close(self) -> None:
        self.carrier.close()


@dataclass
class Waiting:
    """What it has under way."""

    work: Work
    told: list[str]

    def wait(self) -> None:
        self.work.wait()
        self.told.append("come")


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("way", [ROWS, VISITS], ids=["rows", "visits"])
def test_local_tokens_wherever_experts_live(
    ranks: RankPool, hosts: int, way: dict[str, Any]
) -> None:
    one = outcome(ranks, 1, tiny_job(**DROPS), STEPS)
    job = tiny_job(**DROPS, layout={"ep": 4, "dispatch_hosts": hosts, **FIRST, **way})
    assert_same(outcome(ranks, 4, job, STEPS, placement=PLACEMENT), one)
