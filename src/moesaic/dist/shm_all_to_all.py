"""All-to-all through shared memory, between ranks of one host.

A rank copies outgoing rows into a buffer of its own, from which its peers read. Notifications go
over sockets, so no rank spins, and one that waits for a dead peer gets an error. Buffers are
anonymous files (memfd), so nothing is left behind, however a rank ends.
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

from moesaic.dist.all_to_all import PairwiseAllToAll, Transport, Work, received_rows

_RECORD = struct.Struct("=BxxxIQQQ")
"""Notification: kind, buffer number, exchange, offset, bytes."""
_ROWS_READY, _BUFFER_READ, _BUFFER_FREED = range(3)
"""Kinds: rows are ready; a buffer has been read; a buffer is freed."""
_NO_BUFFER = 0
_ALIGNMENT = 64
"""Alignment of each peer's rows in a buffer: a cache line."""
_BUFFER_GRANULARITY = 1 << 20
"""Buffer sizes are multiples of this."""
_PAUSE_S = 1e-3

SHARED_MEMORY = "memory"
"""Name of this transport for log lines."""


def make_transport(group: dist.ProcessGroup, timeout_s: float) -> Transport:
    """Return a transport for `group`, whose ranks are on CPUs. Collective over the group.

    Shared memory is used if all ranks are on one host and can connect to each other; else gloo.
    """
    with contextlib.ExitStack() as stack:
        host, listener, own_address = _host_id(), None, ""
        if host:
            listener, own_address = _listen()
            stack.callback(listener.close)
        peers = _all_gather_object(group, (host, own_address, secrets.token_bytes(16)))
        if listener is None or {other for other, _, _ in peers} != {host}:
            return PairwiseAllToAll(group)
        # Each round ends only when all ranks have done theirs, so no rank waits for one that left.
        connections = _Connections(group.rank(), [secret for _, _, secret in peers])
        stack.callback(connections.close)
        connections.connect([address for _, address, _ in peers])
        _all_gather_object(group, None)
        connections.accept(listener)
        if not all(_all_gather_object(group, connections.is_complete)):
            return PairwiseAllToAll(group)
        stack.pop_all()
        listener.close()
        return SharedMemoryAllToAll(group, connections.by_rank, timeout_s)


def _all_gather_object(group: dist.ProcessGroup, value: Any) -> list[Any]:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _host_id() -> str:
    """Return an id shared by all ranks that can reach each other's sockets and memory; "" if none
    can."""
    try:
        os.close(os.memfd_create("moesaic"))
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except (AttributeError, OSError):  # Not Linux, or a restricted container.
        return ""


def _listen() -> tuple[socket.socket, str]:
    """Return a socket on which peers connect, and its address."""
    address = f"\0moesaic-{secrets.token_hex(16)}"
    listener = _new_socket()
    listener.bind(address)
    listener.listen(socket.SOMAXCONN)
    return listener, address


def _new_socket() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)
    return connection


class _Connections:
    """Connections from this rank to all others of a group, during setup."""

    _HELLO = struct.Struct("=Q16s")

    def __init__(self, rank: int, secrets_by_rank: Sequence[bytes]) -> None:
        """Ranks exchange secrets through the group, so a correct secret proves membership."""
        self._rank, self._secrets = rank, secrets_by_rank
        self.by_rank: dict[int, socket.socket] = {}

    def connect(self, addresses: Sequence[str]) -> None:
        """Connect to all reachable ranks before this one."""
        for other, address in enumerate(addresses[: self._rank]):
            connection = _new_socket()
            try:
                connection.connect(address)
                connection.send(self._HELLO.pack(self._rank, self._secrets[other]))
                self.by_rank[other] = connection
            except OSError:
                connection.close()

    def accept(self, listener: socket.socket) -> None:
        """Accept the pending connections of ranks after this one, and reject all others."""
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # No connection is pending.
                return
            connection.setblocking(False)
            rank = self._read_peer_rank(connection)
            if rank is None or rank <= self._rank or rank in self.by_rank:
                connection.close()
            else:
                self.by_rank[rank] = connection

    def _read_peer_rank(self, connection: socket.socket) -> int | None:
        try:
            rank, secret = self._HELLO.unpack(connection.recv(self._HELLO.size))
        except (OSError, struct.error):
            return None
        return rank if secret == self._secrets[self._rank] else None

    @property
    def is_complete(self) -> bool:
        """True if every other rank is connected."""
        return len(self.by_rank) == len(self._secrets) - 1

    def close(self) -> None:
        """Close all connections."""
        for connection in self.by_rank.values():
            connection.close()


@dataclass
class _SharedBuffer:
    """Shared memory that this rank fills and its peers read."""

    number: int
    bytes: Tensor
    file: int
    readers: int = 0
    """Peers that have yet to read its content."""

    @classmethod
    def make(cls, number: int, size: int) -> _SharedBuffer:
        """Return a new buffer."""
        file = os.memfd_create("moesaic", os.MFD_CLOEXEC)
        try:
            try:
                # Otherwise a lack of memory would kill a later copy.
                os.posix_fallocate(file, 0, size)
            except OSError as error:  # The kernel reports a full disk.
                message = f"{size:,} bytes to share with other ranks: {error.strerror}"
                raise MemoryError(message) from error
            return cls(number, _map_file(file), file)
        except BaseException:
            os.close(file)
            raise


def _map_file(file: int) -> Tensor:
    """Return the bytes of `file`, mapped for the lifetime of the tensor."""
    return torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8)


class _Peer:
    """Another rank of the group, and the connection to it."""

    def __init__(
        self, rank: int, connection: socket.socket, timeout_s: float, on_read: Callable[[int], None]
    ) -> None:
        """Call `on_read` with the number of each own buffer that the peer has read."""
        self._rank, self._connection, self._timeout_s, self._on_read = (
            rank,
            connection,
            timeout_s,
            on_read,
        )
        self._known_buffers: set[int] = set()
        """Own buffers whose file the peer has."""
        self._buffers: dict[int, Tensor] = {}
        self._received: dict[int, tuple[int, int, int]] = {}
        """Buffer number, offset and bytes of the rows from the peer, by exchange."""
        connection.settimeout(timeout_s)

    def notify(
        self, exchange_id: int, buffer: _SharedBuffer | None, offset: int, size: int
    ) -> bool:
        """Tell the peer where its rows are; return False if too many files are in flight."""
        if buffer is None:
            self._send_record(_ROWS_READY, _NO_BUFFER, exchange_id)
            return True
        files = () if buffer.number in self._known_buffers else (buffer.file,)
        try:
            self._send_record(_ROWS_READY, buffer.number, exchange_id, offset, size, files=files)
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:
                return False
            raise
        self._known_buffers.add(buffer.number)
        return True

    def free_buffer(self, buffer: _SharedBuffer) -> None:
        """Tell the peer that an own buffer is freed."""
        if buffer.number in self._known_buffers:
            self._known_buffers.remove(buffer.number)
            self._send_record(_BUFFER_FREED, buffer.number)

    def read(self, exchange_id: int, into: Tensor) -> None:
        """Wait for the peer's rows of `exchange_id` and copy them to `into`."""
        while exchange_id not in self._received:
            try:
                self._receive_record()
            except TimeoutError:
                raise self._timeout_error() from None
            except ConnectionError as error:
                raise self._lost_error() from error
        number, offset, size = self._received.pop(exchange_id)
        if size != len(into):
            raise RuntimeError(
                f"{size} bytes came from rank {self._rank}, where {len(into)} are to arrive"
            )
        if size:
            into.copy_(self._buffers[number][offset : offset + size])
            try:
                self._connection.send(_RECORD.pack(_BUFFER_READ, number, 0, 0, 0))
            except TimeoutError:
                raise self._timeout_error() from None
            except ConnectionError:
                pass  # The peer has left; it needs nothing more.

    def receive_pending(self) -> None:
        """Handle pending notifications. A lost peer raises only when it is needed."""
        self._connection.settimeout(0.0)
        try:
            while True:
                self._receive_record()
        except (BlockingIOError, ConnectionError):
            pass
        finally:
            self._connection.settimeout(self._timeout_s)

    def close(self) -> None:
        """Close the connection and release the peer's buffers."""
        self._connection.close()
        self._buffers.clear()

    def _send_record(self, kind: int, buffer: int, *rows: int, files: Sequence[int] = ()) -> None:
        record = _RECORD.pack(kind, buffer, *(*rows, 0, 0, 0)[:3])
        try:
            if files:
                socket.send_fds(self._connection, [record], files)
            else:
                self._connection.send(record)
        except TimeoutError:
            raise self._timeout_error() from None
        except ConnectionError as error:
            raise self._lost_error() from error

    def _receive_record(self) -> None:
        record, files, flags, _ = socket.recv_fds(self._connection, _RECORD.size, 1)
        if not record:
            raise ConnectionResetError
        kind, number, exchange, offset, size = _RECORD.unpack(record)
        for file in files:
            try:
                self._buffers[number] = _map_file(file)
            finally:
                os.close(file)
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if kind == _ROWS_READY:
            self._received[exchange] = (number, offset, size)
        elif kind == _BUFFER_READ:
            self._on_read(number)
        else:
            del self._buffers[number]

    def _lost_error(self) -> RuntimeError:
        return RuntimeError(f"rank {self._rank} is gone: connection closed by peer")

    def _timeout_error(self) -> RuntimeError:
        return RuntimeError(
            f"timed out after {self._timeout_s:g} s of waiting for rank {self._rank}"
        )


class SharedMemoryAllToAll:
    """Transport through shared memory. Rows are copied into a buffer at the start and out of it in
    the wait, so nothing overlaps."""

    name = SHARED_MEMORY

    def __init__(
        self, group: dist.ProcessGroup, connections: dict[int, socket.socket], timeout_s: float
    ) -> None:
        """Take `connections` to all other ranks of the group."""
        self.group, self._rank, self._timeout_s = group, group.rank(), timeout_s
        self._buffers: dict[int, _SharedBuffer] = {}
        self._num_buffers_made = self._num_exchanges = 0
        world_ranks = dist.get_process_group_ranks(group)
        self._world_rank = world_ranks[self._rank]
        # Start with the next rank, so that ranks do not all read from the same one.
        order = sorted(connections, key=lambda other: (other < self._rank, other))
        self._peers = {
            other: _Peer(world_ranks[other], connections[other], timeout_s, self._on_read)
            for other in order
        }

    def start(
        self, rows: Tensor, send: list[int], receive: list[int], into: Tensor | None = None
    ) -> tuple[Tensor, Work]:
        """Start the exchange; see `Transport.start`."""
        if send[self._rank] != receive[self._rank]:
            raise ValueError(
                f"{send[self._rank]} rows are to stay on rank {self._world_rank}, where "
                f"{receive[self._rank]} are to arrive"
            )
        result = received_rows(rows, receive, into)
        width = math.prod(rows.shape[1:]) * rows.itemsize
        outgoing = _bytes(rows.contiguous()).split([n * width for n in send])
        incoming = _bytes(result).split([n * width for n in receive])
        self._num_exchanges += 1
        self._send(outgoing)
        incoming[self._rank].copy_(outgoing[self._rank])
        pending = [(peer, incoming[other]) for other, peer in self._peers.items()]
        return result, PendingCopies(self._num_exchanges, pending)

    def close(self) -> None:
        """Close all connections and release all buffers."""
        for peer in self._peers.values():
            peer.close()
        for buffer in self._buffers.values():
            os.close(buffer.file)
        self._buffers.clear()

    def _send(self, outgoing: Sequence[Tensor]) -> None:
        """Copy outgoing rows into a buffer, and notify each peer once its rows are there."""
        sizes = [len(outgoing[other]) for other in self._peers]
        *starts, total = accumulate(
            (-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0
        )
        buffer = self._acquire_buffer(total) if total else None
        if buffer is not None:
            buffer.readers = sum(size > 0 for size in sizes)
        for other, size, start in zip(self._peers, sizes, starts, strict=True):
            if buffer is None or not size:
                self._notify(other, None, 0, 0)
            else:
                buffer.bytes[start : start + size].copy_(outgoing[other])
                self._notify(other, buffer, start, size)

    def _notify(self, other: int, buffer: _SharedBuffer | None, offset: int, size: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._peers[other].notify(self._num_exchanges, buffer, offset, size):
            # The kernel limits files in flight; wait until some have arrived.
            if time.monotonic() > deadline:
                raise RuntimeError(f"timed out after {self._timeout_s:g} s of sending memory")
            self._receive_pending()
            time.sleep(_PAUSE_S)

    def _receive_pending(self) -> None:
        for peer in self._peers.values():
            peer.receive_pending()

    def _acquire_buffer(self, size: int) -> _SharedBuffer:
        """Return a buffer of at least `size` bytes that all peers have read."""
        buffer = self._find_free_buffer(size)
        if buffer is None:
            self._receive_pending()
            buffer = self._find_free_buffer(size)
        if buffer is not None:
            return buffer
        for small in [buffer for buffer in self._buffers.values() if not buffer.readers]:
            for peer in self._peers.values():
                peer.free_buffer(small)
            os.close(self._buffers.pop(small.number).file)
        self._num_buffers_made += 1
        buffer = self._buffers[self._num_buffers_made] = _SharedBuffer.make(
            self._num_buffers_made, -(-size // _BUFFER_GRANULARITY) * _BUFFER_GRANULARITY
        )
        return buffer

    def _find_free_buffer(self, size: int) -> _SharedBuffer | None:
        free = (buffer for buffer in self._buffers.values() if not buffer.readers)
        return next((buffer for buffer in free if len(buffer.bytes) >= size), None)

    def _on_read(self, number: int) -> None:
        self._buffers[number].readers -= 1


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, invisible to autograd."""
    start = tensor.storage_offset() * tensor.itemsize
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return storage[start : start + tensor.nbytes]


class PendingCopies:
    """Rows still to be copied from the buffers of peers."""

    def __init__(self, exchange_id: int, expected: list[tuple[_Peer, Tensor]]) -> None:
        """Expect rows from each peer in a target tensor."""
        self._exchange_id, self._expected = exchange_id, expected

    def wait(self) -> None:
        """Wait for each peer and copy its rows to their target."""
        while self._expected:
            peer, target = self._expected.pop(0)
            peer.read(self._exchange_id, target)
