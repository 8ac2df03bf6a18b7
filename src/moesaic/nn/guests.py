"""Guests: experts of other ranks that are on this one for a step.

Where experts have copies, every rank sends parameters of its own to the ranks that get some, all
for one rank in one message, in the type that products take. Nothing of a guest outlives
the step: its gradient goes home, where it is added to that of the expert, and with the graph of the
step it is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.dist.clock import Clock, during
from moesaic.dist.exchange import LANDING, RETURN, Carrier, Flight
from moesaic.facts.balance import Balance, Ints
from moesaic.facts.moves import ExpertMoves


@dataclass(frozen=True)
class Homes:
    """Which rank of a group has which expert, in which of its slots."""

    slots: tuple[int, ...]
    """The experts of all slots of the group, rank by rank."""
    ranks: int

    @property
    def each(self) -> int:
        """Slots of a rank."""
        return len(self.slots) // self.ranks

    @cached_property
    def places(self) -> Ints:
        """The slot of each expert."""
        return np.argsort(self.slots)

    def order(self, balance: Balance) -> Ints:
        """Places of copies (expert, rank) by rank, on one those that leave ahead first, and then by
        the slots of their homes: so they stand there."""
        experts, ranks = balance.copies.T
        ahead = np.zeros(len(experts), bool) if balance.ahead is None else balance.ahead
        return np.lexsort((self.places[experts], ~ahead, ranks))


class Guests:
    """Of a rank, under way: some may leave ahead of others."""

    def __init__(
        self, bank_arena: Tensor, balance: Balance, homes: Homes, rank: int, carrier: Carrier,
        dtype: torch.dtype, clock: Clock | None = None,
    ) -> None:  # fmt: skip
        """Copies are those of `balance`, between the ranks of a group, of which this is one; what
        they keep it from computing goes to `clock`."""
        self._homes, self._rank, self._carrier, self._clock = homes, rank, carrier, clock
        order = homes.order(balance)
        self._copies = balance.copies[order]
        self._late = np.ones(len(order), bool)
        if balance.ahead is not None:
            self._late = ~balance.ahead[order]
        number = int((self._copies[:, 1] == rank).sum())
        self.arena = bank_arena
        """The rank's own slots, whose gradient is that of all copies too."""
        self.guests = bank_arena.new_empty((number, bank_arena.shape[1]), dtype=dtype)
        """To be read when they have landed."""
        self.flights = list[Flight]()

    def leave(self, *, ahead: bool) -> None:
        """Launch those that leave ahead, or all others; every rank of the group must."""
        experts, ranks = self._copies[self._late != ahead].T
        if not len(experts):
            return
        homes, rank = self._homes, self._rank
        moves = ExpertMoves(experts, homes.places[experts] // homes.each, ranks)
        share = moves.share(rank, homes.ranks)
        flight = Flight(self._carrier, share.send, share.receive, self._clock)
        come = sum(one.coming for one in self.flights)
        landing = self.guests[come : come + flight.coming]
        order = (homes.places[share.leaves] - rank * homes.each).tolist()
        self.arena = Invite.apply(self.arena, landing, order, flight)
        self.flights.append(flight)


class Invite(torch.autograd.Function):
    """Launch parameters of an arena to where they will be."""

    @staticmethod
    def forward(
        ctx: Any, arena: Tensor, landing: Tensor, order: list[int], flight: Flight
    ) -> Tensor:
        """The arena as it is."""
        ctx.set_materialize_grads(False)
        ctx.flight, ctx.order = flight, order
        with during(flight.clock, LANDING):
            flight.leave(_gathered(arena, order, landing.dtype), landing)
        return arena.view_as(arena)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        """Wait for gradients, which experts have launched, and add them to that of the arena."""
        grad = grads[0]
        if grad is not None:  # It was made for this, and nobody else has it.
            with during(ctx.flight.clock, RETURN):
                for row, slot in zip(ctx.flight.back(), ctx.order, strict=True):
                    grad[slot].add_(row)  # In this order, whatever the device.
        return grad, None, None, None


def _gathered(arena: Tensor, order: list[int], dtype: torch.dtype) -> Tensor:
    """Those slots in `dtype`, in one piece: where they lie, if they lie so."""
    first = order[0] if order else 0
    if arena.dtype == dtype and order == list(range(first, first + len(order))):
        return arena[first : first + len(order)]
    gathered = arena.new_empty((len(order), arena.shape[1]), dtype=dtype)
    for row, slot in zip(gathered, order, strict=True):
        row.copy_(arena[slot])
    return gathered
