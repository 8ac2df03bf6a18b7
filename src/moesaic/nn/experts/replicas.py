"""Expert replicas: experts of other ranks that this rank computes in one step.

Each owner rank sends the parameters that its peers need, in one message per peer, in the matmul
dtype. A replica lives for one step. Its gradient returns to the owner rank, which adds it to the
expert's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.dist.all_to_all import BACKWARD_EXCHANGE, FORWARD_EXCHANGE, AsyncAllToAll, Transport
from moesaic.dist.clock import Clock, timed
from moesaic.facts.balance import BalanceDecision, IntArray
from moesaic.facts.moves import ExpertMoves


@dataclass(frozen=True)
class ExpertPlacement:
    """Owner rank and slot of each expert in an EP group."""

    slot_experts: tuple[int, ...]
    """Expert of each slot of the group, rank by rank."""
    num_ranks: int

    @property
    def slots_per_rank(self) -> int:
        """Slots of one rank, without replicas."""
        return len(self.slot_experts) // self.num_ranks

    @cached_property
    def slot_of_expert(self) -> IntArray:
        """Slot of each expert, [experts]."""
        return np.argsort(self.slot_experts)

    def replica_order(self, balance: BalanceDecision) -> IntArray:
        """Return the order of `balance.replicas` in replica slots: by rank, prefetched first, then
        by owner slot."""
        experts, ranks = balance.replicas.T
        prefetched = (
            np.zeros(len(experts), bool) if balance.prefetched is None else balance.prefetched
        )
        return np.lexsort((self.slot_of_expert[experts], ~prefetched, ranks))


class Replicas:
    """Replicas that this rank sends and receives in one step; some may be prefetched."""

    def __init__(
        self,
        bank_arena: Tensor,
        balance: BalanceDecision,
        placement: ExpertPlacement,
        rank: int,
        transport: Transport,
        dtype: torch.dtype,
        clock: Clock | None = None,
    ) -> None:
        """Prepare the transfers; `send` starts them.

        Args:
            bank_arena: this rank's own slots.
            balance: replicas to send.
            placement: owner ranks and slots.
            rank: index of this rank in the EP group.
            transport: transport of parameters between the EP ranks.
            dtype: dtype of the sent parameters.
            clock: records the time that the transfers block this rank.
        """
        self._placement, self._rank, self._transport, self._clock = (
            placement,
            rank,
            transport,
            clock,
        )
        order = placement.replica_order(balance)
        self._replicas = balance.replicas[order]
        self._is_prefetched = np.zeros(len(order), bool)
        if balance.prefetched is not None:
            self._is_prefetched = balance.prefetched[order]
        num_replicas = int((self._replicas[:, 1] == rank).sum())
        self.arena = bank_arena
        """Own slots; their gradient includes that of all replicas."""
        self.parameters = bank_arena.new_empty((num_replicas, bank_arena.shape[1]), dtype=dtype)
        """Parameters of this rank's replicas, valid once `all_to_alls` have been awaited."""
        self.all_to_alls = list[AsyncAllToAll]()

    def send(self, *, prefetched: bool) -> None:
        """Start to send the prefetched replicas or the others, on all EP ranks alike."""
        experts, ranks = self._replicas[self._is_prefetched == prefetched].T
        if not len(experts):
            return
        placement, rank = self._placement, self._rank
        moves = ExpertMoves(
            experts, placement.slot_of_expert[experts] // placement.slots_per_rank, ranks
        )
        rank_moves = moves.rank_moves(rank, placement.num_ranks)
        all_to_all = AsyncAllToAll(
            self._transport, rank_moves.send_counts, rank_moves.receive_counts, self._clock
        )
        start = sum(one.num_received for one in self.all_to_alls)
        received = self.parameters[start : start + all_to_all.num_received]
        order = (
            placement.slot_of_expert[rank_moves.send_experts] - rank * placement.slots_per_rank
        ).tolist()
        self.arena = SendReplicas.apply(self.arena, received, order, all_to_all)
        self.all_to_alls.append(all_to_all)


class SendReplicas(torch.autograd.Function):
    """Start of a transfer of expert parameters to the ranks with their replicas."""

    @staticmethod
    def forward(
        ctx: Any, arena: Tensor, received: Tensor, order: list[int], all_to_all: AsyncAllToAll
    ) -> Tensor:
        """Start the transfer into `received`, and return the arena unchanged."""
        ctx.set_materialize_grads(False)
        ctx.all_to_all, ctx.order = all_to_all, order
        with timed(all_to_all.clock, FORWARD_EXCHANGE):
            all_to_all.start(_gather_slots(arena, order, received.dtype), received)
        return arena.view_as(arena)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        """Wait for the gradients of the replicas, and add them to the arena's."""
        grad = grads[0]
        # The experts made it for this node alone, so it may be modified in place.
        if grad is not None:
            with timed(ctx.all_to_all.clock, BACKWARD_EXCHANGE):
                for row, slot in zip(ctx.all_to_all.wait_backward(), ctx.order, strict=True):
                    grad[slot].add_(row)  # A fixed order keeps sums the same on every device.
        return grad, None, None, None


def _gather_slots(arena: Tensor, order: list[int], dtype: torch.dtype) -> Tensor:
    """Return the slots in `order` as one contiguous tensor of `dtype`; a view if possible."""
    first = order[0] if order else 0
    if arena.dtype == dtype and order == list(range(first, first + len(order))):
        return arena[first : first + len(order)]
    gathered = arena.new_empty((len(order), arena.shape[1]), dtype=dtype)
    for row, slot in zip(gathered, order, strict=True):
        row.copy_(arena[slot])
    return gathered
