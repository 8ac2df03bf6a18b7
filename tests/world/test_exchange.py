"""Rows from rank to rank: by the group and by memory, the same."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
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


STRANGER = """
import socket, sys
for address in sys.argv[1:]:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect("\\0" + address)
"""


def with_strangers(world: World) -> str:
    """Another process connects to ranks first."""
    group, connect = world.group, shm_all_to_all._connect
    assert group is not None

    def connect_after_stranger(addresses: Iterable[str]) -> dict[int, socket.socket]:
        addresses = list(addresses)
        names = [address[1:] for address in addresses]
        subprocess.run([sys.executable, "-c", STRANGER, *names], check=True)
        return connect(addresses)

    with mock.patch.object(shm_all_to_all, "_connect", connect_after_stranger):
        carrier = shm_all_to_all.make_transport(group, 30.0)
    goes_through(world, carrier, 7, (WIDTH,))
    return carrier.name


def test_other_processes_are_refused(ranks: RankPool) -> None:
    assert ranks.run(3, with_strangers) == ["memory"] * 3


def num_open_files(world: World) -> int:
    gc.collect()  # Transports of earlier tests.
    shm_all_to_all._all_gather_object(world.group, None)  # Opens the group's own connections.
    return len(os.listdir("/proc/self/fd"))


def with_one_unreachable(world: World) -> str:
    before = num_open_files(world)
    assert world.group is not None
    silent = mock.patch.object(shm_all_to_all, "_connect", return_value={})
    with silent if world.rank == 1 else contextlib.nullcontext():
        carrier = shm_all_to_all.make_transport(world.group, 30.0)
    assert len(os.listdir("/proc/self/fd")) <= before
    goes_through(world, carrier, 7, (WIDTH,))
    return carrier.name


def test_gloo_serves_ranks_that_cannot_connect(ranks: RankPool) -> None:
    assert ranks.run(3, with_one_unreachable) == ["gloo"] * 3


def exchange_many_sizes(world: World) -> tuple[int, int, int]:
    """Return buffers, bytes that the file takes, and files left open after the transport closes."""
    before = num_open_files(world)
    carrier = shm_all_to_all.make_transport(world.group, 30.0)
    assert isinstance(carrier, shm_all_to_all.SharedMemoryAllToAll)
    for step in range(40):
        size = 7000 * (step % 7 + 1)
        _, work = carrier.start(torch.rand(2 * size, 50), [size] * 2, [size] * 2)
        work.wait()
    dist.barrier(world.group)
    found = len(carrier._buffers), os.fstat(carrier._file.fileno()).st_blocks * 512
    dist.barrier(world.group)
    carrier.close()
    return *found, len(os.listdir("/proc/self/fd")) - before


def test_memory_is_reused_and_released(ranks: RankPool) -> None:
    for buffers, num_bytes, left_open in ranks.run(2, exchange_many_sizes):
        assert buffers <= 3
        assert num_bytes <= 3 * (10 << 20)  # The largest message has 9.8 million bytes.
        assert left_open <= 0  # A connection of an earlier test may close meanwhile.


def exchange_once(world: World, send: list[list[int]], receive: list[list[int]]) -> None:
    carrier = world.transport([range(world.size)])
    assert carrier is not None
    mine = send[world.rank]
    _, work = carrier.start(torch.rand(sum(mine), 4), mine, receive[world.rank])
    work.wait()


def test_unequal_counts_are_refused(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match="0 bytes came from rank 0, where 16 are to arrive"):
        ranks.run(2, exchange_once, [[1, 0], [1, 1]], [[1, 1], [1, 1]])


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


def lack_memory(world: World) -> str:
    carrier = shm_all_to_all.make_transport(world.group, 30.0)
    refused = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        mock.patch.object(os, "posix_fallocate", side_effect=refused),
        pytest.raises(MemoryError) as short,
    ):
        carrier.start(torch.rand(2, 4), [1, 1], [1, 1])
    assert "there is not enough memory" in str(as_user_error(short.value, "buy some"))
    return str(short.value)


def test_too_little_memory_is_no_full_disk(ranks: RankPool) -> None:
    for message in ranks.run(2, lack_memory):
        assert "1,048,576 bytes to share with other ranks: No space" in message


def test_hosts_are_told_apart() -> None:
    own = shm_all_to_all._host_id()
    with mock.patch.object(Path, "read_text", return_value="another"):
        assert shm_all_to_all._host_id() not in ("", own)
    with mock.patch.object(os, "stat", return_value=mock.Mock(st_ino=1)):
        assert shm_all_to_all._host_id() not in ("", own)
    with mock.patch.object(os, "memfd_create", side_effect=OSError):
        assert shm_all_to_all._host_id() == ""
