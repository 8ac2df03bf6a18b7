"""Rows through a host's memory, between ranks that share one.

A rank has boxes: memory that it fills with rows and that its neighbours, the group's other ranks,
read. What they tell each other, that rows are there or have been read, goes through sockets: nobody
spins, and whoever waits for a rank that has died hears of it. The memory has no name in any file
system, so that nothing stays behind, however a rank ends.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.dist.exchange import ByPairs, Carrier, Work

_RECORD = struct.Struct("=BxxxIQQQ")
"""What is said, the number of a box; of rows the exchange, where they begin, how many bytes."""
_ROWS, _READ, _GONE = range(3)
"""There are rows; a box has been read; a box is no more."""
_NO_BOX = 0
_ALIGNED = 64
"""Rows of each neighbour begin at multiples of it: what a processor moves at a time."""
_STEP = 1 << 20
"""Boxes are as large as multiples of it."""
_PAUSE_S = 1e-3

MEMORY = "memory"
"""What a person calls it."""


def carrier_of(group: dist.ProcessGroup, deadline_s: float) -> Carrier:
    """What carries rows in `group`, whose ranks are on CPUs; all of them must call this.

    Memory does where all ranks are on one host and can reach each other's, else the group itself.
    """
    with contextlib.ExitStack() as held:
        host, door = _host(), None
        if host:
            door = held.enter_context(contextlib.closing(_Door()))
        said = _say_all(
            group, (host, "" if door is None else door.address, secrets.token_bytes(16))
        )
        if door is None or {at for at, _, _ in said} != {host}:
            return ByPairs(group)
        # After each round what the others did in it is done: nobody waits for one who is gone.
        lines = _Lines(group.rank(), [secret for _, _, secret in said])
        held.callback(lines.close)
        lines.knock([address for _, address, _ in said])
        _say_all(group, None)
        lines.answer(door)
        if not all(_say_all(group, lines.complete)):
            return ByPairs(group)
        held.pop_all()
        door.close()
        return ByMemory(group, lines.by_rank, deadline_s)


def _say_all(group: dist.ProcessGroup, word: Any) -> list[Any]:
    """What every rank says."""
    said: list[Any] = [None] * group.size()
    dist.all_gather_object(said, word, group=group)
    return said


def _host() -> str:
    """What ranks have in common that reach each other's sockets and memory; empty: nothing."""
    try:
        os.close(os.memfd_create("moesaic"))
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except (AttributeError, OSError):  # Another system, or a box that has neither.
        return ""


class _Door:
    """Where neighbours knock."""

    def __init__(self) -> None:
        self.address = f"\0moesaic-{secrets.token_hex(16)}"
        self._socket = _line()
        self._socket.bind(self.address)
        self._socket.listen(socket.SOMAXCONN)

    def close(self) -> None:
        """Nobody else may come."""
        self._socket.close()

    def next(self) -> socket.socket | None:
        """Whoever has knocked, and has not been answered yet."""
        try:
            line, _ = self._socket.accept()
        except OSError:
            return None
        line.setblocking(False)
        return line


def _line() -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.setblocking(False)
    return line


class _Lines:
    """From one rank to all others of a group, while they are being made."""

    _HELLO = struct.Struct("=Q16s")

    def __init__(self, rank: int, secrets_by_rank: Sequence[bytes]) -> None:
        """Whoever knows the secret of a rank was told by its group."""
        self._rank, self._secrets = rank, secrets_by_rank
        self.by_rank: dict[int, socket.socket] = {}

    def knock(self, addresses: Sequence[str]) -> None:
        """Connect to all ranks before this one that can be reached."""
        for other, address in enumerate(addresses[: self._rank]):
            line = _line()
            try:
                line.connect(address)
                line.send(self._HELLO.pack(self._rank, self._secrets[other]))
                self.by_rank[other] = line
            except OSError:
                line.close()

    def answer(self, door: _Door) -> None:
        """Take in all ranks after this one, which have knocked by now, and nobody else."""
        while (line := door.next()) is not None:
            rank = self._known(line)
            if rank is None or rank <= self._rank or rank in self.by_rank:
                line.close()
            else:
                self.by_rank[rank] = line

    def _known(self, line: socket.socket) -> int | None:
        try:
            rank, secret = self._HELLO.unpack(line.recv(self._HELLO.size))
        except (OSError, struct.error):
            return None
        return rank if secret == self._secrets[self._rank] else None

    @property
    def complete(self) -> bool:
        """Whether there is one to each."""
        return len(self.by_rank) == len(self._secrets) - 1

    def close(self) -> None:
        """Give them up."""
        for line in self.by_rank.values():
            line.close()


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
        try:
            try:
                os.posix_fallocate(file, 0, size)  # Or too little memory would show in a copy.
            except OSError as error:  # No disk is full, whatever the kernel calls it.
                said = f"{size:,} bytes to share with other ranks: {error.strerror}"
                raise MemoryError(said) from error
            return cls(number, _mapped(file), file)
        except BaseException:
            os.close(file)
            raise


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
        self._arrived: dict[int, tuple[int, int, int]] = {}
        """By exchange, in which box its rows are, from where on, and how many bytes."""
        line.settimeout(deadline_s)

    def tell(self, exchange: int, box: _Box | None, at: int, size: int) -> bool:
        """There are rows for it, or none. Not told if too many files are on their way."""
        if box is None:
            self._say(_ROWS, _NO_BOX, exchange)
            return True
        files = () if box.number in self._known else (box.file,)
        try:
            self._say(_ROWS, box.number, exchange, at, size, files=files)
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:
                return False
            raise
        self._known.add(box.number)
        return True

    def forget(self, box: _Box) -> None:
        """A box is no more."""
        if box.number in self._known:
            self._known.remove(box.number)
            self._say(_GONE, box.number)

    def read(self, exchange: int, into: Tensor) -> None:
        """Wait for what it says of `exchange` and copy its rows."""
        while exchange not in self._arrived:
            try:
                self._hear()
            except TimeoutError:
                raise self._overdue() from None
            except ConnectionError as error:
                raise self._lost() from error
        number, at, size = self._arrived.pop(exchange)
        if size != len(into):
            raise RuntimeError(
                f"{size} bytes came from rank {self._rank}, where {len(into)} are to arrive"
            )
        if size:
            into.copy_(self._boxes[number][at : at + size])
            try:
                self._line.send(_RECORD.pack(_READ, number, 0, 0, 0))
            except TimeoutError:
                raise self._overdue() from None
            except ConnectionError:
                pass  # It has left, with all it needs.

    def hear_all(self) -> None:
        """Take in what has been said so far. That the other has left shows when it is needed."""
        self._line.settimeout(0.0)
        try:
            while True:
                self._hear()
        except (BlockingIOError, ConnectionError):
            pass
        finally:
            self._line.settimeout(self._deadline_s)

    def close(self) -> None:
        """Hang up, and let go of the other's boxes."""
        self._line.close()
        self._boxes.clear()

    def _say(self, what: int, box: int, *rows: int, files: Sequence[int] = ()) -> None:
        record = _RECORD.pack(what, box, *(*rows, 0, 0, 0)[:3])
        try:
            if files:
                socket.send_fds(self._line, [record], files)
            else:
                self._line.send(record)
        except TimeoutError:
            raise self._overdue() from None
        except ConnectionError as error:
            raise self._lost() from error

    def _hear(self) -> None:
        record, files, flags, _ = socket.recv_fds(self._line, _RECORD.size, 1)
        if not record:
            raise ConnectionResetError
        what, box, exchange, at, size = _RECORD.unpack(record)
        for file in files:
            try:
                self._boxes[box] = _mapped(file)
            finally:
                os.close(file)
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if what == _ROWS:
            self._arrived[exchange] = (box, at, size)
        elif what == _READ:
            self._read(box)
        else:
            del self._boxes[box]

    def _lost(self) -> RuntimeError:
        return RuntimeError(f"rank {self._rank} is gone: connection closed by peer")

    def _overdue(self) -> RuntimeError:
        return RuntimeError(
            f"timed out after {self._deadline_s:g} s of waiting for rank {self._rank}"
        )


class ByMemory:
    """Carries rows through boxes. Rows are copied into one at the start, and out of it when they
    are waited for: nothing moves in between."""

    name = MEMORY

    def __init__(
        self, group: dist.ProcessGroup, lines: dict[int, socket.socket], deadline_s: float
    ) -> None:
        """`lines` lead to all other ranks of the group."""
        self.group, self._rank, self._deadline_s = group, group.rank(), deadline_s
        self._boxes: dict[int, _Box] = {}
        self._made = self._exchanges = 0
        names = dist.get_process_group_ranks(group)
        self._name = names[self._rank]
        # From the next on, so that not all begin with the same.
        turn = sorted(lines, key=lambda other: (other < self._rank, other))
        self._neighbours = {
            other: _Neighbour(names[other], lines[other], deadline_s, self._has_read)
            for other in turn
        }

    def start(
        self, rows: Tensor, send: list[int], receive: list[int], into: Tensor | None = None
    ) -> tuple[Tensor, Work]:
        """As `Carrier` says."""
        if send[self._rank] != receive[self._rank]:
            raise ValueError(
                f"{send[self._rank]} rows are to stay on rank {self._name}, where "
                f"{receive[self._rank]} are to arrive"
            )
        result = rows.new_empty((sum(receive), *rows.shape[1:])) if into is None else into
        width = math.prod(rows.shape[1:]) * rows.itemsize
        out = _bytes(rows.contiguous()).split([n * width for n in send])
        back = _bytes(result).split([n * width for n in receive])
        self._exchanges += 1
        self._put(out)
        back[self._rank].copy_(out[self._rank])
        arriving = [(neighbour, back[other]) for other, neighbour in self._neighbours.items()]
        return result, Arriving(self._exchanges, arriving)

    def close(self) -> None:
        """Hang up, and let go of all boxes."""
        for neighbour in self._neighbours.values():
            neighbour.close()
        for box in self._boxes.values():
            os.close(box.file)
        self._boxes.clear()

    def _put(self, out: Sequence[Tensor]) -> None:
        """Put what goes to neighbours into a box and tell each, as soon as its rows are there."""
        sizes = [len(out[other]) for other in self._neighbours]
        *starts, total = accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0)
        box = self._box(total) if total else None
        if box is not None:
            box.readers = sum(size > 0 for size in sizes)
        for other, size, start in zip(self._neighbours, sizes, starts, strict=True):
            if box is None or not size:
                self._tell(other, None, 0, 0)
            else:
                box.bytes[start : start + size].copy_(out[other])
                self._tell(other, box, start, size)

    def _tell(self, other: int, box: _Box | None, at: int, size: int) -> None:
        until = time.monotonic() + self._deadline_s
        while not self._neighbours[other].tell(self._exchanges, box, at, size):
            # The kernel lets so many files be on their way: until some of them have arrived.
            if time.monotonic() > until:
                raise RuntimeError(f"timed out after {self._deadline_s:g} s of sending memory")
            self._hear_all()
            time.sleep(_PAUSE_S)

    def _hear_all(self) -> None:
        for neighbour in self._neighbours.values():
            neighbour.hear_all()

    def _box(self, size: int) -> _Box:
        """One that has been read by all, and has room for so many bytes."""
        box = self._fitting(size)
        if box is None:
            self._hear_all()
            box = self._fitting(size)
        if box is not None:
            return box
        for small in [box for box in self._boxes.values() if not box.readers]:
            for neighbour in self._neighbours.values():
                neighbour.forget(small)
            os.close(self._boxes.pop(small.number).file)
        self._made += 1
        box = self._boxes[self._made] = _Box.make(self._made, -(-size // _STEP) * _STEP)
        return box

    def _fitting(self, size: int) -> _Box | None:
        fitting = (b for b in self._boxes.values() if not b.readers and len(b.bytes) >= size)
        return next(fitting, None)

    def _has_read(self, number: int) -> None:
        self._boxes[number].readers -= 1


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor that is in one piece, as a tensor that autograd does not know."""
    start = tensor.storage_offset() * tensor.itemsize
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return whole[start : start + tensor.nbytes]


class Arriving:
    """Rows that neighbours have not brought yet."""

    def __init__(self, exchange: int, expected: list[tuple[_Neighbour, Tensor]]) -> None:
        """From each neighbour, to where."""
        self._exchange, self._expected = exchange, expected

    def wait(self) -> None:
        """Copy them to where they belong."""
        while self._expected:
            neighbour, target = self._expected.pop(0)
            neighbour.read(self._exchange, target)
