"""Two hosts: bytes over the link between them, and replicas of experts of the other host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from benchmarks import hosts as between
from benchmarks.on_ranks import plan_of
from layouts import ASKING, Run, assert_same, outcome, run_layout, together
from torch import Tensor

from moesaic.dist.all_to_all import PairwiseAllToAll
from moesaic.dist.world import World
from moesaic.facts.job import Job
from moesaic.facts.plan import Plan, plan_from_layout
from moesaic.facts.workload.loads import dedup_token_bytes, routed_by_layer
from moesaic.models.build import make_dispatch_ranks
from moesaic.testing.hosts import (
    join_across_hosts,
    sent_bytes,
    two_hosts,
    unsupported_reason,
)
from moesaic.testing.jobs import tiny_job
from moesaic.testing.ranks import RankPool

TOLERANCE = 0.03
"""Share of bytes for headers, token counts and agreement between ranks."""


@pytest.fixture
def own_ranks() -> Iterator[RankPool]:
    """Rank pool for this test alone, since its ranks stay on their hosts."""
    pool = RankPool()
    yield pool
    pool.close()


def count_bytes(world: World, job: Job, plan: Plan, one: between.Pass) -> tuple[int, int]:
    """Return bytes that this host sends over the link in a pass, and those predicted.

    It takes the pass with the fewest bytes: a busy machine sends packets again.
    """
    sent = []
    for _ in range(5):
        world.barrier()
        before = sent_bytes()
        one()
        world.barrier()
        sent.append(sent_bytes() - before)
    counted = one.dispatcher.count(one.choices, training=False)
    width, host, due = job.model.hidden * 4, world.rank // 2, 0
    if plan.dispatch == "dedup":
        chunks = [chunk.counts_RP for chunk in one.dispatcher.assign_slots(counted).dedup]
        tokens_RP = torch.stack(chunks).sum(0).tolist()
        there_bytes = dedup_token_bytes(job.model.hidden, job.model.top_k, 4)[0]
        ours, theirs = (2 * host, 2 * host + 1), (2 - 2 * host, 3 - 2 * host)
        if plan.dispatch_hosts > 1:  # To one rank of the other host, in the columns of hosts.
            due = sum(tokens_RP[rank][5 - host] * there_bytes for rank in ours)
            due += sum(tokens_RP[rank][4 + host] * width for rank in theirs)
        else:
            due = sum(tokens_RP[rank][other] * there_bytes for rank in ours for other in theirs)
            due += sum(tokens_RP[other][rank] * width for rank in ours for other in theirs)
        return min(sent), due
    for rank in (2 * host, 2 * host + 1):
        (tokens,) = routed_by_layer(job, plan, rank, [counted.counts_RE.tolist()])
        for trip in tokens.exchanges:
            for other, to, back in zip(
                trip.group, trip.send_tokens, trip.receive_tokens, strict=True
            ):
                due += (other // 2 != host) * (to + back) * width
    return min(sent), due


Passes = dict[str, tuple[list[str], Tensor, tuple[int, int]]]


def exchange(world: World, hosts: tuple[str, str]) -> Passes:
    """Return by method: names of the transports, the output, and bytes counted and predicted."""
    found: Passes = {}
    with join_across_hosts(world, hosts) as world:
        for method, layout in between.METHODS.items():
            job = between.layer_job(layout)
            plan = plan_of(job, world)
            one = between.Pass(job, plan, world)
            names = [transport.name for transport in make_dispatch_ranks(plan, world).transports]
            found[method] = (names, one(), count_bytes(world, job, plan, one))
    return found


WHY_NOT = unsupported_reason()
on_two_hosts = pytest.mark.skipif(bool(WHY_NOT), reason=f"no two hosts here: {WHY_NOT}")


@on_two_hosts
def test_a_token_crosses_the_link_once(own_ranks: RankPool) -> None:
    with two_hosts() as hosts:
        results = own_ranks.run(4, exchange, hosts)
    for found in results:
        assert [names for names, _, _ in found.values()] == [
            ["gloo"], ["gloo", "memory"], ["gloo"], ["gloo", "memory"],
        ]  # fmt: skip
        flat, *others = (tokens for _, tokens, _ in found.values())
        assert torch.equal(flat, others[0])
        for tokens in others[1:]:
            torch.testing.assert_close(tokens, flat)
    for found in (results[0], results[2]):
        expected = {method: num for method, (_, _, (_, num)) in found.items()}
        for method, (_, _, (counted, _)) in found.items():
            assert expected[method] <= counted <= (1 + TOLERANCE) * expected[method], method
        assert expected["hierarchical all_to_all"] == expected["all_to_all"]
        # Half of the experts are on the other host, so nearly every token crosses the link.
        assert expected["hierarchical dedup"] < expected["all_to_all"] / 3.5


STEPS = 3
MICRO_BATCHES = {"train": {"micro_batches": 2}}
AGAIN = {"train": {"micro_batches": 2, "recompute": True}}
EARLY = {"balance": {**ASKING, "prefetch": True}}
SPREAD: list[tuple[dict[str, Any], dict[str, Any], int | None]] = [
    ({"ep": 4, "dispatch_hosts": 2, "dispatch": "all_to_all"}, MICRO_BATCHES, 3),
    (
        {"ep": 4, "dispatch_hosts": 2, "dispatch": "dedup", "chunks": 3, "overlap_local": True},
        AGAIN, 4,
    ),
    ({"ep": 4, "dispatch": "dedup"}, {**MICRO_BATCHES, **EARLY}, None),
    ({"ep": 4, "dp_shard": 4}, {**AGAIN, **EARLY}, None),
]  # fmt: skip
"""Layouts, tables, and the seed of random replicas, prefetched in two of three layers."""


def train_on_two_hosts(
    world: World, hosts: tuple[str, str], jobs: list[tuple[Job, int | None]]
) -> Any:
    """Train each job over both hosts."""
    found = []
    with join_across_hosts(world, hosts) as world:
        for job, replica_seed in jobs:
            plan = plan_from_layout(job.layout, job.model, world.size)
            assert isinstance(
                make_dispatch_ranks(plan, world, replicas=True).replica_transport, PairwiseAllToAll
            )
            found.append(run_layout(world, job, STEPS, replica_seed=replica_seed))
    return found


@on_two_hosts
def test_replicas_of_experts_of_the_other_host(ranks: RankPool, own_ranks: RankPool) -> None:
    """Over sockets, pairwise, with prefetched replicas and others."""
    jobs = [
        (tiny_job(**{"balance": ASKING, **tables}, layout=layout), replica_seed)
        for layout, tables, replica_seed in SPREAD
    ]
    with two_hosts() as hosts:
        by_rank: list[list[Run]] = own_ranks.run(4, train_on_two_hosts, hosts, jobs)
    expected = outcome(ranks, 1, tiny_job(**MICRO_BATCHES), STEPS)
    for results in zip(*by_rank, strict=True):
        several = together(list(results))
        assert_same(several, expected)
        assert sum(step["replicas"] for step in several.steps) > 0
