"""Train, close, and assemble another layout in the same processes: same results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from layouts import SIGMOID, plain, put_together, worst_element

from moesaic.base.errors import StoreError
from moesaic.dist.state import EXPERT_TOKENS, TensorShard
from moesaic.dist.transfer import PeerSource
from moesaic.dist.world import World
from moesaic.facts.plan import plan_from_layout
from moesaic.models.init import InitialSource
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import RankPool
from moesaic.testing.runs import start_run
from moesaic.testing.states import live_values
from moesaic.train.assemble import assemble
from moesaic.train.parts import PartPlacement

GENERATIONS: list[dict[str, Any]] = [
    {}, {"ep": 4}, {"ep": 2, "dp_shard": 2}, {"tp": 2, "dp_shard": 2}, {"pp": 2, "tp": 2},
    {"ep": 4, "dp_shard": 4}, {"pp": 2, "dp_shard": 2, "schedule": "zero-bubble"},
    {"tp": 2, "etp": 2, "ep": 2}, {"embedding": "columns", "ep": 2},
    {"pp": 2, "embedding": "columns"}, {"tp": 2, "dp_shard": 2, "ep": 4},
]  # fmt: skip
"""Layouts of the same four ranks, one after another."""


OF_TWO_RANKS: list[dict[str, Any]] = [
    {}, {"ep": 2, "dp_shard": 2, "dispatch": "dedup"}, {"tp": 2, "etp": 2}, {"pp": 2},
    {"ep": 2, "embedding": "columns"},
]  # fmt: skip
OF_FOUR_RANKS: list[dict[str, Any]] = [
    {"ep": 2, "dp_shard": 2}, {"ep": 4, "dispatch": "dedup", "dispatch_hosts": 2},
    {"tp": 2, "dp_shard": 2, "ep": 4}, {"pp": 2, "tp": 2},
]  # fmt: skip


def train_through_layouts(
    world: World, generations: list[dict[str, Any]], ranks: Sequence[int] = ()
) -> Any:
    """Train dense and sparse layers with a tied head, two steps in each layout, on some of the
    ranks if they are given."""
    tables = {**SIGMOID, "model": {**SIGMOID["model"], "tied": True, "vocab": 60}}
    samples = RandomSamples(60, 12)
    shards: list[TensorShard] = []
    counters = None
    losses = []
    for layout in generations:
        job = tiny_job(layout=layout, train={"micro_batches": 2}, **tables)
        plan = plan_from_layout(job.layout, job.model, len(ranks) or world.size)
        own = PartPlacement("", plan, ranks or range(world.size)).subset(world)
        if own is None:
            continue
        source = PeerSource(own, shards) if shards else InitialSource(job.seed, 0.2)
        run = assemble(job, plan, own, source, counters)
        losses += [run.step(samples).loss for _ in range(2)]
        state = run.state()
        shards, counters = state.shards, state.counters
        run.close()
    return losses, [plain(shard) for shard in shards]


def test_another_layout_in_the_same_process(ranks: RankPool) -> None:
    several = ranks.run(4, train_through_layouts, GENERATIONS)
    single = ranks.run(1, train_through_layouts, [{}] * len(GENERATIONS))
    losses, shards = single[0]
    for rank_losses, _ in several:
        assert rank_losses == pytest.approx(losses, rel=1e-9)
    assert worst_element(put_together([held for _, held in several]), put_together([shards])) < 1e-9


@pytest.mark.parametrize(
    ("some", "layouts"),
    [((0, 2), OF_TWO_RANKS), ((0, 1, 3, 4), OF_FOUR_RANKS)],
    ids=["two of three", "four of five"],
)
def test_some_of_the_ranks_equal_a_world_of_their_own(
    ranks: RankPool, some: tuple[int, ...], layouts: list[dict[str, Any]]
) -> None:
    apart = ranks.run(some[-1] + 1, train_through_layouts, layouts, some)
    alone = ranks.run(len(some), train_through_layouts, layouts)
    assert [losses for losses, _ in alone] == [apart[rank][0] for rank in some]
    assert not any(value for rank, one in enumerate(apart) if rank not in some for value in one)
    found = put_together([apart[rank][1] for rank in some])
    assert worst_element(found, put_together([shards for _, shards in alone])) == 0.0


def leave_with_subsets(world: World) -> list[int]:
    """Return the threads of this process after each of some worlds, whose subsets stay."""
    store, plan = world.store, plan_from_layout(tiny_job().layout, tiny_job().model, 2)
    world.leave()
    numbers, kept = [], []
    for generation in range(3):
        again = World.join(world.rank, world.size, store, generation=200 + generation)
        for ranks in ((0, 2), (1, 2)):
            kept.append(PartPlacement(f"{ranks}.", plan, ranks).subset(again))
        again.leave()
        assert all(one is None or one.group is None for one in kept)
        numbers.append(len(list(Path("/proc/self/task").iterdir())))
    return numbers


def test_subsets_end_with_their_world(ranks: RankPool) -> None:
    for first, *later in ranks.run(3, leave_with_subsets):
        assert later == [first, first]


def convert_state(world: World, first: dict[str, Any], then: dict[str, Any]) -> Any:
    """Fill the second job's state from the first; return its token count keys, or the error."""
    before, after = tiny_job(**first), tiny_job(**then)
    plan = plan_from_layout(before.layout, before.model, world.size)
    run = assemble(before, plan, world, InitialSource(before.seed, 0.2))
    source = PeerSource(world, run.state().shards)
    try:
        again = assemble(
            after, plan_from_layout(after.layout, after.model, world.size), world, source
        )
    except StoreError as error:
        return str(error)
    finally:
        run.close()
    names = {shard.key for shard in again.state().shards if shard.kind == EXPERT_TOKENS}
    again.close()
    return sorted(names)


TP, ALONE = {"layout": {"tp": 2}}, {"layout": {"ep": 2}}


@pytest.mark.parametrize(
    ("first", "then", "error"),
    [
        ({"train": {"precision": "fp32"}, **TP}, ALONE, "float32 [60, 32] on the ranks that have"),
        (TP, {"train": {"precision": "fp32"}, **ALONE}, "and torch.float32 [60, 32] in the model"),
        (TP, {"model": {"vocab": 40}, **ALONE}, "and torch.float64 [40, 32] in the model"),
    ],
    ids=["wider", "narrower", "smaller vocabulary"],
)
def test_state_of_another_type_or_shape_is_rejected(
    ranks: RankPool, first: dict[str, Any], then: dict[str, Any], error: str
) -> None:
    tables = ({**one, "model": {"vocab": 60, **one.get("model", {})}} for one in (first, then))
    for found in ranks.run(2, convert_state, *tables):
        assert error in found


def test_expert_token_counts_may_start_at_zero(ranks: RankPool) -> None:
    free = {"expert_tokens_per_s": 1.0, "bytes_per_s": 1e30, "latency_s": 0.0, "overlaps": True}
    then = {"balance": {"policy": "none", "migrate_every": 2, "costs": free}, **ALONE}
    for found in ranks.run(2, convert_state, ALONE, then):
        assert found
        assert all(key.startswith(f"{EXPERT_TOKENS}/") for key in found)


def rejoin(world: World) -> list[float]:
    """Train one run on 3, 2 and 3 ranks in the same processes."""
    store = world.store
    job = tiny_job(layout={"dp_shard": "all"}, train={"batch": 6})
    samples = RandomSamples(61, 12)
    losses: list[float] = []
    shards: list[TensorShard] = []
    counters: dict[str, int] | None = None
    world.leave()
    for generation, size in enumerate((3, 2, 3)):
        if world.rank >= size:
            shards, counters = [], None
            continue
        again = World.join(world.rank, size, store, generation=100 + generation)
        if generation:
            shared = [counters]
            dist.broadcast_object_list(shared, src=0, group=again.group)
            counters = shared[0]
        # A rank that left takes its shards along, so keep unsharded copies.
        source = PeerSource(again, shards) if generation else InitialSource(job.seed, 0.2)
        run = assemble(job, plan_from_layout(job.layout, job.model, size), again, source, counters)
        losses += [run.step(samples).loss for _ in range(2)]
        state = run.state()
        whole = [_whole(shard, again) for shard in state.shards]
        shards, counters = whole, state.counters
        run.close()
        again.leave()
    return losses


def _whole(shard: TensorShard, world: World) -> TensorShard:
    gathered: list[Any] = [None] * world.size
    dist.all_gather_object(gathered, (shard.offset, live_values(shard)), group=world.group)
    whole = live_values(shard).new_zeros(shard.shape)
    for offset, values in gathered:
        box = tuple(slice(a, a + n) for a, n in zip(offset, values.shape, strict=True))
        whole[box] = values
    owners = tuple(range(world.size))
    return TensorShard.of_tensor(
        shard.kind, shard.name, shard.shape, (0,) * len(shard.shape), whole, owners
    )


def reference_losses(world: World) -> list[float]:
    job = tiny_job(train={"batch": 6})
    run, samples = start_run(job, world), RandomSamples(61, 12)
    return [run.step(samples).loss for _ in range(6)]


def test_worlds_of_three_sizes(ranks: RankPool) -> None:
    results = ranks.run(3, rejoin)
    expected = ranks.run(1, reference_losses)[0]
    assert results[0] == pytest.approx(expected, rel=1e-9)
    assert results[2] == pytest.approx(expected[:2] + expected[4:], rel=1e-9)
