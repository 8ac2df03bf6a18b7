"""Prices that ranks measure at a start: what there must be of them, by what carries rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moesaic.dist.exchange import ByPairs
from moesaic.dist.shared import MEMORY
from moesaic.dist.world import World
from moesaic.facts.job import Prices
from moesaic.facts.plan import lay_out
from moesaic.models.initial import InitialSource
from moesaic.testing.jobs import tiny_job
from moesaic.testing.ranks import Ranks
from moesaic.train.assemble import assemble
from moesaic.train.balancing import measured


def prices(world: World, sockets: bool) -> tuple[str, Prices]:
    balance = {"policy": "quota", "least_rows": 1}
    job = tiny_job(layout={"ep": 2}, train={"precision": "fp32"}, balance=balance)
    plan = lay_out(job.layout, job.model, world.size)
    run = assemble(job, plan, world, InitialSource(job.seed, job.model.init_std))
    moe = next(moe for _, moe in run.model.expert_layers())
    ours = moe.dispatcher.ranks
    assert ours.straight is not None
    if sockets:
        ours = moe.dispatcher.ranks = replace(ours, straight=ByPairs(ours.straight.group))
    assert ours.straight is not None
    return ours.straight.name, measured(moe, None, world)


@pytest.mark.parametrize("sockets", [False, True])
def test_prices_are_those_of_what_carries_rows(ranks: Ranks, sockets: bool) -> None:
    (carrier, one), (_, other) = ranks.run(2, prices, sockets)
    assert one == other  # The slowest counts, of all ranks.
    assert (carrier == MEMORY) != sockets
    assert one.hides == sockets
    assert (one.handling_s > 0) == sockets
    assert min(one.rows_per_s, one.bytes_per_s) > 0
    if sockets:  # A byte goes in and out of memory at least, and takes no millisecond.
        assert 1e-12 < one.handling_s < 1e-6
