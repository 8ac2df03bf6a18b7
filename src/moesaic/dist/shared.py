"""Rows through a host's memory, between ranks that share one.

A rank has boxes: memory that it fills with rows and that its neighbours, the group's other ranks on
this host, read. What they tell each other, that rows are there or have been read, goes through
sockets: nobody spins, and whoever waits for a rank that has died hears of it. The memory has no
name in any file system, so that nothing stays behind, however a rank ends.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.dist.exchange import ByGroup, Carrier, Work

_RECORD = struct.Struct("=BxxxIQQQ")
"""What is said, the number of a box; of rows the exchange, where they begin, how many bytes."""
_ROWS, _READ, _GONE = range(3)
"""Rows are in a box; a box has been read; a box is no more."""
_LINE = 64
"""Bytes that a processor moves at a time; rows of each neighbour begin with a line of their own."""
_STEP = 1 << 20
"""Boxes are as large as multiples of it."""


def carrier_of(group: dist.ProcessGroup, deadline_s: float) -> Carrier:
    """What carries rows in `group`, whose ranks are on CPUs; all of them must call this."""
    me, host = group.rank(), _host()
    with _Door(group.size()) if host else contextlib.nullcontext() as door:
        said: list[tuple[str, str]] = [("", "")] * group.size()
        dist.all_gather_object(said, (host, door.address if door else ""), group=group)
        here = {i: address for i, (at, address) in enumerate(said) if at and at == host}
        lines = door.meet(me, here, deadline_s) if door else {}
    hosts = [at for at, _ in said]
    if not _any_two(hosts):
        return ByGroup(group)
    return ByMemory(group, lines, None if len(here) == len(said) else ByGroup(group), deadline_s)


def _any_two(hosts: Sequence[str]) -> bool:
    """Whether two ranks share a host: all ranks of a group must know."""
    named = [host for host in hosts if host]
    return len(set(named)) < len(named)


def _host() -> str:
    """What ranks have in common that reach each other's sockets and memory; empty: nothing."""
    if not hasattr(os, "memfd_create"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino} {os.getuid()}"
    except OSError:
        return ""


class _Door:
    """Where neighbours knock once."""

    def __init__(self, most: int) -> None:
        self.address = f"\0moesaic-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(self.address)
        self._socket.listen(most)

    def __enter__(self) -> _Door:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def meet(
        self, rank: int, addresses: dict[int, str], deadline_s: float
    ) -> dict[int, socket.socket]:
        """A line to each rank of this host, which are at `addresses`."""
        lines: dict[int, socket.socket] = {}
        for other in (other for other in addresses if other < rank):
            line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            line.settimeout(deadline_s)
            line.connect(addresses[other])
            line.send(rank.to_bytes(8, "little"))
            lines[other] = line
        self._socket.settimeout(deadline_s)
        while len(lines) < len(addresses) - (rank in addresses):
            line, _ = self._socket.accept()
            line.settimeout(deadline_s)
            _, owner, _ = struct.unpack(
                "=iII", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            )
            word = line.recv(8) if owner == os.getuid() else b""
            if len(word) == 8 and int.from_bytes(word, "little") in addresses:
                lines[int.from_bytes(word, "little")] = line
            else:  # Somebody else of this machine.
                line.close()
        return lines


@dataclass
class _Box:
    """Memory that neighbours can read."""

    number: int
    bytes: Tensor
    file: int
    readers: int = 0
    """Neighbours that have not read yet what is in it."""

    @classmethod
    def make(cls, number: int, size: int) -> _Box:
        """An empty one."""
        file = os.memfd_create("moesaic", os.MFD_CLOEXEC)
        os.ftruncate(file, size)
        return cls(number, _mapped(file), file)


def _mapped(file: int) -> Tensor:
    """All bytes of `file`, for as long as somebody has the tensor."""
    return torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8)


class _Neighbour:
    """A rank at the other end of a line."""

    def __init__(
        self, rank: int, line: socket.socket, deadline_s: float, read: Callable[[int], None]
    ) -> None:
        """`read` is told of each own box that the neighbour has read."""
        self._rank, self._line, self._deadline_s, self._read = rank, line, deadline_s, read
        self._known: set[int] = set()
        """Own boxes that it has."""
        self._boxes: dict[int, Tensor] = {}
        self._arrived: dict[int, tuple[int, Tensor]] = {}
        """By exchange, the box and the rows in it."""

    def tell(self, box: _Box, exchange: int, at: int, size: int) -> None:
        """There are rows for it."""
        files = () if box.number in self._known else (box.file,)
        self._known.add(box.number)
        self._say(_ROWS, box.number, exchange, at, size, files=files)

    def forget(self, box: _Box) -> None:
        """A box is no more."""
        if box.number in self._known:
            self._known.remove(box.number)
            self._say(_GONE, box.number)

    def read(self, exchange: int, into: Tensor) -> None:
        """Wait for rows of `exchange` and copy them."""
        while exchange not in self._arrived:
            try:
                self._hear()
            except OSError as error:
                raise self._failed(error) from error
        number, rows = self._arrived.pop(exchange)
        if len(rows) != len(into):
            raise RuntimeError(
                f"{len(rows)} bytes came from rank {self._rank} of the group, where "
                f"{len(into)} are to arrive"
            )
        into.copy_(rows)
        with contextlib.suppress(OSError):  # It may have left, having what it waited for.
            self._line.send(_RECORD.pack(_READ, number, exchange, 0, 0))

    def hear_all(self) -> None:
        """Take in what has been said so far. Whether the other is still there shows when it has to
        be: one that needs no more rows may have left."""
        self._line.settimeout(0.0)
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while True:
                self._hear()
        self._line.settimeout(self._deadline_s)

    def close(self) -> None:
        """Hang up, and let go of the other's boxes."""
        self._line.close()
        self._boxes.clear()
        self._arrived.clear()

    def _say(self, what: int, box: int, *rows: int, files: Sequence[int] = ()) -> None:
        record = _RECORD.pack(what, box, *(rows or (0, 0, 0)))
        try:
            if files:
                socket.send_fds(self._line, [record], files)
            else:
                self._line.send(record)
        except OSError as error:
            raise self._failed(error) from error

    def _hear(self) -> None:
        record, files, _, _ = socket.recv_fds(self._line, _RECORD.size, 1)
        if not record:
            raise ConnectionResetError
        what, box, exchange, at, size = _RECORD.unpack(record)
        for file in files:
            self._boxes[box] = _mapped(file)
            os.close(file)
        if what == _ROWS:
            self._arrived[exchange] = (box, self._boxes[box][at : at + size])
        elif what == _READ:
            self._read(box)
        else:
            del self._boxes[box]

    def _failed(self, error: OSError) -> RuntimeError:
        other = f"rank {self._rank} of the group"
        if isinstance(error, TimeoutError):
            return RuntimeError(f"timed out after {self._deadline_s:g} s of waiting for {other}")
        return RuntimeError(f"{other} is gone: connection closed by peer")


class ByMemory:
    """Carries rows of neighbours through boxes, and leaves others to another carrier."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        lines: dict[int, socket.socket],
        elsewhere: Carrier | None,
        deadline_s: float,
    ) -> None:
        """`elsewhere` carries what goes to other hosts, if the group has ranks there."""
        self.group, self._rank, self._elsewhere = group, group.rank(), elsewhere
        self._boxes: dict[int, _Box] = {}
        self._made = self._exchanges = 0
        self._neighbours = {
            other: _Neighbour(other, line, deadline_s, self._has_read)
            for other, line in lines.items()
        }
        self._turn = sorted(self._neighbours, key=lambda other: (other < self._rank, other))
        """Neighbours, from the next on, so that not all begin with the same."""
        self.name = "memory" if elsewhere is None else f"memory, {elsewhere.name}"

    def start(self, rows: Tensor, send: list[int], receive: list[int]) -> tuple[Tensor, Work]:
        """As `Carrier` says."""
        result = rows.new_empty((sum(receive), *rows.shape[1:]))
        width = math.prod(rows.shape[1:]) * rows.itemsize
        out = _bytes(rows.contiguous()).split([n * width for n in send])
        back = _bytes(result).split([n * width for n in receive])
        self._exchanges += 1
        work = Arriving(self._exchanges)
        if self._elsewhere is not None:
            work.far = self._start_far(self._elsewhere, out, back)
        self._put(out)
        back[self._rank].copy_(out[self._rank])
        work.near = [
            (self._neighbours[other], back[other]) for other in self._turn if len(back[other])
        ]
        return result, work

    def close(self) -> None:
        """Hang up, and let go of all boxes."""
        for neighbour in self._neighbours.values():
            neighbour.close()
        for box in self._boxes.values():
            os.close(box.file)
        self._boxes.clear()

    def _put(self, out: Sequence[Tensor]) -> None:
        """Put what goes to neighbours into a box and tell each, as soon as its rows are there."""
        going = [other for other in self._turn if len(out[other])]
        starts = list(accumulate((-(-len(out[i]) // _LINE) * _LINE for i in going), initial=0))
        if not going:
            return
        box = self._box(starts[-1])
        box.readers = len(going)
        for other, start in zip(going, starts, strict=False):
            size = len(out[other])
            box.bytes[start : start + size].copy_(out[other])
            self._neighbours[other].tell(box, self._exchanges, start, size)

    def _box(self, size: int) -> _Box:
        """One that has been read by all, and has room for so many bytes."""
        free = self._free()
        if not free:
            for neighbour in self._neighbours.values():
                neighbour.hear_all()
            free = self._free()
        for box in free:
            if len(box.bytes) >= size:
                return box
        for box in free:  # Too small.
            for neighbour in self._neighbours.values():
                neighbour.forget(box)
            os.close(self._boxes.pop(box.number).file)
        self._made += 1
        box = _Box.make(self._made, -(-size // _STEP) * _STEP)
        self._boxes[box.number] = box
        return box

    def _free(self) -> list[_Box]:
        return [box for box in self._boxes.values() if not box.readers]

    def _has_read(self, number: int) -> None:
        self._boxes[number].readers -= 1

    def _start_far(
        self, carrier: Carrier, out: Sequence[Tensor], back: Sequence[Tensor]
    ) -> tuple[Work, Tensor, list[Tensor]]:
        """Launch what goes to other hosts; the work, what arrives, and where it belongs."""
        near = {self._rank, *self._neighbours}
        away = [i for i in range(len(out)) if i not in near]
        sizes = [[0 if i in near else len(part) for i, part in enumerate(p)] for p in (out, back)]
        arriving, work = carrier.start(torch.cat([out[i] for i in away]), *sizes)
        return work, arriving, [back[i] for i in away]


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor that is in one piece, as a tensor that autograd does not know."""
    start = tensor.storage_offset() * tensor.itemsize
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return whole[start : start + tensor.nbytes]


class Arriving:
    """Rows that neighbours, and a carrier of other hosts', have not brought yet."""

    def __init__(self, exchange: int) -> None:
        self._exchange = exchange
        self.near: list[tuple[_Neighbour, Tensor]] = []
        self.far: tuple[Work, Tensor, list[Tensor]] | None = None

    def wait(self) -> None:
        """Copy them to where they belong."""
        while self.near:
            neighbour, target = self.near.pop(0)
            neighbour.read(self._exchange, target)
        if self.far is not None:
            (work, arrived, targets), self.far = self.far, None
            work.wait()
            parts = arrived.split([len(target) for target in targets])
            for target, part in zip(targets, parts, strict=True):
                target.copy_(part)
