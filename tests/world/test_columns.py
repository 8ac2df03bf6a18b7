"""An embedding whose columns ranks share out: lookups and gradients are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.dist.all_to_all import GroupAllToAll, PairwiseAllToAll, Transport
from moesaic.dist.collectives import GatherColumns
from moesaic.dist.world import World
from moesaic.nn.sharded_embedding import ShardedEmbedding
from moesaic.testing.ranks import RankPool

VOCAB, WIDTH = 23, 6
"""Words, and columns of a rank."""
TOKENS: dict[str, list[tuple[int, int]]] = {
    # By rank: samples, and tokens of each.
    "even": [(2, 5), (2, 5), (2, 5), (2, 5)],
    "uneven": [(3, 7), (1, 7), (2, 7), (4, 7)],
    "some have none": [(0, 9), (2, 9), (0, 9), (3, 9)],
    "one token in all": [(0, 1), (0, 1), (1, 1), (0, 1)],
    "one token each": [(1, 1), (1, 1), (1, 1), (1, 1)],
    "nobody has any": [(0, 4), (0, 4), (0, 4), (0, 4)],
}
WORDS: dict[str, Callable[[tuple[int, int], torch.Generator], Tensor]] = {
    "any words": lambda shape, draw: torch.randint(VOCAB, shape, generator=draw),
    "one word": lambda shape, draw: torch.full(shape, 4),
    "two words": lambda shape, draw: torch.randint(2, shape, generator=draw) * (VOCAB - 1),
}
CARRIERS: dict[str, Callable[[World], Transport | None]] = {
    "as the world has it": lambda world: world.transport([list(range(world.size))]),
    "pairs": lambda world: PairwiseAllToAll(world.group),  # type: ignore[arg-type]
    "group": lambda world: GroupAllToAll(world.group),  # type: ignore[arg-type]
}


def drawn(tokens: str, words: str, size: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """A table, ids of each rank, and gradients of what each has looked up."""
    draw, dtype = torch.Generator().manual_seed(11), torch.float32
    table = torch.randn(VOCAB, size * WIDTH, generator=draw, dtype=dtype)
    ids = [WORDS[words](shape, draw) for shape in TOKENS[tokens][:size]]
    # Of all magnitudes: a sum in another order would be another sum.
    seeds = [
        torch.randn(*one.shape, size * WIDTH, generator=draw)
        * 10.0 ** torch.randint(-3, 4, (*one.shape, 1), generator=draw)
        for one in ids
    ]
    return table, ids, seeds


def look_up(world: World, tokens: str, words: str, by: str) -> tuple[Tensor, Tensor | None]:
    """What a rank finds for its ids, and the gradient of its columns of the table."""
    table, ids, seeds = drawn(tokens, words, world.size)
    here = slice(world.rank * WIDTH, (world.rank + 1) * WIDTH)
    own = table[:, here].clone().requires_grad_()
    columns = ShardedEmbedding(world.size, CARRIERS[by](world))
    found = columns.look_up(ids[world.rank], own)
    found.backward(seeds[world.rank])
    with torch.no_grad():
        assert torch.equal(columns.look_up(ids[world.rank], own), found)
    return found.detach(), own.grad


@pytest.mark.parametrize("by", CARRIERS)
@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("size", [2, 4])
def test_bits_are_those_of_one_process(
    ranks: RankPool, size: int, tokens: str, words: str, by: str
) -> None:
    table, ids, seeds = drawn(tokens, words, size)
    one = nn.Embedding.from_pretrained(table, freeze=False)
    everything = torch.cat([part.flatten() for part in ids])
    looked_up = one(everything)
    looked_up.backward(torch.cat([seed.flatten(0, 1) for seed in seeds]))
    whole = one.weight.grad
    assert whole is not None
    for rank, (found, gradient) in enumerate(ranks.run(size, look_up, tokens, words, by)):
        before = sum(part.numel() for part in ids[:rank])
        mine = looked_up[before : before + ids[rank].numel()]
        assert torch.equal(found, mine.view(*ids[rank].shape, size * WIDTH))
        assert torch.equal(gradient, whole[:, rank * WIDTH : (rank + 1) * WIDTH])


def test_another_order_of_tokens_would_be_other_bits() -> None:
    """What the test above can see."""
    table, ids, seeds = drawn("uneven", "one word", 4)
    gradients = []
    for order in (1, -1):
        weight = table.clone().requires_grad_()
        found = F.embedding(torch.cat([part.flatten() for part in ids[::order]]), weight)
        found.backward(torch.cat([seed.flatten(0, 1) for seed in seeds[::order]]))
        gradients.append(weight.grad)
    assert not torch.equal(*gradients)  # type: ignore[arg-type]


def checked(world: World, frozen: bool) -> int:
    """Derivatives against differences; `frozen`, exchanges of a lookup that nobody learns."""
    carrier = world.transport([list(range(world.size))])
    assert carrier is not None
    columns = ShardedEmbedding(world.size, carrier)
    draw = torch.Generator().manual_seed(world.rank)
    ids = torch.randint(4, (world.rank % 2 * 2, 3), generator=draw)
    weight = torch.randn(4, 2, generator=draw, dtype=torch.float64, requires_grad=not frozen)
    if frozen:
        return int(columns.look_up(ids, weight).requires_grad)
    factors = torch.randn(*ids.shape, 2 * world.size, generator=draw, dtype=torch.float64)

    def loss(own: Tensor) -> Tensor:
        """This rank's share of a sum that all ranks have parts in."""
        return (columns.look_up(ids, own).square() * factors).sum()

    own = torch.autograd.grad(loss(weight), weight)[0]
    step = 1e-6
    worst = 0.0
    for rank in range(world.size):
        for place in range(weight.numel()):
            values = []
            for sign in (1, -1):
                with torch.no_grad():
                    moved = weight.clone()
                    if rank == world.rank:
                        moved.view(-1)[place] += sign * step
                    share = loss(moved)
                torch.distributed.all_reduce(share)
                values.append(float(share))
            if rank == world.rank:
                slope = (values[0] - values[1]) / (2 * step)
                worst = max(worst, abs(slope - float(own.view(-1)[place])))
    assert worst < 1e-8
    return 1


def test_derivatives_are_those_of_differences(ranks: RankPool) -> None:
    """In fp64, over the loss of all ranks: torch's own check knows of one."""
    assert ranks.run(4, checked, False) == [1] * 4


def test_a_frozen_table_has_no_way_back(ranks: RankPool) -> None:
    assert ranks.run(2, checked, True) == [0] * 2


def join(world: World, bucket_bytes: int) -> tuple[Tensor, Tensor]:
    """A table put together, and the gradient of this rank's columns."""
    draw = torch.Generator().manual_seed(5)
    table = torch.randn(VOCAB, world.size * WIDTH, generator=draw, dtype=torch.float64)
    own = table[:, world.rank * WIDTH : (world.rank + 1) * WIDTH].clone().requires_grad_()
    joined = GatherColumns.apply(own, world.group, bucket_bytes)
    seed = torch.randn(joined.shape, dtype=torch.float64, generator=draw) * (1 + world.rank)
    joined.backward(seed)
    assert own.grad is not None
    assert torch.equal(joined, table)
    return seed, own.grad


@pytest.mark.parametrize("rows", [1, 5, VOCAB, 100])
@pytest.mark.parametrize("size", [2, 3])
def test_columns_come_together_and_gradients_go_apart(
    ranks: RankPool, size: int, rows: int
) -> None:
    """However many rows travel at a time; too small a message has one."""
    found = ranks.run(size, join, rows * size * WIDTH * 8 if rows > 1 else 1)
    total: Any = sum(seed for seed, _ in found)
    for rank, (_, gradient) in enumerate(found):
        torch.testing.assert_close(gradient, total[:, rank * WIDTH : (rank + 1) * WIDTH])


def lost(world: World) -> Tensor:
    """Gradients of `join` may be asked for again: nothing that is handed on is written to."""
    own = torch.ones(3, 2, requires_grad=True)
    whole = GatherColumns.apply(own, world.group)
    ask = partial(torch.autograd.grad, whole, own, torch.ones_like(whole), retain_graph=True)
    assert torch.equal(*ask(), *ask())
    return whole.detach()


def test_a_backward_may_come_twice(ranks: RankPool) -> None:
    assert all(torch.equal(one, torch.ones(3, 4)) for one in ranks.run(2, lost))
