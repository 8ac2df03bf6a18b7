"""All-to-all through shared memory, between ranks of one host.

A rank copies outgoing rows into memory that its peers have mapped. Notifications go over sockets,
so no rank spins, and one that waits for a dead peer gets an error. The memory is an anonymous file
(memfd), so nothing is left behind, however a rank ends.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.dist.all_to_all import PairwiseAllToAll, Transport, Work, received_rows

_RECORD = struct.Struct("=BxxxxxxxQQQQ")
"""Notification: kind, start of the buffer, exchange, first byte, bytes."""
_ROWS_READY, _BUFFER_READ = range(2)
"""Kinds: rows are ready; a buffer has been read."""
_CREDENTIALS = struct.Struct("=iII")
"""Process, user and group of a connected peer."""
_ALIGNMENT = 64
"""Alignment of each peer's rows in a buffer: a cache line."""
_BUFFER_GRANULARITY = 1 << 20
"""Buffer sizes are multiples of this."""

SHARED_MEMORY = "memory"
"""Name of this transport for log lines."""


def make_transport(group: dist.ProcessGroup, timeout_s: float) -> Transport:
    """Return a transport for `group`, whose ranks are on CPUs. Collective over the group.

    Shared memory is used if all ranks are on one host and can connect to each other; else gloo.
    """
    hosts = set(_all_gather_object(group, _host_id()))
    if len(hosts) > 1 or "" in hosts:
        return PairwiseAllToAll(group)
    transport = SharedMemoryAllToAll(group, timeout_s)
    if transport.connect():
        return transport
    transport.close()
    return PairwiseAllToAll(group)


def _all_gather_object(group: dist.ProcessGroup, value: Any) -> list[Any]:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _host_id() -> str:
    """Return an id shared by all ranks that can reach each other's sockets and files; "" if none
    can."""
    try:
        os.close(os.memfd_create("moesaic"))
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.stat(f"/proc/self/ns/{space}").st_ino for space in ("net", "pid")]
        return f"{boot} {spaces}"
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


def _connect(addresses: Iterable[str]) -> dict[int, socket.socket]:
    """Return connections to `addresses` by their index, without those that cannot be reached."""
    connections = {}
    for index, address in enumerate(addresses):
        connection = _new_socket()
        try:
            connection.connect(address)
            connections[index] = connection
        except OSError:
            connection.close()
    return connections


def _accept(listener: socket.socket, rank_of_pid: Mapping[int, int]) -> dict[int, socket.socket]:
    """Return the pending connections of known processes by rank, and refuse all others."""
    connections = dict[int, socket.socket]()
    with contextlib.suppress(BlockingIOError):  # No connection is pending.
        while True:
            connection, _ = listener.accept()
            credentials = connection.getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
            )
            pid, _, _ = _CREDENTIALS.unpack(credentials)
            if pid in rank_of_pid and rank_of_pid[pid] not in connections:
                connections[rank_of_pid[pid]] = connection
            else:
                connection.close()
    return connections


def _size(file: FileIO) -> int:
    return os.fstat(file.fileno()).st_size


class _Peer:
    """Another rank of the group: the connection to it, and the memory that it shares."""

    def __init__(
        self,
        rank: int,
        connection: socket.socket,
        file: FileIO,
        timeout_s: float,
        on_read: Callable[[int], None],
    ) -> None:
        """Call `on_read` with the start of each own buffer that the peer has read."""
        self._rank, self._connection, self._file = rank, connection, file
        self._timeout_s, self._on_read = timeout_s, on_read
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._received: dict[int, tuple[int, int, int]] = {}
        """Start of the buffer, first byte, and bytes of the rows from the peer, by exchange."""
        connection.settimeout(timeout_s)

    def notify(self, exchange: int, buffer: int, first: int, size: int) -> None:
        """Tell the peer where its rows are."""
        try:
            self._connection.send(_RECORD.pack(_ROWS_READY, buffer, exchange, first, size))
        except TimeoutError:
            raise self._timeout_error() from None
        except ConnectionError as error:
            raise self._lost_error() from error

    def read(self, exchange: int, into: Tensor) -> None:
        """Wait for the peer's rows of `exchange` and copy them to `into`."""
        while exchange not in self._received:
            try:
                self._receive_record()
            except TimeoutError:
                raise self._timeout_error() from None
            except ConnectionError as error:
                raise self._lost_error() from error
        buffer, first, size = self._received.pop(exchange)
        if size != len(into):
            raise RuntimeError(
                f"{size} bytes came from rank {self._rank}, where {len(into)} are to arrive"
            )
        if not size:
            return
        if first + size > len(self._memory):
            whole_file = mmap.mmap(self._file.fileno(), _size(self._file))
            self._memory = torch.frombuffer(whole_file, dtype=torch.uint8)
        into.copy_(self._memory[first : first + size])
        try:
            self._connection.send(_RECORD.pack(_BUFFER_READ, buffer, 0, 0, 0))
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
        """Close the connection and the peer's file."""
        self._connection.close()
        self._file.close()

    def _receive_record(self) -> None:
        record = self._connection.recv(_RECORD.size)
        if not record:
            raise ConnectionResetError
        kind, buffer, exchange, first, size = _RECORD.unpack(record)
        if kind == _ROWS_READY:
            self._received[exchange] = (buffer, first, size)
        else:
            self._on_read(buffer)

    def _lost_error(self) -> RuntimeError:
        return RuntimeError(f"rank {self._rank} is gone: connection closed by peer")

    def _timeout_error(self) -> RuntimeError:
        return RuntimeError(
            f"timed out after {self._timeout_s:g} s of waiting for rank {self._rank}"
        )


@dataclass
class _Buffer:
    """Part of this rank's file."""

    memory: mmap.mmap
    bytes: Tensor
    readers: int = 0
    """Peers that have yet to read its content."""


class SharedMemoryAllToAll:
    """Transport through shared memory. Rows are copied into a buffer at the start and out of it in
    the wait, so nothing overlaps."""

    name = SHARED_MEMORY

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        """Create this rank's file; `connect` follows."""
        self.group, self._rank, self._timeout_s = group, group.rank(), timeout_s
        self._file = FileIO(os.memfd_create("moesaic", os.MFD_CLOEXEC), "r+")
        self._buffers: dict[int, _Buffer] = {}
        """Buffers by their start in the file."""
        self._peers: dict[int, _Peer] = {}
        self._num_exchanges = 0

    def connect(self) -> bool:
        """Connect to all other ranks, and return whether every rank could. Collective."""
        listener, address = _listen()
        with listener:
            ranks = _all_gather_object(self.group, (os.getpid(), self._file.fileno(), address))
            connections = _connect(address for *_, address in ranks[: self._rank])
            # This round ends when all ranks have connected, so no rank waits for one that left.
            _all_gather_object(self.group, None)
            later = {pid: rank for rank, (pid, *_) in enumerate(ranks) if rank > self._rank}
            connections |= _accept(listener, later)
        world_ranks = dist.get_process_group_ranks(self.group)
        # Start with the next rank, so that ranks do not all read from the same one.
        for other in sorted(connections, key=lambda other: (other < self._rank, other)):
            pid, number, _ = ranks[other]
            try:
                file = FileIO(f"/proc/{pid}/fd/{number}", "r+")
            except OSError:
                connections[other].close()
                continue
            self._peers[other] = _Peer(
                world_ranks[other], connections[other], file, self._timeout_s, self._on_read
            )
        return all(_all_gather_object(self.group, len(self._peers) == len(ranks) - 1))

    def start(
        self, rows: Tensor, send: list[int], receive: list[int], into: Tensor | None = None
    ) -> tuple[Tensor, Work]:
        """Start the exchange; see `Transport.start`."""
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
        """Close all connections and release all memory."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._buffers.clear()
        self._file.close()

    def _send(self, outgoing: Sequence[Tensor]) -> None:
        """Copy outgoing rows into a buffer, and notify each peer once its rows are there."""
        sizes = [len(outgoing[other]) for other in self._peers]
        *starts, total = accumulate(
            (-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0
        )
        buffer_start = self._acquire_buffer(total) if total else 0
        if total:
            self._buffers[buffer_start].readers = sum(size > 0 for size in sizes)
        for (other, peer), size, start in zip(self._peers.items(), sizes, starts, strict=True):
            if size:
                self._buffers[buffer_start].bytes[start : start + size].copy_(outgoing[other])
            peer.notify(self._num_exchanges, buffer_start, buffer_start + start, size)

    def _acquire_buffer(self, size: int) -> int:
        """Return the start of a buffer of at least `size` bytes that all peers have read."""
        start = self._find_free_buffer(size)
        if start is None:
            self._receive_pending()
            start = self._find_free_buffer(size)
        if start is not None:
            return start
        for start, buffer in list(self._buffers.items()):
            if not buffer.readers:
                buffer.memory.madvise(mmap.MADV_REMOVE)
                del self._buffers[start]
        return self._add_buffer(-(-size // _BUFFER_GRANULARITY) * _BUFFER_GRANULARITY)

    def _find_free_buffer(self, size: int) -> int | None:
        free = (start for start, buffer in self._buffers.items() if not buffer.readers)
        return next((start for start in free if len(self._buffers[start].bytes) >= size), None)

    def _add_buffer(self, size: int) -> int:
        """Append a buffer to the file, and return its start."""
        start = _size(self._file)
        try:
            # Otherwise a lack of memory would kill a later copy.
            os.posix_fallocate(self._file.fileno(), start, size)
        except OSError as error:  # The kernel reports a full disk.
            message = f"{size:,} bytes to share with other ranks: {error.strerror}"
            raise MemoryError(message) from error
        memory = mmap.mmap(self._file.fileno(), size, offset=start)
        self._buffers[start] = _Buffer(memory, torch.frombuffer(memory, dtype=torch.uint8))
        return start

    def _receive_pending(self) -> None:
        for peer in self._peers.values():
            peer.receive_pending()

    def _on_read(self, start: int) -> None:
        self._buffers[start].readers -= 1


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
