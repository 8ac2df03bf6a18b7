"""Deduplicated dispatch: each token travels once per destination rank and returns as one sum.

One row of bytes holds the token, the weights of its choices, and their slots on the destination.
Rows of a slot have the order of global tokens, as with every dispatch method. Results are summed in
another order: over the experts of a rank, then over the ranks of a host, then over hosts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moesaic.dist.all_to_all import AsyncAllToAll, PendingRows, Transport
from moesaic.facts.workload.loads import SLOT_INDEX_BYTES, dedup_token_bytes
from moesaic.nn.dispatch.all_to_all import (
    DispatchGroups,
    ExpertInputs,
    OutgoingTokens,
    make_permutation,
)
from moesaic.nn.dispatch.permute import unpermute


class DedupTraffic(NamedTuple):
    """Destinations of deduplicated tokens: the EP ranks, then the hosts if dispatch has two levels.

    P destinations.
    """

    destinations_TP: Tensor
    """Mask of the destinations of this rank's tokens."""
    counts_RP: Tensor
    """Tokens of each EP rank for each destination, on the host."""


def destination_mask(slots_NK: Tensor, num_slots: int, num_destinations: int) -> Tensor:
    """Return the mask of the destinations that have a slot in `slots_NK`, [N, destinations].

    Destinations split the `num_slots` slots evenly, in order. Slot `num_slots` has no destination.
    """
    mask_NP = slots_NK.new_zeros((len(slots_NK), num_destinations + 1), dtype=torch.bool)
    return mask_NP.scatter_(1, slots_NK // (num_slots // num_destinations), True)[
        :, :num_destinations
    ]


class DedupPermutation(NamedTuple):
    """Permutation from T tokens to V sent rows, sorted by destination, then token."""

    tokens_V: Tensor
    """Token of each sent row."""
    rows_TP: Tensor
    """Sent row of each (token, destination); 0 where there is none."""
    present_TP: Tensor
    """Mask of the (token, destination) pairs that have a row."""


class Exchange(NamedTuple):
    """Transport of one hop and its row counts by peer."""

    transport: Transport
    send: list[int]
    receive: list[int]


class Hop:
    """One exchange that sends tokens once per destination and returns partial sums."""

    def __init__(
        self,
        tokens_TH: Tensor,
        weights_TK: Tensor,
        slots_TK: Tensor,
        destinations_TP: Tensor,
        slots_per_destination: int,
        exchange: Exchange,
    ) -> None:
        """Start the exchange of tokens with the destinations in the mask `destinations_TP`."""
        mask_PT = destinations_TP.T.contiguous()
        destinations_V, tokens_V = mask_PT.nonzero(as_tuple=True)
        rows_PT = mask_PT.view(-1).cumsum(0).sub_(1).view(mask_PT.shape)
        self._permutation = DedupPermutation(
            tokens_V, rows_PT.T.where(destinations_TP, 0), destinations_TP
        )
        self._exchange, self._all_to_all = exchange, AsyncAllToAll(*exchange)
        slots_VK = slots_TK[tokens_V] - slots_per_destination * destinations_V[:, None]
        self._pending_tokens: tuple[Tensor, Tensor, Tensor] = StartDedup.apply(
            tokens_TH,
            weights_TK,
            slots_VK,
            slots_per_destination,
            self._permutation,
            self._all_to_all,
        )

    def finish_dispatch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Wait, and return tokens, weights, and local slots; a slot out of range means none."""
        rows, weights_NK, slots_NK = WaitDedup.apply(*self._pending_tokens, self._all_to_all)
        del self._pending_tokens
        return rows, weights_NK, slots_NK

    def start_combine(self, results: Tensor) -> None:
        """Start to send back the partial sum of each received row."""
        transport, send, receive = self._exchange
        self._pending_results = PendingRows(results, transport, receive, send)

    def finish_combine(self) -> Tensor:
        """Wait, and return each token's sum over destinations, [T, H]."""
        combined: Tensor = SumPartialResults.apply(self._pending_results.wait(), *self._permutation)
        return combined


class DedupAllToAll:
    """Flat dispatch that sends each token once per destination rank."""

    def __init__(
        self, outgoing: OutgoingTokens, groups: DispatchGroups, dedup: DedupTraffic
    ) -> None:
        """Start the exchange of tokens."""
        local_RS = groups.local_slot_counts(outgoing.counts_RS)
        self._counts_S = local_RS.sum(0)
        (transport,) = groups.transports
        exchange = Exchange(
            transport,
            dedup.counts_RP[groups.ep_rank].tolist(),
            dedup.counts_RP[:, groups.ep_rank].tolist(),
        )
        self._hop = Hop(*outgoing[:3], dedup.destinations_TP, local_RS.shape[1], exchange)

    def finish_dispatch(self) -> ExpertInputs:
        """Wait, and return tokens with one or more experts each."""
        rows, weights_NK, slots_NK = self._hop.finish_dispatch()
        present_NK = slots_NK < len(self._counts_S)
        return rows, make_permutation(slots_NK, present_NK, self._counts_S), weights_NK

    def start_combine(self, results: Tensor) -> None:
        """Start to send back the partial sum of each token."""
        self._hop.start_combine(results)

    def finish_combine(self) -> Tensor:
        """Wait, and return each token's sum over ranks, [T, H]."""
        return self._hop.finish_combine()


class _RowLayout(NamedTuple):
    """Byte layout of one sent row: token, weights, slots."""

    hidden: int
    choices: int
    dtype: torch.dtype

    @classmethod
    def from_tensors(cls, tokens_TH: Tensor, weights_TK: Tensor) -> _RowLayout:
        return cls(tokens_TH.shape[1], weights_TK.shape[1], tokens_TH.dtype)

    @property
    def _sizes(self) -> tuple[int, int]:
        return dedup_token_bytes(self.hidden, self.choices, self.dtype.itemsize)

    @property
    def num_bytes(self) -> int:
        return self._sizes[0]

    def split_fields(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of the tokens, weights, and slots in `rows`."""
        itemsize = self.dtype.itemsize
        weights_at, weights_end = self.hidden * itemsize, (self.hidden + self.choices) * itemsize
        slots_at = self._sizes[1]
        slots = rows[:, slots_at : slots_at + self.choices * SLOT_INDEX_BYTES]
        return (
            rows[:, :weights_at].view(self.dtype),
            rows[:, weights_at:weights_end].view(self.dtype),
            slots.view(torch.int32),
        )


class StartDedup(torch.autograd.Function):
    """Start of an exchange of tokens, weights, and slots; `WaitDedup` ends it."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens_TH: Tensor,
        weights_TK: Tensor,
        slots_VK: Tensor,
        slots_per_destination: int,
        permutation: DedupPermutation,
        all_to_all: AsyncAllToAll,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the buffers of received tokens, weights, and slots, to be read after the wait.

        Choices with slots on other destinations get weight 0 and slot `slots_per_destination`.
        """
        ctx.save_for_backward(*permutation)
        ctx.all_to_all, ctx.hidden = all_to_all, tokens_TH.shape[1]
        is_local_VK = (slots_VK >= 0) & (slots_VK < slots_per_destination)
        layout = _RowLayout.from_tensors(tokens_TH, weights_TK)
        sent = tokens_TH.new_empty((len(slots_VK), layout.num_bytes), dtype=torch.uint8)
        rows, weights, slots = layout.split_fields(sent)
        torch.index_select(tokens_TH, 0, permutation.tokens_V, out=rows)
        weights.copy_(torch.where(is_local_VK, weights_TK[permutation.tokens_V], 0.0))
        slots.copy_(torch.where(is_local_VK, slots_VK, slots_per_destination))
        rows, weights, slots = layout.split_fields(all_to_all.start(sent))
        ctx.mark_non_differentiable(slots)
        return rows, weights, slots

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Wait for the gradients of tokens and weights, which arrive side by side, and sum them."""
        received, (_, rows_TP, present_TP) = ctx.all_to_all.wait_backward(), ctx.saved_tensors
        summed = unpermute(received, rows_TP, present_TP.to(received.dtype))
        return summed[:, : ctx.hidden], summed[:, ctx.hidden :], *[None] * 4


class WaitDedup(torch.autograd.Function):
    """End of an exchange that `StartDedup` began."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, slots: Tensor, all_to_all: AsyncAllToAll
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Wait, and return the received tokens, weights, and slots."""
        ctx.all_to_all = all_to_all
        all_to_all.wait()
        ctx.mark_non_differentiable(slots)
        return rows.view_as(rows), weights.contiguous(), slots.long()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Start to send the gradients of tokens and weights, side by side.

        `StartDedup` waits for them, and ignores the gradients that this returns.
        """
        grads_NH, grads_NK, _ = grads
        ctx.all_to_all.start_backward(torch.cat((grads_NH, grads_NK), dim=1))
        return grads_NH, grads_NK, None, None


class SumPartialResults(torch.autograd.Function):
    """Sum of each token's partial results, in the order of destinations."""

    @staticmethod
    def forward(
        ctx: Any, results: Tensor, tokens_V: Tensor, rows_TP: Tensor, present_TP: Tensor
    ) -> Tensor:
        """Return tokens, [T, H], from partial results, [V, H]."""
        ctx.save_for_backward(tokens_V)
        return unpermute(results, rows_TP, present_TP.to(results.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the token's gradient for each of its partial results."""
        (tokens_V,) = ctx.saved_tensors
        return grads[0].index_select(0, tokens_V), None, None, None
