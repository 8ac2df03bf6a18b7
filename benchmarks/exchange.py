"""Rows among ranks of one host: through its memory as ours go, by gloo, and as two bare copies."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import measure
from benchmarks.families import Unlike
from benchmarks.layer import PATIENCE_S, in_turn
from moesaic.dist.exchange import Carrier
from moesaic.dist.world import World
from moesaic.testing.ranks import Ranks

SIZES = {"32 KiB": 32 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20, "16 MiB": 16 << 20}
"""What a rank sends in one exchange, itself included."""
BARRED = 1 << 20
"""From so much on there are bars: below, telling one another takes longer than copying."""
BARS = {"gloo": ">= 3.0", "copies": ">= 0.6"}
WORLDS = (2, 4)
WIDTH = 64
"""Numbers of four bytes in a row."""
MOVED = 32 << 20
"""What a rank sends between two looks at the clock, at least."""
SHARED = Path("/dev/shm")
"""Where Linux has files that are memory."""


@dataclass(frozen=True)
class Case:
    """An exchange: how much, among how many, and whether evenly."""

    name: str
    ranks: int
    bytes: int
    even: bool

    def send(self) -> list[int]:
        """Rows of any rank to each: as many to all, or more to the later ones, up to 1:3:5:7."""
        weights = [1 if self.even else 1 + 2 * rank for rank in range(self.ranks)]
        return [self.bytes // (4 * WIDTH) * one // sum(weights) for one in weights]

    @property
    def times(self) -> int:
        """Exchanges between two looks at the clock."""
        return max(1, MOVED // self.bytes)


def cases() -> Iterator[Case]:
    """Every case, the smaller first."""
    for ranks in WORLDS:
        for name, size in SIZES.items():
            for even in (True, False):
                how = "even" if even else "uneven"
                yield Case(f"{ranks} ranks, {name} a rank, {how}", ranks, size, even)


class Exchange:
    """The same rows, carried by everybody."""

    def __init__(self, world: World, carrier: Carrier, case: Case, memory: Path) -> None:
        self._world, self._carrier, self._group = world, carrier, world.everyone
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
        """By the carrier."""
        result, work = self._carrier.start(self._rows, self._send, self._receive)
        work.wait()
        return result

    def gloo(self) -> Tensor:
        """By the group, into memory that is there."""
        dist.all_to_all_single(self._out, self._rows, self._receive, self._send, group=self._group)
        return self._out

    def copies(self) -> Tensor:
        """Into memory that all share and out of it, whatever the others do meanwhile."""
        self.put()
        return self.get()

    def put(self) -> None:
        """What goes to others, into the shared memory."""
        for target, source in self._put:
            target.copy_(source)

    def get(self) -> Tensor:
        """What comes from others, out of it, and what stays."""
        for target, source in self._get:
            target.copy_(source)
        return self._out

    def check(self) -> None:
        """All bring what the others have sent."""
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
    """What a rank sends."""
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(sum(case.send()), WIDTH, generator=draw)


def _mapped(path: Path, like: Tensor) -> Tensor:
    flat = torch.from_file(str(path), shared=True, size=like.numel(), dtype=like.dtype)
    return flat.view(like.shape)


def on_ranks(
    world: World, every: list[Case], rounds: int, root: int, memory: str
) -> list[measure.Times] | None:
    """On each rank: all in turn, case by case; None where ranks cannot reach one memory."""
    carrier = world.carrier([range(world.size)])
    if carrier is None or carrier.name != "memory":
        return None
    results = []
    for number, case in enumerate(every):
        folder = Path(memory) / str(number)
        folder.mkdir(exist_ok=True)
        world.barrier()
        exchange = Exchange(world, carrier, case, folder)
        exchange.check()

        def often(way: Callable[[], Tensor], times: int = case.times) -> Callable[[], object]:
            def again() -> None:
                for _ in range(times):
                    way()  # What it brings is let go of, as a layer's rows are.

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
    """Every figure, as it comes."""
    for ranks in WORLDS:
        every = [case for case in cases() if case.ranks == ranks]
        if not SHARED.is_dir():
            yield from _rows_of(every, None, rounds)
            continue
        pool = Ranks()
        try:
            with tempfile.TemporaryDirectory(dir=SHARED) as memory:
                found = pool.run(
                    ranks, on_ranks, every, rounds, os.getpid(), memory, timeout_s=PATIENCE_S
                )
        finally:
            pool.close()
        yield from _rows_of(every, found[0], rounds)


def _rows_of(
    every: list[Case], found: list[measure.Times] | None, rounds: int
) -> Iterator[measure.Row]:
    words = {
        "gloo": f"gloo's all_to_all_single, torch {torch.__version__}",
        "copies": "limit: a copy into shared memory and one out of it, nobody waiting for anybody "
        "(ceiling 1.0)",
    }
    for place, case in enumerate(every):
        for peer, bar in BARS.items():
            what = f"all-to-all, {case.name}, against {peer}"
            bar = bar if case.bytes >= BARRED else ""
            if found is None:
                yield measure.row(
                    what, None, "ratio", bar=bar, repeats=0,
                    against="untried: ranks of this system cannot reach each other's memory",
                )  # fmt: skip
                continue
            ratio, interval = found[place].ratio(peer, "ours")
            yield measure.row(
                what, ratio, "ratio", bar=bar, interval=interval, repeats=rounds,
                against=words[peer],
            )  # fmt: skip
