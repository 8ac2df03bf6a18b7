"""All-to-all among ranks of one host: through shared memory, by gloo, and as two bare copies."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import measure
from benchmarks.on_ranks import Unlike, in_turn, on_ranks
from moesaic.dist.all_to_all import Transport
from moesaic.dist.world import World

SIZES = {"1 MiB": 1 << 20, "4 MiB": 4 << 20, "16 MiB": 16 << 20}
"""Bytes that a rank sends in one exchange, its own share included; below, synchronisation takes
longer than copying."""
BARS = {"gloo": ">= 3.0", "copies": ">= 0.6"}
WORLDS = (2, 4)
WIDTH = 64
"""Numbers of four bytes in a row."""
MOVED = 32 << 20
"""Bytes that a rank sends between two readings of the clock, at least."""
SHARED = Path("/dev/shm")
"""Directory of Linux whose files are memory."""


@dataclass(frozen=True)
class Case:
    """An exchange: ranks, bytes, and whether all get as much."""

    name: str
    ranks: int
    bytes: int
    even: bool

    def send(self) -> list[int]:
        """Return rows to each rank: as many to all, or 1:3:5:7."""
        weights = [1 if self.even else 1 + 2 * rank for rank in range(self.ranks)]
        return [self.bytes // (4 * WIDTH) * one // sum(weights) for one in weights]

    @property
    def times(self) -> int:
        """Exchanges between two readings of the clock."""
        return max(1, MOVED // self.bytes)


def cases() -> Iterator[Case]:
    """Yield every case, the smaller first."""
    for ranks in WORLDS:
        for name, size in SIZES.items():
            for even in (True, False):
                how = "even" if even else "uneven"
                yield Case(f"{ranks} ranks, {name} a rank, {how}", ranks, size, even)


class Exchange:
    """The same rows through each contender."""

    def __init__(self, world: World, carrier: Transport, case: Case, memory: Path) -> None:
        self._world, self._carrier, self._group = world, carrier, world.group
        me, self._send = world.rank, case.send()
        self._receive = [self._send[me]] * world.size
        self._rows = rows_from(me, case)
        self._out = self._rows.new_empty(sum(self._receive), WIDTH)
        self._expected = torch.cat(
            [rows_from(other, case).split(self._send)[me] for other in range(world.size)]
        )
        first, count = list(accumulate(self._send, initial=0))[me], self._send[me]
        boxes = [_mapped(memory / str(rank), self._rows) for rank in range(world.size)]
        going, coming = self._rows.split(self._send), self._out.split(self._receive)
        own = boxes[me].split(self._send)
        others = [rank for rank in range(world.size) if rank != me]
        self._put = [(own[other], going[other]) for other in others]
        self._get = [(coming[other], boxes[other][first : first + count]) for other in others]
        self._get.append((coming[me], going[me]))

    def ours(self) -> Tensor:
        """Exchange by moesaic's carrier."""
        result, work = self._carrier.start(self._rows, self._send, self._receive)
        work.wait()
        return result

    def gloo(self) -> Tensor:
        """Exchange by gloo, into memory that exists."""
        dist.all_to_all_single(self._out, self._rows, self._receive, self._send, group=self._group)
        return self._out

    def copies(self) -> Tensor:
        """Copy into shared memory and out of it, without waiting for other ranks."""
        self.put()
        return self.get()

    def put(self) -> None:
        """Copy what goes to others into the shared memory."""
        for target, source in self._put:
            target.copy_(source)

    def get(self) -> Tensor:
        """Copy out of it what comes from others, and what stays."""
        for target, source in self._get:
            target.copy_(source)
        return self._out

    def check(self) -> None:
        """Raise unless all contenders bring what the others sent."""
        ways = {"ours": self.ours, "gloo": self.gloo, "copies": self._copies_in_step}
        for name, way in ways.items():
            self._out.zero_()
            if not torch.equal(way(), self._expected):
                raise Unlike(f"rank {self._world.rank}: {name} brought other rows")

    def _copies_in_step(self) -> Tensor:
        self.put()
        self._world.barrier()
        return self.get()


def rows_from(rank: int, case: Case) -> Tensor:
    """Return what a rank sends."""
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(sum(case.send()), WIDTH, generator=draw)


def _mapped(path: Path, like: Tensor) -> Tensor:
    flat = torch.from_file(str(path), shared=True, size=like.numel(), dtype=like.dtype)
    return flat.view(like.shape)


def timed(
    world: World, every: list[Case], rounds: int, memory: str, root: int
) -> list[measure.Times] | None:
    """On each rank: time all in turn, case by case; None where ranks share no memory."""
    carrier = world.transport([range(world.size)])
    if carrier is None or carrier.name != "memory":
        return None
    results = []
    for number, case in enumerate(every):
        folder = Path(memory) / str(number)
        folder.mkdir(exist_ok=True)
        world.barrier()
        exchange = Exchange(world, carrier, case, folder)
        exchange.check()

        def often(call: Callable[[], Tensor], times: int = case.times) -> Callable[[], object]:
            def again() -> None:
                for _ in range(times):
                    call()  # The result is freed, as a layer's rows are.

            return again

        calls = {
            "ours": often(exchange.ours), "gloo": often(exchange.gloo),
            "copies": often(exchange.copies),
        }  # fmt: skip
        times = in_turn(world, calls, rounds, root)
        if times is not None:
            results.append(times)
    return results


def rows(rounds: int) -> Iterator[measure.Row]:
    """Measure all cases; claims are the worst of 1 to 16 MiB."""
    by_peer: dict[str, list[measure.Row]] = {peer: [] for peer in BARS}
    details = list[measure.Row]()
    for ranks in WORLDS:
        every = [case for case in cases() if case.ranks == ranks]
        found = None
        if SHARED.is_dir():
            with tempfile.TemporaryDirectory(dir=SHARED) as memory:
                found = on_ranks(ranks, timed, every, rounds, memory)
        for peer in BARS:
            by_peer[peer] += [
                _row(case, peer, found[number] if found else None)
                for number, case in enumerate(every)
            ]
        title = f"all-to-all, {ranks} ranks of one host against gloo, worst of 1 to 16 MiB"
        details.append(measure.worst(title, by_peer["gloo"][-len(every) :]))
    words = {"gloo": "gloo", "copies": "two bare copies"}
    for peer, bar in BARS.items():
        yield measure.worst(
            f"all-to-all on one host against {words[peer]}, worst of 1 to 16 MiB, 2 and 4 ranks",
            by_peer[peer], bar,
        )  # fmt: skip
    yield from details


def _row(case: Case, peer: str, times: measure.Times | None) -> measure.Row:
    name = f"all-to-all, {case.name}, against {peer}"
    if times is None:
        return measure.untried(name, "", "ranks of this system share no memory")
    words = {
        "gloo": f"gloo's all_to_all_single, torch {torch.__version__}",
        "copies": "limit: a copy into shared memory and one out of it, without synchronisation",
    }
    return measure.compare(name, times, peer, "ours", against=words[peer])
