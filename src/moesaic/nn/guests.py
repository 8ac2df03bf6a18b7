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

from moesaic.dist.clock import Clock
from moesaic.dist.exchange import Carrier, Flight
from moesaic.facts.balance import Ints


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

    def ordered(self, copies: Ints) -> Ints:
        """Copies (expert, rank) by rank, and on one by the slots of their homes: so they arrive."""
        experts, ranks = copies.T
        return copies[np.lexsort((self.places[experts], ranks))]


@dataclass(frozen=True)
class Guests:
    """Of a rank, under way."""

    arena: Tensor
    """The rank's own slots, whose gradient is that of all copies too."""
    guests: Tensor
    """To be read when they have landed."""
    flight: Flight


def invite(
    arena: Tensor,
    copies: Ints,
    homes: Homes,
    rank: int,
    carrier: Carrier,
    dtype: torch.dtype,
    clock: Clock | None = None,
) -> Guests:
    """Launch experts between ranks of the group, of which this is one; waiting goes to `clock`."""
    experts, ranks = homes.ordered(copies).T
    slots = homes.places[experts]
    leaving, coming = slots // homes.each == rank, ranks == rank
    send = np.bincount(ranks[leaving], minlength=homes.ranks).tolist()
    receive = np.bincount(slots[coming] // homes.each, minlength=homes.ranks).tolist()
    order = (slots[leaving] - rank * homes.each).tolist()
    flight = Flight(carrier, send, receive, clock)
    own, guests = Invite.apply(arena, order, dtype, flight)
    return Guests(own, guests, flight)


class Invite(torch.autograd.Function):
    """Launch parameters; what it returns of others may be read when it has landed."""

    @staticmethod
    def forward(
        ctx: Any, arena: Tensor, order: list[int], dtype: torch.dtype, flight: Flight
    ) -> tuple[Tensor, Tensor]:
        """The arena as it is, and its guests."""
        ctx.set_materialize_grads(False)
        ctx.flight, ctx.order = flight, order
        leaving = arena.new_empty((len(order), arena.shape[1]), dtype=dtype)
        for row, slot in zip(leaving, order, strict=True):
            row.copy_(arena[slot])
        return arena.view_as(arena), flight.leave(leaving)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        """Wait for gradients, which experts have launched, and add them to that of the arena."""
        grad = grads[0]
        if grad is not None:  # It was made for this, and nobody else has it.
            for row, slot in zip(ctx.flight.back(), ctx.order, strict=True):
                grad[slot].add_(row)  # In this order, whatever the device.
        return grad, None, None, None
