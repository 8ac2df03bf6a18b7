"""Prefetch in two dimensions: experts from the drive, dense parameters from other ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from layouts import plain
from test_block_order import GatherCounter
from test_tiers import merged, smallest

from moesaic.dist.checkpoint.staging import Staging, live_values
from moesaic.dist.world import World
from moesaic.facts.expert_blocks import STATE, BlockKind
from moesaic.facts.job import Job
from moesaic.facts.plan import plan_from_layout
from moesaic.models.init import InitialSource
from moesaic.models.lm import DecoderLayer
from moesaic.store.cache import BlockCache
from moesaic.testing.jobs import RandomSamples
from moesaic.testing.ranks import RankPool
from moesaic.train.assemble import LMRun, assemble

LAYERS = 4
SHARDED: dict[str, Any] = {
    "layout": {"ep": 2, "dp_shard": 2}, "model": {"layers": LAYERS}, "train": {"clip": 0.0},
}  # fmt: skip


def make_run(world: World, job: Job) -> LMRun:
    plan = plan_from_layout(job.layout, job.model, world.size)
    return assemble(job, plan, world, InitialSource(job.seed, job.model.init_std))


def with_budget(tables: dict[str, Any], ssd: Path, blocks: int, ranks: int) -> Job:
    host = smallest(merged(tables, ssd=str(ssd)), blocks, ranks)
    return merged(tables, ssd=str(ssd), host=host)


def traced(world: World, job: Job) -> list[tuple[str, int]]:
    """Return what happens in the forward passes of a step, in order, with the layer."""
    run, events = make_run(world, job), list[tuple[str, int]]()
    samples = RandomSamples(job.model.vocab, job.data.sequence)
    run.step(samples)
    layers = list(run.part.model.decoder_layers())
    tiers = run.part.tiers
    assert tiers is not None
    owners = {
        places.block(slot): layer
        for layer, places in tiers.places.items()
        for slot in range(places.num_slots)
    }
    read, gather, compute = BlockCache._read, type(layers[0]).unshard, DecoderLayer._compute

    def on_read(cache: BlockCache, block: int, **options: Any) -> None:
        if block in owners:
            events.append(("read", owners[block]))
        read(cache, block, **options)

    def on_gather(layer: Any, async_op: bool = False) -> Any:
        events.append(("gather" if async_op else "wait", layers.index(layer)))
        return gather(layer, async_op)

    def on_compute(layer: DecoderLayer, *arguments: Any) -> Any:
        events.append(("begin", layers.index(layer)))
        result = compute(layer, *arguments)
        events.append(("end", layers.index(layer)))
        return result

    with (
        mock.patch.object(BlockCache, "_read", on_read),
        mock.patch.object(type(layers[0]), "unshard", on_gather),
        mock.patch.object(DecoderLayer, "_compute", on_compute),
    ):
        run.step(samples)
    run.close()
    return events[: events.index(("end", LAYERS - 1))]


def test_the_next_layer_is_read_and_gathered_while_one_computes(
    ranks: RankPool, tmp_path: Path
) -> None:
    job = with_budget(SHARDED, tmp_path, 14, 2)
    for events in ranks.run(2, traced, job):
        for layer in range(1, LAYERS):
            computed = events.index(("end", layer - 1))
            assert events.index(("gather", layer)) < events.index(("begin", layer - 1))
            # Layer 1 was read at the end of the step before.
            assert layer == 1 or ("read", layer) in events[:computed], layer


def trained(world: World, job: Job, reads_ahead: bool) -> tuple[list[float], list[Any]]:
    read_ahead = BlockCache._read_ahead if reads_ahead else (lambda _: None)
    with mock.patch.object(BlockCache, "_read_ahead", read_ahead):
        run = make_run(world, job)
        samples = RandomSamples(job.model.vocab, job.data.sequence)
        norms = [run.step(samples).grad_norm for _ in range(3)]
        state = [plain(shard) for shard in run.state().shards]
        run.close()
    return norms, state


def test_without_read_ahead_the_bits_are_the_same(ranks: RankPool, tmp_path: Path) -> None:
    job = with_budget(SHARDED, tmp_path, 14, 2)
    ahead, on_demand = (ranks.run(2, trained, job, reads_ahead) for reads_ahead in (True, False))
    for (norms, state), (expected_norms, expected) in zip(ahead, on_demand, strict=True):
        assert norms == expected_norms
        for (key, *_, found), (*_, wanted) in zip(state, expected, strict=True):
            assert np.array_equal(found, wanted), key


def collectives(world: World, job: Job) -> Counter[str]:
    run = make_run(world, job)
    samples = RandomSamples(job.model.vocab, job.data.sequence)
    run.step(samples)
    with GatherCounter() as counter:
        run.step(samples)
    run.close()
    return Counter({name: n for name, n in counter.counts.items() if name.startswith("c10d")})


def test_reading_experts_takes_no_further_collective(ranks: RankPool, tmp_path: Path) -> None:
    few = ranks.run(2, collectives, with_budget(SHARDED, tmp_path, 14, 2))
    full = ranks.run(2, collectives, merged(SHARDED))
    assert few == full
    assert few[0].total() > 0


def written(world: World, job: Job) -> list[dict[str, set[int]]]:
    """Return blocks of each step: written ones, changed ones, gradients, and those that are dirty
    before and after it."""
    run, steps = make_run(world, job), []
    samples = RandomSamples(job.model.vocab, job.data.sequence)
    assert run.part.tiers is not None
    places, cache, write = run.part.tiers.places, run.part.tiers.cache, BlockCache._write

    def on_write(cache: BlockCache, block: int, **options: Any) -> None:
        step["written"].add(block)
        write(cache, block, **options)

    with mock.patch.object(BlockCache, "_write", on_write):
        for _ in range(4):
            step = {"before": set(cache.contents()[1]), "written": set[int]()}
            counts = run.step(samples).counts
            touched = [
                (places[layer], slot)
                for layer, tokens in counts.items()
                for slot in tokens.nonzero().flatten().tolist()
            ]
            step["after"] = set(cache.contents()[1])
            step["changed"] = {own.block(slot, kind) for own, slot in touched for kind in STATE}
            step["gradients"] = {own.block(slot, BlockKind.GRADIENT) for own, slot in touched}
            steps.append(step)
    run.close()
    return steps


@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("period", [0, 2])
def test_only_changed_state_is_written(
    ranks: RankPool, tmp_path: Path, period: int, clip: float
) -> None:
    """One sample of top-1 tokens touches few experts; a write period writes what has changed."""
    tables = {
        "model": {"top_k": 1, "layers": 4, "experts": 32}, "train": {"batch": 1, "clip": clip},
        "data": {"sequence": 6},
    }  # fmt: skip
    host = smallest(merged(tables, ssd=str(tmp_path)), 40, 1)
    job = merged(tables, ssd=str(tmp_path), host=host, period=period)
    (steps,) = ranks.run(1, written, job)
    for number, one in enumerate(steps, 1):
        assert len(one["changed"]) <= 3 * 4 * 6
        state = one["before"] | one["changed"]
        assert (one["written"] | one["after"]) - one["gradients"] == state
        if period and number % period == 0:
            assert not one["after"]
            assert one["written"]


def saved(world: World, job: Job) -> list[tuple[int, int, list[bytes]]]:
    """Return reads, misses and values of a save that reads ahead, and of one that does not."""
    run, found = make_run(world, job), []
    assert run.part.tiers is not None
    run.step(RandomSamples(job.model.vocab, job.data.sequence))
    cache, state = run.part.tiers.cache, run.state()
    files = Staging(world.rank, world.device, 1 << 20).plan_files(state.shards).files
    for expect_reads in (state.expect_reads, None):
        cache.take_stats()
        state.expect_reads = expect_reads
        values = [bytes(one) for file in files for one in live_values(file, state)]
        stats = cache.take_stats()
        found.append((stats.reads, stats.misses, values))
    run.close()
    return found


def test_a_save_reads_ahead(ranks: RankPool, tmp_path: Path) -> None:
    tables = {"model": {"layers": 4, "experts": 32}}
    (found,) = ranks.run(1, saved, with_budget(tables, tmp_path, 40, 1))
    (reads, misses, values), (on_demand, all_misses, same_values) = found
    assert values == same_values
    assert min(reads, on_demand) > 300
    assert on_demand == all_misses
    assert misses < 0.1 * reads
