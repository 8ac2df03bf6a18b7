"""Train, tear down, assemble another layout in the same processes: same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from layouts import SIGMOID, plain, put_together, worst_element

from moesaic.dist.state import Piece
from moesaic.dist.transfer import PeerSource
from moesaic.dist.world import World
from moesaic.facts.plan import lay_out
from moesaic.models.initial import InitialSource
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import Ranks
from moesaic.train.assemble import assemble

GENERATIONS = [(1, 1), (4, 1), (2, 2), (4, 4)]
"""ep and shard of each generation, all on the same four ranks."""


def train_through_layouts(
    world: World, generations: list[tuple[int, int]], tables: dict[str, Any]
) -> Any:
    samples = RandomSamples(61, 12)
    pieces: list[Piece] = []
    counters = None
    losses = []
    for ep, shard in generations:
        job = tiny_job(layout={"ep": ep, "shard": shard}, train={"micro_batches": 2}, **tables)
        plan = lay_out(job.layout, job.model, world.size)
        source = PeerSource(world, pieces) if pieces else InitialSource(job.seed, 0.2)
        run = assemble(job, plan, world, source, counters)
        losses += [run.step(samples).loss for _ in range(3)]
        state = run.state()
        pieces, counters = state.pieces, state.counters
        run.close()
    return losses, [plain(piece) for piece in pieces]


@pytest.mark.parametrize("tables", [{}, SIGMOID], ids=["plain", "layers that differ"])
def test_another_layout_in_the_same_process(ranks: Ranks, tables: dict[str, Any]) -> None:
    moving = ranks.run(4, train_through_layouts, GENERATIONS, tables)
    still = ranks.run(1, train_through_layouts, [(1, 1)] * len(GENERATIONS), tables)
    losses, pieces = still[0]
    for rank_losses, _ in moving:
        assert rank_losses == pytest.approx(losses, rel=1e-9)
    assert worst_element(put_together([held for _, held in moving]), put_together([pieces])) < 1e-9


def rejoin(world: World) -> list[float]:
    """Three generations of world on 3, 2 and 3 ranks in the same processes, one training run."""
    store = world.store
    job = tiny_job(layout={"shard": "all"}, train={"batch": 6})
    samples = RandomSamples(61, 12)
    losses: list[float] = []
    pieces: list[Piece] = []
    counters: dict[str, int] | None = None
    world.leave()
    for generation, size in enumerate((3, 2, 3)):
        if world.rank >= size:
            pieces, counters = [], None
            continue
        again = World.join(world.rank, size, store, generation=100 + generation)
        if generation:
            shared = [counters]
            dist.broadcast_object_list(shared, src=0, group=again.everyone)
            counters = shared[0]
        # A rank that left takes its pieces along: keep whole copies, as snapshots of peers do.
        source = PeerSource(again, pieces) if generation else InitialSource(job.seed, 0.2)
        run = assemble(job, lay_out(job.layout, job.model, size), again, source, counters)
        losses += [run.step(samples).loss for _ in range(2)]
        state = run.state()
        solo = [_whole(piece, again) for piece in state.pieces]
        pieces, counters = solo, state.counters
        run.close()
        again.leave()
    return losses


def _whole(piece: Piece, world: World) -> Piece:
    gathered: list[Any] = [None] * world.size
    dist.all_gather_object(gathered, (piece.offset, piece.tensor), group=world.everyone)
    whole = piece.tensor.new_zeros(piece.shape)
    for offset, values in gathered:
        box = tuple(slice(a, a + n) for a, n in zip(offset, values.shape, strict=True))
        whole[box] = values
    owners = tuple(range(world.size))
    return Piece(piece.kind, piece.name, piece.shape, (0,) * len(piece.shape), whole, owners)


def reference_losses(world: World) -> list[float]:
    job = tiny_job(train={"batch": 6})
    run = assemble(job, lay_out(job.layout, job.model, 1), world, InitialSource(job.seed, 0.2))
    samples = RandomSamples(61, 12)
    return [run.step(samples).loss for _ in range(6)]


def test_three_generations_of_world(ranks: Ranks) -> None:
    results = ranks.run(3, rejoin)
    expected = ranks.run(1, reference_losses)[0]
    assert results[0] == pytest.approx(expected, rel=1e-9)
    assert results[2] == pytest.approx(expected[:2] + expected[4:], rel=1e-9)
