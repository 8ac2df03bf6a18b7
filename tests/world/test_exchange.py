"""Rows from rank to rank: by the group and by memory, the same."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import socket
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.base.errors import as_user_error
from moesaic.dist import shm_all_to_all
from moesaic.dist.all_to_all import (
    AsyncAllToAll,
    GroupAllToAll,
    PairwiseAllToAll,
    PendingRows,
    StartAllToAll,
    Transport,
    WaitAllToAll,
)
from moesaic.dist.world import World, is_peer_lost
from moesaic.testing.ranks import RankFailed, RankPool

WIDTH = 3
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.float64, torch.bool, torch.complex64)


def counts(case: int, size: int) -> list[list[int]]:
    """How many rows each rank sends to each: even, all to one, none, large, or anything."""
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


def rows_of(
    case: int, rank: int, sent: list[list[int]], shape: tuple[int, ...] = (WIDTH,)
) -> Tensor:
    """Rows that are like no others."""
    many = torch.arange(sum(sent[rank]) * (WIDTH if shape else 1)).view(-1, *shape)
    return ((many + 10 * rank + case) % 251).to(DTYPES[case % len(DTYPES)])


def expected(
    case: int, rank: int, sent: list[list[int]], shape: tuple[int, ...] = (WIDTH,)
) -> Tensor:
    """What arrives, worked out from what all ranks have."""
    parts = [
        rows_of(case, other, sent, shape).split(sent[other])[rank] for other in range(len(sent))
    ]
    return torch.cat(parts)


def exchange_all(world: World) -> list[str]:
    """Which carriers there were; every case went through each of them as it should."""
    group = world.group
    assert group is not None
    carriers = [
        GroupAllToAll(group),
        PairwiseAllToAll(group),
        shm_all_to_all.make_transport(group, 30.0),
    ]
    for carrier in carriers:
        for case in range(14):
            # complex and bool are no types of gloo's all-to-all.
            if (
                not isinstance(carrier, GroupAllToAll)
                or DTYPES[case % len(DTYPES)] not in DTYPES[4:]
            ):
                goes_through(world, carrier, case, (WIDTH,))
        several_at_once(world, carrier)
        backward_is_the_way_back(world, carrier)
    for carrier in carriers[1:]:
        goes_through(world, carrier, 7, ())
        goes_through(world, carrier, 8, (WIDTH,), apart=True)
        each = [2] * world.size
        result, work = carrier.start(torch.empty(2 * world.size, 0), each, each)
        work.wait()
        assert result.shape == (2 * world.size, 0)
    return [carrier.name for carrier in carriers]


def goes_through(
    world: World, carrier: Transport, case: int, shape: tuple[int, ...], *, apart: bool = False
) -> None:
    """Rows arrive that are in one piece, or lie apart from each other."""
    sent = counts(case, world.size)
    rows = rows_of(case, world.rank, sent, shape)
    if apart:
        rows = rows.repeat(1, 2)[:, : rows.shape[1]]
        assert not rows.is_contiguous()
    receive = [row[world.rank] for row in sent]
    result, work = carrier.start(rows, sent[world.rank], receive)
    work.wait()
    assert torch.equal(result, expected(case, world.rank, sent, shape)), case


def several_at_once(world: World, carrier: Transport) -> None:
    """Five exchanges are on their way together, and waited for in another order."""
    sent = [[1 + (rank + to) % 3 for to in range(world.size)] for rank in range(world.size)]
    receive = [row[world.rank] for row in sent]
    works = []
    for case in (0, 6, 12, 18, 24):
        rows = rows_of(case, world.rank, sent)
        works.append((case, rows, *carrier.start(rows, sent[world.rank], receive)))
    for case, _, result, work in works[::-1]:
        work.wait()
        assert torch.equal(result, expected(case, world.rank, sent)), case


def backward_is_the_way_back(world: World, carrier: Transport) -> None:
    sent = counts(5, world.size)
    receive = [row[world.rank] for row in sent]
    rows = torch.rand(sum(sent[world.rank]), WIDTH, dtype=torch.float64, requires_grad=True)
    there = AsyncAllToAll(carrier, sent[world.rank], receive)
    departed = StartAllToAll.apply(rows, there)
    other = PendingRows(
        rows, carrier, sent[world.rank], receive
    ).wait()  # While these are on their way.
    result = WaitAllToAll.apply(departed, there)
    assert torch.equal(result, other)
    again = PendingRows(result, carrier, receive, sent[world.rank]).wait()
    assert torch.equal(again, rows)
    (again * rows.detach()).sum().backward()
    assert rows.grad is not None
    assert torch.equal(rows.grad, rows.detach())


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_arrive(ranks: RankPool, size: int) -> None:
    assert ranks.run(size, exchange_all) == [["gloo", "gloo", "memory"]] * size


def which_carrier(world: World, hosts: list[str]) -> str:
    group = world.group
    assert group is not None
    with mock.patch.object(shm_all_to_all, "_host_id", return_value=hosts[world.rank]):
        return shm_all_to_all.make_transport(group, 30.0).name


@pytest.mark.parametrize("hosts", [["a", "b"], ["a", "a", "b"], ["", "a"], ["", ""]], ids=str)
def test_the_group_carries_between_hosts(ranks: RankPool, hosts: list[str]) -> None:
    assert set(ranks.run(len(hosts), which_carrier, hosts)) == {"gloo"}


def with_strangers(world: World) -> str:
    """Somebody connects to every door: says nothing, something else, or that it is a rank."""
    group, strangers = world.group, []
    assert group is not None
    knock = shm_all_to_all._Connections.connect

    def after_strangers(lines: shm_all_to_all._Connections, addresses: list[str]) -> None:
        words = (b"", b"hello", shm_all_to_all._Connections._HELLO.pack(1, b"0" * 16))
        for address in addresses:
            for word in words:
                stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                strangers.append(stranger)
                stranger.connect(address)
                if word:
                    stranger.send(word)
        knock(lines, addresses)

    with mock.patch.object(shm_all_to_all._Connections, "connect", after_strangers):
        carrier = shm_all_to_all.make_transport(group, 30.0)
    goes_through(world, carrier, 7, (WIDTH,))
    for stranger in strangers:
        stranger.close()
    return carrier.name


def test_strangers_are_let_in_nowhere(ranks: RankPool) -> None:
    assert ranks.run(3, with_strangers) == ["memory"] * 3


def one_cannot_be_reached(world: World) -> str:
    group = world.group
    assert group is not None
    gc.collect()  # Carriers of earlier tests.
    shm_all_to_all._all_gather_object(group, None)  # Which makes what the group holds open.
    before = len(os.listdir("/proc/self/fd"))
    silent = mock.patch.object(shm_all_to_all._Connections, "connect")
    with silent if world.rank == 1 else contextlib.nullcontext():
        carrier = shm_all_to_all.make_transport(group, 30.0)
    assert len(os.listdir("/proc/self/fd")) <= before
    goes_through(world, carrier, 7, (WIDTH,))
    return carrier.name


def test_all_leave_it_to_the_group_where_one_cannot_be_reached(ranks: RankPool) -> None:
    assert ranks.run(3, one_cannot_be_reached) == ["gloo"] * 3


def num_mapped() -> int:
    return len(re.findall("memfd:moesaic", Path("/proc/self/maps").read_text()))


def boxes_while_exchanging(world: World) -> tuple[int, int, int, int]:
    """Boxes of one's own, those of the other, what is mapped of them, and files that stay open."""
    group = world.group
    assert group is not None
    gc.collect()  # Carriers of earlier tests.
    shm_all_to_all._all_gather_object(group, None)  # Which makes what the group holds open.
    before, mapped = len(os.listdir("/proc/self/fd")), -num_mapped()
    carrier = shm_all_to_all.make_transport(group, 30.0)
    assert isinstance(carrier, shm_all_to_all.SharedMemoryAllToAll)
    for step in range(40):
        size = 7000 * (step % 7 + 1)
        _, work = carrier.start(torch.rand(2 * size, 50), [size] * 2, [size] * 2)
        work.wait()
    dist.barrier(group)
    (neighbour,) = carrier._peers.values()
    neighbour.receive_pending()
    found = len(carrier._buffers), len(neighbour._buffers), mapped + num_mapped()
    dist.barrier(group)
    carrier.close()
    return *found, len(os.listdir("/proc/self/fd")) - before


def test_boxes_are_used_again_and_nothing_stays(ranks: RankPool) -> None:
    for own, others, mapped, left in ranks.run(2, boxes_while_exchanging):
        assert own <= 3
        assert others <= 3
        assert mapped == own + others
        assert left <= 0  # A connection of an earlier test may close meanwhile.


def exchange_once(world: World, send: list[list[int]], receive: list[list[int]]) -> None:
    carrier = world.transport([range(world.size)])
    assert carrier is not None
    mine = send[world.rank]
    _, work = carrier.start(torch.rand(sum(mine), 4), mine, receive[world.rank])
    work.wait()


@pytest.mark.parametrize(
    ("sent", "received", "said"),
    [
        (2, 1, "32 bytes came from rank 0, where 16 are to arrive"),
        (2, 0, "32 bytes came from rank 0, where 0 are to arrive"),
        (0, 1, "0 bytes came from rank 0, where 16 are to arrive"),
    ],
)
def test_what_was_not_agreed_on_is_refused(
    ranks: RankPool, sent: int, received: int, said: str
) -> None:
    with pytest.raises(RankFailed, match=said):
        ranks.run(2, exchange_once, [[1, sent], [1, 1]], [[1, 1], [received, 1]])


def test_a_rank_agrees_with_itself(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match="2 rows are to stay on rank 0, where 1 are"):
        ranks.run(2, exchange_once, [[2, 1], [1, 1]], [[1, 1], [1, 1]])


def one_dies(world: World, by_pairs: bool) -> None:
    carrier = world.transport([range(world.size)])
    assert carrier is not None
    carrier = PairwiseAllToAll(carrier.group) if by_pairs else carrier
    if world.rank == 1:
        os._exit(3)
    with pytest.raises(RuntimeError) as lost:
        exchange_twice(carrier)
    assert is_peer_lost(lost.value)
    raise lost.value


def exchange_twice(carrier: Transport) -> None:
    for _ in range(2):
        _, work = carrier.start(torch.rand(2, 4), [1, 1], [1, 1])
        work.wait()


@pytest.mark.parametrize(
    ("by_pairs", "said"),
    [(False, "rank 1 is gone: connection closed by peer"), (True, "closed by peer|reset by peer")],
)
def test_a_rank_that_dies_is_noticed(ranks: RankPool, by_pairs: bool, said: str) -> None:
    with pytest.raises(RankFailed, match=f"(?i){said}"):
        ranks.run(2, one_dies, by_pairs)


def one_is_late(world: World) -> None:
    group = world.group
    assert group is not None
    carrier = shm_all_to_all.make_transport(group, 0.3)
    if world.rank == 0:
        _, work = carrier.start(torch.rand(2, 4), [1, 1], [1, 1])
        work.wait()
    else:
        time.sleep(1.0)


def test_patience_ends(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match=r"timed out after 0.3 s of waiting for rank 1"):
        ranks.run(2, one_is_late)


def leave_early(world: World) -> None:
    """Whoever has all that it needs may go, whatever it has not heard yet."""
    carrier = world.transport([range(world.size)])
    assert isinstance(carrier, shm_all_to_all.SharedMemoryAllToAll)
    for _ in range(3):
        _, work = carrier.start(torch.rand(20, 4), [10, 10], [10, 10])
        work.wait()
    if world.rank == 1:
        carrier.close()
        world.store.set("gone", "")
        return
    world.wait_for_keys(world.store, ["gone"])
    (neighbour,) = carrier._peers.values()
    neighbour.receive_pending()


def test_one_may_leave_before_the_other(ranks: RankPool) -> None:
    ranks.run(2, leave_early)


def test_too_little_memory_is_no_full_disk() -> None:
    before = len(os.listdir("/proc/self/fd"))
    refused = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        mock.patch.object(os, "posix_fallocate", side_effect=refused),
        pytest.raises(MemoryError) as short,
    ):
        shm_all_to_all._SharedBuffer.make(1, 1 << 20)
    assert "1,048,576 bytes to share with other ranks: No space" in str(short.value)
    assert "there is not enough memory" in str(as_user_error(short.value, "buy some"))
    assert len(os.listdir("/proc/self/fd")) == before


def test_hosts_are_told_apart() -> None:
    said = shm_all_to_all._host_id()
    assert Path("/proc/sys/kernel/random/boot_id").read_text().strip() in said
    with mock.patch.object(Path, "read_text", return_value="another"):
        assert shm_all_to_all._host_id() not in ("", said)
    with mock.patch.object(os, "stat", return_value=mock.Mock(st_ino=1)):
        assert shm_all_to_all._host_id() not in ("", said)
    with mock.patch.object(Path, "read_text", side_effect=OSError):
        assert shm_all_to_all._host_id() == ""
    with mock.patch.object(os, "memfd_create", side_effect=OSError):
        assert shm_all_to_all._host_id() == ""
