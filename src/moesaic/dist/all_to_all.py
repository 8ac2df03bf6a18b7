"""All-to-all of rows in a group: transports, and autograd functions that overlap it with
computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.dist.clock import Clock, timed

FORWARD_EXCHANGE, BACKWARD_EXCHANGE = "forward exchange", "backward exchange"
"""Clock kinds of the time that an exchange of rows, or of their gradients, keeps a rank from
computing."""


class Work(Protocol):
    """An exchange under way."""

    def wait(self) -> object:
        """Block until the rows have arrived."""


class Transport(Protocol):
    """All-to-all of rows in one group; ranks call it with matching counts, in the same order."""

    name: str
    """Name for log lines."""
    group: dist.ProcessGroup

    def start(
        self, rows: Tensor, send: list[int], receive: list[int], into: Tensor | None = None
    ) -> tuple[Tensor, Work]:
        """Start to send `send[i]` consecutive rows to rank i of the group, possibly zero.

        Return the rows received, ordered by rank, and the work. They go to `into` or a new tensor,
        valid after the work's `wait`. Until then do not write to `rows`.
        """

    def close(self) -> None:
        """Release connections and memory."""


class _BackendTransport:
    """Base of transports that the group's backend provides; they keep no resources."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.name: str = dist.get_backend(group)

    def close(self) -> None:
        """Do nothing."""


class GroupAllToAll(_BackendTransport):
    """Transport by the all-to-all of the group's backend."""

    def start(
        self, rows: Tensor, send: list[int], receive: list[int], into: Tensor | None = None
    ) -> tuple[Tensor, Work]:
        """Start the exchange; see `Transport.start`."""
        result = received_rows(rows, receive, into)
        work = dist.all_to_all_single(
            result, rows.contiguous(), receive, send, group=self.group, async_op=True
        )
        assert work is not None
        return result, work


class PairwiseAllToAll(_BackendTransport):
    """Transport by one send and one receive per pair of ranks, for gloo.

    gloo's own all-to-all serializes the two directions of a link: a rank may delay its receive from
    a peer until its send to that peer has left.
    """

    def start(
        self, rows: Tensor, send: list[int], receive: list[int], into: Tensor | None = None
    ) -> tuple[Tensor, Work]:
        """Start the exchange; see `Transport.start`."""
        result = received_rows(rows, receive, into)
        incoming, outgoing = result.split(receive), rows.contiguous().split(send)
        rank, size = self.group.rank(), self.group.size()
        peers = [(rank + step) % size for step in range(1, size)]
        works = [
            dist.irecv(incoming[peer], group=self.group, group_src=peer)
            for peer in peers
            if incoming[peer].numel()
        ]
        works += [
            dist.isend(outgoing[peer], group=self.group, group_dst=peer)
            for peer in peers
            if outgoing[peer].numel()
        ]
        incoming[rank].copy_(outgoing[rank])
        return result, _CombinedWork(works)


def received_rows(rows: Tensor, receive: list[int], into: Tensor | None) -> Tensor:
    """Return the tensor for the rows that an exchange of `rows` receives: `into`, or a new one."""
    return rows.new_empty((sum(receive), *rows.shape[1:])) if into is None else into


class _CombinedWork:
    def __init__(self, works: Sequence[Work | None]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            assert work is not None
            work.wait()


class AsyncAllToAll:
    """One exchange of rows in a group, and that of their gradients on the way back.

    Rows leave in `StartAllToAll` and arrive in `WaitAllToAll`; in backward, gradients leave in
    `WaitAllToAll` and arrive in `StartAllToAll`. Computation between the two overlaps the exchange
    in both directions.
    """

    def __init__(
        self, transport: Transport, send: list[int], receive: list[int], clock: Clock | None = None
    ) -> None:
        """Exchange `send[i]` consecutive rows to rank i for `receive[i]` rows from it. `clock`
        counts the seconds that keep this rank from computing."""
        self._transport, self._send, self._receive = transport, send, receive
        self.clock = clock
        self._work: Work | None = None
        self._gradients: Tensor | None = None

    def start(self, rows: Tensor, into: Tensor | None = None) -> Tensor:
        """Start the exchange; return the tensor that will hold the rows received."""
        with timed(self.clock, FORWARD_EXCHANGE):  # The transport may copy bytes on this thread.
            received, self._work = self._transport.start(rows, self._send, self._receive, into)
        return received

    def wait(self) -> None:
        """Block until the rows have arrived; release those sent."""
        self._wait(FORWARD_EXCHANGE)

    def _wait(self, kind: str) -> None:
        work, self._work = self._work, None
        assert work is not None
        with timed(self.clock, kind):
            work.wait()

    @property
    def num_received(self) -> int:
        """Number of rows that this rank receives."""
        return sum(self._receive)

    def start_backward(self, gradients: Tensor) -> None:
        """Start to send gradients back to the ranks that the rows came from."""
        with timed(self.clock, BACKWARD_EXCHANGE):
            self._gradients, self._work = self._transport.start(
                gradients, self._receive, self._send
            )

    def wait_backward(self) -> Tensor:
        """Block until the gradients have arrived, and return them."""
        self._wait(BACKWARD_EXCHANGE)
        gradients, self._gradients = self._gradients, None
        assert gradients is not None
        return gradients


class StartAllToAll(torch.autograd.Function):
    """Start an exchange; the output is valid only after `WaitAllToAll`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, all_to_all: AsyncAllToAll) -> Tensor:
        """Start to send the rows."""
        ctx.all_to_all = all_to_all
        return all_to_all.start(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Wait for the gradients of the rows sent."""
        return ctx.all_to_all.wait_backward(), None


class WaitAllToAll(torch.autograd.Function):
    """Wait for an exchange that `StartAllToAll` started."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, all_to_all: AsyncAllToAll) -> Tensor:
        """Wait for the rows."""
        ctx.all_to_all = all_to_all
        all_to_all.wait()
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Start to send the gradients; `StartAllToAll` waits for them and ignores the result."""
        ctx.all_to_all.start_backward(grads[0])
        return grads[0], None


class PendingRows:
    """An exchange that starts on construction, with autograd."""

    def __init__(
        self, rows: Tensor, transport: Transport, send: list[int], receive: list[int]
    ) -> None:
        """Start the exchange."""
        self._all_to_all = AsyncAllToAll(transport, send, receive)
        self._received: Tensor | None = StartAllToAll.apply(rows, self._all_to_all)

    def wait(self) -> Tensor:
        """Wait and return the rows received."""
        received, self._received = self._received, None
        rows: Tensor = WaitAllToAll.apply(received, self._all_to_all)
        return rows
