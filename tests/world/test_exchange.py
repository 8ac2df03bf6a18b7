"""Rows from rank to rank: by the group, by memory, and by both, the same."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.dist import shared
from moesaic.dist.exchange import ByGroup, Carrier, Exchange
from moesaic.dist.world import World
from moesaic.testing.ranks import RankFailed, Ranks

WIDTH = 3


def counts(case: int, size: int) -> list[list[int]]:
    """How many rows each rank sends to each: even, uneven, to one only, none, large."""
    draw = torch.Generator().manual_seed(case)
    if case == 0:
        return [[2] * size for _ in range(size)]
    if case == 1:
        return [[7 if to == size - 1 else 0 for to in range(size)] for _ in range(size)]
    if case == 2:
        return [[0] * size for _ in range(size)]
    if case == 3:
        return [[90_000 * (rank + to) for to in range(size)] for rank in range(size)]
    return torch.randint(0, 5, (size, size), generator=draw).tolist()


def rows_of(case: int, rank: int, sent: list[list[int]], dtype: torch.dtype) -> Tensor:
    """Rows that are like no others."""
    many = torch.arange(sum(sent[rank]) * WIDTH).view(-1, WIDTH)
    return (many % 251 + 10 * rank + case % 7).to(dtype)


def expected(case: int, rank: int, sent: list[list[int]], dtype: torch.dtype) -> Tensor:
    """What arrives, worked out from what all ranks have."""
    parts = [
        rows_of(case, other, sent, dtype).split(sent[other])[rank] for other in range(len(sent))
    ]
    return torch.cat(parts)


def hosts_of_two(rank: int) -> str:
    return f"host {rank // 2}"


def exchange_all(world: World, hosts: str) -> list[str]:
    """Which carriers there were; every case went through each of them as it should."""
    names = []
    for carrier in carriers(world, hosts):
        for case in range(12):
            dtype = (torch.float32, torch.bfloat16, torch.int64, torch.float64)[case % 4]
            sent = counts(case, world.size)
            receive = [row[world.rank] for row in sent]
            rows = rows_of(case, world.rank, sent, dtype)
            result, work = carrier.start(rows, sent[world.rank], receive)
            work.wait()
            assert torch.equal(result, expected(case, world.rank, sent, dtype)), case
        several_at_once(world, carrier)
        backward_is_the_way_back(world, carrier)
        names.append(carrier.name)
    return names


def carriers(world: World, hosts: str) -> list[Carrier]:
    group = world.everyone
    assert group is not None
    said = {"one": "here", "two": hosts_of_two(world.rank), "apart": f"host {world.rank}"}[hosts]
    with mock.patch.object(shared, "_host", return_value=said):
        return [ByGroup(group), shared.carrier_of(group, 30.0)]


def several_at_once(world: World, carrier: Carrier) -> None:
    """Five exchanges are on their way together, and waited for in another order."""
    sent = [[1 + (rank + to) % 3 for to in range(world.size)] for rank in range(world.size)]
    receive = [row[world.rank] for row in sent]
    works = []
    for case in range(5):
        rows = rows_of(case, world.rank, sent, torch.float32)
        works.append((case, *carrier.start(rows, sent[world.rank], receive)))
        rows.fill_(-1.0) if isinstance(carrier, shared.ByMemory) else None
    for case, result, work in works[::-1]:
        work.wait()
        if carrier.name == "memory":
            assert torch.equal(result, expected(case, world.rank, sent, torch.float32))


def backward_is_the_way_back(world: World, carrier: Carrier) -> None:
    sent = counts(5, world.size)
    receive = [row[world.rank] for row in sent]
    rows = torch.rand(sum(sent[world.rank]), WIDTH, dtype=torch.float64, requires_grad=True)
    works: list[Any] = []
    result = Exchange.apply(rows, sent[world.rank], receive, carrier, works)
    works.pop().wait()
    back: list[Any] = []
    again = Exchange.apply(result, receive, sent[world.rank], carrier, back)
    back.pop().wait()
    assert torch.equal(again, rows)
    (again * rows.detach()).sum().backward()
    assert rows.grad is not None
    assert torch.equal(rows.grad, rows.detach())


@pytest.mark.parametrize(
    ("size", "hosts", "names"),
    [
        (2, "one", ["gloo", "memory"]),
        (4, "one", ["gloo", "memory"]),
        (4, "two", ["gloo", "memory, gloo"]),
        (3, "two", ["gloo", "memory, gloo"]),
        (2, "apart", ["gloo", "gloo"]),
    ],
)
def test_rows_arrive(ranks: Ranks, size: int, hosts: str, names: list[str]) -> None:
    assert ranks.run(size, exchange_all, hosts) == [names] * size


def boxes_while_exchanging(world: World) -> tuple[int, int]:
    """Most boxes at a time, and files that stay open after all."""
    group = world.everyone
    assert group is not None
    before = len(os.listdir("/proc/self/fd"))
    carrier = shared.carrier_of(group, 30.0)
    assert isinstance(carrier, shared.ByMemory)
    most = 0
    for step in range(40):
        size = 1000 * (step % 7 + 1)
        _, work = carrier.start(torch.rand(2 * size, 50), [size] * 2, [size] * 2)
        work.wait()
        most = max(most, len(carrier._boxes))
    dist.barrier(group)
    carrier.close()
    return most, len(os.listdir("/proc/self/fd")) - before


def test_boxes_are_used_again_and_nothing_stays(ranks: Ranks) -> None:
    for most, left in ranks.run(2, boxes_while_exchanging):
        assert most <= 3
        assert left == 0


def one_sends_less(world: World) -> None:
    carrier = world.carrier([range(world.size)])
    assert carrier is not None
    send = [1, 1] if world.rank else [1, 2]
    _, work = carrier.start(torch.rand(sum(send), 4), send, [1, 1])
    work.wait()


def test_what_was_not_agreed_on_is_refused(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match="32 bytes came from rank 0 of the group, where 16 are to"):
        ranks.run(2, one_sends_less)


def one_dies(world: World) -> None:
    carrier = world.carrier([range(world.size)])
    assert carrier is not None
    if world.rank == 1:
        os._exit(3)
    _, work = carrier.start(torch.rand(2, 4), [1, 1], [1, 1])
    work.wait()


def test_a_rank_that_dies_is_noticed(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match="rank 1 of the group is gone: connection closed by peer"):
        ranks.run(2, one_dies)


def one_is_late(world: World) -> None:
    group = world.everyone
    assert group is not None
    carrier = shared.carrier_of(group, 0.3)
    if world.rank == 0:
        _, work = carrier.start(torch.rand(2, 4), [1, 1], [1, 1])
        work.wait()
    else:
        time.sleep(1.0)


def test_patience_ends(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match=r"timed out after 0.3 s of waiting for rank 1"):
        ranks.run(2, one_is_late)


def test_hosts_are_told_apart() -> None:
    said = shared._host()
    assert Path("/proc/sys/kernel/random/boot_id").read_text().strip() in said
    with mock.patch.object(Path, "read_text", side_effect=OSError):
        assert shared._host() == ""
