"""Rows from rank to rank of a group, and what carries them there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.dist.clock import Clock, during

LANDING, RETURN = "landing", "return"
"""What a clock calls handing over rows and waiting for them, and the same of their gradients."""


class Work(Protocol):
    """Rows on their way."""

    def wait(self) -> object:
        """Return when they have arrived."""


class Carrier(Protocol):
    """Carries rows between the ranks of a group; all of them ask for the same, in one order."""

    name: str
    """What a person calls it."""
    group: dist.ProcessGroup

    def start(
        self, rows: Tensor, send: list[int], receive: list[int], into: Tensor | None = None
    ) -> tuple[Tensor, Work]:
        """Launch `send[i]` consecutive rows to rank i of the group; zero is allowed.

        What arrives, by rank, `into` rows that there are or new ones, may be read when the work has
        been waited for; `rows` may be written to from then on.
        """

    def close(self) -> None:
        """Let go of what it holds."""


class ByGroup:
    """Leaves it to the group's own all-to-all."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.name: str = dist.get_backend(group)

    def start(
        self, rows: Tensor, send: list[int], receive: list[int], into: Tensor | None = None
    ) -> tuple[Tensor, Work]:
        """As `Carrier` says."""
        result = rows.new_empty((sum(receive), *rows.shape[1:])) if into is None else into
        work = dist.all_to_all_single(
            result, rows.contiguous(), receive, send, group=self.group, async_op=True
        )
        assert work is not None
        return result, work

    def close(self) -> None:
        """Nothing is held."""


class ByPairs:
    """Rank by rank over sockets, where every rank first says that it is ready to receive.

    gloo's all-to-all lets a rank say so to another only when what it sends to that one has left, if
    that one had been ready before: both ways over a link then come one after the other.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.name: str = dist.get_backend(group)

    def start(
        self, rows: Tensor, send: list[int], receive: list[int], into: Tensor | None = None
    ) -> tuple[Tensor, Work]:
        """As `Carrier` says."""
        result = rows.new_empty((sum(receive), *rows.shape[1:])) if into is None else into
        rows = rows.contiguous()
        coming, going = result.split(receive), rows.split(send)
        me, size = self.group.rank(), self.group.size()
        others = [(me + step) % size for step in range(1, size)]
        works = [
            dist.irecv(coming[one], group=self.group, group_src=one)
            for one in others
            if coming[one].numel()
        ]
        works += [
            dist.isend(going[one], group=self.group, group_dst=one)
            for one in others
            if going[one].numel()
        ]
        coming[me].copy_(going[me])
        return result, _Several(works)

    def close(self) -> None:
        """Nothing is held."""


class _Several:
    """Several works, which end together."""

    def __init__(self, works: Sequence[Work | None]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            assert work is not None
            work.wait()


class Flight:
    """Rows on their way between the ranks of a group, and their gradients on the way back.

    Rows leave in `Depart` and are awaited in `Land`; gradients leave where those of landed rows
    come to, and are awaited where rows departed. What is computed in between is computed while they
    travel, in either direction.
    """

    def __init__(
        self, carrier: Carrier, send: list[int], receive: list[int], clock: Clock | None = None
    ) -> None:
        """Of `send[i]` consecutive rows to rank i, and as many from it as `receive` says; what that
        keeps a rank from computing goes to `clock`."""
        self._carrier, self._send, self._receive = carrier, send, receive
        self.clock = clock
        self._work: Work | None = None
        self._gradients: Tensor | None = None

    def leave(self, rows: Tensor, into: Tensor | None = None) -> Tensor:
        """Where they will be."""
        with during(self.clock, LANDING):  # A rank may have to move bytes itself.
            landing, self._work = self._carrier.start(rows, self._send, self._receive, into)
        return landing

    def wait(self) -> None:
        """Until they are there; what was sent is let go of."""
        self._wait(LANDING)

    def _wait(self, kind: str) -> None:
        work, self._work = self._work, None
        assert work is not None
        with during(self.clock, kind):
            work.wait()

    @property
    def coming(self) -> int:
        """Rows that arrive."""
        return sum(self._receive)

    def turn_back(self, gradients: Tensor) -> None:
        """Let gradients leave for where the rows came from."""
        with during(self.clock, RETURN):
            self._gradients, self._work = self._carrier.start(gradients, self._receive, self._send)

    def back(self) -> Tensor:
        """Those gradients, awaited."""
        self._wait(RETURN)
        gradients, self._gradients = self._gradients, None
        assert gradients is not None
        return gradients


class Depart(torch.autograd.Function):
    """Launch rows; what this returns may be read when it has landed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: Flight) -> Tensor:
        """To each rank what the flight says."""
        ctx.flight = flight
        return flight.leave(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Every row's gradient, back where the row came from."""
        return ctx.flight.back(), None


class Land(torch.autograd.Function):
    """Wait for rows that have departed."""

    @staticmethod
    def forward(ctx: Any, landing: Tensor, flight: Flight) -> Tensor:
        """They are there."""
        ctx.flight = flight
        flight.wait()
        return landing.view_as(landing)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Launch gradients; `Depart` waits for them, and does not read what this returns."""
        ctx.flight.turn_back(grads[0])
        return grads[0], None


class Journey:
    """Rows that leave when it is made and are there when it ends, as `Flight` has it."""

    def __init__(self, rows: Tensor, carrier: Carrier, send: list[int], receive: list[int]) -> None:
        """Launch them."""
        self._flight = Flight(carrier, send, receive)
        self._landing: Tensor | None = Depart.apply(rows, self._flight)

    def end(self) -> Tensor:
        """Wait; the rows that came from others."""
        landing, self._landing = self._landing, None
        landed: Tensor = Land.apply(landing, self._flight)
        return landed
