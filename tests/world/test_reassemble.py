"""Train, tear down, assemble another layout in the same processes: same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from layouts import SIGMOID, plain, put_together, worst_element

from moesaic.base.errors import StoreError
from moesaic.dist.state import ROWS, Piece
from moesaic.dist.transfer import PeerSource
from moesaic.dist.world import World
from moesaic.facts.plan import lay_out
from moesaic.models.initial import InitialSource
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import Ranks
from moesaic.train.assemble import assemble

GENERATIONS: list[dict[str, Any]] = [
    {}, {"ep": 4}, {"ep": 2, "shard": 2}, {"tp": 2, "shard": 2}, {"pp": 2, "tp": 2},
    {"ep": 4, "shard": 4}, {"pp": 2, "shard": 2, "schedule": "zero-bubble"},
    {"tp": 2, "etp": 2, "ep": 2}, {"embedding": "columns", "ep": 2},
    {"pp": 2, "embedding": "columns"}, {"tp": 2, "shard": 2, "ep": 4},
]  # fmt: skip
"""All on the same four ranks, one after another."""
TIED = {**SIGMOID, "model": {**SIGMOID["model"], "tied": True}}


def train_through_layouts(
    world: World, generations: list[dict[str, Any]], tables: dict[str, Any]
) -> Any:
    tables = {**tables, "model": {**tables.get("model", {}), "vocab": 60}}
    samples = RandomSamples(60, 12)
    pieces: list[Piece] = []
    counters = None
    losses = []
    for layout in generations:
        job = tiny_job(layout=layout, train={"micro_batches": 2}, **tables)
        plan = lay_out(job.layout, job.model, world.size)
        source = PeerSource(world, pieces) if pieces else InitialSource(job.seed, 0.2)
        run = assemble(job, plan, world, source, counters)
        losses += [run.step(samples).loss for _ in range(2)]
        state = run.state()
        pieces, counters = state.pieces, state.counters
        run.close()
    return losses, [plain(piece) for piece in pieces]


@pytest.mark.parametrize(
    "tables",
    [
        pytest.param({}, id="plain", marks=pytest.mark.soak),
        pytest.param(SIGMOID, id="layers that differ"),
        pytest.param(TIED, id="tied head"),
    ],
)
def test_another_layout_in_the_same_process(ranks: Ranks, tables: dict[str, Any]) -> None:
    moving = ranks.run(4, train_through_layouts, GENERATIONS, tables)
    still = ranks.run(1, train_through_layouts, [{}] * len(GENERATIONS), tables)
    losses, pieces = still[0]
    for rank_losses, _ in moving:
        assert rank_losses == pytest.approx(losses, rel=1e-9)
    assert worst_element(put_together([held for _, held in moving]), put_together([pieces])) < 1e-9


def change(world: World, first: dict[str, Any], then: dict[str, Any]) -> Any:
    """One job's state as that of another job; what is said, if it cannot be."""
    before, after = tiny_job(**first), tiny_job(**then)
    plan = lay_out(before.layout, before.model, world.size)
    run = assemble(before, plan, world, InitialSource(before.seed, 0.2))
    source = PeerSource(world, run.state().pieces)
    try:
        again = assemble(after, lay_out(after.layout, after.model, world.size), world, source)
    except StoreError as error:
        return str(error)
    finally:
        run.close()
    names = {piece.key for piece in again.state().pieces if piece.kind == ROWS}
    again.close()
    return sorted(names)


TP, ALONE = {"layout": {"tp": 2}}, {"layout": {"ep": 2}}


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        ({"train": {"precision": "fp32"}, **TP}, ALONE, "float32 [60, 32] on the ranks that hold"),
        (TP, {"train": {"precision": "fp32"}, **ALONE}, "and torch.float32 [60, 32] in the model"),
        (TP, {"model": {"vocab": 40}, **ALONE}, "and torch.float64 [40, 32] in the model"),
    ],
    ids=["wider", "narrower", "fewer words"],
)
def test_other_numbers_are_not_taken_for_these(
    ranks: Ranks, first: dict[str, Any], then: dict[str, Any], said: str
) -> None:
    tables = ({**one, "model": {"vocab": 60, **one.get("model", {})}} for one in (first, then))
    for found in ranks.run(2, change, *tables):
        assert said in found


def test_rows_may_begin_to_be_counted(ranks: Ranks) -> None:
    free = {"rows_per_s": 1.0, "bytes_per_s": 1e30, "latency_s": 0.0, "hides": True}
    then = {"balance": {"policy": "none", "rehome_every": 2, "prices": free}, **ALONE}
    for found in ranks.run(2, change, ALONE, then):
        assert found
        assert all(key.startswith("rows/") for key in found)


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
