"""Column-sharded embeddings: lookups and gradients equal one process."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.dist.all_to_all import GroupAllToAll, PairwiseAllToAll, Transport
from moesaic.dist.collectives import GatherColumns
from moesaic.dist.world import World
from moesaic.nn.sharded_embedding import ShardedEmbedding
from moesaic.testing.ranks import RankPool

VOCAB, WIDTH = 23, 6
"""Words, and columns of a rank."""
SHAPES: dict[str, list[tuple[int, int]]] = {
    "even": [(2, 5), (2, 5), (2, 5), (2, 5)],
    "uneven": [(3, 7), (1, 7), (2, 7), (4, 7)],
    "some have none": [(0, 9), (2, 9), (0, 9), (3, 9)],
    "one token each": [(1, 1), (1, 1), (1, 1), (1, 1)],
    "no token": [(0, 4), (0, 4), (0, 4), (0, 4)],
}
"""Samples of each rank, and tokens of each sample."""
TRANSPORTS: dict[str, Callable[[World], Transport | None]] = {
    "shared memory": lambda world: world.transport([list(range(world.size))]),
    "pairwise": lambda world: PairwiseAllToAll(world.group),  # type: ignore[arg-type]
    "group": lambda world: GroupAllToAll(world.group),  # type: ignore[arg-type]
}


def make_case(shapes: str, words: int, size: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return a table, ids of each rank below `words`, and gradients of what each looks up."""
    draw = torch.Generator().manual_seed(11)
    table = torch.randn(VOCAB, size * WIDTH, generator=draw)
    ids = [torch.randint(words, shape, generator=draw) for shape in SHAPES[shapes][:size]]
    # Magnitudes differ, so a sum in another order has other bits.
    seeds = [
        torch.randn(*one.shape, size * WIDTH, generator=draw)
        * 10.0 ** torch.randint(-3, 4, (*one.shape, 1), generator=draw)
        for one in ids
    ]
    return table, ids, seeds


def own_columns(table: Tensor, rank: int) -> Tensor:
    return table[:, rank * WIDTH : (rank + 1) * WIDTH]


def look_up(world: World, shapes: str, words: int, transport: str) -> tuple[Tensor, Tensor | None]:
    """Return the lookups of a rank, and the gradient of its columns of the table."""
    table, ids, seeds = make_case(shapes, words, world.size)
    own = own_columns(table, world.rank).clone().requires_grad_()
    embedding = ShardedEmbedding(world.size, TRANSPORTS[transport](world))
    found = embedding.look_up(ids[world.rank], own)
    found.backward(seeds[world.rank])
    with torch.no_grad():
        assert torch.equal(embedding.look_up(ids[world.rank], own), found)
    return found.detach(), own.grad


def look_up_on_one_rank(
    table: Tensor, ids: list[Tensor], seeds: list[Tensor]
) -> tuple[list[Tensor], Tensor]:
    """Return the lookups of each rank, and the gradient of the table."""
    weight = table.clone().requires_grad_()
    found = F.embedding(torch.cat([one.flatten() for one in ids]), weight)
    found.backward(torch.cat([seed.flatten(0, 1) for seed in seeds]))
    assert weight.grad is not None
    return list(found.detach().split([one.numel() for one in ids])), weight.grad


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("shapes", "words"), [*((one, VOCAB) for one in SHAPES), ("uneven", 1)])
@pytest.mark.parametrize("size", [2, 4])
def test_bits_equal_one_process(
    ranks: RankPool, size: int, shapes: str, words: int, transport: str
) -> None:
    expected, whole = look_up_on_one_rank(*make_case(shapes, words, size))
    for rank, (found, gradient) in enumerate(ranks.run(size, look_up, shapes, words, transport)):
        assert torch.equal(found.flatten(0, 1), expected[rank])
        assert torch.equal(gradient, own_columns(whole, rank))


def test_another_order_of_tokens_has_other_bits() -> None:
    """The test above would notice."""
    table, ids, seeds = make_case("uneven", 1, 4)
    one, other = (look_up_on_one_rank(table, ids[::order], seeds[::order])[1] for order in (1, -1))
    assert not torch.equal(one, other)


def worst_gradient_error(world: World) -> float:
    """Return the largest difference of a gradient from a difference quotient, in fp64.

    The loss is a sum over all ranks, which `gradcheck` does not support.
    """
    embedding = ShardedEmbedding(world.size, world.transport([list(range(world.size))]))
    draw = torch.Generator().manual_seed(world.rank)
    ids = torch.randint(4, (world.rank % 2 * 2, 3), generator=draw)
    weight = torch.randn(4, 2, generator=draw, dtype=torch.float64, requires_grad=True)
    factors = torch.randn(*ids.shape, 2 * world.size, generator=draw, dtype=torch.float64)

    def loss(own: Tensor) -> Tensor:
        return (embedding.look_up(ids, own).square() * factors).sum()

    (own_grad,) = torch.autograd.grad(loss(weight), weight)
    step, worst = 1e-6, 0.0
    for rank, index in product(range(world.size), range(weight.numel())):
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                moved = weight.clone()
                moved.view(-1)[index] += sign * step * (rank == world.rank)
                total = loss(moved)
            torch.distributed.all_reduce(total)
            values.append(float(total))
        if rank == world.rank:
            slope = (values[0] - values[1]) / (2 * step)
            worst = max(worst, abs(slope - float(own_grad.view(-1)[index])))
    return worst


def test_gradients_equal_difference_quotients(ranks: RankPool) -> None:
    assert max(ranks.run(4, worst_gradient_error)) < 1e-8


def look_up_frozen(world: World) -> bool:
    embedding = ShardedEmbedding(world.size, world.transport([list(range(world.size))]))
    return embedding.look_up(torch.zeros(1, 2, dtype=torch.int64), torch.ones(4, 2)).requires_grad


def test_a_frozen_table_has_no_gradient(ranks: RankPool) -> None:
    assert ranks.run(2, look_up_frozen) == [False] * 2


def gather_columns(world: World, bucket_bytes: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of a gathered table, and of this rank's columns."""
    draw = torch.Generator().manual_seed(5)
    table = torch.randn(VOCAB, world.size * WIDTH, generator=draw, dtype=torch.float64)
    own = own_columns(table, world.rank).clone().requires_grad_()
    gathered = GatherColumns.apply(own, world.group, bucket_bytes)
    assert torch.equal(gathered, table)
    seed = torch.randn(gathered.shape, dtype=torch.float64, generator=draw) * (1 + world.rank)
    first, second = (
        torch.autograd.grad(gathered, own, seed, retain_graph=True)[0] for _ in range(2)
    )
    assert torch.equal(first, second)
    return seed, first


@pytest.mark.parametrize("rows", [1, 5, VOCAB, 100])
@pytest.mark.parametrize("size", [2, 3])
def test_gathered_columns(ranks: RankPool, size: int, rows: int) -> None:
    """In messages of any number of rows; a message has one row at least."""
    found = ranks.run(size, gather_columns, rows * size * WIDTH * 8 if rows > 1 else 1)
    total: Any = sum(seed for seed, _ in found)
    for rank, (_, gradient) in enumerate(found):
        torch.testing.assert_close(gradient, own_columns(total, rank))
