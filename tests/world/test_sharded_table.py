"""Rows of a table over ranks: equal to those of one table, and what travels."""

from __future__ import annotations

from typing import Any

import numpy as np

from moesaic.dist.world import World
from moesaic.facts.job import TableConfig
from moesaic.ps.sharded import ShardedTable
from moesaic.ps.table import Table
from moesaic.testing.ranks import RankPool

DIM = 4
CONFIG = TableConfig(admit_count=2, max_rows=5, optimizer="adam", init_std=0.5)


def bags_of(rank: int) -> tuple[Any, ...]:
    """Return keys, offsets, gradients and clicks of a rank; rank 2 has no sample."""
    random = np.random.default_rng(rank)
    sizes = np.array([2, 0, 3, 1, 4] if rank < 2 else [], np.int64)
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    keys = random.integers(-4, 4, offsets[-1])
    grads = random.normal(size=(len(sizes), DIM))
    return keys, offsets, grads, random.integers(0, 2, len(sizes)).astype(np.float32)


def make_table() -> Table:
    return Table(CONFIG, DIM, seed=3, dtype="float64")


def train_ranks(world: World) -> tuple[list[Any], dict[int, bytes], int]:
    """Take two steps and end a day; return the sums, this rank's records, and bytes sent."""
    rows = ShardedTable(make_table(), world)
    sums = []
    for _ in range(2):
        keys, offsets, grads, clicks = bags_of(world.rank)
        lookup = rows.look_up(keys, offsets, training=True)
        lookup.push(grads, clicks)
        sums.append(lookup.sums)
        rows.step()
    sent = rows.take_bytes_sent()
    rows.end_day()
    assert rows.num_rows() == 5
    owned, _ = rows.table.index.items()
    assert rows.owns(owned).all()
    return sums, records_of(rows.table), sent


def records_of(table: Table) -> dict[int, bytes]:
    keys, _ = table.index.items()
    return {
        key: record.tobytes() for key, record in zip(keys.tolist(), table.read(keys), strict=True)
    }


def test_ranks_equal_one_table(ranks: RankPool) -> None:
    """Admission counts the samples of all ranks, and the cap on rows is one for all."""
    table = make_table()
    sums = []
    for _ in range(2):
        lookups = [(table.look_up(*bags_of(rank)[:2], training=True), rank) for rank in range(3)]
        for lookup, rank in lookups:
            lookup.push(*bags_of(rank)[2:])
        sums.append([lookup.sums for lookup, _ in lookups])
        table.step()
    single = ShardedTable(table, World.solo())
    single.end_day()
    found = ranks.run(3, train_ranks)
    for step in range(2):
        for rank in range(3):
            np.testing.assert_allclose(found[rank][0][step], sums[step][rank], rtol=1e-12)
    expected = records_of(table)
    assert len(expected) == 5
    records = {key: record for _, one, _ in found for key, record in one.items()}
    assert records.keys() == expected.keys()
    for key, record in records.items():
        numbers = 3 * DIM * 8
        np.testing.assert_allclose(
            np.frombuffer(record[:numbers]), np.frombuffer(expected[key][:numbers]), rtol=1e-12
        )
        assert record[numbers:] == expected[key][numbers:]


def count_bytes(world: World) -> tuple[int, int, int]:
    """Return the bytes of one step, distinct keys sent to others, and keys received from them."""
    rows = ShardedTable(make_table(), world)
    keys, offsets, grads, clicks = bags_of(world.rank)
    lookup = rows.look_up(keys, offsets, training=True)
    lookup.push(grads, clicks)
    rows.step()
    assert lookup.route is not None
    received = sum(lookup.route.receive) - lookup.route.receive[world.rank]
    return rows.take_bytes_sent(), int((~rows.owns(np.unique(keys))).sum()), received


def test_only_distinct_keys_and_their_rows_travel(ranks: RankPool) -> None:
    for sent, num_keys, received in ranks.run(2, count_bytes):
        assert num_keys > 0
        counts, gradient = 8, (DIM + 2) * 8
        assert sent == counts + num_keys * (8 + gradient) + received * DIM * 8
