"""Two hosts: what goes over the link between them and what stays on a host, and experts of one that
are computed on the other for a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from benchmarks import layer
from layouts import ASKING, Run, assert_same, outcome, run_layout, together
from torch import Tensor

from moesaic.dist.exchange import ByPairs
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import lay_out
from moesaic.testing.hosts import impossible, met, two_hosts
from moesaic.testing.jobs import tiny_job
from moesaic.testing.ranks import Ranks
from moesaic.train.assemble import ranks_of

TOLERANCE = 0.03
"""Of bytes without headers: counts of tokens, and what ranks agree on."""


@pytest.fixture
def own_ranks() -> Iterator[Ranks]:
    """Ranks that nobody else needs: they stay on their hosts."""
    pool = Ranks()
    yield pool
    pool.close()


Seen = dict[str, tuple[list[str], Tensor, tuple[int, int]]]


def exchange(world: World, hosts: tuple[str, str]) -> Seen:
    """By form: what carries tokens, what comes back, bytes counted and due."""
    found: Seen = {}
    with met(world, hosts) as world:
        for form, layout in layer.FORMS.items():
            job = layer.layer_job(layout)
            plan = layer.plan_of(job, world)
            one = layer.Pass(job, plan, world)
            names = [carrier.name for carrier in ranks_of(plan, world).carriers]
            found[form] = (names, one(), one.counted())
    return found


WHY_NOT = impossible()
on_two_hosts = pytest.mark.skipif(bool(WHY_NOT), reason=f"no two hosts here: {WHY_NOT}")


@on_two_hosts
def test_a_token_goes_over_the_link_once(own_ranks: Ranks) -> None:
    with two_hosts() as hosts:
        results = own_ranks.run(4, exchange, hosts)
    for found in results:
        assert [names for names, _, _ in found.values()] == [
            ["gloo"], ["gloo", "memory"], ["gloo"], ["gloo", "memory"],
        ]  # fmt: skip
        straight, *others = (tokens for _, tokens, _ in found.values())
        assert torch.equal(straight, others[0])
        for tokens in others[1:]:
            torch.testing.assert_close(tokens, straight)
    for found in (results[0], results[2]):
        due = {form: due for form, (_, _, (_, due)) in found.items()}
        for form, (_, _, (counted, _)) in found.items():
            assert due[form] <= counted <= (1 + TOLERANCE) * due[form], form
        assert due["by hosts"] == due["straight"]
        # Four of eight experts are on the other host, and hardly a token has none of them there.
        assert due["visits by hosts"] < due["straight"] / 3.5


STEPS = 3
MICRO_BATCHES = {"train": {"micro_batches": 2}}
AGAIN = {"train": {"micro_batches": 2, "recompute": True}}
EARLY = {"balance": {**ASKING, "early": True}}
SPREAD: dict[int, list[tuple[dict[str, Any], dict[str, Any], int | None]]] = {
    2: [
        ({"ep": 2}, MICRO_BATCHES, 1),
        ({"ep": 2, "dispatch": "visits", "chunks": 2, "local": "first"}, AGAIN, 2),
        ({"ep": 2}, {**AGAIN, **EARLY}, None),
    ],
    4: [
        ({"ep": 4, "hosts": 2, "dispatch": "rows"}, MICRO_BATCHES, 3),
        ({"ep": 4, "hosts": 2, "dispatch": "visits", "chunks": 3}, AGAIN, 4),
        ({"ep": 4, "dispatch": "visits"}, {**MICRO_BATCHES, **EARLY}, None),
        ({"ep": 4, "shard": 4}, {**AGAIN, **EARLY}, None),
    ],
}
"""By number of ranks, layouts, tables, and what copies at random begin with: of two of three layers
these leave early."""


def train_apart(world: World, hosts: tuple[str, str], jobs: list[tuple[Job, int | None]]) -> Any:
    """Each job over both hosts."""
    found = []
    with met(world, hosts) as world:
        for job, shaken in jobs:
            plan = lay_out(job.layout, job.model, world.size)
            assert isinstance(ranks_of(plan, world, copies=True).straight, ByPairs)
            found.append(run_layout(world, job, STEPS, shaken=shaken))
    return found


@on_two_hosts
@pytest.mark.parametrize("size", SPREAD)
def test_experts_of_the_other_host(ranks: Ranks, own_ranks: Ranks, size: int) -> None:
    """Over sockets, rank by rank; with copies that leave behind tokens and early ones."""
    ways = [
        (tiny_job(**{"balance": ASKING, **tables}, layout=layout), shaken)
        for layout, tables, shaken in SPREAD[size]
    ]
    with two_hosts() as hosts:
        by_rank: list[list[Run]] = own_ranks.run(size, train_apart, hosts, ways)
    alone = outcome(ranks, 1, tiny_job(**MICRO_BATCHES), STEPS)
    for results in zip(*by_rank, strict=True):
        several = together(list(results))
        assert_same(several, alone)
        assert sum(step["copies"] for step in several.steps) > 0
