"""Prices that ranks measure when a run starts, for shared memory and for sockets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moesaic.dist.all_to_all import PairwiseAllToAll
from moesaic.dist.shm_all_to_all import SHARED_MEMORY
from moesaic.dist.world import World
from moesaic.facts.job import Prices
from moesaic.testing.jobs import tiny_job
from moesaic.testing.ranks import RankPool
from moesaic.testing.runs import start_run
from moesaic.train.balancing import measure_prices


def transport_and_prices(world: World, sockets: bool) -> tuple[str, Prices]:
    balance = {"policy": "quota", "min_replica_tokens": 1}
    job = tiny_job(layout={"ep": 2}, train={"precision": "fp32"}, balance=balance)
    run = start_run(job, world)
    moe = next(moe for _, moe in run.part.model.expert_layers())
    groups = moe.dispatcher.groups
    assert groups.replica_transport is not None
    if sockets:
        groups = moe.dispatcher.groups = replace(
            groups, replica_transport=PairwiseAllToAll(groups.replica_transport.group)
        )
    assert groups.replica_transport is not None
    return groups.replica_transport.name, measure_prices(moe, None, world)


@pytest.mark.parametrize("sockets", [False, True])
def test_measured_prices_fit_the_transport(ranks: RankPool, sockets: bool) -> None:
    (transport, one), (_, other) = ranks.run(2, transport_and_prices, sockets)
    assert one == other  # The slowest rank counts.
    assert (transport == SHARED_MEMORY) != sockets
    assert one.overlaps == sockets
    assert (one.cpu_s_per_byte > 0) == sockets
    assert min(one.expert_tokens_per_s, one.bytes_per_s) > 0
    if sockets:  # More than a memory access, less than a microsecond.
        assert 1e-12 < one.cpu_s_per_byte < 1e-6
